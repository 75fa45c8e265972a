"""How are measurements asked for, and how is one that runs shown? Shared by the verbs that measure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from winml.modelkit.cli._options import declared_options_of
from winml.modelkit.cli._progress import LINE_S, steps_paused
from winml.modelkit.cli._streams import own_stderr, tell
from winml.modelkit.fields import fields_of
from winml.modelkit.verbs.running import ProviderFields

__all__ = [
    "live_progress",
    "provider_options",
    "refuse_unknown_ep",
]

provider_options = declared_options_of(fields_of(ProviderFields))
"""Adds the options that say where a model runs."""


def refuse_unknown_ep(name: str | None) -> None:
    """Refuse a name no provider has, before anything heavy is imported.

    Raises:
        UsageError: there is none of this name.
    """
    if name is not None:
        from winml.modelkit.runtime.execution_providers import find_execution_provider

        find_execution_provider(name)


@contextmanager
def live_progress(*, quiet: bool, counted: str = "runs") -> Iterator[Callable[[int, float], None] | None]:
    """Return what shows how far a measurement is: a bar on a terminal, else a line now and then. None when quiet.

    Args:
        quiet: Whether nothing is to be shown.
        counted: What the numbers count.
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
        TextColumn(f"{{task.fields[runs]}} {counted}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    # Drawn only when told to, so that nothing of ours runs beside the clock.
    bar = Progress(*columns, console=Console(file=own_stderr()), transient=True, auto_refresh=False)
    task = bar.add_task("", total=1.0, runs=0, left="")
    started = 0.0

    def show(runs: int, share: float) -> None:
        nonlocal started
        if not started:
            bar.start()
            started = time.monotonic()
        bar.update(task, completed=share, runs=runs, left=_left_words(time.monotonic() - started, share), refresh=True)

    try:
        with steps_paused():
            yield show
    finally:
        if started:
            bar.stop()


def _left_words(seconds: float, share: float) -> str:
    """Return an estimate of the time that is left; empty where nothing can be estimated."""
    return f"about {seconds * (1 / share - 1):.0f} s left" if 0 < share < 1 else ""


def _progress_lines(counted: str) -> Callable[[int, float], None]:
    """Return what writes how far a measurement is, at most every :data:`LINE_S` seconds."""
    last = started = time.monotonic()

    def show(done: int, share: float) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= LINE_S:
            last = now
            left = _left_words(now - started, share)
            words = [f"measuring: {done:,} {counted}", f"{100 * share:.0f} %", f"{now - started:.0f} s", left]
            tell(", ".join(filter(None, words)))

    return show
