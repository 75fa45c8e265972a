"""Lists the external data files of a model, with a note for each that is missing, cut off or outside the folder."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from winml.modelkit.graph.files.external_data import check_data_file
from winml.modelkit.inspect.onnx_contents import DataLocation, Weight
from winml.modelkit.inspect.onnx_inspection import FileInfo

__all__ = ["find_data_files"]


def find_data_files(model_path: Path, weights: Iterable[Weight]) -> tuple[list[FileInfo], list[str]]:
    """Look for the data files of a model.

    Args:
        model_path: The model file; data files are named relative to its folder.
        weights: Its initializers.

    Returns:
        The data files in the order they are first named, and a note for each problem.
    """
    locations: dict[str, list[DataLocation]] = defaultdict(list)
    for weight in weights:
        if weight.location is not None:
            locations[weight.location.file].append(weight.location)
    files, notes = [], []
    for name, uses in locations.items():
        needed_bytes = max((use.end_bytes or 0 for use in uses), default=0)
        file = check_data_file(model_path.parent, name, needed_bytes)
        if file.problem == "outside":
            notes.append(f"data file {name!r} is not inside the model's folder, where it belongs; it was not looked at")
            continue
        files.append(FileInfo(file.path, file.size_bytes))
        if file.problem == "missing":
            notes.append(f"data file {file.path} is missing: it holds {len(uses)} of the weights")
        elif file.problem == "cut off":
            notes.append(f"data file {file.path} is cut off: it has {file.size_bytes} bytes and needs {needed_bytes}")
    return files, notes
