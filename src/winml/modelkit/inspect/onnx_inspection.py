"""The record of an inspected ONNX file, to be printed or written as JSON.

The JSON keys are the same for every file; values that do not apply are null or empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from winml.modelkit.hierarchy.tagging import Coverage
from winml.modelkit.inspect.module_costs import Cost, ModuleCost, Shape
from winml.modelkit.inspect.onnx_contents import Weight
from winml.modelkit.inspect.onnx_tree import TreeSource
from winml.modelkit.records import Record, entry

__all__ = ["FileInfo", "NodeInfo", "OnnxInspection", "ValueInfo", "WeightSummary"]


@dataclass(frozen=True)
class FileInfo(Record):
    """One file of the model."""

    path: Path
    size_bytes: int | None
    """None where it is missing."""


@dataclass(frozen=True)
class ValueInfo(Record):
    """One input or output of the model."""

    name: str
    dtype: str
    """Element type; ``sequence``, ``optional``, ``map`` or ``opaque`` where it is no tensor."""
    shape: Shape | None = field(metadata=entry(before="dtype"))
    """None: the rank is unknown, or it is no tensor."""


@dataclass(frozen=True)
class WeightSummary(Record):
    """The weights of one element type."""

    count: int
    parameters: int
    size_bytes: int


@dataclass(frozen=True)
class NodeInfo(Record):
    """One node of a selected module."""

    name: str
    operator: str
    tag: str
    macs: int | None
    """Multiply-accumulate operations of one run; None where they are unknown."""
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class OnnxInspection:
    """Everything known about one ONNX file."""

    files: tuple[FileInfo, ...]
    """The model file first, then the data files it names."""
    ir_version: int
    producer_name: str
    producer_version: str
    graph_name: str
    opsets: Mapping[str, int]
    """Version of each operator set; ONNX's own is ``ai.onnx``."""
    inputs: tuple[ValueInfo, ...]
    """Without the initializers, which older files list among them."""
    outputs: tuple[ValueInfo, ...]
    weights: tuple[Weight, ...]
    weight_summaries: Mapping[str, WeightSummary]
    """By element type, the largest first; of quantized weights the type of the values that are packed."""
    operators: Mapping[str, int]
    """Number of nodes per operator, the most frequent first; subgraphs and functions included."""
    subgraph_nodes: int
    """Number of nodes in subgraphs."""
    functions: Mapping[str, int]
    """Number of nodes per function the file defines."""
    total: Cost
    """Cost of the whole file."""
    records: Mapping[str, Any]
    """The ``winml.*`` metadata, parsed; the module tree is in ``modules`` instead."""
    metadata: Mapping[str, str]
    """All other metadata."""
    tree_source: TreeSource
    coverage: Coverage
    modules: tuple[ModuleCost, ...]
    """The module tree, or the selected subtrees."""
    unclaimed: Cost
    """Cost of nodes and weights that belong to no module."""
    selector: str | None
    module_nodes: tuple[NodeInfo, ...]
    """Nodes of the selected modules; empty without ``selector``."""
    notes: tuple[str, ...]
    """Problems and limits of the inspection, one sentence each."""

    @property
    def size_bytes(self) -> int:
        """Size on disk, existing data files included."""
        return sum(file.size_bytes or 0 for file in self.files)

    def as_record(self, *, with_hierarchy: bool = True, with_weights: bool = False) -> dict[str, Any]:
        """Return a JSON-ready record: sizes in bytes, unknown operations as null.

        Args:
            with_hierarchy: Fill ``modules``; else it is null.
            with_weights: Fill ``initializers.tensors``; else it is null.
        """
        return {
            "kind": "onnx",
            "path": str(self.files[0].path),
            "size_bytes": self.size_bytes,
            "files": [file.as_record() for file in self.files],
            "ir_version": self.ir_version,
            "opsets": dict(self.opsets),
            "producer": {"name": self.producer_name, "version": self.producer_version},
            "graph_name": self.graph_name,
            "inputs": [value.as_record() for value in self.inputs],
            "outputs": [value.as_record() for value in self.outputs],
            "initializers": {
                "count": len(self.weights),
                "parameters": self.total.parameters,
                "bits": self.total.bits,
                "size_bytes": self.total.size_bytes,
                "by_dtype": {dtype: summary.as_record() for dtype, summary in self.weight_summaries.items()},
                "tensors": [weight.as_record() for weight in self.weights] if with_weights else None,
            },
            "nodes": self.total.nodes,
            "subgraph_nodes": self.subgraph_nodes,
            "functions": dict(self.functions),
            "operators": dict(self.operators),
            "macs": self.total.macs,
            "records": dict(self.records),
            "metadata": dict(self.metadata),
            "tree_source": self.tree_source,
            "coverage": self.coverage.as_record(),
            "modules": [module.as_record() for module in self.modules] if with_hierarchy else None,
            "unclaimed": self.unclaimed.as_record(),
            "selector": self.selector,
            "module_nodes": [node.as_record() for node in self.module_nodes] if self.selector is not None else None,
            "notes": list(self.notes),
        }
