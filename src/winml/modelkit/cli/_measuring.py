"""How are measurements asked for, and how is one that runs shown? Shared by the verbs that measure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from winml.modelkit.cli._options import device_option
from winml.modelkit.cli._streams import own_stderr, tell
from winml.modelkit.errors import UsageError

if TYPE_CHECKING:
    from winml.modelkit.measure.latency import LatencyOptions

__all__ = [
    "latency_options",
    "live_progress",
    "measuring_options",
    "provider_options",
    "refuse_unknown_ep",
]

_F = TypeVar("_F", bound=Callable[..., Any])

MOST_THREADS = 1024
"""Chosen: more than any processor has cores; ONNX Runtime starts as many as it is told, and dies of too many."""
MOST_RUNS = 100_000_000
"""Chosen: a day of runs of a millisecond; the time of each is kept."""
LONGEST_S = 86_400
"""Chosen: a day; refuses ``inf``, which would measure until the memory is full."""


LINE_S = 10.0
"""Seconds between two lines of progress where no terminal shows a bar. Chosen: a log of an hour stays readable, and
whoever follows it sees that something goes on."""


def provider_options(command: _F) -> _F:
    """Add the options that say where a model runs."""
    for option in reversed(
        (
            click.option("--ep", metavar="NAME", help="Execution provider, such as openvino; cpu without --device."),
            device_option("Kind of processor."),
            click.option(
                "--ep-options", multiple=True, metavar="KEY=VALUE", help="Option of the provider; repeatable."
            ),
            click.option(
                "--threads",
                type=click.IntRange(1, MOST_THREADS),
                help="Threads that share the work of one operator on the CPU; else the runtime's own choice.",
            ),
        )
    ):
        command = option(command)
    return command


def measuring_options(command: _F) -> _F:
    """Add the options that say what is timed, and how often."""
    for option in reversed(
        (
            click.option("--iterations", type=click.IntRange(1, MOST_RUNS), help="Counted runs.  [default: 100]"),
            click.option(
                "--warmup",
                type=click.IntRange(0, MOST_RUNS),
                default=10,
                show_default=True,
                help="Runs before, not counted.",
            ),
            click.option(
                "--duration",
                type=click.FloatRange(min=0, min_open=True, max=LONGEST_S),
                metavar="SECONDS",
                help="Measure for this long instead of a number of runs.",
            ),
            click.option(
                "--io-binding/--no-io-binding",
                default=True,
                show_default=True,
                help="Copy inputs to the device once and leave outputs there; else pass arrays in every run.",
            ),
        )
    ):
        command = option(command)
    return command


def latency_options(options: Mapping[str, Any]) -> LatencyOptions:
    """Return how often is measured.

    Raises:
        UsageError: both a number and a duration are given.
    """
    if options["iterations"] is not None and options["duration"] is not None:
        raise UsageError(
            f"--iterations {options['iterations']} and --duration {options['duration']:g} both say when to stop",
            hint="Give one of the two.",
        )
    from winml.modelkit.measure.latency import LatencyOptions

    return LatencyOptions(options["iterations"] or 100, options["warmup"], options["duration"])


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
        yield _progress_lines(counted)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("measuring"),
        BarColumn(),
        TextColumn(f"{{task.fields[runs]}} {counted}"),
        TimeElapsedColumn(),
    )
    # Drawn only when told to, so that nothing of ours runs beside the clock.
    bar = Progress(*columns, console=Console(file=own_stderr()), transient=True, auto_refresh=False)
    task = bar.add_task("", total=1.0, runs=0)
    started = False

    def show(runs: int, share: float) -> None:
        nonlocal started
        if not started:
            bar.start()
            started = True
        bar.update(task, completed=share, runs=runs, refresh=True)

    try:
        yield show
    finally:
        if started:
            bar.stop()


def _progress_lines(counted: str) -> Callable[[int, float], None]:
    """Return what writes how far a measurement is, at most every :data:`LINE_S` seconds."""
    last = started = time.monotonic()

    def show(done: int, share: float) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= LINE_S:
            last = now
            tell(f"measuring: {done:,} {counted}, {100 * share:.0f} %, {now - started:.0f} s")

    return show
