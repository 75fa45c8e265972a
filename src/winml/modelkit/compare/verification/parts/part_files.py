"""Runs the files of several parts, to compare a text that all of them make together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from winml.modelkit.arrays import Arrays
from winml.modelkit.compare.verification.single_rows import feeds_by_rows, joined_rows, takes_single_rows
from winml.modelkit.errors import StageError, VerificationError
from winml.modelkit.models.parts import ModelPart
from winml.modelkit.onnx.files.graph_reading import graph_of
from winml.modelkit.onnx.files.placing import external_files
from winml.modelkit.onnx.files.reading import read_structure
from winml.modelkit.words import size_words

if TYPE_CHECKING:
    from winml.modelkit.ort.sessions import Session

MOST_WHOLE_BYTES = 1_000_000_000
"""Chosen: files of more are not run as a whole, nor more weights held, since building takes less."""


def beyond_memory(paths: Iterable[Path]) -> str:
    """Return why files are not run one after another where only few bits are compared; empty where they are."""
    size = sum(file.stat().st_size for path in paths for file in (path, *external_files(path)))
    words = f"the files have {size_words(size)}; the limit for running them together is {size_words(MOST_WHOLE_BYTES)}"
    return words if size > MOST_WHOLE_BYTES else ""


def opened_file(path: Path) -> Session:
    """Return a file in ONNX Runtime, opened with its defaults."""
    from winml.modelkit.ort.sessions import Session  # imports onnxruntime

    return Session(path)


def opened_decoder(path: Path) -> Callable[[Arrays], Arrays]:
    """Return what runs a decoder in a file as :func:`opened_file` does, row by row where it takes no more."""
    run = opened_file(path).run
    if not takes_single_rows(graph_of(read_structure(path), path)):
        return run
    return lambda feeds: joined_rows([run(rows) for rows in feeds_by_rows(feeds)])


@contextmanager
def failures_as_unverified() -> Iterator[None]:
    """Tell a file that does not run as one that was not verified.

    Raises:
        VerificationError: ONNX Runtime cannot run a file.
    """
    try:
        yield
    except StageError as error:
        raise VerificationError(
            f"cannot generate with the files: {error.message}",
            hint="--no-verify writes them without comparing.",
            is_graph_wrong=True,
        ) from error


def sizes_of_rows(part: ModelPart, rows: int) -> dict[str, int]:
    """Return the sizes a part is traced with, and so many rows."""
    batch = part.inputs[0].shape[0]
    return {name: rows if name == batch else size for name, size in part.trace_sizes.items()}
