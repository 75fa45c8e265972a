"""Which rotation by position do the operators on queries or keys compute? Found by probing.

The operators are given vectors chosen so that the answer shows the cosines and sines of every position. Then random
vectors must be answered as those tables say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from winml.modelkit.arrays import Array
from winml.modelkit.errors import StageError
from winml.modelkit.optimize.graph_matching import permutation_of, producer_of, rank_of
from winml.modelkit.runtime.sessions import Session

# --- Computes a part of a graph on values chosen here, to see what it does.
#
# What a rotation or a mask looks like in a graph differs by model, exporter and version. What it answers does not.


_LARGEST_CONSTANT = 1 << 26
"""Bytes. Chosen: tables of cosines stay below, weights of matrices of a large model do not."""
_MOST_NODES = 500
"""Chosen: masks and rotations have up to 60 nodes."""
_IR_VERSION = 8
"""Chosen: every ONNX Runtime takes it."""


@dataclass
class Probe:
    """The nodes that compute one value from others."""

    result: ir.Value
    leaves: tuple[ir.Value, ...]
    """Values that have to be given, in the order they were met."""
    nodes: tuple[ir.Node, ...]
    """In an order in which they can run."""
    constants: Mapping[ir.Value, ir.TensorProtocol]
    _session: Session | None = field(default=None, repr=False)

    def run(self, feeds: Mapping[ir.Value, Array]) -> Array:
        """Return the value for some leaves.

        Raises:
            StageError: ONNX Runtime cannot compute it.
        """
        if self._session is None:
            # As written: fusing nodes of a graph that runs a few times costs more than it saves.
            self._session = Session(self._as_bytes(), optimize=False, threads=1, name="a part of the graph")
        named = {str(leaf.name): array for leaf, array in feeds.items()}
        return next(iter(self._session.run(named).values()))

    def _as_bytes(self) -> bytes:
        values = {leaf: ir.Value(name=leaf.name, type=leaf.type) for leaf in self.leaves}
        initializers = []
        for value, tensor in self.constants.items():
            values[value] = ir.Value(name=value.name, type=ir.TensorType(tensor.dtype), const_value=tensor)
            values[value].shape = ir.Shape(tensor.shape.numpy())
            initializers.append(values[value])
        nodes = []
        for node in self.nodes:
            inputs = [None if value is None else values[value] for value in node.inputs]
            # Sizes are left out: those of the graph may be fixed where a probe has others.
            outputs = [ir.Value(name=value.name, type=value.type) for value in node.outputs]
            values |= zip(node.outputs, outputs, strict=True)
            nodes.append(
                ir.Node(node.domain, node.op_type, inputs, attributes=list(node.attributes.values()), outputs=outputs)
            )
        owner = self.result.producer()
        assert owner is not None
        assert owner.graph is not None
        graph = ir.Graph(
            [values[leaf] for leaf in self.leaves],
            [values[self.result]],
            nodes=nodes,
            initializers=initializers,
            opset_imports=dict(owner.graph.opset_imports),
            name="probe",
        )
        content: bytes = ir.to_proto(ir.Model(graph, ir_version=_IR_VERSION)).SerializeToString()
        return content


def probe_between(result: ir.Value, is_leaf: Callable[[ir.Value], bool]) -> Probe | None:
    """Return what computes a value from graph inputs and other leaves.

    None where that takes weights of matrices, other than tensors, subgraphs or too many nodes.

    Args:
        result: The value.
        is_leaf: Says of a value that a node makes whether it is given.
    """
    leaves: dict[ir.Value, None] = {}
    nodes: dict[ir.Node, None] = {}
    constants: dict[ir.Value, ir.TensorProtocol] = {}
    waiting: list[tuple[ir.Value, bool]] = [(result, False)]
    while waiting:
        value, is_done = waiting.pop()
        node = value.producer()
        if is_done:
            assert node is not None
            nodes[node] = None
        elif value.const_value is not None and node is None:
            if value.const_value.nbytes > _LARGEST_CONSTANT:
                return None
            constants[value] = value.const_value
        elif node is None or (value is not result and is_leaf(value)):
            if value.dtype is None:
                return None
            leaves[value] = None
        elif node not in nodes:
            if len(nodes) > _MOST_NODES or any(
                item.type == ir.AttributeType.GRAPH for item in node.attributes.values()
            ):
                return None
            waiting.append((value, True))
            waiting += [(read, False) for read in node.inputs if read is not None]
    if result.dtype is None or not nodes:
        return None
    return Probe(result, tuple(leaves), tuple(nodes), constants)


TO_HEADS = (0, 2, 1, 3)
"""Permutation of [batch, sequence, heads, size] that moves the heads before the sequence, and back."""
_CHUNK = 512
"""Chosen: positions that are computed at once."""
_MOST_POSITIONS = 1 << 18
"""Chosen: tables of as many positions have up to 128 MB; of more, the rotation stays as it is."""
_CLOSE = 1e-5
"""Chosen: a few roundings of float32, of vectors of size 1."""
_SEED = 0


@dataclass(frozen=True, eq=False)
class Rotation:
    """Cosines and sines by position, and which elements turn together."""

    cos: Array
    """Positions × turned pairs, float32."""
    sin: Array
    is_interleaved: bool
    """Whether neighbours turn together, rather than elements of the first half with those of the second."""
    size: int
    """Of a head."""

    @property
    def turned(self) -> int:
        """How many elements of a head are turned; those after them stay."""
        return int(2 * self.cos.shape[1])

    def apply(self, x: Array, positions: Array) -> Array:
        """Return x, of shape [1, heads, sequence, size], turned."""
        cos, sin = self.cos[positions][None, None], self.sin[positions][None, None]
        first, second = self.places()
        output = x.copy()
        output[..., first] = x[..., first] * cos - x[..., second] * sin
        output[..., second] = x[..., second] * cos + x[..., first] * sin
        return output

    def places(self) -> tuple[slice, slice]:
        """Return the elements that turn into each other."""
        return _places(self.turned, is_interleaved=self.is_interleaved)


def _places(turned: int, *, is_interleaved: bool) -> tuple[slice, slice]:
    if is_interleaved:
        return slice(0, turned, 2), slice(1, turned, 2)
    return slice(0, turned // 2), slice(turned // 2, turned)


class RotationFinder:
    """Finds the rotations of one graph; layers that turn alike share one record."""

    def __init__(self, positions: ir.Value | None, count: int | None) -> None:
        """Remember where positions come from.

        Args:
            positions: Input of the graph with the position of every token, [batch, sequence]; None: it has none.
            count: How many positions there are; None: not known, so that no table can be made.
        """
        self._positions = positions
        self._count = count
        self._known: list[Rotation] = []

    def find(self, rotated: ir.Value, heads: int, size: int) -> tuple[ir.Value, Rotation] | None:
        """Return the value before the rotation, and the rotation; None where the operators compute something else.

        Args:
            rotated: Queries or keys of shape [batch, heads, sequence, size].
            heads: Number of heads.
            size: Of each.
        """
        if self._positions is None or self._count is None or self._count > _MOST_POSITIONS:
            return None
        probe = probe_between(rotated, _is_before_rotation)
        if probe is None or len(probe.leaves) != 2 or self._positions not in probe.leaves:
            return None
        source = next(leaf for leaf in probe.leaves if leaf is not self._positions)
        if not _is_before_rotation(source) or rotated.dtype != ir.DataType.FLOAT:
            return None
        runs = _Runs(probe, source, self._positions, heads, size)
        try:
            rotation = self._found(runs)
        except (StageError, ValueError):  # not a function of any number of tokens
            return None
        return (source, rotation) if rotation is not None else None

    def _found(self, runs: _Runs) -> Rotation | None:
        assert self._count is not None
        for known in self._known:
            if runs.is_turned_by(known, self._count):
                return known
        form = runs.form(self._count)
        if form is None:
            return None
        found = runs.table(self._count, *form)
        if not runs.is_turned_by(found, self._count):
            return None
        self._known.append(found)
        return found


def _is_before_rotation(value: ir.Value) -> bool:
    """Say whether a value can be queries or keys as they are turned: split into heads, normalized or not."""
    node = producer_of(value, "Transpose") or producer_of(value, "SimplifiedLayerNormalization")
    if node is None or rank_of(value) != 4:
        return False
    return node.op_type != "Transpose" or permutation_of(node) == TO_HEADS


@dataclass(frozen=True)
class _Runs:
    """Runs of the operators between a value and the same turned."""

    probe: Probe
    source: ir.Value
    positions: ir.Value
    heads: int
    size: int

    def run(self, x: Array, positions: Array) -> Array:
        rows = np.broadcast_to(x, (1, self.heads, *x.shape[-2:])).astype(np.float32)
        output = self.probe.run({self.source: rows, self.positions: positions[None].astype(np.int64)})
        if output.shape != rows.shape:
            raise ValueError(f"shape {output.shape} of a rotation of {rows.shape}")
        return output

    def form(self, count: int) -> tuple[int, bool] | None:
        """Return how many elements are turned, and whether neighbours turn together; None where it is no rotation."""
        position = min(1, count - 1)
        # Row i of the answer is what becomes of the i-th unit vector.
        matrix = self.run(np.eye(self.size, dtype=np.float32)[None, None], np.full(self.size, position))[0, 0].T
        apart = np.abs(matrix) > _CLOSE
        np.fill_diagonal(apart, val=False)
        partners = np.flatnonzero(apart[0])
        if len(partners) != 1:
            return None
        distance = int(partners[0])
        if distance == 1 and self.size > 2:
            return 2 * int(np.count_nonzero(apart) // 2), True
        return 2 * distance, False

    def table(self, count: int, turned: int, is_interleaved: bool) -> Rotation:
        first, second = _places(turned, is_interleaved=is_interleaved)
        cos, sin = (np.empty((count, turned // 2), np.float32) for _ in range(2))
        for start in range(0, count, _CHUNK):
            positions = np.arange(start, min(count, start + _CHUNK))
            x = np.zeros((1, 1, len(positions), self.size), np.float32)
            x[..., first] = 1
            output = self.run(x, positions)[0, 0]
            cos[positions], sin[positions] = output[:, first], output[:, second]
        return Rotation(cos, sin, is_interleaved, self.size)

    def is_turned_by(self, rotation: Rotation, count: int) -> bool:
        if rotation.size != self.size:
            return False
        generator = np.random.default_rng(_SEED)
        spread = np.linspace(0, count - 1, min(count, 64)).astype(np.int64)
        positions = np.concatenate([spread, generator.integers(0, count, 64)])
        x = generator.uniform(-1, 1, (1, self.heads, len(positions), self.size)).astype(np.float32)
        scale = max(1.0, float(np.abs(rotation.cos).max()))
        return bool(np.abs(self.run(x, positions) - rotation.apply(x, positions)).max() <= _CLOSE * scale)
