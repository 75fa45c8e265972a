"""Collection of the data of a page: structure and known numbers of one or two models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from winml.modelkit.onnx.bundle import read_part_description
from winml.modelkit.onnx.module_costs import count_node_macs
from winml.modelkit.view.records import KnownNumbers, ModelPage, ViewedModel, ViewedPart
from winml.modelkit.view.structure import (
    GraphFile,
    ModuleLevel,
    TemplateStore,
    TemplateWriter,
    build_levels,
    read_graph_file,
)
from winml.modelkit.words import printable

@dataclass(frozen=True)
class ViewedFile:
    """One part of a model with its modules."""

    name: str
    file: GraphFile
    root: ModuleLevel


@dataclass(frozen=True)
class ViewedSide:
    """One model of a page."""

    name: str
    files: Sequence[ViewedFile]


def read_side(name: str, parts: Mapping[str, Path]) -> ViewedSide:
    """Read the files of a model.

    Args:
        name: Name as passed by the user.
        parts: Part → its file.

    Raises:
        InputError: a file is damaged or no ONNX file.
    """
    files = []
    for part, path in parts.items():
        file = read_graph_file(path)
        files.append(ViewedFile(part, file, build_levels(file)))
    return ViewedSide(name, files)


def collect_page(sides: Sequence[ViewedSide]) -> ModelPage:
    """Collect the data of the page of one or two models."""
    store = TemplateStore()
    models = [_model_data(side, store) for side in sides]
    data = {"texts": store.texts, "templates": store.templates, "models": models}
    return ModelPage(tuple(map(_viewed_model, sides)), None, _printable_data(data))


def _model_data(side: ViewedSide, store: TemplateStore) -> dict[str, Any]:
    """Return one model of the page: its parts, the tensors between them, and the titles of known numbers."""
    feeds = []
    if len(side.files) > 1:
        for viewed in side.files:
            part = read_part_description(viewed.file.path)
            feeds += [[viewed.name, feed.output, feed.part, feed.input] for feed in (part.feeds if part else ())]
    return {
        "name": side.name,
        "file": side.name,
        "parts": [_part_data(viewed, store) for viewed in side.files],
        "feeds": feeds,
        "measures": [],
    }


def _part_data(viewed: ViewedFile, store: TemplateStore) -> dict[str, Any]:
    macs = count_node_macs(viewed.file.contents, viewed.file.types.shapes)
    root = viewed.root
    return {
        "name": viewed.name,
        "file": str(viewed.file.path),
        "label": root.label,
        "path": root.address.path,
        "tag": root.address.tag,
        "inputs": list(root.inputs),
        "outputs": list(root.outputs),
        "template": TemplateWriter(viewed.file, store, macs).add(root),
        "measures": {},
    }


def _viewed_model(side: ViewedSide) -> ViewedModel:
    parts = tuple(
        ViewedPart(
            viewed.name,
            viewed.file.path,
            viewed.file.tree.source,
            len(viewed.file.tree.modules),
            len(viewed.file.contents.nodes),
        )
        for viewed in side.files
    )
    notes = [note for viewed in side.files for note in (*viewed.file.notes, *_tree_notes(viewed.file))]
    return ViewedModel(side.name, parts, (), tuple(notes))


def _tree_notes(file: GraphFile) -> Iterable[str]:
    """Yield a note on modules that do not come from tags."""
    if file.tree.source == "none":
        yield f"{file.path.name} has no tags and no scopes: the graph is shown without modules"
    elif file.tree.source != "winml tags":
        yield f"{file.path.name} has no tags of winml: the modules come from {file.tree.source}"


def _printable_data(value: Any) -> Any:
    """Escape the unprintable characters in all texts of the data."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {_printable_data(key): _printable_data(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_printable_data(entry) for entry in value]
    return value
