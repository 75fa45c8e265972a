"""Prints tasks in a terminal, each with the classes that serve it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console

from winml.modelkit.report.terminal import print_rows

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

    def words(task: str) -> str:
        others = ", ".join(alias for alias, meant in (aliases or {}).items() if meant == task)
        return ", ".join(tasks[task]) + (f"; also called {others}" if others else "")

    print_rows(((task, words(task)) for task in tasks), console)
