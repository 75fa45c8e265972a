"""How is progress shown? One line per step on stderr; a terminal also sees the running one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from winml.modelkit.cli._streams import own_stderr, tell

if TYPE_CHECKING:
    from winml.modelkit.progress import RunningStep, StepEvent
    from winml.modelkit.sweep.cells import Cell
    from winml.modelkit.sweep.records import CellResult
    from winml.modelkit.sweep.work_queue import SweepListener


def show_step(event: StepEvent) -> None:
    """Show that a step started or ended; how far it is, is shown from time to time."""
    head = f"[{event.number}/{event.total}] {event.name}"
    is_terminal = own_stderr().isatty()
    if event.finished is None:
        if event.running is not None and not _LONG_STEPS.follow(head, event.running):
            return
        if is_terminal:
            tell(f"{head} …", start="\r", end="")
        return
    line = f"{head:<28} {event.finished.seconds:6.2f} s  {event.finished.summary}"
    # The carriage return writes over the line of the running step.
    tell(f"{line:<{_LONG_STEPS.width}}" if is_terminal else line, start="\r" if is_terminal else "")


LINE_S = 10.0
"""Seconds between two lines of progress where no terminal shows it. Chosen: a log of an hour stays readable, and
whoever follows it sees that something goes on."""
SHORT_S = 3.0
"""Chosen: nobody waits for a step so short; a terminal then shows each second how far it is."""


class _LongSteps:
    """Shows how far steps are that take long, from a thread of its own; the innermost of several."""

    def __init__(self) -> None:
        self._steps: list[tuple[str, RunningStep]] = []
        self._lock = threading.Lock()
        self._is_followed = False
        self._paused = 0
        self.width = 0
        """Characters of the longest line that was written over."""

    def follow(self, head: str, step: RunningStep) -> bool:
        """Show a step until it is over; say whether it was not shown already."""
        with self._lock:
            if any(step is other for _, other in self._steps):
                return False
            self._steps.append((head, step))
            if not self._is_followed:
                self._is_followed = True
                threading.Thread(target=self._show, daemon=True, name="progress").start()
            return True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Show nothing as long as the block lasts."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def _show(self) -> None:
        is_terminal = own_stderr().isatty()
        told = time.monotonic()
        while True:
            time.sleep(_TICK_S)
            with self._lock:
                self._steps = [item for item in self._steps if not item[1].is_over]
                if not self._steps:
                    self._is_followed = False
                    return
                head, step = self._steps[-1]
            now = time.monotonic()
            since = now - max(told, step.started)
            if self._paused or since < (1 if is_terminal else LINE_S) or now - step.started < SHORT_S:
                continue
            told = now
            line = f"{head} … {step.words}"
            self.width = max(self.width, len(line))
            tell(f"{line:<{self.width}}", start="\r", end="") if is_terminal else tell(line)


_TICK_S = 0.5
"""Chosen: often enough for a line each second."""
_LONG_STEPS = _LongSteps()
steps_paused = _LONG_STEPS.paused
"""Block in which long steps are not shown, since it shows more itself."""


@contextmanager
def shown_wait(words: str) -> Iterator[None]:
    """Show how far the work of the block is, where it takes long; nothing is left on a terminal.

    Args:
        words: What is done, such as ``comparing``.
    """
    from winml.modelkit.progress import RunningStep, running_step

    step = RunningStep()
    _LONG_STEPS.follow(words, step)
    try:
        with running_step(step):
            yield
    finally:
        if _LONG_STEPS.width and own_stderr().isatty():
            tell(" " * _LONG_STEPS.width, start="\r", end="\r")


@contextmanager
def sweep_progress(ended: list[str], *, quiet: bool) -> Iterator[SweepListener]:
    """Yield the listener that shows a sweep: a line for each cell that ended; a terminal also sees what is running.

    Args:
        ended: Gets the id of every cell that ended.
        quiet: Show nothing.
    """
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from winml.modelkit.sweep.records import settings_words
    from winml.modelkit.sweep.work_queue import SweepListener
    from winml.modelkit.words import printable

    running: dict[str, tuple[Cell, float, str]] = {}

    def words(cell: Cell | CellResult) -> str:
        return printable(f"{cell.model} {settings_words(cell.settings)}".strip())

    def running_lines() -> Text:
        lines = [f"  {time.monotonic() - at:6.0f} s  {words(cell)}: {step}" for cell, at, step in [*running.values()]]
        return Text("\n".join([f"{len(ended)} configurations completed, {len(running)} running", *lines]))

    def started(cell: Cell) -> None:
        running[cell.cell_id] = (cell, time.monotonic(), "starts")

    def stepped(so_far: CellResult) -> None:
        if so_far.cell_id in running:
            running[so_far.cell_id] = (*running[so_far.cell_id][:2], so_far.step)

    def finished(result: CellResult) -> None:
        running.pop(result.cell_id, None)
        ended.append(result.cell_id)
        if not quiet:
            stated = f": {result.step}: {result.problem}" if result.problem else ""
            tell(f"[{len(ended)}] {result.state:<6} {result.seconds:7.1f} s  {words(result)}{stated}")

    listener = SweepListener(started, stepped, finished, (lambda _words: None) if quiet else tell)
    if quiet or not own_stderr().isatty():
        yield listener
        return
    console = Console(file=own_stderr())
    with Live(console=console, get_renderable=running_lines, refresh_per_second=2, transient=True):
        yield listener
