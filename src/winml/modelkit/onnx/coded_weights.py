"""Quantized weights: codes, scales and zero points, read from a file on demand.

A coded weight defines its storage and the conversion of its codes to floating-point numbers. In a graph, the numbers
are a tensor, by reference, until a step replaces its readers by operators on codes. Independent of
checkpoint formats and operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import ml_dtypes
import numpy as np
import onnx_ir as ir

from winml.modelkit.arrays import Array
from winml.modelkit.onnx.files.stored_tensors import ReferringTensor

CodeKind = Literal["integer", "number", "nf4", "bnb_fp4", "float4_e2m1", "float8_e4m3fn", "float8_e5m2"]
"""Meaning of a code: an integer (minus its zero point), an entry of a table of 16, or a small float; ``number`` is a
float32 value, for codes of any other meaning.
"""

CODE_TABLES: dict[str, tuple[float, ...]] = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "bnb_fp4": (
        0.0, 0.005208333333333333, 0.6666666666666666, 1.0, 0.3333333333333333, 0.5, 0.16666666666666666, 0.25,
        -0.0, -0.005208333333333333, -0.6666666666666666, -1.0, -0.3333333333333333, -0.5, -0.16666666666666666, -0.25,
    ),
    "float4_e2m1": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
}  # fmt: skip
"""Specified: values of 4-bit codes by kind: bitsandbytes' NormalFloat and FP4, and E2M1 of the microscaling formats."""

_PIECE_ELEMENTS = 1 << 20
"""Values computed at a time. Chosen: they and their scales take a few MB."""

_FLOAT8 = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}


@dataclass(frozen=True)
class CodedParts:
    """The codes of a weight in memory; rows are output channels."""

    codes: Array
    """uint8, rows × bytes per row. Codes of less than eight bits are packed from the lowest bits of a byte on."""
    scales: Array
    """float32, rows × blocks of a row."""
    zero_points: Array | None = None
    """uint8, rows × blocks per row, one per byte; or float32; None: 2 to the power of bits - 1."""


@dataclass(frozen=True, eq=False)
class CodedWeight:
    """A quantized weight as stored in a checkpoint.

    Rows are output channels: rows × depth, or for experts experts × rows × depth, read as one sequence of rows. A row
    is divided into blocks of equal size, of which the last may be shorter.
    """

    source_format: str
    """Name of its source format, such as ``gptq``."""
    key: str
    """Name of its parameter in the checkpoint, for messages."""
    shape: tuple[int, ...]
    kind: CodeKind
    bits: int
    block_size: int
    """Values of a row that share a scale. A scale for several rows is repeated for each."""
    read: Callable[[], CodedParts]
    """Reads all of it."""
    has_zero_points: bool = False
    has_float_zero_points: bool = False
    """True if zero points lie between the steps: float32."""
    stored_type: str = ""
    """Name of the type in the format, such as ``Q4_K``; ``""`` if the format has no type names."""
    read_order: Callable[[], Array] | None = None
    """Reads the input channel of each stored position of a row (int64); None: stored in order."""
    members: tuple[CodedWeight, ...] = ()
    """For experts, the weight of each expert."""

    @property
    def dtype(self) -> ir.DataType:
        """Type of the dequantized values."""
        return ir.DataType.FLOAT

    @property
    def depth(self) -> int:
        """Values of a row: input channels."""
        return self.shape[-1]

    @property
    def precision(self) -> str:
        """Name of the code type: ``int4``, ``nf4``, ``fp4``, ``float8_e4m3fn``, ``Q4_K`` …"""
        if self.stored_type:
            return self.stored_type
        return f"int{self.bits}" if self.kind == "integer" else self.kind.removeprefix("bnb_")

    @property
    def published_bits(self) -> int:
        """Bits of a code in the checkpoint, scales not included."""
        digit = self.stored_type[1:2]
        return int(digit) if digit.isdigit() else self.bits

    @property
    def rows(self) -> int:
        """Rows, of all experts together."""
        return math.prod(self.shape[:-1])

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return math.ceil(self.depth / self.block_size)

    @property
    def stored_bytes(self) -> int:
        """Number of bytes of the codes alone."""
        return self.rows * math.ceil(self.depth * self.bits / 8)

    def dequantized(self) -> Array:
        """Return the dequantized values, float32."""
        parts = self.read()
        values: Array = np.empty((self.rows, self.depth), np.float32)
        for start in range(0, self.rows, step := max(1, _PIECE_ELEMENTS // max(1, self.depth))):
            rows = slice(start, start + step)
            values[rows] = self.values_of_rows(parts, rows)
        return values.reshape(self.shape)

    def values_of_rows(self, parts: CodedParts, rows: slice | Array) -> Array:
        """Return the dequantized values of rows, float32.

        Args:
            parts: Codes, scales and zero points.
            rows: Row indices, over all experts.
        """
        values = _decode_values(parts.codes[rows], self.kind, self.bits, self.depth)
        if self.kind == "integer":
            if parts.zero_points is None:
                values -= np.float32(1 << (self.bits - 1))
            else:
                values -= np.repeat(parts.zero_points[rows], self.block_size, axis=1)[:, : self.depth]
        values *= np.repeat(parts.scales[rows], self.block_size, axis=1)[:, : self.depth]
        if self.read_order is not None:
            ordered = np.empty_like(values)
            ordered[:, self.read_order()] = values
            return ordered
        return values


def _decode_values(codes: Array, kind: CodeKind, bits: int, depth: int) -> Array:
    """Return the numbers of codes before zero points and scales: float32, rows × depth."""
    if kind == "number":
        return np.ascontiguousarray(codes).view(np.float32).copy()
    if kind in _FLOAT8:
        floats: Array = codes.view(_FLOAT8[kind]).astype(np.float32)
        return floats
    numbers = unpack_codes(codes, bits, depth)
    if kind == "integer":
        return numbers.astype(np.float32)
    return np.asarray(CODE_TABLES[kind], np.float32)[numbers]


def unpack_codes(packed: Array, bits: int, count: int) -> Array:
    """Return codes, one in each byte, from codes packed along the last axis, the first in the lowest bits of a byte.

    Args:
        packed: uint8.
        bits: Of a code: 1, 2, 4 or 8.
        count: Codes of a row.
    """
    if bits == 8:
        return packed[..., :count]
    per_byte = 8 // bits
    codes = np.empty((*packed.shape, per_byte), np.uint8)
    for index in range(per_byte):
        codes[..., index] = (packed >> (bits * index)) & ((1 << bits) - 1)
    return codes.reshape(*packed.shape[:-1], -1)[..., :count]


def pack_codes(codes: Array, bits: int, fill: int = 0) -> Array:
    """Return codes packed along the last axis, the first in the lowest bits of a byte; the last byte is filled up."""
    if bits == 8:
        return codes
    per_byte = 8 // bits
    if missing := -codes.shape[-1] % per_byte:
        padding = [(0, 0)] * (codes.ndim - 1) + [(0, missing)]
        codes = np.pad(codes, padding, constant_values=fill)
    packed = np.ascontiguousarray(codes, np.uint8)
    while bits < 8:
        pairs = packed.view("<u2")
        packed = (pairs | pairs >> (8 - bits)).astype(np.uint8)
        bits *= 2
    return packed


def stack_weights(members: Sequence[CodedWeight]) -> CodedWeight | None:
    """Stack the weights of experts to one weight; `None` for weights stored differently."""
    first_member = members[0]
    if any(len(member.shape) != 2 or member.shape != first_member.shape for member in members) or not _are_alike(
        members
    ):
        return None
    return replace(
        first_member,
        shape=(len(members), *first_member.shape),
        read=lambda: _read_concatenated(members),
        members=tuple(members),
    )


def join_weights(weights: Sequence[CodedWeight]) -> CodedWeight | None:
    """Concatenate the rows of weights, per expert; `None` for weights stored differently."""
    first_weight = weights[0]
    if any(
        weight.depth != first_weight.depth or len(weight.members) != len(first_weight.members) for weight in weights
    ):
        return None
    if first_weight.members:
        experts = [join_weights(group) for group in zip(*(weight.members for weight in weights), strict=True)]
        return None if None in experts else stack_weights([expert for expert in experts if expert is not None])
    if not _are_alike(weights):
        return None
    rows = sum(weight.rows for weight in weights)
    return replace(first_weight, shape=(rows, first_weight.depth), read=lambda: _read_concatenated(weights))


def _are_alike(weights: Sequence[CodedWeight]) -> bool:
    """Return True if the codes of weights mean the same, in the same order of input channels."""
    storage_kinds = {
        (weight.source_format, weight.kind, weight.bits, weight.block_size, weight.has_zero_points)
        for weight in weights
    }
    return len(storage_kinds) == 1 and all(weight.read_order is None for weight in weights)


def _read_concatenated(weights: Sequence[CodedWeight]) -> CodedParts:
    """Read weights with equal rows, and concatenate their codes, scales and zero points."""
    parts = [weight.read() for weight in weights]
    points = [part.zero_points for part in parts if part.zero_points is not None]
    return CodedParts(
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.scales for part in parts]),
        np.concatenate(points) if points else None,
    )


class CodedTensor(ReferringTensor[CodedWeight]):
    """Dequantized values of a coded weight, computed on each read."""

    @property
    def weight(self) -> CodedWeight:
        """The coded weight."""
        return self.source

    def _source_values(self) -> Array:
        return self.source.dequantized()

    def expert(self, index: int, name: str) -> CodedTensor:
        """Return the matrix of one expert; the first axis must be theirs."""
        order = self.permutation or (0, 1, 2)
        assert order[0] == 0
        member = self.source.members[index]
        return CodedTensor(member, dtype=self.dtype, permutation=[axis - 1 for axis in order[1:]], name=name)
