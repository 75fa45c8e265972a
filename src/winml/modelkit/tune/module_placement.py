"""Which modules does a placement of QuantizeLinear and DequantizeLinear slow down?

Conversions cost time where a provider has no integer kernel behind them, or where the product is small. Modules that
are alike, such as one of each layer, form a group; each group is put back into float in a candidate of its own, and a
race decides. Makes and runs nothing.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from winml.modelkit.metadata_keys import QUANTIZATION_KEY
from winml.modelkit.onnx.files.graph_reading import load_by_reference
from winml.modelkit.profile.race import Times, ratio_between
from winml.modelkit.quantize.precisions import FLOAT32
from winml.modelkit.transform.module_functions import graph_modules
from winml.modelkit.tune.records import Candidate

_MOST_GROUPS = 16
"""Chosen: a transformer has six to ten groups. Of more, those with the most quantized nodes are tried."""
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A segment of a module path that is a number."""


def group_candidates(best: Candidate, rules: Mapping[str, str] | None, model: Path) -> dict[str, Candidate]:
    """Return for each group of modules a candidate that has them in float: selector → candidate.

    Args:
        best: A candidate with integers.
        rules: Modules that it has in float already, selector → precision.
        model: Its file, which says what was quantized in which module.

    Raises:
        InputError: the file is damaged.
    """
    graph = load_by_reference(model)
    record = json.loads(graph.metadata_props.get(QUANTIZATION_KEY, "{}"))
    paths = {module.tag: module.path for module in graph_modules(graph, model.stem).modules}
    nodes: Counter[str] = Counter()
    for module in record.get("modules", ()):
        if path := paths.get(module["tag"], ""):
            nodes[_NUMBER.sub("*", path)] += int(module["quantized"])
    chosen = [selector for selector, count in nodes.most_common(_MOST_GROUPS) if count]
    # With one group, all of it in float is the float file.
    if len(chosen) < 2:
        return {}
    return {
        selector: placed_candidate(best, rules, {selector: FLOAT32}, f"{best.name}~{number}-{_slug(selector)}")
        for number, selector in enumerate(chosen, start=1)
    }


def placed_candidate(
    best: Candidate, rules: Mapping[str, str] | None, in_float: Mapping[str, str], name: str
) -> Candidate:
    """Return a candidate with more modules in float."""
    quant = {**best.sections["quant"], "per_module": {**in_float, **(rules or {})}}
    words = f"{best.words}; {', '.join(in_float)} in float, because faster"
    sections = {**best.sections, "quant": quant}
    return replace(best, name=name, kind="placement", words=words, sections=sections, part_of="")


def faster_in_float(times: Times, best: str, candidates: Mapping[str, Candidate]) -> list[str]:
    """Return the selectors of the groups without which the candidate is faster by more than the noise."""
    return [
        selector
        for selector, item in candidates.items()
        if times.get(item.name) and ratio_between(times, item.name, best).verdict == "faster"
    ]


def _slug(selector: str) -> str:
    return re.sub(r"[^\w.]+", "_", selector)[-40:].strip("._")
