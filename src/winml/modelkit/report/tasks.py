"""Prints tasks in a terminal, each with the classes that serve it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape

__all__ = ["print_tasks"]


def print_tasks(
    tasks: Mapping[str, Sequence[str]], console: Console, *, aliases: Mapping[str, str] | None = None
) -> None:
    """Print the tasks with the classes that implement them, and other names that are understood.

    Args:
        tasks: Task → classes.
        console: Where to print.
        aliases: Other name → task.
    """
    width = max(map(len, tasks), default=0)
    for task, classes in tasks.items():
        others = ", ".join(alias for alias, meant in (aliases or {}).items() if meant == task)
        also = f"; also called {others}" if others else ""
        console.print(f"[bold]{task:<{width}}[/bold]  {escape(', '.join(classes))}{also}", highlight=False)
