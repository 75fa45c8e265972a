"""Detection of the weight files of a checkpoint folder, and checks for completeness.

Reads file names, sizes and safetensors headers only: no tensor is read, nothing is unpickled, torch is not imported.
``weights.py`` checks whether the tensors fit the model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winml.modelkit.errors import CheckpointError, first_line
from winml.modelkit.onnx.files.foreign_files import library_file
from winml.modelkit.onnx.files.foreign_names import file_within, name_problem
from winml.modelkit.options import JsonError, load_json, read_json_file

FORMATS = (
    ("safetensors", "model.safetensors", "model.safetensors.index.json"),
    ("pickle", "pytorch_model.bin", "pytorch_model.bin.index.json"),
)
"""Format, single file, index of a sharded checkpoint: in the order in which transformers prefers them."""

_DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits per element, by the names of the safetensors format."""

_DTYPE_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32",
    "I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
"""Name in the safetensors format → name in numpy and torch."""

_MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors format."""

_RESAVE = "Download or save the checkpoint again."


@dataclass(frozen=True)
class WeightFiles:
    """The weights of a checkpoint folder."""

    format: str
    """``safetensors``, ``pickle`` or ``gguf``."""
    folder: Path
    """The checkpoint folder."""
    files: tuple[Path, ...]
    """One file, or the shards in the order of their names."""


def find_weights(folder: Path) -> WeightFiles | None:
    """Return the weight files transformers would load from ``folder``; `None` for a folder without weights.

    Raises:
        CheckpointError: an index is malformed, names a missing shard, or one outside of the folder; or a file is a link
            that leads out of the folder, or no regular file.
    """
    for kind, single, index in FORMATS:
        if (file := library_file(folder, single, error=CheckpointError)) is not None:
            return WeightFiles(kind, folder, (file,))
        if (file := library_file(folder, index, error=CheckpointError)) is not None:
            return WeightFiles(kind, folder, _list_shards(file))
    names = sorted(path.name for path in folder.glob("*.gguf"))
    gguf_file = library_file(folder, names[0], error=CheckpointError) if len(names) == 1 else None
    return None if gguf_file is None else WeightFiles("gguf", folder, (gguf_file,))


def check_index(folder: Path) -> None:
    """Check that the shards of a safetensors checkpoint contain the tensors in its index; nothing without an index.

    Raises:
        CheckpointError: a shard lacks a tensor; names both.
    """
    _, single, name = FORMATS[0]
    index = folder / name
    if (folder / single).is_file() or not index.is_file():
        return
    tensors_by_file: dict[str, Collection[str]] = {}
    for tensor, file in _read_weight_map(index).items():
        if file not in tensors_by_file:
            tensors_by_file[file] = stored_entries([folder / file])
        if tensor not in tensors_by_file[file]:
            raise CheckpointError(
                f"{index}: lists tensor {tensor!r} in {file}, which does not contain it",
                hint="Index and shards belong to different downloads: download the checkpoint again.",
            )


def _read_weight_map(index: Path) -> dict[str, str]:
    """Return tensor → file, which lies in the folder of the index, or is missing.

    Raises:
        CheckpointError: the index is malformed or empty, or leads out of its folder; names the entry.
    """
    try:
        content = read_json_file(index)
    except (JsonError, FileNotFoundError) as error:
        raise CheckpointError(f"{index}: {error}", hint=_RESAVE) from None
    entries = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(entries, dict) or not all(isinstance(file, str) for file in entries.values()):
        raise CheckpointError(f"{index}: has no weight_map from tensors to files", hint=_RESAVE)
    if not entries:
        raise CheckpointError(f"{index}: its weight_map is empty", hint=_RESAVE)
    # One tensor per file, the first in the index, is enough to check the file.
    for file, tensor in {file: tensor for tensor, file in reversed(entries.items())}.items():
        file_within(index.parent, file, f"{index}: tensor {tensor!r}", missing_ok=True, error=CheckpointError)
    return entries


def _list_shards(index: Path) -> tuple[Path, ...]:
    """Return the shards in an index, sorted by name.

    Raises:
        CheckpointError: a shard is missing.
    """
    shards = tuple(index.parent / name for name in sorted(set(_read_weight_map(index).values())))
    missing = [shard.name for shard in shards if name_problem(index.parent, shard.relative_to(index.parent))]
    if missing:
        raise CheckpointError(
            f"{index}: lists {len(shards)} shards, {len(missing)} of them missing: {', '.join(missing[:3])}",
            hint="Put the missing file with the others, or download the checkpoint again.",
        )
    return shards


def check_safetensors(path: Path) -> None:
    """Check that the header is well formed and that the file contains every tensor of the header.

    Raises:
        CheckpointError: truncated or malformed; names the file and, if known, the first tensor concerned.
    """
    header, data_start = _read_header(path)
    size_bytes = path.stat().st_size
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        bits = _DTYPE_BITS.get(entry["dtype"])
        needed = None if bits is None else -(-math.prod(entry["shape"]) * bits // 8)
        if begin > end or (needed is not None and end - begin != needed):
            raise CheckpointError(
                f"{path}: tensor {name!r} is {entry['dtype']} of shape {entry['shape']}, which does not fill "
                f"its {end - begin} bytes",
                hint=_RESAVE,
            )
        if data_start + end > size_bytes:
            raise CheckpointError(
                f"{path}: truncated: tensor {name!r} ends at byte {data_start + end}, the file has {size_bytes}",
                hint=_RESAVE,
            )


@dataclass(frozen=True)
class StoredEntry:
    """Position of a tensor in a safetensors file."""

    path: Path
    offset: int
    """Byte of the file at which the values start."""
    dtype: str
    """Name in numpy and torch (``bfloat16``); if they have none, the name of the format in lower case."""
    shape: tuple[int, ...]
    bits: int = 0
    """Bits per value; 0 if the element type is unknown."""


def stored_entries(files: Iterable[Path]) -> dict[str, StoredEntry]:
    """Return tensor → its position in safetensors files; of two equal names the last, as in transformers.

    Raises:
        CheckpointError: a header is malformed.
    """
    return {
        name: StoredEntry(
            file,
            start + entry["data_offsets"][0],
            _dtype_name(entry["dtype"]),
            tuple(entry["shape"]),
            _DTYPE_BITS.get(entry["dtype"], 0),
        )
        for file in files
        for header, start in [_read_header(file)]
        for name, entry in header.items()
    }


@dataclass(frozen=True)
class StoredSize:
    """Size of the tensors of one dtype in weight files."""

    dtype: str
    """Name in numpy and torch (``bfloat16``)."""
    count: int
    """Number of values."""
    size_bytes: int


def stored_sizes(files: Iterable[Path]) -> tuple[StoredSize, ...]:
    """Return the sizes of the tensors in safetensors headers per dtype, in the order of first use.

    Raises:
        CheckpointError: a header is malformed.
    """
    counts: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for file in files:
        for entry in _read_header(file)[0].values():
            name = _dtype_name(entry["dtype"])
            begin, end = entry["data_offsets"]
            counts[name] = counts.get(name, 0) + math.prod(entry["shape"])
            sizes[name] = sizes.get(name, 0) + end - begin
    return tuple(StoredSize(name, count, sizes[name]) for name, count in counts.items())


def _dtype_name(name: str) -> str:
    return _DTYPE_NAMES.get(name, name.lower())


def _read_header(path: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Return the header without its ``__metadata__``, and the byte at which the data starts.

    Raises:
        CheckpointError: the file cannot be read, is truncated, or is no safetensors file.
    """
    try:
        with path.open("rb") as stream:
            size_bytes = os.fstat(stream.fileno()).st_size
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > _MAX_HEADER_BYTES or 8 + length > size_bytes:
                raise CheckpointError(
                    f"{path}: truncated or not a safetensors file: {size_bytes} bytes cannot hold its header",
                    hint=_RESAVE,
                )
            content = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}", hint=_RESAVE) from error
    try:
        header = load_json(content.decode())
    except ValueError as error:
        raise CheckpointError(
            f"{path}: not a safetensors file: its header is malformed: {first_line(error)}", hint=_RESAVE
        ) from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: not a safetensors file: its header is malformed: no JSON object", hint=_RESAVE)
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if not _is_header_entry(entry):
            raise CheckpointError(
                f"{path}: not a safetensors file: its header is malformed at {name!r}, which is no tensor's entry",
                hint=_RESAVE,
            )
    return header, 8 + length


def _is_header_entry(entry: object) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    offsets, shape = entry.get("data_offsets"), entry.get("shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not isinstance(shape, list):
        return False
    return all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in offsets + shape)
