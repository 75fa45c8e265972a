"""Places a model for readers that look for its weights by name, in pieces of a limited size.

Elsewhere weights are called after their content (``data_path``). Bytes are copied as they are; no tensor is split.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import onnx

from winml.modelkit.errors import InputError
from winml.modelkit.file_names import numbered_data_path
from winml.modelkit.graph.files.placing import (
    copy_data,
    data_names,
    external_files,
    external_tensors,
    place_copy,
    rename_locations,
    stored_bytes,
)
from winml.modelkit.graph.files.writing import ALIGNED_BYTES, ALIGNMENT_BYTES

__all__ = ["PIECE_BYTES", "place_numbered"]

PIECE_BYTES = 2_000_000_000
"""Largest piece, unless a tensor is larger. Chosen: browsers read a file into one array, of 2**31 bytes in some."""
_COPIED_BYTES = 1 << 24
"""Chosen: bytes copied at a time."""


def place_numbered(
    original: Path, target: Path, *, may_link: bool = True, piece_bytes: int = PIECE_BYTES
) -> tuple[Path, ...]:
    """Give a model another name; weights outside go to ``<name>.onnx_data``, ``<name>.onnx_data_1`` and so on.

    Args:
        original: The model; not changed.
        target: The new name; must not exist.
        may_link: Allow a hard link to a model with its weights inside; see ``place_copy``.
        piece_bytes: Largest data file.

    Returns:
        The files made, the model first.

    Raises:
        ModelPathError: there is no such model file.
        InputError: it is no ONNX file, or a data file is missing, too short or outside the model's folder.
        OSError: a file cannot be made.
    """
    data = external_files(original)
    if not data:
        return place_copy(original, target, may_link=may_link)
    # Small: the large tensors are in the data files.
    model = onnx.load(original, load_external_data=False)
    if len(data) == 1 and data[0].stat().st_size <= piece_bytes:
        piece = numbered_data_path(target, 0)
        copy_data(data[0], piece)
        rename_locations(model, dict.fromkeys(data_names(original), piece.name))
        pieces = [piece]
    else:
        pieces = _write_pieces(model, original.parent, target, piece_bytes)
    target.write_bytes(model.SerializeToString())
    return (target, *pieces)


def _write_pieces(model: onnx.ModelProto, folder: Path, target: Path, piece_bytes: int) -> list[Path]:
    """Copy the bytes of each tensor, and let the tensors name their new places."""
    pieces: list[Path] = []
    places: dict[tuple[str, int, int], tuple[str, int]] = {}
    size = 0
    for tensor in external_tensors(model):
        entries = {entry.key: entry.value for entry in tensor.external_data}
        name, start = entries["location"], int(entries.get("offset", 0))
        length = int(entries.get("length", stored_bytes(tensor)))
        source = (name, start, length)
        if source not in places:
            begin = -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES if length >= ALIGNED_BYTES else size
            if not pieces or (begin and begin + length > piece_bytes):
                pieces.append(numbered_data_path(target, len(pieces)))
                begin = 0
            with pieces[-1].open("r+b" if begin else "wb") as written, (folder / name).open("rb") as read:
                read.seek(start)
                written.seek(begin)
                _copy_bytes(read, written, length)
            places[source] = (pieces[-1].name, begin)
            size = begin + length
        _point_at(tensor, *places[source], length)
    return pieces


def _copy_bytes(source: BinaryIO, target: BinaryIO, length: int) -> None:
    while length > 0:
        block = source.read(min(length, _COPIED_BYTES))
        if not block:
            raise InputError(
                f"data file {source.name} ends {length} bytes too early: a tensor in it is larger",
                hint="Export or download the model again.",
            )
        target.write(block)
        length -= len(block)


def _point_at(tensor: onnx.TensorProto, name: str, start: int, length: int) -> None:
    del tensor.external_data[:]
    for key, value in (("location", name), ("offset", str(start)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)
