"""Renders a document as Markdown, in which every foreign text is escaped.

Charts are omitted: they are for HTML pages, and their numbers are also in tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from winml.modelkit.report import document as doc
from winml.modelkit.words import printable

_MEANINGFUL = re.compile(r"[\\`*\[\]|#~<>&]|(?<![^\W_])_|_(?![^\W_])")
"""Characters with a meaning in Markdown; an underscore has one only at the edge of a word."""
_ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}


def render_markdown(document: doc.Document, *, level: int = 1, detail: doc.Detail = doc.Detail.PAGE) -> str:
    """Return the document as Markdown text.

    Args:
        document: The document to render.
        level: Level of the heading with the title.
        detail: Highest detail level to include.
    """
    groups = [[f"{'#' * level} {_markdown_text(document.title)}"]] if document.title else []
    groups += [[_line_text(document.answer)]] if document.answer else []
    groups += [[_line_text(document.introduction)]] if document.introduction else []
    groups += _format_blocks(doc.visible(document.page_blocks, detail), level + 1)
    return "\n\n".join("\n".join(group) for group in groups) + "\n"


def _format_blocks(blocks: Iterable[doc.Block], level: int) -> Iterator[list[str]]:
    """Yield the lines of each block; blocks are separated by an empty line."""
    for block in blocks:
        match block:
            case doc.Fields():
                rows = block.visible(doc.Detail.PAGE)
                yield list(_table_lines((doc.Column(""), doc.Column("value")), rows))
            case doc.Table():
                if block.heading:
                    yield [f"{'#' * level} {_markdown_text(block.heading)}"]
                yield list(_table_lines(block.columns, block.rows))
                if block.rest:
                    yield [_line_text(block.rest)]
            case doc.Tree():
                if block.heading:
                    yield [f"{'#' * level} {_markdown_text(block.heading)}"]
                yield list(_tree_lines(block))
            case doc.Paragraph():
                yield [_line_text(block.words)]
            case doc.Section():
                yield [f"{'#' * level} {(_code_span if block.is_name else _markdown_text)(block.heading)}"]
                yield from _format_blocks(block.blocks, level + 1)
            case doc.Boxes() | doc.Dots():
                pass


def _table_lines(columns: Iterable[doc.Column], rows: Iterable[Iterable[doc.Cell]]) -> Iterator[str]:
    columns = list(columns)
    yield _row_text(_markdown_text(column.name) for column in columns)
    yield _row_text("---:" if column.is_number else "---" for column in columns)
    for row in rows:
        yield _row_text(_cell_text(column, cell) for column, cell in zip(columns, row, strict=True))


def _row_text(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell_text(column: doc.Column, cell: doc.Cell) -> str:
    """Return the Markdown of a table cell, escaped; a link as text, label and target."""
    content = column.words(cell)
    # A table ends a cell at a pipe, in code as well.
    text = _code_span(content).replace("|", "\\|") if column.kind == "name" and content else _markdown_text(content)
    return (
        f"{text} ({_markdown_text(cell.label)}: {_markdown_text(cell.target)})"
        if isinstance(cell, doc.Linked)
        else text
    )


def _tree_lines(tree: doc.Tree) -> Iterator[str]:
    lines = [
        printable(f"{'  ' * level}{'  '.join(filter(None, (branch.name, branch.path)))}{branch.words}")
        for branch, level in tree.root.walk()
    ]
    fence = _backquote_fence("\n".join(lines), minimum=3)
    yield f"{fence}text"
    yield from lines
    yield fence


def _markdown_text(text: str) -> str:
    r"""Escape a foreign text for Markdown, on one line.

    >>> _markdown_text("<b>layer_0|__init__</b>")
    '&lt;b&gt;layer_0\\|\\_\\_init\\_\\_&lt;/b&gt;'
    """
    return _MEANINGFUL.sub(lambda match: _ENTITIES.get(match[0], f"\\{match[0]}"), printable(text))


def _line_text(text: str) -> str:
    r"""Escape a foreign text on a separate line, where Markdown reads some beginnings as a list or a rule.

    >>> _line_text("- 1"), _line_text("1. x")
    ('\\- 1', '1\\. x')
    """
    return re.sub(r"^(\d*)([-+=.)])", r"\1\\\2", _markdown_text(text).strip())


def _code_span(text: str) -> str:
    """Format a foreign text as a code span on one line, with all characters unchanged.

    >>> _code_span("a`b")
    '`` a`b ``'
    """
    text = printable(text)
    fence = _backquote_fence(text, minimum=1)
    space = " " if "`" in text or not text else ""
    return f"{fence}{space}{text}{space}{fence}"


def _backquote_fence(text: str, *, minimum: int) -> str:
    """Return a fence that is longer than every run of backquotes in the text."""
    return "`" * max(minimum, *(len(run) + 1 for run in re.findall("`+", text)), 0)
