"""What can be done about a node that a provider does not run?"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import onnx

from winml.modelkit.inspect.node_facts import GraphFacts
from winml.modelkit.inspect.provider_fit import FindingKind
from winml.modelkit.runtime.devices import ChosenProvider
from winml.modelkit.runtime.execution_providers import short_name
from winml.modelkit.runtime.placement.kernels import is_composed

__all__ = ["remedy_for"]

_ON_CPU = "It runs on the CPU, and values are copied there and back"


def remedy_for(kind: FindingKind, what: str, path: Path, facts: GraphFacts, chosen: ChosenProvider) -> str:
    """Return what to do about a finding, in a sentence with a command where there is one.

    Args:
        kind: What keeps the nodes from the provider.
        what: The dimension, operator, or operator and types.
        path: The file.
        facts: Its nodes.
        chosen: The provider.
    """
    return _REMEDIES[kind](what, path, facts, chosen)


def _for_open_size(what: str, path: Path, facts: GraphFacts, chosen: ChosenProvider) -> str:  # noqa: ARG001
    sizes = json.dumps({name: 1 for name in facts.open_places if name not in facts.sums})
    command = f"winml export -m {path} -o fixed.onnx --shape-config '{sizes}'"
    return f"Fix the sizes, with those you need in place of 1: {command}"


def _for_unknown_size(what: str, path: Path, facts: GraphFacts, chosen: ChosenProvider) -> str:  # noqa: ARG001
    return f"{_ON_CPU}. Cut the graph there (winml extract), or write the model with sizes that do not depend on data."


def _for_operator(what: str, path: Path, facts: GraphFacts, chosen: ChosenProvider) -> str:
    short = short_name(chosen.provider.name)
    domain, _, operator = what.rpartition(".")
    if domain == "com.microsoft":
        return f"Optimize the export again for this provider, which leaves it out: winml optimize --ep {short}."
    if not domain and (version := _version_composed_from(operator, facts)) is not None:
        return f"Export with --opset {version - 1}: {operator} is written in simpler operators there."
    return f"{_ON_CPU}. What fusing would change: winml optimize -m {path} --level full --ep {short} --check"


def _version_composed_from(operator: str, facts: GraphFacts) -> int | None:
    """Return the opset that brought an operator that ONNX defines by others; None for any other."""
    try:
        schema = onnx.defs.get_schema(operator, facts.opsets.get("", 1), "")
        while schema.since_version > 1:
            schema_before = _schema_before(operator, schema.since_version)
            if schema_before is None:
                break
            schema = schema_before
    except onnx.defs.SchemaError:
        return None
    return schema.since_version if is_composed(schema) and schema.since_version > _OLDEST_EXPORT else None


_OLDEST_EXPORT = 17
"""Chosen: both exporters write it."""


def _schema_before(operator: str, version: int) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(operator, version - 1, "")
    except onnx.defs.SchemaError:
        return None


def _for_dtype(what: str, path: Path, facts: GraphFacts, chosen: ChosenProvider) -> str:  # noqa: ARG001
    if "float64" in what:
        return "Export again with --dtype fp32."
    if "bfloat16" in what:
        return "Export again with --dtype fp32, or fp16."
    if "float16" in what:
        return "Take the file before winml quantize --precision fp16, or export with --dtype fp32."
    if "float32" in what:
        return f"Take fewer bits: winml quantize -m {path} -o half.onnx --precision fp16"
    return f"{_ON_CPU}: keep values of this type out of the large products."


def _for_refused(what: str, path: Path, facts: GraphFacts, chosen: ChosenProvider) -> str:  # noqa: ARG001
    return f"{_ON_CPU}. Give other --ep-options or another --device; winml compile names what stays outside."


def _for_graph(what: str, path: Path, facts: GraphFacts, chosen: ChosenProvider) -> str:  # noqa: ARG001
    if what.startswith("opset"):
        return f"Convert it: winml optimize -m {path} --opset N."
    if short_name(chosen.provider.name) == "qnn":
        return "Name the processor it is for: --ep-options soc_model=N, by the number Qualcomm gives it."
    return "Give other --ep-options or another --device; what its documentation lists follows."


_REMEDIES: Mapping[FindingKind, Callable[[str, Path, GraphFacts, ChosenProvider], str]] = {
    "open size": _for_open_size,
    "unknown size": _for_unknown_size,
    "operator": _for_operator,
    "dtype": _for_dtype,
    "refused": _for_refused,
    "graph": _for_graph,
}
