"""Checks the external data files that a model names, by their names and sizes; never opens one.

Returns what is wrong as a value: ``placing`` refuses such a model, ``inspect`` only reports it. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from winml.modelkit.graph.files.foreign_names import name_problem

__all__ = ["DataFile", "DataProblem", "check_data_file"]

DataProblem = Literal["outside", "missing", "cut off"]
"""What is wrong with a data file. ``outside``: its name leads out of the folder of the model, by itself or by a link.
``missing``: there is no such regular file. ``cut off``: it ends before the data does."""


@dataclass(frozen=True)
class DataFile:
    """A data file as a model names it."""

    path: Path
    size_bytes: int | None
    """Size of the file; None where it is missing or was not looked at."""
    problem: DataProblem | None


def check_data_file(folder: Path, name: str, needed_bytes: int = 0) -> DataFile:
    """Check one data file of a model.

    Args:
        folder: The folder of the model file.
        name: The file as the model names it. A name that leads out of the folder is not looked up: it could name any
            file of the machine.
        needed_bytes: Smallest size of the file that holds all the data.
    """
    path = folder / name
    problem = name_problem(folder, name)
    if problem is not None:
        return DataFile(path, None, "outside" if problem in ("no name", "outside") else "missing")
    size_bytes = path.stat().st_size
    return DataFile(path, size_bytes, "cut off" if size_bytes < needed_bytes else None)
