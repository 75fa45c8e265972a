"""Reports of a replayed proof: for readers of JUnit reports, and annotations of GitHub Actions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from xml.etree import ElementTree as ET

from winml.modelkit.compare.records import ModelComparison, ProofReplay
from winml.modelkit.compare.words import nearness_words
from winml.modelkit.words import message_words

_SUITE = "winml verify"


def junit_text(result: ProofReplay) -> str:
    """Return a JUnit report: a test case for each output, and for each compared module."""
    cases = [case for name, part in _parts(result).items() for case in _cases(part, f"{name}." if name else "")]
    failures = sum(case.find("failure") is not None for case in cases)
    counts = {"tests": str(len(cases)), "failures": str(failures), "errors": "0", "skipped": "0"}
    root = ET.Element("testsuites", {"name": _SUITE, **counts})
    ET.SubElement(root, "testsuite", {"name": message_words(result.candidate), **counts}).extend(cases)
    ET.indent(root)
    return f"{ET.tostring(root, encoding='unicode', xml_declaration=True)}\n"


def _cases(replay: ProofReplay, prefix: str) -> Iterator[ET.Element]:
    """Yield a test case for each output and each compared module call of a replay.

    Args:
        replay: Replay of one part.
        prefix: Beginning of the class of each case, which tells apart equal names in several parts.
    """
    for output in replay.outputs:
        words = nearness_words(output.fidelity)
        problem = "" if replay.is_output_within(output) else f"{words}; {replay.limit_words}"
        yield _case(f"{prefix}outputs", output.fidelity.name, problem, words)
    if replay.upgrade is not None:
        for name, verdict in replay.upgrade.verdicts.items():
            problem = replay.upgrade.problem_words(name) if name in replay.upgrade.refused else ""
            yield _case(f"{prefix}upgrade", name, problem, verdict.words)
    for module in replay.modules or ():
        if module.fidelity is not None:
            words = nearness_words(module.fidelity)
            problem = f"first module that diverges: {words}" if module is replay.first_divergence else ""
            name = module.identity.words or "(root)"
            yield _case(f"{prefix}modules", name, "" if replay.is_within else problem, words)


def _case(group: str, name: str, problem: str, words: str) -> ET.Element:
    case = ET.Element("testcase", {"classname": group, "name": message_words(name)})
    if problem:
        ET.SubElement(case, "failure", {"message": message_words(problem)})
    ET.SubElement(case, "system-out").text = message_words(words)
    return case


def annotation_lines(result: ProofReplay) -> Iterator[str]:
    """Yield the workflow commands of GitHub Actions.

    An error for each output beyond its limit, with the first wrong module, and for a loss since the baseline; a warning
    for a slower run.
    """
    for part in _parts(result).values():
        if part.upgrade is not None:
            for name in part.upgrade.verdicts:
                if problem := part.upgrade.problem_words(name):
                    level = "error" if name in part.upgrade.refused else "warning"
                    text = f"{part.candidate}: {name} since the baseline: {problem}."
                    yield f"::{level} title={_SUITE}::{_escaped(message_words(text))}"
        first = part.first_divergence
        where = "" if first is None else f" First module that diverges: {first.identity.words} ({first.identity.tag})."
        for output in part.outputs:
            if not part.is_output_within(output):
                text = (
                    f"{part.candidate}: {output.fidelity.name}: {nearness_words(output.fidelity)}; {part.limit_words}."
                )
                yield f"::error title={_SUITE}::{_escaped(message_words(text + where))}"


def _parts(result: ProofReplay) -> dict[str, ProofReplay]:
    """Return part → its replay; ``""`` → the replay itself for a model of one part."""
    parts: Mapping[str, ModelComparison] = result.parts or {"": result}
    return {name: part for name, part in parts.items() if isinstance(part, ProofReplay)}


def _escaped(text: str) -> str:
    """Escape the characters that end or change a workflow command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
