"""How is progress shown? One line per step on stderr; a terminal also sees the running one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from winml.modelkit.cli._streams import own_stderr, tell

if TYPE_CHECKING:
    from winml.modelkit.progress import StepEvent
    from winml.modelkit.results.sweep import CellResult
    from winml.modelkit.sweep.cells import Cell
    from winml.modelkit.sweep.work_queue import SweepListener

__all__ = [
    "show_step",
    "sweep_progress",
]


def show_step(event: StepEvent) -> None:
    """Show that a step started or ended."""
    head = f"[{event.number}/{event.total}] {event.name}"
    is_terminal = own_stderr().isatty()
    if event.finished is None:
        if is_terminal:
            tell(f"{head} …", start="\r", end="")  # over what the same step was at before
        return
    line = f"{head:<28} {event.finished.seconds:6.2f} s  {event.finished.summary}"
    # The carriage return writes over the line of the running step, which is shorter.
    tell(line, start="\r" if is_terminal else "")


# --- How is a sweep shown while it runs? A line for each cell that ended; a terminal also sees what is running.


@contextmanager
def sweep_progress(ended: list[str], *, quiet: bool) -> Iterator[SweepListener]:
    """Return who is told how a sweep goes on.

    Args:
        ended: Gets the id of every cell that ended.
        quiet: Show nothing.
    """
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from winml.modelkit.results.sweep import settings_words
    from winml.modelkit.sweep.work_queue import SweepListener
    from winml.modelkit.words import printable

    running: dict[str, tuple[Cell, float, str]] = {}

    def words(cell: Cell | CellResult) -> str:
        return printable(f"{cell.model} {settings_words(cell.settings)}".strip())

    def running_lines() -> Text:
        lines = [f"  {time.monotonic() - at:6.0f} s  {words(cell)}: {step}" for cell, at, step in [*running.values()]]
        return Text("\n".join([f"{len(ended)} cells ended, {len(running)} running", *lines]))

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
