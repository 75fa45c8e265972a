"""Which step of a flow is running, and how long did each take?

A flow tells it by ``with clock.step(name)``; whoever shows progress listens. Prints nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from winml.modelkit.errors import WinMLError

__all__ = ["RunningStep", "StepClock", "StepEvent", "StepTiming"]


@dataclass(frozen=True)
class StepTiming:
    """One finished step."""

    number: int
    """Position, from 1."""
    name: str
    seconds: float
    summary: str
    """What it did, in a few words."""

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready form."""
        return {"name": self.name, "milliseconds": round(self.seconds * 1000, 1), "summary": self.summary}


@dataclass(frozen=True)
class StepEvent:
    """A step started, or finished."""

    number: int
    """Position, from 1."""
    total: int
    name: str
    finished: StepTiming | None = None
    """None while it runs."""


@dataclass
class RunningStep:
    """Handed to the body of a step, which says here what it did."""

    summary: str = ""


class StepClock:
    """Times the steps of one flow, in the order they were planned."""

    def __init__(self, names: Sequence[str], listener: Callable[[StepEvent], None] | None = None) -> None:
        self._names = tuple(names)
        self._listener = listener or (lambda _event: None)
        self._finished: list[StepTiming] = []
        self._running: tuple[int, str, float, RunningStep] | None = None

    @contextmanager
    def step(self, name: str) -> Iterator[RunningStep]:
        """Run a step.

        An error that leaves it learns which step of how many it was (``WinMLError.step``).
        """
        number, total = self._names.index(name) + 1, len(self._names)
        running = RunningStep()
        self._running = (number, name, time.perf_counter(), running)
        self._listener(StepEvent(number, total, name))
        try:
            yield running
        except WinMLError as error:
            error.step = f"step {number} of {total}, {name}"
            raise
        timing = self._timing()
        self._running = None
        self._finished.append(timing)
        self._listener(StepEvent(number, total, name, timing))

    def timings(self) -> tuple[StepTiming, ...]:
        """Return the finished steps, and the running one as far as it has come."""
        return (*self._finished, *([self._timing()] if self._running else []))

    def _timing(self) -> StepTiming:
        assert self._running is not None
        number, name, started, running = self._running
        return StepTiming(number, name, time.perf_counter() - started, running.summary)
