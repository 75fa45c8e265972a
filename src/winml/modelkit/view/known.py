"""Numbers of modules that the structure does not contain: metadata of a file, and results of earlier runs.

A result of an earlier run is the JSON of ``perf``, ``compare``, ``quantize --sensitivity`` or ``inspect --ep``, or the
proof of a build. The JSON states the fingerprint of the model, by which a result of another model is recognized.
Errors also depend on the weights: their JSON states a digest of the content of the files.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, Literal

from winml.modelkit.errors import InputError, UsageError, first_line, spell
from winml.modelkit.file_names import proof_paths
from winml.modelkit.metadata_keys import MODULES_KEY, QUANTIZATION_KEY
from winml.modelkit.onnx.files.placing import file_digest, model_digest
from winml.modelkit.onnx.fingerprint import file_fingerprint
from winml.modelkit.options import load_metadata, read_json_file
from winml.modelkit.view.structure import GraphFile

_LARGEST_RESULT = 50_000_000
"""Chosen: maximum bytes of a file that is searched for a result beside a model; results of large models have 2 MB."""
_DIGITS = 6
"""Chosen: significant digits of a number on the page; it displays three."""
PLACEMENT = "provider"
"""Key of the measure of the provider that runs the nodes of a module."""
_OF_MODEL = "model"
"""Source of the numbers that the file itself contains."""

_OTHER_JSON = (TypeError, KeyError, AttributeError)
"""Errors of a reader of results for JSON of another program."""

Value = float | str | None


@dataclass(frozen=True)
class Measure:
    """A number or text of modules, by tag or path."""

    key: str
    title: str
    values: Mapping[str, Value]
    unit: str = ""
    """``ms``, ``dB``, ``bytes``, or empty."""
    kind: Literal["size", "shade", "text"] = "shade"
    """``size``: a number that adds up over modules."""
    folded: Literal["sum", "max", "min"] = "max"
    """Aggregation over equal modules."""
    is_logarithmic: bool = False
    is_dark_low: bool = False
    is_verdict: bool = False
    """True for answers, which may differ between equal layers by chance: such layers are still one box."""
    source: str = _OF_MODEL

    def as_data(self) -> dict[str, Any]:
        """Return the description of the measure on the page."""
        return {
            "key": self.key,
            "title": self.title,
            "unit": self.unit,
            "isSize": self.kind == "size",
            "isText": self.kind == "text",
            "folded": "sum" if self.kind == "size" else self.folded,
            "logarithmic": self.is_logarithmic,
            "darkLow": self.is_dark_low,
            "isVerdict": self.is_verdict,
            "source": self.source,
        }

    def value(self, tag: str, path: str) -> Value:
        """Return the value of a module; None if unknown."""
        value = self.values.get(tag, self.values.get(path) if path else None)
        return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


@dataclass(frozen=True)
class EarlierResult:
    """The numbers of one model in the JSON of an earlier run."""

    path: Path
    fingerprint: str
    """Empty: written by a version that did not state it."""
    measures: tuple[Measure, ...]
    verdict: str = ""
    """Sentence on the model as a whole; empty: none."""
    baseline: str = ""
    """Name of the model that the numbers are relative to; empty: none."""
    digest: str | None = None
    """Digest of the content of the model's files; empty: not stated; `None`: the numbers do not depend on weights."""
    reference: str = ""
    """The same of the model that the errors are relative to; empty for PyTorch."""


class KnownFiles:
    """The files of a page, by which results of earlier runs are recognized."""

    def __init__(self, names: Iterable[str], files: Iterable[Path]) -> None:
        """Read the fingerprints of the files.

        Args:
            names: Names of the models of the page.
            files: Their files.

        Raises:
            InputError: a file is damaged or no ONNX file.
        """
        self._names = [PurePath(name).name for name in names]
        self.prints = {path: file_fingerprint(path) for path in files}
        self._digests: dict[Path, set[str]] = {}

    def _digests_of(self, path: Path) -> set[str]:
        """Return the digests that a result can state: a proof states that of the graph file alone."""
        if path not in self._digests:
            self._digests[path] = {file_digest(path)}
            with contextlib.suppress(InputError):  # a model without its data can be shown
                self._digests[path].add(model_digest(path))
        return self._digests[path]

    def results_of(self, path: Path, results: Iterable[EarlierResult]) -> list[EarlierResult]:
        """Return the results that belong to a file.

        Errors belong to a file with the same weights; beside another model, numbers relative to a third are left out.
        """
        return [result for result in results if result.fingerprint == self.prints[path] and self._fits(result, path)]

    def _fits(self, result: EarlierResult, path: Path) -> bool:
        is_pair = len(self._names) > 1
        if is_pair and result.baseline and result.baseline not in self._names:
            return False
        if result.digest is not None and result.digest not in self._digests_of(path):
            return False
        others = (self._digests_of(file) for file in self.prints)
        return not (is_pair and result.reference) or any(result.reference in digests for digests in others)

    def verdict(self, name: str, result: EarlierResult) -> str:
        """Return the sentence on a model as a whole; empty if it names another model."""
        return result.verdict if PurePath(name).name in result.verdict else ""

    def notes(self, path: Path, results: Iterable[EarlierResult]) -> Iterator[str]:
        """Yield a note on each result of the graph of a file whose weights are unknown."""
        for result in results:
            if result.fingerprint == self.prints[path] and result.digest == "":
                yield f"errors of {result.path.name} are not shown: it does not state its weights; repeat its command"

    def refuse_foreign(self, results: Iterable[EarlierResult]) -> None:
        """Refuse a named result that belongs to none of the files.

        Raises:
            UsageError: names the file.
        """
        by_path = defaultdict(list)
        for result in results:
            by_path[result.path].append(result)
        for path, stated in by_path.items():
            if any(self.results_of(file, stated) for file in self.prints):
                continue
            same_graph = [result for result in stated if result.fingerprint in self.prints.values()]
            is_old = not any(result.fingerprint for result in stated)
            reason, remedy = "is a result of another model", "Omit it, or name the model that it belongs to."
            if is_old or (same_graph and all(result.digest == "" for result in same_graph)):
                reason, remedy = f"does not state its {'model' if is_old else 'weights'}", "Repeat its command."
            raise UsageError(f"{spell('with')} {path} {reason}", hint=remedy)


def read_results(path: Path) -> list[EarlierResult]:
    """Read the JSON of an earlier run.

    Raises:
        UsageError: the file contains no numbers of modules.
        InputError: the file does not exist, or is no JSON.
    """
    try:
        results = results_in(read_json_file(path), path)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{spell('with')} {path}: {first_line(error)}", hint="Specify the JSON of a command."
        ) from error
    except _OTHER_JSON:
        results = []
    if not results:
        raise UsageError(
            f"{path} contains no numbers of modules",
            hint="Specify the JSON (-f json) of winml perf --by-module; winml compare --by-module; winml quantize "
            "--sensitivity; or winml inspect --ep.",
        )
    return results


def results_in(record: Mapping[str, Any], path: Path) -> list[EarlierResult]:
    """Return the results with numbers or a verdict in a JSON object; ``path`` names their source."""
    return [result for result in _find_results(record, path, 0) if result.measures or result.verdict]


def results_beside(paths: Iterable[Path]) -> Iterator[EarlierResult]:
    """Yield the results of earlier runs and the proofs in the folders of some models; other files are ignored."""
    for folder in dict.fromkeys(path.parent for path in paths):
        for file in (*sorted(folder.glob("*.json")), proof_paths(folder)[0]):
            try:
                if file.stat().st_size > _LARGEST_RESULT:
                    continue
                text = file.read_text(encoding="utf-8")
                if '"fingerprint"' in text:
                    yield from results_in(json.loads(text), file)
            except (OSError, ValueError, RecursionError, *_OTHER_JSON):
                continue


def _find_results(record: Mapping[str, Any], path: Path, depth: int, name: str = "") -> Iterator[EarlierResult]:
    """Yield the results in a JSON object and in the objects inside it: parts, phases and baselines."""
    for phase in ("", *_PHASES):
        yield from _read_ratios(record, path, phase)
    for key, read in _READERS.items():
        if isinstance(record.get(key), (dict, list)) and (result := read(record, path, name)) is not None:
            yield result
    if depth < _DEEPEST:
        for key, value in record.items():
            # The parts of a proof are a list, those of a comparison an object.
            inner = value if key == "parts" and isinstance(value, list) else [value]
            for entry in inner:
                if isinstance(entry, dict) and key not in _READERS:
                    yield from _find_results(entry, path, depth + 1, key if key in _PHASES else name)


_DEEPEST = 3
"""Specified: parts contain phases, which contain a baseline."""
_PHASES = ("prompt", "step")


def _read_ratios(record: Mapping[str, Any], path: Path, phase: str) -> Iterator[EarlierResult]:
    """Yield the verdicts of ``winml perf --by-module`` on the time of a model and of each module beside a baseline.

    Args:
        record: JSON of a model, or of the phases of a decoder.
        path: Source of the JSON.
        phase: Phase of a decoder; empty for the times of a whole model.
    """
    baseline = record.get("baseline") or {}
    times, ratios = (side.get(phase) or {} if phase else side for side in (record, baseline))
    if not baseline or "by_module" not in times:
        return
    where, name = f" in a {phase}" if phase else "", PurePath(baseline["name"]).name
    rows = [row for row in ratios.get("ratios") or () if row["ratio"]]
    title = f"time{where} relative to {name}"
    values = {row["tag"]: _number(row["ratio"]["value"]) for row in rows if row["verdict"] != _UNDECIDED}
    answers = {row["tag"]: _FASTER.get(row["verdict"], "no") for row in rows}
    measures = [
        Measure(f"ratio {phase}".strip(), title, values),
        Measure(f"faster {phase}".strip(), f"faster{where} than {name}", answers, kind="text", is_verdict=True),
    ]
    verdict = baseline.get("verdict")
    words = f"{verdict['question']}: {verdict['answer']} ({verdict['reason']})" if isinstance(verdict, dict) else ""
    result = _result(path, times["by_module"].get("fingerprint", ""), measures)
    yield replace(result, verdict=words, baseline=name)


_UNDECIDED = "undecided"
_FASTER = {"faster": "yes", _UNDECIDED: _UNDECIDED}
"""Verdict on the time of a module → answer to the question whether it is faster; other verdicts are no."""


def _read_times(record: Mapping[str, Any], path: Path, phase: str) -> EarlierResult | None:
    """Read ``by_module`` of ``winml perf``."""
    times = record["by_module"]
    if not isinstance(times, dict) or "tree" not in times:
        return None
    rows = list(_walk(times["tree"]))
    ending = f" of {phase}" if phase else ""
    unit = times.get("unit", "ms")
    suffix = "kcycles" if unit == "kcycles" else "ms"
    outputs, fused = _by_tag(rows, "output_bytes"), _by_tag(rows, "fused_with", _joined)
    measures = [
        Measure(f"time {phase}".strip(), f"time{ending}", _by_tag(rows, f"self_{suffix}"), unit, "size"),
        Measure(f"outputs {phase}".strip(), f"bytes of outputs{ending}", outputs, "bytes", "size"),
        Measure(f"fused {phase}".strip(), f"runs fused with{ending}", fused, kind="text"),
    ]
    measures += _memory(rows, ending)
    if times.get("placement"):
        measures.append(_placement(times["placement"], "provider"))
    return _result(path, times.get("fingerprint", ""), measures)


def _memory(rows: Sequence[Mapping[str, Any]], ending: str) -> Iterator[Measure]:
    """Yield the memory of modules (``winml perf --memory``), without the modules inside."""
    found = {
        "memory of weights": ("weights_bytes", "packed_bytes"),
        "memory at the peak": ("weights_bytes", "packed_bytes", "peak_bytes"),
    }

    def total(row: Mapping[str, Any], keys: Sequence[str]) -> float:
        return float(sum((row.get("memory") or {}).get(key, 0) for key in keys))

    for title, keys in found.items():
        own = {
            row["tag"]: max(0.0, total(row, keys) - sum(total(child, keys) for child in row.get("children") or ()))
            for row in rows
        }
        yield Measure(f"{title}{ending}", f"{title}{ending}", own, "bytes", "size")


def _read_comparison(record: Mapping[str, Any], path: Path, _name: str) -> EarlierResult | None:
    """Read ``modules`` of ``winml compare --by-module``, ``winml quantize --sensitivity``, or a part of a proof."""
    rows = record["modules"]
    if not isinstance(rows, list) or not rows or not isinstance(rows[0], dict):
        return None
    if "boundary" in rows[0]:
        rows = [{**row, **row["boundary"]["identity"]} for row in rows]
    if any("own_error" in row for row in rows):
        measures = [
            Measure("own error", "own error", _by_tag(rows, "own_error"), is_logarithmic=True),
            Measure("sqnr", "SQNR", _by_tag(rows, "sqnr_db", merge=min), "dB", folded="min", is_dark_low=True),
        ]
        if (tolerance := record.get("tolerance")) is not None:
            errors = _by_tag(rows, "own_error")
            exact = {row["tag"]: _answer(errors.get(row["tag"]), tolerance) for row in rows}
            measures.append(Measure("exact", "adds no error", exact, kind="text", is_verdict=True))
        digests = record.get("digests") or {}
        reference = str(digests.get("reference", ""))
        # A proof states the SHA-256 of its file. Without a candidate file, the result belongs to the reference.
        digest = str(digests.get("candidate") or reference or record.get("sha256", ""))
        result = _result(path, record.get("fingerprint", ""), measures)
        return replace(result, digest=digest, reference=reference if "candidate" in digests else "")
    if "modes" in record and "precision" in record:
        title = f"SQNR with only this module in {record['precision']}"
        values = _by_tag(rows, "sqnr_db", merge=min)
        measures = [Measure("sensitivity", title, values, "dB", folded="min", is_dark_low=True)]
        return replace(_result(path, record.get("fingerprint", ""), measures), digest=str(record.get("digest", "")))
    return None


def _answer(error: Value, tolerance: float) -> str:
    """Answer whether the own error of a module is at most the tolerance for rounding."""
    return _UNDECIDED if error is None else "yes" if float(error) <= tolerance else "no"


def _read_fit(record: Mapping[str, Any], path: Path, _name: str) -> EarlierResult | None:
    """Read ``execution_provider`` of ``winml inspect --ep``."""
    fit = record["execution_provider"]
    if not isinstance(fit, dict) or not fit.get("modules"):
        return None
    measure = _placement(fit["modules"], f"on {fit.get('provider', 'the provider')}")
    return _result(path, fit.get("fingerprint", ""), [measure])


_READERS: Mapping[str, Callable[[Mapping[str, Any], Path, str], EarlierResult | None]] = {
    "by_module": _read_times,
    "modules": _read_comparison,
    "execution_provider": _read_fit,
}
"""Key → reader of the object with the key."""


def _result(path: Path, fingerprint: str, measures: Sequence[Measure]) -> EarlierResult:
    named = tuple(replace(measure, source=path.name) for measure in measures if any(measure.values.values()))
    return EarlierResult(path, str(fingerprint), named)


def _placement(rows: Sequence[Mapping[str, Any]], title: str) -> Measure:
    """Return where the nodes of modules run, with the reasons of nodes outside the provider."""
    words = {}
    for row in rows:
        nodes, on_device, reasons = row["nodes"], row["on_device"], row.get("reasons") or {}
        reason = f": {', '.join(reasons)}" if reasons else ""
        words[row["module"]] = "all nodes" if nodes == on_device else f"{on_device} of {nodes} nodes{reason}"
    return Measure(PLACEMENT, title, words, kind="text")


def _walk(rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield nested rows in order."""
    for row in rows:
        yield row
        yield from _walk(row.get("children") or ())


def _number(value: Any) -> float | None:
    """Return a finite number; None for other values."""
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def _joined(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value or "")


def _by_tag(
    rows: Iterable[Mapping[str, Any]],
    key: str,
    read: Callable[[Any], Value] = _number,
    merge: Callable[[Any, Any], Any] = max,
) -> dict[str, Value]:
    """Return tag → value of the rows; several calls of a module are merged."""
    values: dict[str, Value] = {}
    for row in rows:
        value = read(row.get(key))
        if value is None or value == "":
            continue
        tag = row["tag"]
        values[tag] = merge(values[tag], value) if tag in values else value
    return values


def file_measures(file: GraphFile) -> Iterator[Measure]:
    """Yield the numbers and texts of modules in the metadata of a file: precisions, and modules fused with others."""
    precisions: dict[str, Value] = {}
    try:
        record = load_metadata(file.metadata.get(QUANTIZATION_KEY, "{}"))
        for module in record.get("modules", ()):
            precisions[module["tag"]] = str(module["actual"] or "float")
    except (ValueError, TypeError, KeyError, AttributeError):
        precisions = {}
    if precisions:
        yield Measure("precision", "precision", precisions, kind="text")
    fused: dict[str, dict[str, None]] = defaultdict(dict)
    for node, tag in zip(file.contents.nodes, file.tree.tags, strict=True):
        for entry in node.proto.metadata_props:
            if entry.key == MODULES_KEY:
                fused[tag] |= dict.fromkeys(_paths(entry.value))
    if fused:
        yield Measure("merged", "fused with", {tag: ", ".join(paths) for tag, paths in fused.items()}, kind="text")


def _paths(text: str) -> list[str]:
    """Return the module paths in the metadata of a fused node; `[]` for damaged metadata."""
    try:
        return [str(path) for path in load_metadata(text)]
    except (ValueError, TypeError):
        return []
