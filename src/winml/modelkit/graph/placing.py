"""How does an ONNX file get a second name without a second copy of what is in it?

By a hard link where the file system has them. Weights kept outside are copied, or named by both: onnx refuses data
files that have two names. Nothing here looks at what the graph computes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath

import onnx

from winml.modelkit.errors import InputError
from winml.modelkit.graph.files import data_path
from winml.modelkit.graph.reading import read_structure

__all__ = ["external_files", "link_or_copy", "place_copy"]

_LOCATION = "location"
"""Specified: key of a tensor's external data that names its file."""


def external_files(path: Path) -> tuple[Path, ...]:
    """Return the data files a model names, in the order it first names them.

    Raises:
        ModelPathError: there is no such model file.
        InputError: it is no ONNX file, a data file is missing, or one lies outside the model's folder.
    """
    names = dict.fromkeys(entry.value for entry in _locations(read_structure(path)))
    return tuple(_data_file(path, name) for name in names)


def place_copy(source: Path, target: Path, *, share_data: bool = False) -> tuple[Path, ...]:
    """Give a model another name: a hard link, or a copy where links fail.

    Weights kept outside are copied under the name that goes with the target (``data_path``; further data files are
    numbered), unless they are shared.

    Args:
        source: The model; stays as it is.
        target: The new name; must not exist.
        share_data: Let the target name the data files of the source. Right only for a target that ends up in the folder
            of the source, and as long as the source stays.

    Returns:
        The files made, the model first.

    Raises:
        ModelPathError: there is no such model file.
        InputError: it is no ONNX file, a data file is missing, or one lies outside the model's folder.
        OSError: a file cannot be made.
    """
    data = external_files(source)
    if not data or share_data:
        link_or_copy(source, target)
        return (target,)
    names = {file: f"{data_path(target).name}{number or ''}" for number, file in enumerate(data)}
    placed = [target.with_name(name) for name in names.values()]
    for file, place in zip(data, placed, strict=True):
        shutil.copyfile(file, place)
    # Small: what makes a model large is in the data files.
    model = onnx.load(source, load_external_data=False)
    for entry in _locations(model):
        entry.value = names[_data_file(source, entry.value)]
    target.write_bytes(model.SerializeToString())
    return (target, *placed)


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file another name by a hard link, or copy it where links fail; a data file must be copied.

    Raises:
        OSError: the file cannot be made.
    """
    source = source.resolve()
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except (OSError, NotImplementedError):
        shutil.copyfile(source, target)


def _data_file(model: Path, name: str) -> Path:
    paths = (PurePosixPath(name), PureWindowsPath(name))
    if not name or any(path.is_absolute() or path.anchor or ".." in path.parts for path in paths):
        raise InputError(
            f"{model}: names a data file outside its folder: {name!r}",
            hint="Put the data file beside the model, and save the model so that it names it there.",
        )
    file = model.parent / name
    if not file.is_file():
        raise InputError(
            f"{model}: its data file {file} is missing", hint="Put it beside the model, or export the model again."
        )
    return file


def _locations(model: onnx.ModelProto) -> Iterator[onnx.StringStringEntryProto]:
    """Yield the entries that name data files, wherever tensors stand."""
    in_functions = (tensor for function in model.functions for node in function.node for tensor in _tensors_of(node))
    for tensor in (*_tensors(model.graph), *in_functions):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            yield from (entry for entry in tensor.external_data if entry.key == _LOCATION)


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        yield from _tensors_of(node)


def _tensors_of(node: onnx.NodeProto) -> Iterator[onnx.TensorProto]:
    for attribute in node.attribute:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        if attribute.HasField("g"):
            yield from _tensors(attribute.g)
        for graph in attribute.graphs:
            yield from _tensors(graph)
