"""Runs the files of several parts, and their model, to compare a text that all of them make together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from winml.modelkit.errors import StageError, VerificationError
from winml.modelkit.load.parts import ModelPart
from winml.modelkit.verify.other_sizes import Draw, unchanged_attributes
from winml.modelkit.verify.reference_run import PreparedPart, run_reference, with_values
from winml.modelkit.verify.stable_draws import is_decided_by_rounding

__all__ = ["SCORES", "Arrays", "is_rounding", "opened_file", "sizes_of_rows", "told_failures"]

Arrays = Mapping[str, NDArray[Any]]
SCORES = "logits"
"""Output whose values are compared."""


def opened_file(path: Path) -> Callable[[Arrays], Arrays]:
    """Return what runs a file in ONNX Runtime, opened with its defaults."""
    from winml.modelkit.runtime.sessions import Session

    return Session(path).run


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
