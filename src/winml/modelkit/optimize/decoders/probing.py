"""Evaluation of a subgraph on chosen values, to identify its function.

The operators of a rotation or a mask differ by model, exporter and version; the results do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from winml.modelkit.arrays import Array
from winml.modelkit.ort.sessions import Session

_LARGEST_CONSTANT = 1 << 26
"""Bytes. Chosen: tables of cosines stay below, weights of matrices of a large model do not."""
_MOST_NODES = 500
"""Chosen: masks and rotations have up to 60 nodes."""
_IR_VERSION = 8
"""Chosen: every ONNX Runtime takes it."""


@dataclass
class Probe:
    """A subgraph from leaves to a computed value."""

    result: ir.Value
    leaves: tuple[ir.Value, ...]
    """Values that must be fed, in the order of discovery."""
    nodes: tuple[ir.Node, ...]
    """In execution order."""
    constants: tuple[ir.Value, ...]
    _session: Session | None = field(default=None, repr=False)

    def run(self, feeds: Mapping[ir.Value, Array]) -> Array:
        """Return the computed value for values of the leaves; the session is created on first use.

        Raises:
            StageError: ONNX Runtime cannot compute it.
        """
        if self._session is None:
            # As written: fusing nodes of a graph that runs a few times costs more than it saves.
            self._session = Session(self._as_bytes(), optimize=False, threads=1, name="a part of the graph")
        arrays = {str(leaf.name): array for leaf, array in feeds.items()}
        return next(iter(self._session.run(arrays).values()))

    def _as_bytes(self) -> bytes:
        """Serialize the subgraph as a model without sizes."""
        owner = self.result.producer()
        assert owner is not None
        assert owner.graph is not None
        graph = ir.GraphView(
            self.leaves,
            [self.result],
            nodes=self.nodes,
            initializers=self.constants,
            opset_imports=dict(owner.graph.opset_imports),
            name="probe",
        ).clone()
        for value in (*graph.inputs, *(output for node in graph for output in node.outputs)):
            # Sizes of the graph may be fixed while the probe's differ.
            value.shape = None
        content: bytes = ir.to_proto(ir.Model(graph, ir_version=_IR_VERSION)).SerializeToString()
        return content


def probe_between(result: ir.Value, is_leaf: Callable[[ir.Value], bool], most_nodes: int = _MOST_NODES) -> Probe | None:
    """Extract the nodes that compute a value from graph inputs and other leaves.

    `None` if the computation reads weight matrices or values other than tensors, or has subgraphs or too many nodes.

    Args:
        result: The value.
        is_leaf: Returns True if a value is a leaf although a node produces it, or it is a constant.
        most_nodes: Maximum number of nodes.
    """
    leaves: dict[ir.Value, None] = {}
    nodes: dict[ir.Node, None] = {}
    constants: dict[ir.Value, None] = {}
    waiting: list[tuple[ir.Value, bool]] = [(result, False)]
    while waiting:
        value, is_done = waiting.pop()
        node = value.producer()
        if is_done:
            assert node is not None
            nodes[node] = None
        elif value.const_value is not None and node is None and not is_leaf(value):
            if value.const_value.nbytes > _LARGEST_CONSTANT:
                return None
            constants[value] = None
        elif node is None or (value is not result and is_leaf(value)):
            if value.dtype is None:
                return None
            leaves[value] = None
        elif node not in nodes:
            if len(nodes) > most_nodes or any(
                attribute.type == ir.AttributeType.GRAPH for attribute in node.attributes.values()
            ):
                return None
            waiting.append((value, True))
            waiting += [(input_value, False) for input_value in node.inputs if input_value is not None]
    if result.dtype is None or not nodes:
        return None
    return Probe(result, tuple(leaves), tuple(nodes), tuple(constants))
