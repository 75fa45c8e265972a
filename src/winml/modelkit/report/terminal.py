"""Renders a document in a terminal or a pipe, with complete names and without control characters of foreign texts.

In a terminal, tables are as wide as the window and long names are folded; in a pipe, no line is folded. Charts are
omitted: they are for HTML pages, and their numbers are also in tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TextIO

from rich import table as rich_table
from rich import tree as rich_tree
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from winml.modelkit.report import document as doc
from winml.modelkit.words import printable

_UNLIMITED = 1_000_000
"""Chosen: width for a pipe; no line is as long."""
_LEAST_TEXT = 12
"""Chosen: minimum columns at which a folded name is readable. The terminal wraps the lines of a wider table."""
_GAP = 1
"""Specified: columns that rich adds on each side of a cell."""
_TONES = {"good": "green", "bad": "red"}


def console_for(stream: TextIO) -> Console:
    """Return a console with the width of the terminal; if the stream is no terminal, no line is cut or wrapped.

    Colour never carries information alone, and ``NO_COLOR`` is obeyed. Emoji codes and markup are not interpreted.
    """
    width = None if stream.isatty() else _UNLIMITED
    return Console(file=stream, width=width, markup=False, emoji=False, highlight=False)


def print_document(document: doc.Document, console: Console, *, verbose: bool = False) -> None:
    """Print a document.

    Args:
        document: The document to print.
        console: The console to print on.
        verbose: Also print verbose blocks, and all rows of all tables.
    """
    detail = doc.Detail.VERBOSE if verbose else doc.Detail.ALWAYS
    blocks = list(doc.visible([*document.blocks, document.summary], detail))
    _print_blocks(blocks, console, max([0, *_label_widths(blocks)]))


def _label_widths(blocks: Iterable[doc.Block]) -> Iterable[int]:
    """Yield the width of every label, so that all values of a document start in one column."""
    for block in blocks:
        if isinstance(block, doc.Fields):
            yield from (cell_len(printable(row[0])) for row in block.rows)
        elif isinstance(block, doc.Section):
            yield from _label_widths(block.blocks)


def _print_blocks(blocks: Sequence[doc.Block], console: Console, label_width: int) -> None:
    """Print blocks, separated by an empty line."""
    for number, block in enumerate(blocks):
        if number:
            console.print()
        match block:
            case doc.Fields():
                for label, value in block.visible(doc.Detail.PAGE):
                    gap = " " * (label_width - cell_len(printable(label)) + 2)
                    line = Text.assemble((printable(label), "bold"), gap, printable(value))
                    console.print(line, soft_wrap=True)
            case doc.Table():
                _print_table(block, console)
            case doc.Tree():
                tree = rich_tree.Tree(_branch_text(block.root), guide_style="dim")
                _add_branches(tree, block.root.children)
                console.print(tree)
            case doc.Paragraph():
                console.print(Text(printable(block.words)), soft_wrap=True)
            case doc.Section():
                console.print(Text(printable(block.heading), "bold"), soft_wrap=True)
                _print_blocks(block.blocks, console, label_width)
            case doc.Boxes() | doc.Dots():
                raise AssertionError("charts are for pages")


def _branch_text(branch: doc.Branch) -> Text:
    """Format the name, path and details of a tree entry."""
    parts = ((branch.name, "dim" if branch.is_dim else "bold"), (f" {branch.path}" if branch.path else "", "dim"))
    details = (branch.words, "dim" if branch.is_dim else "")
    return Text.assemble(*((printable(text), style) for text, style in (*parts, details)))


def _add_branches(tree: rich_tree.Tree, branches: Iterable[doc.Branch]) -> None:
    for branch in branches:
        _add_branches(tree.add(_branch_text(branch)), branch.children)


def _print_table(table: doc.Table, console: Console) -> None:
    """Print a table within the console width, or at full width if the names were unreadable otherwise."""
    rows = [
        [printable(column.words(cell)) for column, cell in zip(table.columns, row, strict=True)] for row in table.rows
    ]
    names = [printable(column.name) for column in table.columns]
    widths = [max(map(cell_len, column)) for column in zip(names, *rows, strict=True)]
    gaps = 2 * _GAP * (len(widths) - 1)
    text_widths = [width for column, width in zip(table.columns, widths, strict=True) if not column.is_number]
    min_width = sum(widths) - sum(text_widths) + sum(min(width, _LEAST_TEXT) for width in text_widths) + gaps
    console_width = console.width
    if min_width > console_width:
        console.width = sum(widths) + gaps
    try:
        console.print(_make_rich_table(table.columns, rows), crop=False)
    finally:
        console.width = console_width
    if table.rest:
        console.print(Text(printable(table.rest)), soft_wrap=True)


def _make_rich_table(columns: Sequence[doc.Column], rows: Iterable[Sequence[str]]) -> rich_table.Table:
    heads = [
        rich_table.Column(
            Text(printable(column.name)),
            style="dim" if column.is_dim else "",
            justify="right" if column.is_number else "left",
            no_wrap=column.is_number,
            overflow="fold",
            min_width=None if column.is_number else _LEAST_TEXT,
        )
        for column in columns
    ]
    table = rich_table.Table(*heads, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        tones = (_TONES.get(column.tones.get(text, ""), "") for column, text in zip(columns, row, strict=True))
        table.add_row(*map(Text, row, tones))
    return table
