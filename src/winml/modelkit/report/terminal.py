"""How does text reach a terminal or a pipe? Rows and tables in which no name is lost, and no foreign text is obeyed.

A terminal gets tables as wide as it is, with long names folded; a pipe gets every line whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from winml.modelkit.words import printable

__all__ = ["TextTable", "console_for", "label", "print_rows"]

UNLIMITED = 1_000_000
"""Chosen: columns for who reads a pipe; no line is as long."""
LEAST_TEXT = 12
"""Chosen: columns below which a folded name cannot be read. A terminal wraps a table that leaves less."""
_GAP = 1
"""Specified: columns that rich puts beside a cell."""


def console_for(stream: TextIO) -> Console:
    """Return a console that is as wide as a terminal, and never cuts or wraps a line elsewhere.

    Colour alone carries no information; it obeys ``NO_COLOR``. Codes of emojis and markup mean nothing in it.
    """
    width = None if stream.isatty() else UNLIMITED
    return Console(file=stream, width=width, markup=False, emoji=False, highlight=False)


def label(*parts: str | tuple[str, str]) -> Text:
    """Return a text of parts, each with a style or none, that can be printed whatever it holds."""
    return Text.assemble(
        *(printable(part) if isinstance(part, str) else (printable(part[0]), part[1]) for part in parts)
    )


def print_rows(rows: Iterable[tuple[str, str]], console: Console, *, width: int = 0) -> None:
    """Print one line for each pair of a heading and a text; a terminal wraps it.

    Args:
        rows: Pairs of a heading and a text.
        console: Where to print.
        width: Columns of the headings; at least those of the longest.
    """
    rows = list(rows)
    width = max([width, *(cell_len(printable(name)) for name, _ in rows)])
    for name, value in rows:
        heading = printable(name)
        gap = " " * (width - cell_len(heading) + 2)
        console.print(Text.assemble((heading, "bold"), gap, printable(value)), soft_wrap=True)


@dataclass
class TextTable:
    """A table of texts and numbers."""

    columns: Sequence[str]
    numbers: frozenset[int] = frozenset()
    """Positions of the columns of numbers, which are never folded."""
    dim: frozenset[int] = frozenset()
    """Positions of the columns that are shown less brightly."""
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def add(self, *cells: str) -> None:
        """Add a row; every cell may be foreign."""
        self.rows.append(tuple(map(printable, cells)))

    def print(self, console: Console) -> None:
        """Print the table as wide as the console, or whole where names could not be read otherwise."""
        widths = [max(map(cell_len, column)) for column in zip(self.columns, *self.rows, strict=True)]
        gaps = 2 * _GAP * (len(widths) - 1)
        texts = [width for index, width in enumerate(widths) if index not in self.numbers]
        least = sum(widths) - sum(texts) + sum(min(width, LEAST_TEXT) for width in texts) + gaps
        console_width = console.width
        if least > console_width:
            console.width = sum(widths) + gaps
        try:
            console.print(self._table(), crop=False)
        finally:
            console.width = console_width

    def _table(self) -> Table:
        columns = [
            Column(
                Text(name),
                style="dim" if index in self.dim else "",
                justify="right" if index in self.numbers else "left",
                no_wrap=index in self.numbers,
                overflow="fold",
                min_width=None if index in self.numbers else LEAST_TEXT,
            )
            for index, name in enumerate(self.columns)
        ]
        table = Table(*columns, box=None, pad_edge=False, header_style="bold")
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table
