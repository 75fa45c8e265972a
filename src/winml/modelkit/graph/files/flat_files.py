"""Gives what runs a file the same without modules that are functions, so that its nodes are called as everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from winml.modelkit.graph.files.foreign_reading import load_by_reference
from winml.modelkit.graph.files.graph_reading import reading_graph
from winml.modelkit.graph.files.reading import read_structure
from winml.modelkit.graph.files.temporary import temporary_folder
from winml.modelkit.graph.files.writing import write_model
from winml.modelkit.metadata_keys import FUNCTION_DOMAIN

__all__ = ["flat_file"]


@contextmanager
def flat_file(path: Path) -> Iterator[Path]:
    """Yield the file itself, or for the time of the block a copy without functions of modules; weights are copied, too.

    Raises:
        InputError: the file is no ONNX model, or damaged.
        WriteError: there is no room for the copy.
    """
    if not any(function.domain == FUNCTION_DOMAIN for function in read_structure(path, as_written=True).functions):
        yield path
        return
    with temporary_folder() as folder:
        flat = folder / path.name
        write_model(reading_graph(path, lambda: load_by_reference(path)), flat)
        yield flat
