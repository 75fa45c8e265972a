"""Reports of a replayed proof: for readers of JUnit reports, and annotations of GitHub Actions."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree import ElementTree as ET

from winml.modelkit.compare.records import ModelComparison, ProofReplay
from winml.modelkit.compare.words import nearness_words
from winml.modelkit.words import message_words

_SUITE = "winml verify"


def junit_text(result: ProofReplay) -> str:
    """Return a JUnit report: a test case for each output, and for each compared module."""
    cases = [case for part in _parts(result) for case in _cases(part)]
    failures = sum(case.find("failure") is not None for case in cases)
    counts = {"tests": str(len(cases)), "failures": str(failures), "errors": "0", "skipped": "0"}
    root = ET.Element("testsuites", {"name": _SUITE, **counts})
    ET.SubElement(root, "testsuite", {"name": message_words(result.candidate), **counts}).extend(cases)
    ET.indent(root)
    return f"{ET.tostring(root, encoding='unicode', xml_declaration=True)}\n"


def _cases(replay: ProofReplay) -> Iterator[ET.Element]:
    """Yield a test case for each output and each compared module call of a replay."""
    for output in replay.outputs:
        words = nearness_words(output.fidelity)
        problem = "" if replay.is_output_within(output) else f"{words}; {replay.limit_words}"
        yield _case("outputs", output.fidelity.name, problem, words)
    for module in replay.modules or ():
        if module.fidelity is not None:
            words = nearness_words(module.fidelity)
            problem = f"first module that diverges: {words}" if module is replay.first_divergence else ""
            yield _case("modules", module.identity.words or "(root)", "" if replay.is_within else problem, words)


def _case(group: str, name: str, problem: str, words: str) -> ET.Element:
    case = ET.Element("testcase", {"classname": group, "name": message_words(name)})
    if problem:
        ET.SubElement(case, "failure", {"message": message_words(problem)})
    ET.SubElement(case, "system-out").text = message_words(words)
    return case


def annotation_lines(result: ProofReplay) -> Iterator[str]:
    """Yield a workflow command of GitHub Actions for each output beyond its limit, with the first wrong module."""
    for part in _parts(result):
        first = part.first_divergence
        where = "" if first is None else f" First module that diverges: {first.identity.words} ({first.identity.tag})."
        for output in part.outputs:
            if not part.is_output_within(output):
                text = (
                    f"{part.candidate}: {output.fidelity.name}: {nearness_words(output.fidelity)}; {part.limit_words}."
                )
                yield f"::error title={_SUITE}::{_escaped(message_words(text + where))}"


def _parts(result: ProofReplay) -> list[ProofReplay]:
    """Return the replays of all parts; the replay itself for a model of one part."""
    parts: list[ModelComparison] = [*result.parts.values()] or [result]
    return [part for part in parts if isinstance(part, ProofReplay)]


def _escaped(text: str) -> str:
    """Escape the characters that end or change a workflow command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
