"""How is progress shown? One line per step on stderr; a terminal also sees the running one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from winml.modelkit.progress import StepEvent

__all__ = ["show_step"]


def show_step(event: StepEvent) -> None:
    """Show that a step started or ended."""
    head = f"[{event.number}/{event.total}] {event.name}"
    is_terminal = sys.stderr.isatty()
    if event.finished is None:
        if is_terminal:
            click.echo(f"{head} …", err=True, nl=False)
        return
    line = f"{head:<28} {event.finished.seconds:6.2f} s  {event.finished.summary}"
    # The carriage return writes over the line of the running step, which is shorter.
    click.echo(f"\r{line}" if is_terminal else line, err=True)
