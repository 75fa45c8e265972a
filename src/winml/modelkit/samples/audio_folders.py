"""Reads a folder of audio files as datasets lays one out.

The reader of datasets needs torchcodec only to name the files; here they are named, and opened when they are read.
Splits are folders called ``train``, ``validation`` or ``test``; the folder of a file is its label if there are several;
a ``metadata.csv`` or ``metadata.jsonl`` with a column ``file_name`` has its other columns.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winml.modelkit.errors import InputError
from winml.modelkit.onnx.files.foreign_names import ForeignNameError, file_below
from winml.modelkit.samples.data_sources import AUDIO_SUFFIXES, SourceKind
from winml.modelkit.samples.local_files import read_files

if TYPE_CHECKING:
    import datasets


_SPLITS = {"train": "train", "validation": "validation", "valid": "validation", "dev": "validation", "test": "test"}
"""Name of a folder → the split it is, as datasets calls it."""
_METADATA: dict[str, SourceKind] = {"metadata.csv": "csv", "metadata.jsonl": "json"}
_NAME_COLUMN = "file_name"


def read_audio_folder(folder: Path, cache: Path) -> dict[str, datasets.Dataset]:
    """Return the splits of a folder of recordings: a column ``audio`` and what the folder says of each.

    Args:
        folder: The folder.
        cache: Where datasets puts what it reads of metadata.

    Raises:
        InputError: the metadata names no files, or files outside of the folder.
    """
    folder = folder.absolute()
    places = {split: folder / name for name, split in _SPLITS.items() if (folder / name).is_dir()}
    return {split: _read_split(place, split, cache) for split, place in (places or {"train": folder}).items()}


def _read_split(folder: Path, split: str, cache: Path) -> datasets.Dataset:
    import datasets

    metadata = next((name for name in _METADATA if (folder / name).is_file()), None)
    if metadata is not None:
        columns = _read_metadata(folder, metadata, cache)
        return _with_recordings(columns, [_inside(folder, name) for name in columns.pop(_NAME_COLUMN)], split)
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in AUDIO_SUFFIXES)
    labels = [path.parent.name for path in files]
    names = sorted(set(labels))
    table = _with_recordings({"label": labels} if len(names) > 1 else {}, [str(path) for path in files], split)
    return table.cast_column("label", datasets.ClassLabel(names=names)) if len(names) > 1 else table


def _with_recordings(columns: dict[str, list[Any]], paths: list[str], split: str) -> datasets.Dataset:
    import datasets

    table = datasets.Dataset.from_dict({"audio": paths, **columns}, split=datasets.NamedSplit(split))
    return table.cast_column("audio", datasets.Audio(decode=False))


def _read_metadata(folder: Path, name: str, cache: Path) -> dict[str, list[Any]]:
    try:
        metadata = file_below(folder, name)
    except ForeignNameError as error:
        raise InputError(f"{folder / name}: {error}", hint="Only regular files below the folder are read.") from error
    tables = read_files(_METADATA[name], {"train": [metadata]}, cache)
    columns: dict[str, list[Any]] = tables["train"].to_dict()
    if _NAME_COLUMN not in columns:
        raise InputError(
            f"{folder / name}: no column {_NAME_COLUMN}; columns: {', '.join(columns)}",
            hint="Add the path of every audio file, relative to the folder of this file.",
        )
    return columns


def _inside(folder: Path, name: Any) -> str:
    """Return the path of a file that metadata names; one outside of the folder is nobody's."""
    path = Path(os.path.normpath(folder / str(name)))
    if not path.is_relative_to(os.path.normpath(folder)):
        raise InputError(
            f"{folder}: the metadata references {name}, which is outside the folder", hint="Move it into the folder."
        )
    return str(path)
