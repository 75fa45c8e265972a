"""Which data files does a model name, and are they there?

Asks the file system for their sizes; never opens one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path, PurePosixPath, PureWindowsPath

from winml.modelkit.inspect.onnx_contents import DataLocation, Weight
from winml.modelkit.inspect.onnx_inspection import FileInfo

__all__ = ["find_data_files"]


def find_data_files(model_path: Path, weights: Iterable[Weight]) -> tuple[list[FileInfo], list[str]]:
    """Look for the data files of a model.

    Args:
        model_path: The model file; data files are named relative to its folder.
        weights: Its initializers.

    Returns:
        The data files in the order they are first named, and what is wrong with them, one sentence each.
    """
    locations: dict[str, list[DataLocation]] = defaultdict(list)
    for weight in weights:
        if weight.location is not None:
            locations[weight.location.file].append(weight.location)
    files, notes = [], []
    for name, uses in locations.items():
        if _leads_outside(name):
            # Such a name may ask about any file of the machine; a model has no business with those.
            notes.append(f"data file {name!r} is not inside the model's folder, where it belongs; it was not looked at")
            continue
        file = _look_at(model_path.parent / name)
        files.append(file)
        needed = max((use.end_bytes or 0 for use in uses), default=0)
        if file.size_bytes is None:
            notes.append(f"data file {file.path} is missing: it holds {len(uses)} of the weights")
        elif file.size_bytes < needed:
            notes.append(f"data file {file.path} is cut off: it has {file.size_bytes} bytes and needs {needed}")
    return files, notes


def _leads_outside(name: str) -> bool:
    paths = (PurePosixPath(name), PureWindowsPath(name))
    return not name or any(path.is_absolute() or path.anchor or ".." in path.parts for path in paths)


def _look_at(path: Path) -> FileInfo:
    try:
        return FileInfo(path, path.stat().st_size if path.is_file() else None)
    except OSError:
        return FileInfo(path, None)
