"""Shows how far a running measurement is. Shared by the commands that measure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from winml.modelkit.cli._progress import LINE_S, steps_paused
from winml.modelkit.cli._streams import own_stderr, tell
from winml.modelkit.words import count_noun


@contextmanager
def live_progress(*, quiet: bool, counted: str = "run") -> Iterator[Callable[[int, float], None] | None]:
    """Return what shows how far a measurement is: a bar on a terminal, else a line now and then. None when quiet.

    Args:
        quiet: Whether nothing is to be shown.
        counted: What the numbers count, one of them.
    """
    if quiet:
        yield None
        return
    if not own_stderr().isatty():
        with steps_paused():
            yield _progress_lines(counted)
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
    # Drawn only when told to, so that nothing of ours runs beside the clock.
    bar = Progress(*columns, console=Console(file=own_stderr()), transient=True, auto_refresh=False)
    task = bar.add_task("", total=1.0, counted="", left="")
    pace = _Pace()

    def show(done: int, share: float) -> None:
        bar.start()
        left = pace.left_words(time.monotonic(), share)
        bar.update(task, completed=share, counted=count_noun(done, counted), left=left, refresh=True)

    try:
        with steps_paused():
            yield show
    finally:
        if pace.began:
            bar.stop()


@dataclass
class _Pace:
    """How fast a measurement comes along, from its first report on: what was done before it may have taken longer.

    >>> pace = _Pace()
    >>> pace.left_words(100.0, 0.1), pace.left_words(102.0, 0.3), pace.left_words(110.0, 0.1)
    ('', 'about 7 s left', '')
    """

    began: float = 0.0
    """Time of the first report."""
    first: float = 0.0
    """Share that was done then."""
    last: float = 1.0
    """Share that was reported last; where a smaller one follows, another measurement began."""

    def left_words(self, now: float, share: float) -> str:
        """Return an estimate of the time that is left; empty where nothing can be estimated.

        Args:
            now: Seconds on a clock.
            share: What is done of the measurement, 0 to 1.
        """
        if share < self.last:
            self.began, self.first = now, share
        self.last = share
        if not self.first < share < 1:
            return ""
        return f"about {(now - self.began) * (1 - share) / (share - self.first):.0f} s left"


def _progress_lines(counted: str) -> Callable[[int, float], None]:
    """Return what writes how far a measurement is, at most every :data:`LINE_S` seconds."""
    last, pace = time.monotonic(), _Pace()

    def show(done: int, share: float) -> None:
        nonlocal last
        now = time.monotonic()
        left = pace.left_words(now, share)
        if now - last >= LINE_S:
            last = now
            words = [f"measuring: {count_noun(done, counted)}", f"{100 * share:.0f} %", left]
            tell(", ".join(filter(None, words)))

    return show
