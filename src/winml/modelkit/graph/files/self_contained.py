"""Places a model so that no other model's files are needed to run it.

Its weights go inside, or, where the file would be too large for that, to a data file that is called after it. They are
copied from file to file; memory does not grow with them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import onnx

from winml.modelkit.graph.contexts import context_file_attributes
from winml.modelkit.graph.files.initializer_bytes import StoredBytes, stored_outside
from winml.modelkit.graph.files.placing import external_files, external_tensors, place_copy, stored_bytes
from winml.modelkit.graph.files.writing import INLINE_LIMIT_BYTES, ModelFraming

__all__ = ["place_self_contained"]


def place_self_contained(
    original: Path, target: Path, *, may_link: bool = True, inline_limit_bytes: int = INLINE_LIMIT_BYTES
) -> tuple[Path, ...]:
    """Give a model another name under which it depends on files of that name only.

    A model with its weights inside is linked or copied. Weights outside are written into the new file, or copied under
    the names of ``data_path`` where it would exceed the limit. What execution providers compiled stays outside.

    Args:
        original: The model; not changed.
        target: The new name; must not exist.
        may_link: Allow a hard link; see ``place_copy``.
        inline_limit_bytes: Largest file with weights inside.

    Returns:
        The files made, the model first.

    Raises:
        ModelPathError: there is no such model file.
        InputError: it is no ONNX file, or a data file is missing, too short or outside the model's folder.
        OSError: a file cannot be made.
    """
    if not external_files(original) or not _write_inside(original, target, inline_limit_bytes):
        return place_copy(original, target, may_link=may_link)
    return (target,)


def _write_inside(original: Path, target: Path, limit_bytes: int) -> bool:
    """Write a model with all weights inside; False where it would exceed the limit, or names what was compiled."""
    # Small: the large tensors are in the data files.
    model = onnx.load(original, load_external_data=False)
    if sum(map(stored_bytes, external_tensors(model))) > limit_bytes or any(context_file_attributes(model)):
        return False
    streamed = {}
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            streamed[tensor.name] = _Streamed(tensor.name, _values(original, tensor))
            tensor.ClearField("data_location")
    for tensor in external_tensors(model):  # the others, of subgraphs, functions and attributes, are small
        tensor.raw_data = b"".join(_values(original, tensor).read())
        tensor.ClearField("data_location")
        tensor.ClearField("external_data")
    framing = ModelFraming(model, streamed)
    if framing.size_bytes > limit_bytes:
        return False
    with target.open("wb") as file:
        framing.write(file)
    return True


def _values(model: Path, tensor: onnx.TensorProto) -> StoredBytes:
    """Return where exactly the values of a tensor lie; a model may name more of its data file than they take."""
    stored = stored_outside(model, tensor)
    ((start, length),) = stored.pieces
    needed = 0 if 0 in tensor.dims else stored_bytes(tensor) or length
    return replace(stored, pieces=((start, min(needed, length)),))


@dataclass(frozen=True)
class _Streamed:
    """A tensor in a data file, written piece by piece."""

    name: str
    stored: StoredBytes

    @property
    def nbytes(self) -> int:
        return self.stored.size_bytes

    def tofile(self, file: BinaryIO, /) -> None:
        for piece in self.stored.read():
            file.write(piece)
