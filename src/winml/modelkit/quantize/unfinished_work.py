"""Storage of intermediate results, from which an interrupted quantization resumes.

A hidden folder beside the output, removed when the work succeeds or is refused; a killed command leaves it. Its content
is stored with the request it belongs to, and is not used for other requests.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from winml.modelkit.arrays import Array
from winml.modelkit.errors import WinMLError, WriteError
from winml.modelkit.file_names import UNFINISHED_LOCK_NAME, unfinished_work_path
from winml.modelkit.onnx.files.moving import remove_file, remove_folder
from winml.modelkit.onnx.files.output_files import DISK_ERRORS, write_error
from winml.modelkit.onnx.files.recovery import file_state
from winml.modelkit.onnx.files.resumable_results import locked_folder
from winml.modelkit.onnx.files.stored_tensors import StoredTensor
from winml.modelkit.onnx.weights import read_once, to_weightless


@contextlib.contextmanager
def unfinished_folder(output: Path) -> Iterator[Path]:
    """Yield the folder of intermediate results for a file, with the results of an interrupted run.

    The folder is removed when the block ends, unless the process is stopped or the disk is full.

    Args:
        output: The output file.

    Raises:
        UsageError: another process works on this file.
        WriteError: the folder cannot be created.
    """
    folder = unfinished_work_path(output.absolute())
    there = next((parent for parent in folder.parents if parent.is_dir()), None)
    is_done = False
    try:
        with locked_folder(folder, UNFINISHED_LOCK_NAME, "quantization"):
            yield folder
            is_done = True
    except WinMLError as error:
        is_done = not isinstance(error, WriteError)
        raise
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        failed = write_error(folder, error)
        failed.hint += f" {folder.name} has the work so far: the same command resumes there."
        raise failed from error
    finally:
        if is_done:
            remove_folder(folder)
            for parent in folder.parents:
                if parent == there:
                    break
                with contextlib.suppress(OSError):  # it contains the output
                    parent.rmdir()


def digest_of(*parts: object) -> str:
    """Digest of JSON-serializable values."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def graph_digest(model: ir.Model) -> str:
    """Digest of a graph: its nodes, and the locations of its weights; weights in memory count by value.

    Metadata such as the export time is not included.
    """
    sent = to_weightless(model)
    digest = hashlib.blake2b(digest_size=16)
    digest.update(sent.proto.graph.SerializeToString(deterministic=True))
    digest.update(repr(sorted(model.opset_imports.items())).encode())
    for function in sent.proto.functions:
        digest.update(function.SerializeToString(deterministic=True))
    for name, tensor in sent.weights.items():
        digest.update(name.encode())
        location = _weight_location(tensor)
        digest.update(np.ascontiguousarray(read_once(tensor)).view(np.uint8).data if location is None else location)
    return digest.hexdigest()


def _weight_location(tensor: ir.TensorProtocol) -> bytes | None:
    """Location of a tensor's values and state of the file; ``None`` for a tensor in memory."""
    if isinstance(tensor, StoredTensor):
        stored = tensor.stored
        location: tuple[object, ...] = (stored.offset, stored.dtype.name, stored.shape, tensor.permutation)
        path = stored.path
    elif isinstance(tensor, ir.ExternalTensor):
        location, path = (tensor.offset, tensor.length), Path(tensor.path)
    else:
        return None
    real = path.resolve()
    return repr((os.fspath(real), file_state(real), tensor.dtype.name, *location)).encode()


def samples_digest(samples: Sequence[Mapping[str, Array]]) -> str:
    """Digest of the arrays of samples."""
    return digest_of([{name: _array_digest(array) for name, array in sorted(sample.items())} for sample in samples])


def _array_digest(array: Array) -> str:
    """Digest of type, shape and values of an array."""
    if array.dtype.kind in "OUS":
        return digest_of(array.tolist())
    digest = hashlib.blake2b(repr((array.dtype.str, array.shape)).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


class StoredArrays:
    """Arrays in a folder, each with the digest of its values."""

    def __init__(self, folder: Path) -> None:
        """Create the folder if it is missing."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.digests: dict[str, str] = {}
        """Name of an array → digest of its values."""

    def put(self, name: str, array: Array) -> None:
        """Write an array."""
        np.save(self._array_path(name), array, allow_pickle=False)
        self.digests[name] = _array_digest(array)

    def read(self, name: str) -> Array:
        """Read an array."""
        array: Array = np.load(self._array_path(name), allow_pickle=False)
        return array

    def remove(self, name: str) -> None:
        """Remove an array."""
        remove_file(self._array_path(name))
        self.digests.pop(name, None)

    def holds(self, digests: Mapping[str, str]) -> bool:
        """Return True if the arrays exist with these digests."""
        try:
            return all(_array_digest(self.read(name)) == digest for name, digest in digests.items())
        except (OSError, ValueError, EOFError):
            return False

    def _array_path(self, name: str) -> Path:
        return self._folder / f"{name}.npy"
