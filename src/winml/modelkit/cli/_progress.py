"""Progress on stderr: one line per step; a terminal also shows the running step."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from winml.modelkit.cli._streams import own_stderr, tell
from winml.modelkit.words import count_noun, printable

if TYPE_CHECKING:
    from winml.modelkit.progress import Progress, RunningStep, StepEvent
    from winml.modelkit.sweep.cells import Cell
    from winml.modelkit.sweep.records import CellResult
    from winml.modelkit.sweep.work_queue import SweepListener


def show_step(event: StepEvent) -> None:
    """Show that a step started or ended; the progress of a long step is updated periodically."""
    head = f"[{event.number}/{event.total}] {event.name}"
    is_terminal = own_stderr().isatty()
    if event.finished is None:
        if event.running is not None and not _LONG_STEPS.follow(head, event.running):
            return
        if is_terminal:
            tell(f"{head} …", start="\r", end="")
        return
    line = f"{head:<28} {event.finished.seconds:6.2f} s  {event.finished.summary}"
    # The carriage return overwrites the line of the running step.
    tell(f"{line:<{_LONG_STEPS.width}}" if is_terminal else line, start="\r" if is_terminal else "")


LINE_S = 10.0
"""Seconds between two lines of progress without a terminal. Chosen: a log of an hour stays readable, and its reader
sees that the command is active."""
SHORT_S = 3.0
"""Chosen: no progress is needed for a step this short; afterwards a terminal updates the progress each second."""


class _LongSteps:
    """Shows the progress of long steps from a separate thread; of nested steps, the innermost."""

    def __init__(self) -> None:
        self._steps: list[tuple[str, RunningStep]] = []
        self._lock = threading.Lock()
        self._is_followed = False
        self._paused = 0
        self.width = 0
        """Length of the longest line that was overwritten."""

    def follow(self, head: str, step: RunningStep) -> bool:
        """Show a step until it is over; return False if the step was shown already."""
        with self._lock:
            if any(step is active_step for _, active_step in self._steps):
                return False
            self._steps.append((head, step))
            if not self._is_followed:
                self._is_followed = True
                threading.Thread(target=self._show_running, daemon=True, name="progress").start()
            return True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Show no progress inside the block."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def _show_running(self) -> None:
        """Print the progress of the latest long step until no step runs; the body of the thread."""
        is_terminal = own_stderr().isatty()
        last_time = time.monotonic()
        while True:
            time.sleep(_TICK_S)
            with self._lock:
                self._steps = [entry for entry in self._steps if not entry[1].is_over]
                if not self._steps:
                    self._is_followed = False
                    return
                head, step = self._steps[-1]
            now = time.monotonic()
            silence_s = now - max(last_time, step.started)
            if self._paused or silence_s < (1 if is_terminal else LINE_S) or now - step.started < SHORT_S:
                continue
            last_time = now
            line = f"{head} … {step.words}"
            self.width = max(self.width, len(line))
            tell(f"{line:<{self.width}}", start="\r", end="") if is_terminal else tell(line)


_TICK_S = 0.5
"""Chosen: frequent enough for one line per second."""
_LONG_STEPS = _LongSteps()
steps_paused = _LONG_STEPS.paused
"""Context manager without progress of long steps, for a block with more detailed progress."""


@contextmanager
def show_wait(description: str) -> Iterator[None]:
    """Show the progress of long work inside the block; the line is erased from a terminal afterwards.

    Args:
        description: Name of the work, such as ``comparing``.
    """
    from winml.modelkit.progress import RunningStep, running_step

    step = RunningStep()
    _LONG_STEPS.follow(description, step)
    try:
        with running_step(step):
            yield
    finally:
        if _LONG_STEPS.width and own_stderr().isatty():
            tell(" " * _LONG_STEPS.width, start="\r", end="\r")


@contextmanager
def live_progress(*, quiet: bool, counted: str = "run") -> Iterator[Progress | None]:
    """Yield a function that shows the progress of a measurement: a bar in a terminal, else periodic lines; None: quiet.

    Args:
        quiet: Show nothing.
        counted: Singular noun of the counted units.
    """
    if quiet:
        yield None
        return
    if not own_stderr().isatty():
        with steps_paused():
            yield _progress_printer(counted)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("measuring"),
        BarColumn(),
        TextColumn("{task.fields[counted]}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    # Drawn on request only, so that no thread runs beside a latency measurement.
    bar = Progress(*columns, console=Console(file=own_stderr()), transient=True, auto_refresh=False)
    task = bar.add_task("", total=1.0, counted="", left="")
    pace = _Pace()

    def show_progress(completed: int, share: float) -> None:
        bar.start()
        remaining_text = pace.left_words(time.monotonic(), share)
        bar.update(task, completed=share, counted=count_noun(completed, counted), left=remaining_text, refresh=True)

    try:
        with steps_paused():
            yield show_progress
    finally:
        if pace.began:
            bar.stop()


@dataclass
class _Pace:
    """Pace of a measurement since its first report: earlier work may have been slower.

    >>> pace = _Pace()
    >>> pace.left_words(100.0, 0.1), pace.left_words(102.0, 0.3), pace.left_words(110.0, 0.1)
    ('', 'about 7 s left', '')
    """

    began: float = 0.0
    """Time of the first report."""
    start_share: float = 0.0
    """Completed share at the first report."""
    last_share: float = 1.0
    """Share of the latest report; a smaller share starts another measurement."""

    def left_words(self, now: float, share: float) -> str:
        """Estimate the remaining time; empty if no estimate is possible.

        Args:
            now: Seconds on a clock.
            share: Completed share of the measurement, 0 to 1.
        """
        if share < self.last_share:
            self.began, self.start_share = now, share
        self.last_share = share
        if not self.start_share < share < 1:
            return ""
        from winml.modelkit.progress import remaining_words

        return remaining_words(now - self.began, (share - self.start_share) / (1 - self.start_share))


def _progress_printer(noun: str) -> Progress:
    """Return a function that prints the progress of a measurement at most every :data:`LINE_S` seconds."""
    last, pace = time.monotonic(), _Pace()

    def print_progress(completed: int, share: float) -> None:
        nonlocal last
        now = time.monotonic()
        remaining_text = pace.left_words(now, share)
        if now - last >= LINE_S:
            last = now
            texts = [f"measuring: {count_noun(completed, noun)}", f"{100 * share:.0f} %", remaining_text]
            tell(", ".join(filter(None, texts)))

    return print_progress


@contextmanager
def sweep_progress(ended: list[str], *, quiet: bool) -> Iterator[SweepListener]:
    """Yield a listener that prints a line for each finished cell; a terminal also shows the running cells.

    Args:
        ended: Receives the id of every finished cell.
        quiet: Show nothing.
    """
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from winml.modelkit.sweep.records import settings_words
    from winml.modelkit.sweep.work_queue import SweepListener

    running: dict[str, tuple[Cell, float, str]] = {}

    def label(cell: Cell | CellResult) -> str:
        return printable(f"{cell.model} {settings_words(cell.settings)}".strip())

    def running_lines() -> Text:
        lines = [
            f"  {time.monotonic() - start:6.0f} s  {label(cell)}: {step}" for cell, start, step in [*running.values()]
        ]
        return Text("\n".join([f"{len(ended)} configurations completed, {len(running)} running", *lines]))

    def add_cell(cell: Cell) -> None:
        running[cell.cell_id] = (cell, time.monotonic(), "starts")

    def update_cell(so_far: CellResult) -> None:
        if so_far.cell_id in running:
            running[so_far.cell_id] = (*running[so_far.cell_id][:2], so_far.step)

    def end_cell(result: CellResult) -> None:
        running.pop(result.cell_id, None)
        ended.append(result.cell_id)
        if not quiet:
            reason = f": {result.step}: {result.problem}" if result.problem else ""
            tell(f"[{len(ended)}] {result.state:<6} {result.seconds:7.1f} s  {label(result)}{reason}")

    listener = SweepListener(add_cell, update_cell, end_cell, (lambda _words: None) if quiet else tell)
    if quiet or not own_stderr().isatty():
        yield listener
        return
    console = Console(file=own_stderr())
    with Live(console=console, get_renderable=running_lines, refresh_per_second=2, transient=True):
        yield listener
