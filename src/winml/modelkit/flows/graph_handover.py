"""What is done to a graph between its export and its first file, in memory?

Where every work on a graph goes tensor by tensor, no file of the exported graph is needed: its weights are read from
the checkpoint while the result is written. Why: docs/decisions/0010-no-float-copy.md. Knows no verb; who hands over
names the works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from winml.modelkit.flows.graph_file import GraphWork, is_external, refresh_metadata

__all__ = ["GraphHandover", "HandedGraph"]

PIECE_BYTES = 1 << 27
"""Chosen: some 30 pieces of seven billion parameters in 4 bits, each small beside what the libraries take."""


@dataclass(frozen=True)
class HandedGraph:
    """A graph after the works."""

    model: ir.Model
    works: tuple[GraphWork[Any], ...]
    summaries: tuple[str, ...]
    """What each work did, in a few words."""
    notes: tuple[str, ...]

    def late_notes(self) -> tuple[str, ...]:
        """Return what is known only once the model was written."""
        return tuple(note for work in self.works for note in work.late_notes(self.model))


@dataclass(frozen=True)
class GraphHandover:
    """The works on an exported graph before it is written."""

    works: Callable[[Path, ir.Model], Sequence[GraphWork[Any]]]
    """Returns them in order, for the path and the graph that goes there."""
    least_sqnr_db: float
    """Ratio in decibels that every output has to reach beside PyTorch."""
    external_from_bytes: int
    """Size of the weights from which they get a file of their own."""
    piece_bytes: int = PIECE_BYTES
    """Weights of the written file in memory at a time, while it is compared with a model whose weights are not."""

    def apply(self, model: ir.Model, path: Path) -> HandedGraph:
        """Do the works; the model is used up.

        Raises:
            StageError: a work failed.
        """
        works = tuple(self.works(path, model))
        summaries: list[str] = []
        notes: list[str] = []
        for work in works:
            result = work.apply(model)
            model = result.model
            refresh_metadata(model, work, is_plain=True)
            summaries.append(work.summary(result))
            notes += result.notes
        return HandedGraph(model, works, tuple(summaries), tuple(notes))

    def is_external(self, model: ir.Model) -> bool | None:
        """Say whether weights go to a file of their own; None leaves it to the writer, which asks whether they must."""
        return is_external(model, self.external_from_bytes)
