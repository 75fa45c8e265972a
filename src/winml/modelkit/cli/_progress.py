"""How is progress shown? One line per step on stderr; a terminal also sees the running one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from winml.modelkit.cli._streams import own_stderr, tell

if TYPE_CHECKING:
    from winml.modelkit.progress import StepEvent

__all__ = ["show_step"]


def show_step(event: StepEvent) -> None:
    """Show that a step started or ended."""
    head = f"[{event.number}/{event.total}] {event.name}"
    is_terminal = own_stderr().isatty()
    if event.finished is None:
        if is_terminal:
            tell(f"{head} …", end="")
        return
    line = f"{head:<28} {event.finished.seconds:6.2f} s  {event.finished.summary}"
    # The carriage return writes over the line of the running step, which is shorter.
    tell(line, start="\r" if is_terminal else "")
