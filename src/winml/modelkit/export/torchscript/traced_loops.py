"""Traces loops whose rounds depend on values: over the places of a tensor that are not zero.

A trace keeps the rounds that were made while tracing, such as those of the experts that were chosen. Here a loop has a
round for every place; one that nothing belongs to computes on no rows. Whether such a round adds nothing is for the
comparison with PyTorch on other values to say.

NOTE: asks the tracer what a tensor is computed from (docs/decisions/0004-private-seams.md).
``tests/unit/export/torchscript/test_traced_loops.py`` fails when that moves.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["TracedLoops"]

_ROUNDS, _COUNTED = "_winml_rounds", "_winml_counted"
"""Attributes of tensors: how many rounds a loop over one has; that its length is the number of places not zero."""


@dataclass
class TracedLoops:
    """The loops of one trace, and how many rounds they have."""

    input_count: int
    """How many inputs the model has."""
    _most_rounds: dict[int, int] = field(default_factory=dict)
    """Number of places → rounds that can be made."""
    _last_round: tuple[int, int] = (0, 0)
    """Number of places of the last loop, and its place."""

    @contextmanager
    def in_trace(self) -> Iterator[None]:
        """Trace a round for every place inside the block; patches torch."""
        with ExitStack() as stack:
            for owner, name, patch in (
                (torch.Tensor, "nonzero", self._places),
                (torch, "nonzero", self._places),
                (torch.Tensor, "__iter__", self._rounds),
                (torch, "where", _counted),
                (torch.Tensor, "numel", _taken_as_filled),
            ):
                stack.enter_context(_replaced(owner, name, patch))
            yield

    def call(self, trace: Callable[[], bytes]) -> bytes:
        """Return what a trace returns, made with fewer rounds where a place lies past the end of what it chooses from.

        PyTorch would fail there as well: there is never such a place.
        """
        try:
            return trace()
        except IndexError:
            _drop_kept_index()
            if not self._shorten():
                raise
        return self.call(trace)

    def _shorten(self) -> bool:
        """Leave out the place that the trace failed at, and those behind it; return whether there is one."""
        places, place = self._last_round
        is_shorter = 0 < place < self._most_rounds.get(places, places)
        if is_shorter:
            self._most_rounds[places] = place
        self._last_round = (0, 0)
        return is_shorter

    def _places(self, original: Callable[..., Any], values: torch.Tensor, *args: Any, **options: Any) -> Any:
        found = original(values, *args, **options)
        if isinstance(found, torch.Tensor) and values.dim() == 1 and self._depends_on_inputs(values):
            setattr(found, _ROUNDS, len(_values(values)))
        return _marked(found)

    def _rounds(self, original: Callable[..., Any], values: torch.Tensor) -> Any:
        places = getattr(values, _ROUNDS, None)
        return original(values) if places is None else self._round_by_round(places, values.device)

    def _round_by_round(self, places: int, device: torch.device) -> Iterator[torch.Tensor]:
        for place in range(self._most_rounds.get(places, places)):
            self._last_round = (places, place)
            yield torch.full((1,), place, dtype=torch.int64, device=device)
        self._last_round = (0, 0)

    def _depends_on_inputs(self, values: torch.Tensor) -> bool:
        """Say whether a tensor is computed from an input of the model, and not from weights and constants alone."""
        tracing: Any = torch._C._get_tracing_state()
        if tracing is None:
            return False
        # The exporter lists the inputs of the model first, and the weights after them.
        inputs = {value.unique() for value in list(tracing.graph().inputs())[: self.input_count]}
        pending: list[Any] = [torch._C._get_value_trace(values)]  # type: ignore[attr-defined]  # its stub misses it
        seen: set[int] = set()
        while pending:
            value = pending.pop()
            if value.unique() in inputs:
                return True
            if value.unique() not in seen:
                seen.add(value.unique())
                pending += value.node().inputs()
        return False


def _drop_kept_index() -> None:
    """Drop the index that torch keeps of a failed trace, and would put into the next one."""
    with suppress(RuntimeError), warnings.catch_warnings():
        # That it is outdated, as the exporter is.
        warnings.simplefilter("ignore")
        torch.jit.trace(lambda values: values[0], torch.zeros(1), check_trace=False)


@contextmanager
def _replaced(owner: Any, name: str, patch: Callable[..., Any]) -> Iterator[None]:
    original = getattr(owner, name)
    is_own = name in vars(owner)

    @functools.wraps(original)
    def call(*args: Any, **options: Any) -> Any:
        return patch(original, *args, **options)

    setattr(owner, name, call)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def _counted(original: Callable[..., Any], condition: torch.Tensor, *args: Any, **options: Any) -> Any:
    found = original(condition, *args, **options)
    return found if args or options else _marked(found)


def _marked(found: Any) -> Any:
    for tensor in (found,) if isinstance(found, torch.Tensor) else found:
        setattr(tensor, _COUNTED, True)
    return found


def _taken_as_filled(original: Callable[..., Any], values: torch.Tensor) -> Any:
    # Asked whether there is anything to do: a graph does it always, on no rows where there is nothing.
    return max(1, len(_values(values))) if getattr(values, _COUNTED, False) else original(values)


def _values(values: torch.Tensor) -> list[Any]:
    """Return the values of a tensor, none of which is kept in the graph."""
    tracing: Any = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]  # its stub misses it
    try:
        return list(values.detach().cpu().numpy().tolist())
    finally:
        torch._C._set_tracing_state(tracing)  # type: ignore[attr-defined]
