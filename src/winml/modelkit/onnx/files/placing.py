"""Copies of ONNX files with their external data.

A copy is a reflink if the file system supports reflinks. Files of one build folder may be hard links, and may share
data files: onnx refuses data files with more than one hard link. Does not interpret the graph.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import os
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import onnx
import onnx_ir as ir

from winml.modelkit.errors import InputError, UsageError
from winml.modelkit.file_names import MODEL_SUFFIX, data_path, is_data_of, unfinished_data_path
from winml.modelkit.onnx.contents import data_location, subgraphs
from winml.modelkit.onnx.contexts import context_file_attributes
from winml.modelkit.onnx.files.content_digest import content_digest, hash_file
from winml.modelkit.onnx.files.moving import link_file, move_file, remove_file
from winml.modelkit.onnx.files.reading import check_data_file, read_structure

_NOT_SUPPORTED = frozenset({errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.EBADF})
"""Errors of a system or file system that cannot copy a range between files."""
_LOCATION = "location"
"""Specified: the key of a tensor's external data that names its file."""


def external_files(path: Path) -> tuple[Path, ...]:
    """Return the data files of a model, in the order of first reference, files of compiled parts last.

    Raises:
        ModelPathError: the model file does not exist.
        InputError: the file is no ONNX file, or a data file is missing, too short or outside the model's folder.
    """
    files: dict[str, Path] = {}
    structure = read_structure(path)
    for tensor in external_tensors(structure):
        name = data_location(tensor).file
        if name not in files:
            files[name] = _existing_data_file(path, name)
        _refuse_cut_off(path, tensor)
    for name in compiled_files(structure):
        files.setdefault(name, _existing_data_file(path, name))
    return tuple(files.values())


def data_names(path: Path) -> tuple[str, ...]:
    """Return the names of a model's data files as written, without looking them up.

    Raises:
        ModelPathError: the model file does not exist.
        InputError: the file is no ONNX file.
    """
    structure = read_structure(path)
    weights = (entry.value for entry in _location_entries(structure))
    return tuple(dict.fromkeys((*weights, *compiled_files(structure))))


def name_data(data: Path, model: Path, digest: str | None = None) -> Path:
    """Rename the data file of a model after its content; return the new path.

    Args:
        data: The data file.
        model: The model.
        digest: :func:`content_digest` of the data; None: computed here.

    Raises:
        OSError: the file cannot be read or renamed.
    """
    named = data_path(model, digest or content_digest(data))
    move_file(data, named)
    return named


def place_data(files: Iterable[Path], target: Path) -> dict[Path, Path]:
    """Copy the data files of a model for another model.

    Args:
        files: The data files.
        target: The model that will refer to the copies.

    Returns:
        Data file → its copy next to the target, named after the target and its content.

    Raises:
        OSError: a file cannot be created.
    """
    copies = {}
    for file in files:
        copy = unfinished_data_path(target)
        copy_data(file, copy)
        copies[file] = name_data(copy, target)
    return copies


def rename_locations(model: onnx.ModelProto, names: Mapping[str, str]) -> None:
    """Rename data files in the references of a model, in place: name → new name."""
    for entry in _location_entries(model):
        entry.value = names[entry.value]
    for attribute in context_file_attributes(model):
        name = attribute.s.decode()
        attribute.s = names.get(name, name).encode()


def place_copy(
    original: Path,
    target: Path,
    *,
    share_data: bool = False,
    may_link: bool = False,
    placed: dict[Path, Path] | None = None,
) -> tuple[Path, ...]:
    """Copy a model.

    External weights are copied under names made of the target and their content (``data_path``), unless they are
    shared.

    Args:
        original: The model; not changed.
        target: The copy; must not exist.
        share_data: Reference the source's data files in the target. Valid only for a target in the folder of the
            source, and as long as the source exists.
        may_link: Allow a hard link, through which a later write into either file changes both. Valid only between files
            of one build folder.
        placed: Data file → its copy beside the target, which an earlier model shares; extended. None: no copy.

    Returns:
        The new files, the model first.

    Raises:
        ModelPathError: the model file does not exist.
        InputError: the file is no ONNX file, or a data file is missing, too short or outside the model's folder.
        OSError: a file cannot be created.
    """
    data = external_files(original)
    if not data or share_data:
        if may_link:
            link_or_copy(original, target)
        else:
            copy_data(original, target)
        return (target,)
    copies = {} if placed is None else placed
    created = place_data((file for file in data if file not in copies), target)
    copies |= created
    # Small: the large tensors are in the data files.
    model = onnx.load(original, load_external_data=False)
    rename_locations(model, {name: copies[_existing_data_file(original, name)].name for name in data_names(original)})
    target.write_bytes(model.SerializeToString())
    return (target, *dict.fromkeys(created.values()))


def link_or_copy(original: Path, target: Path) -> None:
    """Create a hard link to a file, or a copy if links are not supported. Data files must be copied instead.

    Raises:
        OSError: the file cannot be created.
    """
    original = original.resolve()
    if not link_file(original, target):
        shutil.copyfile(original, target)


def copy_data(original: Path, target: Path) -> None:
    """Copy a data file by reflink if supported, without holding its content in memory.

    Raises:
        OSError: the file cannot be created.
    """
    if not _copy_by_system(original, target):
        shutil.copyfile(original, target)


def _copy_by_system(original: Path, target: Path) -> bool:
    """Copy a file by the system call for reflinks; return False if not supported."""
    if sys.platform != "linux":
        return False
    with original.open("rb") as source_file, target.open("wb") as target_file:
        remaining = os.fstat(source_file.fileno()).st_size
        try:
            while remaining and (copied := os.copy_file_range(source_file.fileno(), target_file.fileno(), remaining)):
                remaining -= copied
        except OSError as error:
            if error.errno in _NOT_SUPPORTED:
                return False
            raise
    return not remaining


def _existing_data_file(model: Path, name: str) -> Path:
    """Return the path of a data file.

    Raises:
        InputError: the file is missing, or outside the model's folder.
    """
    file = check_data_file(model.parent, name)
    if file.problem == "outside":
        raise InputError(
            f"{model}: references a data file outside its folder: {name!r}",
            hint="Put the data file beside the model, and save the model with that reference.",
        )
    if file.problem == "missing":
        raise InputError(
            f"{model}: its data file {file.path} is missing", hint="Put it beside the model, or export the model again."
        )
    return file.path


def _refuse_cut_off(model: Path, tensor: onnx.TensorProto) -> None:
    """Refuse a data file that ends before a tensor's values, and an invalid offset or length.

    Raises:
        InputError: the message names the tensor and the file.
    """
    needed, location = stored_bytes(tensor), data_location(tensor)
    length = needed if location.length is None else location.length
    if location.start < 0 or length < needed:
        raise InputError(
            f"{model}: does not state where the {needed} bytes of tensor {tensor.name!r} lie in "
            f"{model.parent / location.file}: { {entry.key: entry.value for entry in tensor.external_data} }",
            hint="Export the model again.",
        )
    end = location.start + length
    file = check_data_file(model.parent, location.file, end)
    if file.problem == "cut off":
        raise InputError(
            f"{model}: its data file {file.path} is cut off: tensor {tensor.name!r} lies at bytes {location.start} to "
            f"{end}, and the file has {file.size_bytes}",
            hint="Download or copy the data file again, or export the model again.",
        )


def stored_bytes(tensor: onnx.TensorProto) -> int:
    """Return the number of bytes of a tensor's values; 0 for a type unknown to this version of onnx_ir."""
    try:
        bits: int = math.prod(tensor.dims) * ir.DataType(tensor.data_type).bitwidth
        return -(-bits // 8)
    except (ValueError, TypeError):
        return 0


def compiled_files(model: onnx.ModelProto) -> tuple[str, ...]:
    """Return the files compiled by execution providers, as named in the model."""
    return tuple(dict.fromkeys(attribute.s.decode(errors="replace") for attribute in context_file_attributes(model)))


def _location_entries(model: onnx.ModelProto) -> Iterator[onnx.StringStringEntryProto]:
    """Yield the metadata entries that name data files, of every external tensor."""
    for tensor in external_tensors(model):
        yield from (entry for entry in tensor.external_data if entry.key == _LOCATION)


def external_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield the tensors with external data, in initializers and attributes, including functions."""
    in_functions = (
        tensor for function in model.functions for node in function.node for tensor in _tensors_in_node(node)
    )
    for tensor in (*_tensors_in_graph(model.graph), *in_functions):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            yield tensor


def _tensors_in_graph(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Yield the tensors of a graph: initializers, and tensors in attributes, including subgraphs."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        yield from _tensors_in_node(node)


def _tensors_in_node(node: onnx.NodeProto) -> Iterator[onnx.TensorProto]:
    for attribute in node.attribute:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
    for graph in subgraphs(node):
        yield from _tensors_in_graph(graph)


def replaceable_data(model: Path) -> tuple[str, ...]:
    """Return the names of the data files to remove with a model, existing or not.

    Such a file is referenced by the model and named after the model. A file of another name may belong to the source of
    the model, such as the weights of a checkpoint. ``()`` for a file that is no model.
    """
    if model.suffix.lower() != MODEL_SUFFIX:
        return ()
    return tuple(name for name in _read_data_names(model) or () if is_data_of(model.name, name))


def _read_data_names(model: Path) -> tuple[str, ...] | None:
    """Return the names of a model's data files; `None` if the file cannot be read as a model."""
    try:
        return data_names(model) if stat.S_ISREG(model.stat().st_mode) else ()
    except Exception:
        return None


def remove_unused(directory: Path, candidates: Iterable[str]) -> None:
    """Remove data files without a reference from a model of their folder; files in use are left.

    No file is removed if a model of the folder cannot be read, since references are then unknown.
    """
    unused = set(candidates)
    with contextlib.suppress(OSError):
        for model in directory.iterdir() if unused else ():
            if model.suffix.lower() == MODEL_SUFFIX:
                names = _read_data_names(model)
                if names is None:
                    return
                unused -= set(names)
        for name in unused:
            remove_file(directory / name)


def model_digest(model: Path) -> str:
    """Return a digest of a model file and of its data files: 64 hexadecimal digits.

    Raises:
        InputError: the file is no model, or its data is missing.
    """
    return hashlib.sha256("".join(map(file_digest, (model, *external_files(model)))).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Return the digest of a file's content: 64 hexadecimal digits.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        return hash_file(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint="Pass the path of a file.") from error
