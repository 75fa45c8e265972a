"""Trace of a compilation: operators on the device with their source nodes, and reasons of unsupported nodes.

The provider writes a trace when it compiles a graph. A compiled file contains the trace with the modules of the nodes,
so that its operators can be charged to modules without its source file.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from winml.modelkit.metadata_keys import COMPILE_TRACE_KEY
from winml.modelkit.onnx.files.moving import remove_file
from winml.modelkit.options import load_json, load_metadata
from winml.modelkit.records import Record

NO_REASON = "the provider states no reason"
_TRACE_NAME = "qnn_op_trace.json"
"""Specified by onnxruntime-qnn."""


_NODE_NAMED = re.compile(r"\.?\w+ node `[^`]*` will not be assigned to .*$")
"""Suffix of some reasons of QNN, which repeats the node."""


def without_node_name(reason: str) -> str:
    """Return a reason of a provider without the name of the node, so that nodes with equal reasons are counted."""
    return _NODE_NAMED.sub("", reason)


@dataclass(frozen=True)
class DeviceTrace:
    """Trace of a provider."""

    operators: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Operator on the device → names of its source nodes."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Name of an unsupported node → reason."""


def read_device_trace(folder: Path) -> DeviceTrace:
    """Read the trace that a provider wrote into a folder; empty without a trace, or in an unknown format."""
    try:
        record = load_json((folder / _TRACE_NAME).read_text(encoding="utf-8"))
        operators = {
            str(entry["dst_name"]): tuple(str(source["name"]) for source in entry["sources"] if source["type"] == "OP")
            for graph in record["subgraph_traces"]
            for entry in graph["op_mappings"]
        }
        reasons = {
            str(entry["node_name"]): without_node_name(str(entry["reason"])) for entry in record["unsupported_nodes"]
        }
    except (OSError, KeyError, TypeError, ValueError):
        return DeviceTrace()
    return DeviceTrace(operators, reasons)


def take_device_trace(folder: Path) -> DeviceTrace:
    """Read the trace that a provider wrote into a folder, and remove its file: the next model writes its own."""
    trace = read_device_trace(folder)
    remove_file(folder / _TRACE_NAME)
    return trace


class ModulePlacement(Record):
    """Nodes of one module on the device, and reasons of its other nodes."""

    module: str
    """Dotted path, or the tag if the path is unknown; ``""`` for the root."""
    nodes: int
    on_device: int
    reasons: Mapping[str, int]
    """Reason → number of nodes outside of compiled parts; ``""`` if the provider states no reason."""

    @property
    def reason_words(self) -> str:
        """Numbers of nodes outside of compiled parts with their reasons, for people; ``""`` without such nodes."""
        return "; ".join(f"{count}: {reason or NO_REASON}" for reason, count in self.reasons.items())


def place_modules(nodes: Iterable[tuple[str, str | None]]) -> tuple[ModulePlacement, ...]:
    """Count the nodes of each module, in the order of their first node.

    Args:
        nodes: Module of each node, and the reason why the device does not run the node; `None` if the device runs it.
    """
    counts: dict[str, Counter[str | None]] = defaultdict(Counter)
    for module, reason in nodes:
        counts[module][reason] += 1
    return tuple(
        ModulePlacement(
            module,
            reasons.total(),
            reasons[None],
            {reason: count for reason, count in reasons.most_common() if reason is not None},
        )
        for module, reasons in counts.items()
    )


@dataclass(frozen=True)
class CompiledNode:
    """One node of the source of a compiled file."""

    name: str
    op_type: str
    tag: str
    """Tag of its module; ``""`` without a tag."""
    reason: str | None = None
    """Reason why it is outside of compiled parts, ``""`` if unknown; `None` for a compiled node."""


@dataclass(frozen=True)
class CompilationTrace:
    """The nodes that a file was compiled from, in their order, and their operators on the device."""

    nodes: tuple[CompiledNode, ...]
    operators: Mapping[str, tuple[str, ...]]
    """Operator on the device → names of its source nodes."""

    def as_metadata(self) -> str:
        """Return the value of the metadata key; operators of one node with the same name are omitted.

        Nodes are listed, since the branches of an ``If`` may have nodes of equal names.
        """
        modules: dict[str, list[list[str]]] = defaultdict(list)
        for node in self.nodes:
            modules[node.tag].append([node.name, node.op_type, *([] if node.reason is None else [node.reason])])
        record = {
            "modules": modules,
            "operators": {name: sources for name, sources in self.operators.items() if sources != (name,)},
        }
        return json.dumps(record, ensure_ascii=False, separators=(",", ":"))

    def place_modules(self, paths: Mapping[str, str]) -> tuple[ModulePlacement, ...]:
        """Count the nodes of each module.

        Args:
            paths: Tag → module path.
        """
        return place_modules((paths.get(node.tag, node.tag), node.reason) for node in self.nodes)


def read_compilation_trace(metadata: Mapping[str, str]) -> CompilationTrace | None:
    """Read the trace in the metadata of a compiled file; `None` without a trace, or if it is damaged."""
    try:
        record = load_metadata(metadata[COMPILE_TRACE_KEY])
        nodes = tuple(
            CompiledNode(str(name), str(op_type), str(tag), *map(str, reason))
            for tag, listed in record["modules"].items()
            for name, op_type, *reason in listed
        )
        operators = {str(name): tuple(map(str, sources)) for name, sources in record["operators"].items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return CompilationTrace(nodes, operators)
