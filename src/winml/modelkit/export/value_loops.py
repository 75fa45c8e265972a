"""Tracing of loops with a value-dependent number of iterations: over the nonzero positions of a tensor.

A trace records the iterations that ran, such as the iterations of selected experts. Here a loop has an iteration for
every position; an iteration without elements computes on zero rows. The comparison with PyTorch on other values checks
that such an iteration does not change the outputs.
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
"""Attributes of tensors: number of iterations of a loop; mark that the length counts nonzero positions."""
_INDEX = re.compile(r"\bindex (\d+)\b")
"""Format of an out-of-range index in the errors of torch and of its module lists."""
_T = TypeVar("_T")


@dataclass
class ValueLoops(ABC):
    """Loops of one trace and their number of iterations; each exporter counts positions differently."""

    _shortened: dict[int, tuple[int, int]] = field(default_factory=dict, kw_only=True)
    """Index of a loop in the trace → number of positions, and number of possible iterations."""
    _loops: int = field(default=0, kw_only=True)
    """Number of loops started in the trace."""
    _last_round: tuple[int, int, int] | None = field(default=None, kw_only=True)
    """The running loop, its number of positions and the current position; None after the loop's end."""

    @abstractmethod
    def count_positions(self, values: torch.Tensor) -> int | None:
        """Return the number of positions of a one-dimensional tensor; `None` if its loop is not unrolled."""

    @abstractmethod
    def make_position(self, number: int, device: torch.device) -> torch.Tensor:
        """Return the position of one iteration as a tensor of one number."""

    @abstractmethod
    def size_if_filled(self, values: torch.Tensor) -> Any:
        """Return the number of elements at a position, at least 1."""

    def after_failure(self) -> None:  # noqa: B027  # nothing is left behind where it is not overridden
        """Remove the remains of a failed trace."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on loops that have fewer iterations than positions."""
        counts = Counter(self._shortened.values())
        return tuple(
            f"A loop over {places} positions has {rounds} iterations in the graph"
            f"{f' ({loops} times)' if loops > 1 else ''}: PyTorch finds no element at the "
            f"{'other positions' if places - rounds > 1 else 'last one'}."
            for (places, rounds), loops in counts.items()
        )

    def begin(self) -> None:
        """Count the loops from the first again: a forward starts."""
        self._loops, self._last_round = 0, None

    @contextmanager
    def in_trace(self) -> Iterator[None]:
        """Trace an iteration for every position inside the block; patches torch."""
        self.begin()
        with ExitStack() as stack:
            for owner, name, patch in (
                (torch.Tensor, "nonzero", self._mark_positions),
                (torch, "nonzero", self._mark_positions),
                (torch.Tensor, "__iter__", self._iterate_rounds),
                (torch, "where", _mark_counted),
                (torch.Tensor, "numel", self._count_if_filled),
            ):
                stack.enter_context(call_replaced(owner, name, patch))
            yield

    def call(self, trace: Callable[[], _T]) -> _T:
        """Run a trace, with fewer iterations if a position is beyond the end of an indexed list.

        PyTorch would fail there as well: the position never occurs. Any other error of the trace is raised unchanged.
        """
        try:
            return trace()
        except IndexError as error:
            self.after_failure()
            if not self._shorten_loop(str(error)):
                raise
        return self.call(trace)

    def _shorten_loop(self, error: str) -> bool:
        """Drop the position at which the trace failed and all later ones; return True if it failed at a position."""
        index = _INDEX.search(error)
        if index is None or self._last_round is None:
            return False
        loop, places, position = self._last_round
        if not position or position != int(index[1]):
            return False
        # Later loops of the trace may change with the iterations of this loop.
        self._shortened = {earlier: sizes for earlier, sizes in self._shortened.items() if earlier < loop}
        self._shortened[loop] = (places, position)
        return True

    def _mark_positions(self, original: Callable[..., object], *args: Any, **options: Any) -> Any:
        """Call ``nonzero``; mark the result with its number of positions, so that a loop over it is unrolled."""
        result = original(*args, **options)
        values = args[0] if args else options["input"]
        if isinstance(result, torch.Tensor) and values.dim() == 1:
            places = self.count_positions(values)
            if places is not None:
                setattr(result, _ROUNDS, places)
        return _mark_tensors(result)

    def _iterate_rounds(self, original: Callable[..., object], values: torch.Tensor) -> Any:
        """Iterate over every possible position of a marked tensor; over any other tensor as torch does."""
        places = getattr(values, _ROUNDS, None)
        return original(values) if places is None else self._iterate_positions(places, values.device)

    def _iterate_positions(self, places: int, device: torch.device) -> Iterator[torch.Tensor]:
        """Yield the position of each iteration of a loop, which is recorded as the running loop."""
        around, loop = self._last_round, self._loops
        self._loops += 1
        _, rounds = self._shortened.get(loop, (places, places))
        for position in range(rounds):
            self._last_round = (loop, places, position)
            yield self.make_position(position, device)
        self._last_round = around

    def _count_if_filled(self, original: Callable[..., object], values: torch.Tensor) -> Any:
        # A check for an empty loop body: the graph always runs it, on zero rows if empty.
        return self.size_if_filled(values) if getattr(values, _COUNTED, False) else original(values)


def call_replaced(owner: object, name: str, patch: Callable[..., object]) -> AbstractContextManager[None]:
    """Replace a function inside the block.

    Args:
        owner: The class or module with the function.
        name: Its name.
        patch: Called instead, with the original function and the arguments.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: object, **options: object) -> Any:
        return patch(original, *args, **options)

    return attribute_replaced(owner, name, call)


def _mark_counted(original: Callable[..., object], *args: object, **options: object) -> Any:
    result = original(*args, **options)
    # A call with two tensors returns a single tensor, which holds no positions.
    return result if isinstance(result, torch.Tensor) else _mark_tensors(result)


def _mark_tensors(result: Any) -> Any:
    for tensor in (result,) if isinstance(result, torch.Tensor) else result:
        setattr(tensor, _COUNTED, True)
    return result
