"""Reading of the tensors of a quantized checkpoint, with checks that the tensors of a parameter fit together.

Values are read on demand by plain reads. Independent of formats.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir

from winml.modelkit.arrays import Array
from winml.modelkit.errors import CheckpointError, opt
from winml.modelkit.models.checkpoints.weight_files import StoredEntry
from winml.modelkit.onnx.coded_weights import CodedParts, CodedTensor, CodedWeight
from winml.modelkit.onnx.files.stored_tensors import StoredValues

LEAST_BLOCK_SIZE, MOST_BLOCK_SIZE = 16, 256
"""Specified: values of a row that share a scale in operators of ONNX Runtime, a power of two."""
EXPONENTS = ("uint8", "f8_e8m0", "float8_e8m0fnu")
"""Types of scales that are powers of two (E8M0), by the names that files have for them."""
FLOATS = ("float16", "bfloat16", "float32")
"""Element types of scales."""
_USUAL_BLOCK_SIZE = 128
"""Chosen: block size of a row with a single scale."""

_DTYPES = {
    **{name: ir.DataType[name.upper()] for name in (
        "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool", "float16", "bfloat16",
    )},
    "float32": ir.DataType.FLOAT, "float64": ir.DataType.DOUBLE,
    "float8_e4m3fn": ir.DataType.FLOAT8E4M3FN, "float8_e5m2": ir.DataType.FLOAT8E5M2,
    "f8_e8m0": ir.DataType.FLOAT8E8M0,
}  # fmt: skip


def _download_hint() -> str:
    return f"Download the checkpoint again, or pass the original model and a {opt.precision}."


def stored_values(entry: StoredEntry, name: str) -> StoredValues:
    """Return the position of a tensor's values in its file."""
    return StoredValues(entry.path, entry.offset, _DTYPES[entry.dtype], entry.shape, name)


@dataclass
class CodedEntries:
    """Weights found by the reader of a format."""

    tensors: dict[str, CodedTensor] = field(default_factory=dict)
    """Parameter of the float checkpoint → its quantized weight."""
    consumed: set[str] = field(default_factory=set)
    """Names of the tensors that belong to these weights."""
    plain: dict[str, StoredEntry] = field(default_factory=dict)
    """Unquantized tensors located by the reader itself: parameter → position."""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class StoredTensors:
    """The tensors of a checkpoint by name."""

    entries: Mapping[str, StoredEntry]
    folder: Path
    format: str
    """Name of the format, for messages."""
    files: Sequence[Path] = ()
    """The weight files."""

    @property
    def _location(self) -> Path:
        """The weight file, or the folder of several files."""
        return self.files[0] if len(self.files) == 1 else self.folder

    def modules(self, suffix: str) -> Iterator[str]:
        """Yield the prefix of each name with a suffix, in the order of the files."""
        for name in self.entries:
            if name.endswith(suffix):
                yield name.removesuffix(suffix)

    def entry(self, name: str, dtypes: Collection[str], axes: int | None = None) -> StoredEntry:
        """Return the position of a tensor.

        Raises:
            CheckpointError: the tensor is missing, empty, or of another type or number of axes; names the tensor.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self._location}: {self.format}: tensor {name!r} is missing", hint=_download_hint())
        if entry.dtype not in dtypes or (axes is not None and len(entry.shape) != axes) or 0 in entry.shape:
            expected = f"{' or '.join(dtypes)}{f' with {axes} axes' if axes is not None else ''}, none of size 0"
            raise CheckpointError(
                f"{entry.path}: {self.format}: tensor {name!r} is {entry.dtype} of shape {list(entry.shape)}, "
                f"expected {expected}",
                hint=_download_hint(),
            )
        return entry

    def refuse_shape(self, name: str, expected: Sequence[int], because: str) -> None:
        """Refuse a tensor of another shape than expected.

        Raises:
            CheckpointError: names the tensor, both shapes and the source of the expected shape.
        """
        entry = self.entries[name]
        if entry.shape != tuple(expected):
            raise CheckpointError(
                f"{entry.path}: {self.format}: tensor {name!r} has shape {list(entry.shape)}, expected "
                f"{list(expected)} by {because}",
                hint=_download_hint(),
            )

    def refuse_other(self, name: str, dtypes: Collection[str], shape: Sequence[int], because: str) -> None:
        """Refuse a tensor that is missing, or of an unexpected type or shape.

        Raises:
            CheckpointError: names the tensor, and the expected type or shape.
        """
        self.entry(name, dtypes, len(shape))
        self.refuse_shape(name, shape, because)

    def error(self, name: str, problem: str) -> CheckpointError:
        """Return the error for a tensor that cannot be read."""
        entry = self.entries.get(name)
        location = entry.path if entry is not None else self._location
        return CheckpointError(f"{location}: {self.format}: {name}: {problem}", hint=_download_hint())

    def with_value_checks(self, coded: CodedTensor) -> CodedTensor:
        """Return the tensor with a reader that refuses NaN and infinite scales and zero points."""
        weight = self._add_value_checks(coded.weight)
        return CodedTensor(weight, dtype=coded.dtype, permutation=coded.permutation, name=coded.name)

    def _add_value_checks(self, weight: CodedWeight) -> CodedWeight:
        members = tuple(map(self._add_value_checks, weight.members))
        return replace(weight, read=partial(self._read_finite, weight), members=members)

    def _read_finite(self, weight: CodedWeight) -> CodedParts:
        """Read a weight; refuse scales and zero points that are NaN or infinite.

        Raises:
            CheckpointError: a scale or zero point is NaN or infinite; names the tensor.
        """
        parts = weight.read()
        for numbers, label in ((parts.scales, "scales"), (parts.zero_points, "zero points")):
            if numbers is not None and numbers.dtype.kind == "f" and not np.isfinite(numbers).all():
                raise self.error(weight.key, f"its {label} contain NaN or infinite values")
        return parts

    def read(self, name: str, index: int | None = None) -> Array:
        """Return the values of a tensor, or of one index of its first axis.

        Raises:
            CheckpointError: the file became shorter.
        """
        values = stored_values(self.entries[name], name)
        if index is None:
            return values.read()
        shape = values.shape[1:]
        size = math.prod(shape)
        return values.part(index * size, size).reshape(shape)

    def read_float(self, name: str, index: int | None = None) -> Array:
        """Return numbers, or the powers of two that exponents stand for, as float32.

        Raises:
            CheckpointError: the file became shorter.
        """
        values = self.read(name, index)
        if self.entries[name].dtype in EXPONENTS:
            return np.ldexp(np.float32(1), values.view(np.uint8).astype(np.int32) - 127).astype(np.float32)
        return values.astype(np.float32)


@dataclass(frozen=True)
class BlockLayout:
    """Division of a checkpoint's groups, each with a scale, into the blocks of operators."""

    block_size: int
    repeats: int
    """Blocks of a group."""
    blocks: int
    """Blocks of a row."""

    @classmethod
    def of(cls, stored: StoredTensors, name: str, group_size: int, depth: int) -> BlockLayout:
        """Choose the block size for a group size.

        Args:
            stored: The tensors, for messages.
            name: Parameter or module, for messages.
            group_size: Values that share a scale in the checkpoint; the last group may be shorter.
            depth: Values of a row.

        Raises:
            CheckpointError: no operator has a block size that divides the groups.
        """
        if group_size >= depth:
            size = min(_USUAL_BLOCK_SIZE, max(LEAST_BLOCK_SIZE, 1 << (depth - 1).bit_length()))
        else:
            size = math.gcd(group_size, MOST_BLOCK_SIZE)
        if size < LEAST_BLOCK_SIZE:
            raise stored.error(
                name,
                f"groups of {group_size} values cannot be divided into the blocks of {LEAST_BLOCK_SIZE} or more that "
                "operators of ONNX Runtime take",
            )
        return cls(size, math.ceil(min(group_size, depth) / size), math.ceil(depth / size))

    def parts(self, codes: Array, scales: Array, zero_points: Array | None = None) -> CodedParts:
        """Return the parts of a weight, with a scale and a zero point for each block.

        Args:
            codes: Codes in the layout of :class:`CodedParts`.
            scales: float32, rows × groups.
            zero_points: uint8, rows × groups.
        """
        points = None if zero_points is None else self._expand_to_blocks(zero_points)
        return CodedParts(codes, self._expand_to_blocks(scales), points)

    def _expand_to_blocks(self, values: Array) -> Array:
        if self.repeats > 1:
            values = np.repeat(values, self.repeats, axis=1)
        return np.ascontiguousarray(values[:, : self.blocks])
