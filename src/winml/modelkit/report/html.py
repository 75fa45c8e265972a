"""Renders a document as one HTML page without network access: style, script and the data of its charts are embedded.

Bars and dots are elements with a width. The script draws the charts of nested boxes, and sorts and filters tables.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from winml.modelkit.report import document as doc
from winml.modelkit.words import printable

if TYPE_CHECKING:
    from jinja2 import Template

TEMPLATE, STYLE, SCRIPT = "page.html", "page.css", "page.js"
LONG = 20
"""Chosen: minimum number of characters of a text for which the column is as wide as a name."""


def render_html(document: doc.Document) -> str:
    """Render the page."""
    blocks = list(doc.visible(document.page_blocks, doc.Detail.PAGE))
    facts = blocks.pop(0) if blocks and isinstance(blocks[0], doc.Fields) else doc.Fields(())
    rows = facts.visible(doc.Detail.PAGE) if isinstance(facts, doc.Fields) else []
    return _template().render(
        document=document,
        facts=[row for row in rows if row[0] != NOTE],
        notes=[words for label, words in rows if label == NOTE],
        blocks=blocks,
        page=doc.Detail.PAGE,
        earlier=doc.EARLIER,
        style=_read_resource(STYLE),
        script=_read_resource(SCRIPT),
    )


NOTE = "note"
"""Label of the fields that a page displays as paragraphs above the charts."""


def _read_resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def _template() -> Template:
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, finalize=_make_printable)
    kinds = (doc.Fields, doc.Table, doc.Tree, doc.Paragraph, doc.Section, doc.Boxes, doc.Bars, doc.Dots)
    environment.tests |= {kind.__name__.lower(): lambda value, kind=kind: isinstance(value, kind) for kind in kinds}
    environment.filters |= {"cells": _cell_rows, "bar_rows": _bar_rows, "dot_chart": _dot_chart, "box_data": _box_data}
    environment.filters |= {"href": quote}
    return environment.from_string(_read_resource(TEMPLATE))


def _make_printable(value: Any) -> Any:
    """Make every character of a text printable; HTML markup stays unchanged."""
    return printable(value) if type(value) is str else value


@dataclass(frozen=True)
class _PageCell:
    pieces: Sequence[str]
    """Text of the cell, split after dots and slashes, where a narrow column breaks lines first."""
    style: str
    """CSS classes of the cell; may be empty. A narrow page displays a row as a card below its title cell."""
    value: float | None
    """Value for sorting and comparison; None for texts."""
    earlier: float | None
    bar_percent: str
    """Length of the background bar of a share in percent; else empty."""
    link: doc.Linked | None


def _cell_rows(table: doc.Table) -> list[list[_PageCell]]:
    """Return the cells of a table, row by row."""
    names = [index for index, column in enumerate(table.columns) if column.kind == "name"]
    title = names[0] if names else 0
    columns = [
        (column, f"{_td_class(column, [row[index] for row in table.rows])}{' title' if index == title else ''}".strip())
        for index, column in enumerate(table.columns)
    ]
    return [
        [_page_cell(column, style, cell) for (column, style), cell in zip(columns, row, strict=True)]
        for row in table.rows
    ]


def _td_class(column: doc.Column, cells: Sequence[doc.Cell]) -> str:
    if column.is_number:
        return "number"
    return "long" if any(len(column.words(cell)) > LONG for cell in cells) else ""


def _page_cell(column: doc.Column, style: str, cell: doc.Cell) -> _PageCell:
    number = cell if isinstance(cell, doc.Number) else doc.Number(cell if isinstance(cell, (int, float)) else None)
    value = number.value if column.is_number and number.value is not None and math.isfinite(number.value) else None
    words = column.words(cell)
    link = cell if isinstance(cell, doc.Linked) else None
    pieces = re.split(r"(?<=[./])(?=.)", words) if style.startswith("long") else [words]
    bar_percent = _percent(value) if column.kind == "share" and value is not None else ""
    return _PageCell(
        pieces, " ".join(filter(None, (style, column.tones.get(words, "")))), value, number.earlier, bar_percent, link
    )


_MARKS = {"best": "★", "good": "●", "fair": "○", "bad": "✕"}
"""Grade → mark. Chosen: the shapes are distinguishable without colour."""
SMALLEST_MARK, LARGEST_MARK = 1.0, 1.8
"""Chosen: sizes of the smallest and of the largest mark, in heights of a letter."""


def _percent(share: float) -> str:
    """Format a share as a CSS length in percent, clipped to 0–100.

    >>> _percent(0.5), _percent(1.2)
    ('50.00', '100.00')
    """
    return f"{100 * min(max(share, 0.0), 1.0):.2f}"


@dataclass(frozen=True)
class _Scale:
    """Linear scale from values to positions between 0 and 1."""

    low: float
    high: float

    def place(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low) if self.high > self.low else 0.0

    def span(self, low: float, high: float) -> tuple[str, str]:
        """Return start and length of the line between two values."""
        left, right = (min(max(self.place(value), 0.0), 1.0) for value in (low, high))
        return _percent(left), _percent(right - left)


def _bar_rows(chart: doc.Bars) -> list[tuple[doc.Bar, tuple[str, str]]]:
    """Return each bar with its start and length."""
    bars = [bar for bar in chart.bars if math.isfinite(bar.value)]
    scale = _Scale(min(0.0, *(bar.value for bar in bars), 0.0), max(0.0, *(bar.value for bar in bars), 0.0))
    return [(bar, scale.span(min(0.0, bar.value), max(0.0, bar.value))) for bar in bars]


@dataclass(frozen=True)
class _DotRow:
    dot: doc.Dot
    mark: str
    place: str
    size: str
    interval: tuple[str, str] | None
    bar: tuple[str, str]


@dataclass(frozen=True)
class _DotChart:
    rows: Sequence[_DotRow]
    value_line: str
    """Position of the line that separates better from worse values; empty: no line."""
    bar_line: str
    ends: tuple[str, str]
    """Values at both ends of the scale of the dots."""


def _dot_chart(chart: doc.Dots) -> _DotChart:
    """Compute the positions in a chart of dots."""
    ends = [
        end for dot in chart.dots for end in (dot.value, dot.low, dot.high) if end is not None and math.isfinite(end)
    ]
    line = [] if chart.value_line is None else [chart.value_line]
    values = _Scale(*_padded_ends([*ends, *line]))
    lengths = [dot.bar for dot in chart.dots if math.isfinite(dot.bar)]
    limit = [] if chart.bar_line is None else [chart.bar_line]
    bars = _Scale(min([0.0, *lengths]), max([0.0, *lengths, *limit]))
    largest = max((dot.size for dot in chart.dots), default=0) or 1
    rows = [
        _DotRow(
            dot,
            _MARKS[dot.grade],
            _percent(values.place(dot.value)),
            f"{SMALLEST_MARK + (LARGEST_MARK - SMALLEST_MARK) * dot.size / largest:.2f}",
            None if dot.low is None or dot.high is None else values.span(dot.low, dot.high),
            bars.span(min(0.0, dot.bar), max(0.0, dot.bar)),
        )
        for dot in chart.dots
    ]
    return _DotChart(
        rows,
        value_line="" if chart.value_line is None else _percent(values.place(chart.value_line)),
        bar_line="" if chart.bar_line is None else _percent(bars.place(chart.bar_line)),
        ends=(f"{values.low:.3g}", f"{values.high:.3g}"),
    )


def _padded_ends(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of a scale with a margin around all marks; the scale starts at 0 if no value is negative."""
    low, high = min([0.0, *values]), max([0.0, *values])
    margin = 0.05 * (high - low) or 1.0
    return (low - margin if low < 0 else 0.0), high + margin


def _box_data(chart: doc.Boxes) -> str:
    """Return a chart as JSON that can be embedded in a page: no character ends the enclosing element."""
    numbers = {box.key: number for number, box in enumerate(chart.boxes)}
    shades = chart.shades
    scale = None
    if shades is not None:
        scale = {
            "title": printable(shades.title),
            "low": shades.low,
            "high": shades.high,
            "logarithmic": shades.is_logarithmic,
            "darkLow": shades.is_dark_low,
            "folded": shades.folded,
        }
    data = {
        "unit": printable(chart.size_unit),
        "sizeTitle": printable(chart.size_title),
        "kindTitle": printable(chart.kind_title),
        "byClass": chart.is_by_class or shades is None,
        "shades": scale,
        "boxes": list(_box_rows(chart, numbers)),
    }
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&\u2028\u2029]", lambda sign: f"\\u{ord(sign[0]):04x}", text)


def _box_rows(chart: doc.Boxes, numbers: dict[str, int]) -> Iterator[list[object]]:
    for box in chart.boxes:
        parent = numbers.get(box.parent, -1) if box.parent else -1
        texts = [printable(text) for text in (box.label, box.kind, box.words)]
        size = box.size if math.isfinite(box.size) else 0.0
        # JSON has no infinity: values are clipped to the largest float.
        shade = None if math.isnan(box.shade) else min(max(box.shade, -sys.float_info.max), sys.float_info.max)
        yield [
            -1 if numbers[box.key] == parent else parent,
            *texts,
            size,
            shade,
            int(box.is_marked),
            [printable(line) for line in box.lines if line],
        ]
