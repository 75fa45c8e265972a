"""Runs the files of several parts, and their model, to compare a text that all of them make together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from winml.modelkit.errors import StageError, VerificationError
from winml.modelkit.graph.files.graph_reading import graph_of
from winml.modelkit.graph.files.placing import external_files
from winml.modelkit.graph.files.reading import read_structure
from winml.modelkit.load.parts import ModelPart
from winml.modelkit.verify.other_sizes import Draw, unchanged_attributes
from winml.modelkit.verify.reference_run import PreparedPart, run_reference, with_values
from winml.modelkit.verify.single_rows import feeds_by_rows, joined_rows, takes_single_rows
from winml.modelkit.verify.stable_draws import is_decided_by_rounding
from winml.modelkit.words import size_words

__all__ = [
    "MOST_WHOLE_BYTES",
    "SCORES",
    "Arrays",
    "beyond_memory",
    "is_rounding",
    "opened_decoder",
    "opened_file",
    "sizes_of_rows",
    "told_failures",
]

Arrays = Mapping[str, NDArray[Any]]
SCORES = "logits"
"""Output whose values are compared."""
MOST_WHOLE_BYTES = 1_000_000_000
"""Chosen: files of more are not run as a whole, nor more weights held, since building takes less."""


def beyond_memory(paths: Iterable[Path]) -> str:
    """Return why files are not run one after another where only few bits are compared; empty where they are."""
    size = sum(file.stat().st_size for path in paths for file in (path, *external_files(path)))
    words = f"the files have {size_words(size)}, and are run as a whole up to {size_words(MOST_WHOLE_BYTES)}"
    return words if size > MOST_WHOLE_BYTES else ""


def opened_file(path: Path) -> Callable[[Arrays], Arrays]:
    """Return what runs a file in ONNX Runtime, opened with its defaults."""
    from winml.modelkit.runtime.sessions import Session

    return Session(path).run


def opened_decoder(path: Path) -> Callable[[Arrays], Arrays]:
    """Return what runs a decoder in a file as :func:`opened_file` does, row by row where it takes no more."""
    run = opened_file(path)
    if not takes_single_rows(graph_of(read_structure(path), path)):
        return run
    return lambda feeds: joined_rows([run(rows) for rows in feeds_by_rows(feeds)])


@contextmanager
def told_failures() -> Iterator[None]:
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


def is_rounding(prepared: PreparedPart, inputs: Mapping[str, torch.Tensor], dtypes: Sequence[str]) -> bool:
    """Say whether rounding decides what PyTorch answers to inputs of a part."""
    with with_values(prepared) as weighted, unchanged_attributes(weighted.model):
        draw = Draw(inputs, run_reference(weighted, inputs), {})
        return is_decided_by_rounding(weighted, draw, [SCORES], dtypes)


def sizes_of_rows(part: ModelPart, rows: int) -> dict[str, int]:
    """Return the sizes a part is traced with, and so many rows."""
    batch = part.inputs[0].shape[0]
    return {name: rows if name == batch else size for name, size in part.trace_sizes.items()}
