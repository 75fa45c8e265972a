"""Times the steps of a flow and reports the running step.

A flow wraps each step in ``with clock.step(name)``; a listener shows the progress. Without a listener, a notebook shows
a bar below the cell. Prints nothing else.
"""

from __future__ import annotations

import html
import importlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from winml.modelkit.errors import WinMLError
from winml.modelkit.records import Record, entry

_T = TypeVar("_T")


_LEAST_DONE = 0.02
"""Minimum completed share for an estimate. Chosen: start-up and the first item are not representative."""


_MINUTES, _HOURS, _DAY = 100, 100 * 60, 24 * 3600
"""Seconds from which a remaining time is stated in minutes, and in hours; from a day on, it is no estimate."""


def remaining_words(seconds: float, done: float) -> str:
    """Estimate the remaining time; empty if too little is done for an estimate.

    Args:
        seconds: Time since the start.
        done: Completed share, 0 to 1.

    >>> remaining_words(2.0, 0.25), remaining_words(300.0, 0.1), remaining_words(400.0, 0.02)
    ('about 6 s left', 'about 45 min left', 'about 5 h left')
    >>> remaining_words(9.0, 0.01)
    ''
    """
    if not _LEAST_DONE <= done <= 1:
        return ""
    left = seconds * (1 / done - 1)
    if left >= _DAY:
        return "more than a day left"
    for least, unit, words in ((_HOURS, 3600, "h"), (_MINUTES, 60, "min")):
        if left >= least:
            return f"about {left / unit:.0f} {words} left"
    return f"about {left:.0f} s left"


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
    """A step started, progressed, or finished."""

    number: int
    """Position, from 1."""
    total: int
    name: str
    finished: StepTiming | None = None
    """None while the step is running."""
    running: RunningStep | None = None
    """Progress of the step; None: not counted."""


OnStep = Callable[[StepEvent], None]
"""Called when a step starts and when it ends."""
Progress = Callable[[int, float], None]
"""Called between runs with the number of counted runs and the share of finished work, 0 to 1."""
Tell = Callable[[str], None]
"""Called with a text for each step."""


@dataclass
class RunningStep:
    """The step that is running; its body sets the summary."""

    summary: str = ""
    done: float = 0
    """Completed share of its work, if counted."""
    counted: str = ""
    """Completed work in words, such as ``layer 3 of 24``."""
    inner: str = ""
    """Completed work of the nested step, in words."""
    started: float = field(default_factory=time.monotonic)
    is_over: bool = False
    """True if the step ended, or failed."""
    outer: RunningStep | None = None
    """The enclosing step."""
    tell: Callable[[], None] = field(default=lambda: None, compare=False)
    """Notifies the listener of progress."""
    tick: Callable[[], None] = field(default=lambda: None, compare=False)
    """Called at every count of work."""

    @property
    def progress(self) -> str:
        """Completed work of the step and its nested step: ``step 1 of 3, layer 3 of 24``."""
        return ", ".join(filter(None, (self.counted, self.inner)))

    @property
    def words(self) -> str:
        """Elapsed time, completed work, and estimated remaining time: ``12 s, layer 3 of 24, about 84 s left``."""
        seconds = time.monotonic() - self.started
        return ", ".join(filter(None, (f"{seconds:.0f} s", self.progress, remaining_words(seconds, self.done))))

    def outward(self) -> Iterator[RunningStep]:
        """Yield the step and its enclosing steps, the outermost last."""
        step: RunningStep | None = self
        while step is not None:
            yield step
            step = step.outer


_innermost: ContextVar[RunningStep | None] = ContextVar("innermost", default=None)


@contextmanager
def running_step(step: RunningStep) -> Iterator[None]:
    """Count the work of the block as progress of a step, which is over when the block ends; changes ``step``."""
    step.outer = _innermost.get()
    token = _innermost.set(step)
    try:
        yield
    finally:
        step.is_over = True
        _innermost.reset(token)
        for outer in [] if step.outer is None else step.outer.outward():
            outer.inner = ""


def count_progress(completed: float, total: float, counted: str, *, notifies_listeners: bool = False) -> None:
    """Update the progress of the step that runs in this thread; no effect without a step.

    Args:
        completed: Completed amount of work.
        total: Total amount of work.
        counted: Completed work in words, such as ``layer 3 of 24``.
        notifies_listeners: Notify listeners at once; for long work.
    """
    if (running := _innermost.get()) is None or not total:
        return
    running.done, running.counted = completed / total, counted
    inner, *outer = running.outward()
    for step in outer:
        step.inner, inner = inner.progress, step
    for step in running.outward():
        step.tick()
        if notifies_listeners:
            step.tell()


def count_share(noun: str) -> Progress:
    """Return a function that counts completed units, and their share of all, as progress of the running step.

    Args:
        noun: Plural noun of the units.
    """
    return lambda completed, share: count_progress(share, 1, f"{completed} {noun}")


_REDRAW_S = 0.3
"""Minimum time between two drawings of a bar. Chosen: it looks continuous, and costs a measurement nothing."""


class _NotebookBar:
    """A progress bar below a notebook cell."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._drawn = 0.0

    def show(self, words: str, share: float, *, is_urgent: bool = False) -> None:
        """Draw a text and a share from 0 to 1, unless the bar was just drawn and this is not urgent."""
        now = time.monotonic()
        if not is_urgent and now - self._drawn < _REDRAW_S:
            return
        self._drawn = now
        ipython: Any = importlib.import_module("IPython.display")
        bar = ipython.HTML(f'<progress max="1" value="{min(share, 1):.3f}"></progress> {html.escape(words)}')
        if self._handle is None:
            self._handle = ipython.display(bar, display_id=True)
        else:
            self._handle.update(bar)

    def show_step(self, event: StepEvent) -> None:
        """Draw the number, name and progress of a step, or the result of a finished one."""
        head = f"[{event.number}/{event.total}] {event.name}"
        if event.finished is not None:
            words = f"{head} {event.finished.seconds:.1f} s {event.finished.summary}"
            self.show(words, event.number / event.total, is_urgent=True)
        elif event.running is not None:
            running = event.running
            self.show(f"{head} … {running.words}", (event.number - 1 + running.done) / event.total)


def _notebook_bar() -> _NotebookBar | None:
    """Return a bar below the running notebook cell; None outside of notebooks, and inside of a step with a bar."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return None if getattr(shell, "kernel", None) is None or _innermost.get() is not None else _NotebookBar()


def notebook_progress(noun: str) -> Progress | None:
    """Return a function that shows completed units, and their share of all, in a notebook; None elsewhere.

    Args:
        noun: Plural noun of the units.
    """
    bar = _notebook_bar()
    return (
        None if bar is None else lambda completed, share: bar.show(f"{completed} {noun}", share, is_urgent=share >= 1)
    )


@contextmanager
def part_of_step(description: str) -> Iterator[None]:
    """Report the block as a part of the running step; progress inside the block is progress of the part.

    Args:
        description: The part, such as ``step 2 of 3, module 3 of 24``; parts may differ in duration.
    """
    count_progress(0, 1, description, notifies_listeners=True)
    with running_step(RunningStep()):
        yield


def counted(elements: Sequence[_T], noun: str) -> Iterator[_T]:
    """Yield items and count each as progress of the running step; the count is reset at the end.

    Args:
        elements: Items of similar duration, processed one by one.
        noun: Singular noun of an item, such as ``random input``.
    """
    for number, element in enumerate(elements):
        count_progress(number, len(elements), f"{noun} {number + 1} of {len(elements)}")
        yield element
    count_progress(0, 1, "")


class StepClock:
    """Times the steps of one flow, in the order they were planned."""

    def __init__(self, names: Sequence[str], listener: OnStep | None = None) -> None:
        self._names = tuple(names)
        bar = _notebook_bar() if listener is None else None
        self._shows_bar = bar is not None
        self._listener = listener or (lambda _event: None if bar is None else bar.show_step(_event))
        self._finished: list[StepTiming] = []
        self._running: tuple[int, str, float, RunningStep] | None = None

    @contextmanager
    def step(self, name: str) -> Iterator[RunningStep]:
        """Run a step.

        A WinMLError that leaves the block gets the number and name of the step (``WinMLError.step``).
        """
        number, total = self._names.index(name) + 1, len(self._names)
        running = RunningStep()
        running.tell = lambda: self._listener(StepEvent(number, total, name, running=running))
        if self._shows_bar:
            running.tick = running.tell
        self._running = (number, name, time.perf_counter(), running)
        running.tell()
        try:
            with running_step(running):
                yield running
        except WinMLError as error:
            error.step = f"step {number} of {total}, {name}"
            raise
        timing = self._running_timing()
        self._running = None
        self._finished.append(timing)
        self._listener(StepEvent(number, total, name, timing))

    def timings(self) -> tuple[StepTiming, ...]:
        """Return the finished steps, and the running step with its elapsed time."""
        return (*self._finished, *([self._running_timing()] if self._running else []))

    def _running_timing(self) -> StepTiming:
        assert self._running is not None
        number, name, started, running = self._running
        return StepTiming(number, name, time.perf_counter() - started, running.summary)
