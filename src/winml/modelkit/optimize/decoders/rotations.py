"""Recognition of rotary position embeddings on queries or keys, by probing.

The operators run on vectors chosen so that the output shows the cosines and sines of every position. Then outputs for
random vectors must agree with the tables.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from winml.modelkit.arrays import Array
from winml.modelkit.errors import StageError
from winml.modelkit.onnx.operators import producer_of
from winml.modelkit.onnx.weights import add_initializer
from winml.modelkit.optimize.decoders.probing import Probe, probe_between
from winml.modelkit.optimize.graph_matching import TO_HEADS, rank_of, transpose_input

_CHUNK = 512
"""Chosen: positions that are computed at once."""
_MOST_POSITIONS = 1 << 18
"""Chosen: tables of so many positions have up to 128 MB; with more positions, the rotation is not replaced."""
_CLOSE = 1e-5
"""Chosen: a few roundings of float32, of vectors of size 1."""
_SEED = 0


@dataclass(frozen=True, eq=False)
class Rotation:
    """Cosines and sines by position, and the pairing of elements."""

    cos: Array
    """Positions × turned pairs, float32."""
    sin: Array
    is_interleaved: bool
    """True if adjacent elements are rotated together, rather than elements of the first and second half."""
    size: int
    """Size of a head."""

    @property
    def turned(self) -> int:
        """Number of rotated elements of a head; the remaining elements are unchanged."""
        return int(2 * self.cos.shape[1])

    def apply(self, x: Array, positions: Array) -> Array:
        """Return x, of shape [1, heads, sequence, size], turned."""
        cos, sin = self.cos[positions][None, None], self.sin[positions][None, None]
        first_elements, second_elements = _pair_slices(self.turned, is_interleaved=self.is_interleaved)
        output = x.copy()
        output[..., first_elements] = x[..., first_elements] * cos - x[..., second_elements] * sin
        output[..., second_elements] = x[..., second_elements] * cos + x[..., first_elements] * sin
        return output


def _pair_slices(turned: int, *, is_interleaved: bool) -> tuple[slice, slice]:
    """Return the slices with the first and the second elements of all rotated pairs."""
    if is_interleaved:
        return slice(0, turned, 2), slice(1, turned, 2)
    return slice(0, turned // 2), slice(turned // 2, turned)


class RotationFinder:
    """Finds the rotations of one graph; layers with equal rotations share one record."""

    def __init__(self, positions: ir.Value | None, count: int | None) -> None:
        """Store the source of positions.

        Args:
            positions: Input of the graph with the position of every token, [batch, sequence]; None: no such input.
            count: Number of positions; None: unknown, so that no table can be made.
        """
        self._positions = positions
        self._count = count
        self._known: list[Rotation] = []

    def find(self, rotated: ir.Value, heads: int, size: int) -> tuple[ir.Value, Rotation] | None:
        """Return the value before the rotation, and the rotation; `None` if the operators compute no rotation.

        Args:
            rotated: Queries or keys of shape [batch, heads, sequence, size].
            heads: Number of heads.
            size: Size of a head.
        """
        if self._positions is None or self._count is None or self._count > _MOST_POSITIONS:
            return None
        probe = probe_between(rotated, _is_before_rotation)
        if probe is None or len(probe.leaves) != 2 or self._positions not in probe.leaves:
            return None
        source = next(leaf for leaf in probe.leaves if leaf is not self._positions)
        if not _is_before_rotation(source) or rotated.dtype != ir.DataType.FLOAT:
            return None
        runs = _Runs(probe, source, self._positions, self._count, heads, size)
        try:
            rotation = next(filter(runs.is_turned_by, self._known), None) or self._measure_rotation(runs)
        except (StageError, ValueError):  # not a function of any number of tokens
            return None
        return (source, rotation) if rotation is not None else None

    def find_both(
        self, query: ir.Value, heads: int, key: ir.Value, key_heads: int, size: int
    ) -> tuple[ir.Value, ir.Value, Rotation | None]:
        """Return queries and keys before their common rotation, and the rotation; unchanged and `None` without one."""
        of_query, of_key = self.find(query, heads, size), self.find(key, key_heads, size)
        if of_query is None or of_key is None or of_query[1] is not of_key[1]:
            return query, key, None
        return of_query[0], of_key[0], of_query[1]

    def _measure_rotation(self, runs: _Runs) -> Rotation | None:
        """Measure a rotation and verify it on random vectors; the result is stored. `None` for other operators."""
        pairing = runs.find_pairing()
        rotation = None if pairing is None else runs.measure_tables(*pairing)
        if rotation is None or not runs.is_turned_by(rotation):
            return None
        self._known.append(rotation)
        return rotation


class RotationTables:
    """Initializers with the cosines and sines of the rotations of one graph, added once for each rotation."""

    def __init__(self, graph: ir.Graph) -> None:
        """Begin without tables."""
        self._graph = graph
        self._tables: dict[Rotation, tuple[ir.Value, ir.Value]] = {}

    def of(self, rotation: Rotation) -> tuple[ir.Value, ir.Value]:
        """Return the cosines and sines of a rotation by position."""
        if rotation not in self._tables:
            number = f"_{len(self._tables)}" if self._tables else ""
            self._tables[rotation] = (
                self._add(f"cos_by_position{number}", rotation.cos),
                self._add(f"sin_by_position{number}", rotation.sin),
            )
        return self._tables[rotation]

    def _add(self, name: str, array: Array) -> ir.Value:
        """Add an initializer, under a new name if the name is taken."""
        while name in self._graph.initializers:
            name = f"{name}_"
        return add_initializer(self._graph, ir.tensor(array, name=name))


def _is_before_rotation(value: ir.Value) -> bool:
    """Return True if a value can be queries or keys before their rotation: split into heads, normalized or not."""
    is_split = transpose_input(value, TO_HEADS) is not None
    return rank_of(value) == 4 and (is_split or producer_of(value, "SimplifiedLayerNormalization") is not None)


@dataclass(frozen=True)
class _Runs:
    """Runs of the operators of a possible rotation."""

    probe: Probe
    source: ir.Value
    positions: ir.Value
    count: int
    """Number of positions."""
    heads: int
    size: int

    def run(self, x: Array, positions: Array) -> Array:
        """Return vectors [1, heads or 1, sequence, size] as rotated by the operators.

        Raises:
            ValueError: the output has a different shape.
            StageError: ONNX Runtime cannot run the operators.
        """
        rows = np.broadcast_to(x, (1, self.heads, *x.shape[-2:])).astype(np.float32)
        output = self.probe.run({self.source: rows, self.positions: positions[None].astype(np.int64)})
        if output.shape != rows.shape:
            raise ValueError(f"shape {output.shape} of a rotation of {rows.shape}")
        return output

    def find_pairing(self) -> tuple[int, bool] | None:
        """Return the number of rotated elements, and True for adjacent pairs; `None` without a rotation."""
        position = min(1, self.count - 1)
        # Row i of the output is the rotated i-th unit vector.
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

    def measure_tables(self, turned: int, is_interleaved: bool) -> Rotation:
        """Measure the cosines and sines of all positions."""
        first_elements, second_elements = _pair_slices(turned, is_interleaved=is_interleaved)
        cos, sin = (np.empty((self.count, turned // 2), np.float32) for _ in range(2))
        for start in range(0, self.count, _CHUNK):
            positions = np.arange(start, min(self.count, start + _CHUNK))
            x = np.zeros((1, 1, len(positions), self.size), np.float32)
            x[..., first_elements] = 1
            output = self.run(x, positions)[0, 0]
            cos[positions], sin[positions] = output[:, first_elements], output[:, second_elements]
        return Rotation(cos, sin, is_interleaved, self.size)

    def is_turned_by(self, rotation: Rotation) -> bool:
        """Return True if a rotation reproduces the operators' outputs for random vectors and positions."""
        if rotation.size != self.size:
            return False
        generator = np.random.default_rng(_SEED)
        spread = np.linspace(0, self.count - 1, min(self.count, 64)).astype(np.int64)
        positions = np.concatenate([spread, generator.integers(0, self.count, 64)])
        x = generator.uniform(-1, 1, (1, self.heads, len(positions), self.size)).astype(np.float32)
        scale = max(1.0, float(np.abs(rotation.cos).max()))
        return bool(np.abs(self.run(x, positions) - rotation.apply(x, positions)).max() <= _CLOSE * scale)
