"""Traces loops whose rounds depend on values: over the places of a tensor that are not zero.

A trace keeps the rounds that were made while tracing, such as those of the experts that were chosen. Here a loop has
a round for every place; one that nothing belongs to computes on no rows. Whether such a round adds nothing is for the
comparison with PyTorch on other values to say.
"""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from winml.modelkit.ort.shared_settings import attribute_replaced

_ROUNDS, _COUNTED = "_winml_rounds", "_winml_counted"
"""Attributes of tensors: how many rounds a loop over one has; that its length is the number of places not zero."""
_INDEX = re.compile(r"\bindex (\d+)\b")
"""How torch and its lists of modules name the index that lies past the end."""
_T = TypeVar("_T")


@dataclass
class ValueLoops(ABC):
    """The loops of one trace, and how many rounds they have; each exporter counts places in its own way."""

    _shortened: dict[int, tuple[int, int]] = field(default_factory=dict, kw_only=True)
    """Which loop of the trace → how many places there are, and how many rounds can be made."""
    _loops: int = field(default=0, kw_only=True)
    """How many loops the trace has begun."""
    _last_round: tuple[int, int, int] | None = field(default=None, kw_only=True)
    """Which loop was in a round last, its places, and the one it was at; none once it came to its end."""

    @abstractmethod
    def place_count(self, values: torch.Tensor) -> int | None:
        """Return how many places a tensor of one axis has; None where a loop over them stays as it is."""

    @abstractmethod
    def place(self, number: int, device: torch.device) -> torch.Tensor:
        """Return the place of one round: a tensor of one number."""

    @abstractmethod
    def size_if_filled(self, values: torch.Tensor) -> Any:
        """Return the number of elements, at least 1, of what belongs to a place."""

    def after_failure(self) -> None:  # noqa: B027  # nothing is left behind where it is not overridden
        """Remove what a failed trace leaves behind."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be said of loops that have fewer rounds than places."""
        counts = Counter(self._shortened.values())
        return tuple(
            f"A loop over {places} places has {rounds} rounds in the graph{f' ({loops} times)' if loops > 1 else ''}: "
            f"PyTorch finds nothing at {'those' if places - rounds > 1 else 'the one'} behind."
            for (places, rounds), loops in counts.items()
        )

    def begin(self) -> None:
        """Count the loops from the first: the forward starts."""
        self._loops, self._last_round = 0, None

    @contextmanager
    def in_trace(self) -> Iterator[None]:
        """Trace a round for every place inside the block; patches torch."""
        self.begin()
        with ExitStack() as stack:
            for owner, name, patch in (
                (torch.Tensor, "nonzero", self._places),
                (torch, "nonzero", self._places),
                (torch.Tensor, "__iter__", self._rounds),
                (torch, "where", _counted),
                (torch.Tensor, "numel", self._taken_as_filled),
            ):
                stack.enter_context(call_replaced(owner, name, patch))
            yield

    def call(self, trace: Callable[[], _T]) -> _T:
        """Return what a trace returns, made with fewer rounds where a place lies past the end of what it chooses from.

        PyTorch would fail there as well: there is never such a place. Any other error of the trace comes out as it is.
        """
        try:
            return trace()
        except IndexError as error:
            self.after_failure()
            if not self._shorten(str(error)):
                raise
        return self.call(trace)

    def _shorten(self, error: str) -> bool:
        """Leave out the place that the trace failed at, and those behind it; return whether it failed at one."""
        index = _INDEX.search(error)
        if index is None or self._last_round is None:
            return False
        loop, places, place = self._last_round
        if not place or place != int(index[1]):
            return False
        # Which loop comes after this one may change with its rounds.
        self._shortened = {other: sizes for other, sizes in self._shortened.items() if other < loop}
        self._shortened[loop] = (places, place)
        return True

    def _places(self, original: Callable[..., object], *args: Any, **options: Any) -> Any:
        found = original(*args, **options)
        values = args[0] if args else options["input"]
        if isinstance(found, torch.Tensor) and values.dim() == 1:
            places = self.place_count(values)
            if places is not None:
                setattr(found, _ROUNDS, places)
        return _marked(found)

    def _rounds(self, original: Callable[..., object], values: torch.Tensor) -> Any:
        places = getattr(values, _ROUNDS, None)
        return original(values) if places is None else self._round_by_round(places, values.device)

    def _round_by_round(self, places: int, device: torch.device) -> Iterator[torch.Tensor]:
        around, loop = self._last_round, self._loops
        self._loops += 1
        _, rounds = self._shortened.get(loop, (places, places))
        for place in range(rounds):
            self._last_round = (loop, places, place)
            yield self.place(place, device)
        self._last_round = around

    def _taken_as_filled(self, original: Callable[..., object], values: torch.Tensor) -> Any:
        # Asked whether there is anything to do: a graph does it always, on no rows where there is nothing.
        return self.size_if_filled(values) if getattr(values, _COUNTED, False) else original(values)


def call_replaced(owner: object, name: str, patch: Callable[..., object]) -> AbstractContextManager[None]:
    """Replace a function for the time of the block.

    Args:
        owner: The class or module that has it.
        name: Its name.
        patch: Called in its place, with it and the arguments.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: object, **options: object) -> Any:
        return patch(original, *args, **options)

    return attribute_replaced(owner, name, call)


def _counted(original: Callable[..., object], *args: object, **options: object) -> Any:
    found = original(*args, **options)
    # Of two tensors it returns one, which holds no places.
    return found if isinstance(found, torch.Tensor) else _marked(found)


def _marked(found: Any) -> Any:
    for tensor in (found,) if isinstance(found, torch.Tensor) else found:
        setattr(tensor, _COUNTED, True)
    return found
