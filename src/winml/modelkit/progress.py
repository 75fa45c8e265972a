"""Times the steps of a flow and reports which one is running.

A flow wraps each step in ``with clock.step(name)``; a listener shows the progress. Prints nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from winml.modelkit.errors import WinMLError
from winml.modelkit.records import Record, entry

__all__ = ["RunningStep", "StepClock", "StepEvent", "StepTiming"]


@dataclass(frozen=True)
class StepTiming(Record):
    """One finished step."""

    number: int = field(metadata=entry(skip=True))
    """Position, from 1."""
    name: str
    seconds: float = field(metadata=entry("milliseconds", scale=1000, digits=1))
    summary: str
    """Result of the step in a few words."""


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
    """The step that is running; its body sets the summary."""

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

        A WinMLError that leaves the block gets the number and name of the step (``WinMLError.step``).
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
        timing = self._timing_of_running()
        self._running = None
        self._finished.append(timing)
        self._listener(StepEvent(number, total, name, timing))

    def timings(self) -> tuple[StepTiming, ...]:
        """Return the finished steps, and the running one with its time so far."""
        return (*self._finished, *([self._timing_of_running()] if self._running else []))

    def _timing_of_running(self) -> StepTiming:
        assert self._running is not None
        number, name, started, running = self._running
        return StepTiming(number, name, time.perf_counter() - started, running.summary)
