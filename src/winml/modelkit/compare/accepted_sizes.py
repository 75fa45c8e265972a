"""Which sizes of its open dimensions does a file run at? Tried, since a graph does not declare its limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from winml.modelkit.compare.files import large_size, open_session
from winml.modelkit.errors import StageError
from winml.modelkit.graph.dimensions import resolve_names
from winml.modelkit.runtime.graph_inputs import draw_feeds, graph_inputs
from winml.modelkit.runtime.sessions import Session

__all__ = ["RefusedSizes", "refused_sizes"]


@dataclass(frozen=True)
class RefusedSizes:
    """Why a file does not run at some sizes."""

    asked: Mapping[str, int]
    """Dimension, by its name in the file → the size asked for."""
    reason: str
    """ONNX Runtime's."""
    limits: Mapping[str, int]
    """Dimension → the largest size it runs at, below the one asked for; only those that are too large."""


def refused_sizes(path: Path, sizes: Mapping[str, int], seed: int) -> RefusedSizes | None:
    """Return why a file does not run at some sizes; None where it does.

    Args:
        path: The file.
        sizes: Size by name of an open dimension, or by key of ``--shape-config``; the others get small ones.
        seed: Seed of the values.

    Raises:
        StageError: ONNX Runtime cannot open the file.
        UsageError: no values can be drawn for one of its inputs.
    """
    trial = _Trial(open_session(path, as_written=True), seed)
    asked = resolve_names(sizes, trial.names)
    reason = trial.refusal(asked)
    if reason is None:
        return None
    limits = {name: trial.limit(name, size) for name, size in asked.items()}
    return RefusedSizes(asked, reason, {name: limit for name, limit in limits.items() if limit is not None})


class _Trial:
    """Runs a file at sizes."""

    def __init__(self, session: Session, seed: int) -> None:
        self._session = session
        self._inputs = graph_inputs(session)
        self._seed = seed
        self.names = dict.fromkeys(key for item in self._inputs for key in item.keys if isinstance(key, str))
        self._small = {name: large_size(name) or 2 for name in self.names}

    def refusal(self, sizes: Mapping[str, int]) -> str | None:
        """Return why it does not run; None where it does."""
        try:
            self._session.run(draw_feeds(self._inputs, {**self._small, **sizes}, self._seed))
        except StageError as error:
            return error.message.partition(f"{self._session.name}: ")[2] or error.message
        return None

    def limit(self, name: str, size: int) -> int | None:
        """Return the largest size of one dimension it runs at, the others small; None if any will do, or none does."""
        low, high = self._small.get(name, 2), size
        if low >= high or self.refusal({name: high}) is None or self.refusal({name: low}) is not None:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.refusal({name: middle}) is None else (low, middle)
        return low
