"""Renders a document as one HTML page without network access: style, script and the data of its charts are embedded.

Dots and their bars are elements with a width. The script draws charts of nested boxes, and sorts and filters tables.
"""

from __future__ import annotations

import base64
import hashlib
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

TEMPLATE, STYLE = "page.html", "page.css"
_SCRIPTS = ("dom.js", "tables.js", "icicle.js", "charts.js")
"""Scripts of every page, in the order of their dependencies; they share one scope."""
_VIEW_SCRIPTS = ("dagre.min.js", "model.js", "graph.js", "details.js", "search.js", "pair.js", "view.js")
"""Further scripts of a page with a :class:`~winml.modelkit.report.document.ModelView`."""
LONG = 20
"""Chosen: minimum number of characters of a text for which the column is as wide as a name."""


def render_html(document: doc.Document) -> str:
    """Render the page."""
    blocks = list(doc.visible(document.page_blocks, doc.Detail.PAGE))
    facts = blocks.pop(0) if blocks and isinstance(blocks[0], doc.Fields) else doc.Fields(())
    rows = facts.visible(doc.Detail.PAGE) if isinstance(facts, doc.Fields) else []
    has_view = any(isinstance(block, doc.ModelView) for block in blocks)
    scripts = "".join(map(read_resource, (*_SCRIPTS, *(_VIEW_SCRIPTS if has_view else ()))))
    script = f'"use strict";\nconst EARLIER = {_json_data(doc.EARLIER)};\n{scripts}'
    return _load_template().render(
        document=document,
        facts=[row for row in rows if row[0] != NOTE],
        notes=[text for label, text in rows if label == NOTE],
        blocks=blocks,
        page=doc.Detail.PAGE,
        style=read_resource(STYLE),
        script=script,
        policy=_security_policy(script),
        has_view=has_view,
    )


NOTE = "note"
"""Label of the fields that a page displays as paragraphs above the charts."""


def _security_policy(script: str) -> str:
    """Return the policy of a page: no other script runs, and nothing is loaded or sent."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; form-action 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def read_resource(name: str) -> str:
    """Return the text of a file that pages are made from."""
    return files(__package__).joinpath("page", name).read_text(encoding="utf-8")


@cache
def _load_template() -> Template:
    """Load the template of a page, with the tests and filters that it uses."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, finalize=_make_printable)
    kinds = (doc.Fields, doc.Table, doc.Tree, doc.Paragraph, doc.Section, doc.Boxes, doc.Dots, doc.ModelView)
    environment.tests |= {kind.__name__.lower(): lambda value, kind=kind: isinstance(value, kind) for kind in kinds}
    environment.filters |= {"rows": _page_rows, "dot_chart": _dot_chart, "box_data": _box_data}
    environment.filters |= {"json_data": _json_data}
    environment.filters |= {"href": quote}
    return environment.from_string(read_resource(TEMPLATE))


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
    """Length of the background bar in percent; empty: no bar."""
    link: doc.Linked | None


@dataclass(frozen=True)
class _PageRow:
    cells: Sequence[_PageCell]
    variant: tuple[str, str] | None = None
    """Item and variant, for a comparison of variants."""
    fold: int | None = None
    """Number of the fold of the row; None: not folded."""
    place: str = ""
    """``head``: opens the fold; ``inner``: another row of the closed fold; empty: a row of the open fold."""


def _page_rows(table: doc.Table) -> Iterator[_PageRow]:
    """Yield the rows of a table; those of a fold follow the rows that stand for them."""
    starts = {fold.start: number for number, fold in enumerate(table.folds)}
    current: int | None = None
    for place, cells in enumerate(_cell_rows(table, table.rows)):
        if place in starts:
            current = starts[place]
            for number, summary in enumerate(_cell_rows(table, table.folds[current].rows)):
                yield _PageRow(summary, fold=current, place="inner" if number else "head")
        if current is not None and place >= table.folds[current].stop:
            current = None
        yield _PageRow(cells, table.variants[place] if table.variants else None, current)


def _cell_rows(table: doc.Table, rows: Sequence[Sequence[doc.Cell]]) -> list[list[_PageCell]]:
    """Return the cells of rows of a table."""
    names = [index for index, column in enumerate(table.columns) if column.kind == "name"]
    title = names[0] if names else 0
    columns = [
        (column, f"{_td_class(column, [row[index] for row in table.rows])}{' title' if index == title else ''}".strip())
        for index, column in enumerate(table.columns)
    ]
    return [
        [_page_cell(column, style, cell) for (column, style), cell in zip(columns, row, strict=True)] for row in rows
    ]


def _td_class(column: doc.Column, cells: Sequence[doc.Cell]) -> str:
    """Return the CSS class of the cells of a column: ``number``, ``long`` or empty."""
    if column.is_number:
        return "number"
    return "long" if any(len(column.words(cell)) > LONG for cell in cells) else ""


def _page_cell(column: doc.Column, style: str, cell: doc.Cell) -> _PageCell:
    """Return a table cell as text pieces, CSS classes, and the value for sorting."""
    number = cell if isinstance(cell, doc.Number) else doc.Number(cell if isinstance(cell, (int, float)) else None)
    value = number.value if column.is_number and number.value is not None and math.isfinite(number.value) else None
    text = column.words(cell)
    link = cell if isinstance(cell, doc.Linked) else None
    pieces = re.split(r"(?<=[./])(?=.)", text) if style.startswith("long") else [text]
    share = value if column.kind == "share" else number.share
    bar_percent = "" if share is None else _css_percent(share)
    return _PageCell(
        pieces, " ".join(filter(None, (style, column.tones.get(text, "")))), value, number.earlier, bar_percent, link
    )


_MARKS = {"best": "★", "good": "●", "fair": "○", "bad": "✕"}
"""Grade → mark. Chosen: the shapes are distinguishable without colour."""
SMALLEST_MARK, LARGEST_MARK = 1.0, 1.8
"""Chosen: sizes of the smallest and of the largest mark, in heights of a letter."""


def _css_percent(share: float) -> str:
    """Format a share as a CSS length in percent, clipped to 0–100.

    >>> _css_percent(0.5), _css_percent(1.2)
    ('50.00', '100.00')
    """
    return f"{100 * min(max(share, 0.0), 1.0):.2f}"


@dataclass(frozen=True)
class _Scale:
    """Linear scale from values to positions between 0 and 1."""

    low: float
    high: float

    def position(self, value: float) -> float:
        """Return the position of a value; 0 if the scale has no extent."""
        return (value - self.low) / (self.high - self.low) if self.high > self.low else 0.0

    def span(self, low: float, high: float) -> tuple[str, str]:
        """Return start and length of the line between two values."""
        start, end = (min(max(self.position(value), 0.0), 1.0) for value in (low, high))
        return _css_percent(start), _css_percent(end - start)


@dataclass(frozen=True)
class _DotRow:
    dot: doc.Dot
    mark: str
    position: str
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
            _css_percent(values.position(dot.value)),
            f"{SMALLEST_MARK + (LARGEST_MARK - SMALLEST_MARK) * dot.size / largest:.2f}",
            None if dot.low is None or dot.high is None else values.span(dot.low, dot.high),
            bars.span(min(0.0, dot.bar), max(0.0, dot.bar)),
        )
        for dot in chart.dots
    ]
    return _DotChart(
        rows,
        value_line="" if chart.value_line is None else _css_percent(values.position(chart.value_line)),
        bar_line="" if chart.bar_line is None else _css_percent(bars.position(chart.bar_line)),
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
            "limit": shades.limit,
            "limitWords": printable(shades.limit_words),
        }
    data = {
        "unit": printable(chart.size_unit),
        "sizeTitle": printable(chart.size_title),
        "kindTitle": printable(chart.kind_title),
        "byClass": chart.is_by_class or shades is None,
        "shades": scale,
        "boxes": list(_box_rows(chart, numbers)),
    }
    return _json_data(data)


def _json_data(data: object) -> str:
    """Return an object as JSON that can be embedded in a page: no character ends the enclosing element."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&\u2028\u2029]", lambda sign: f"\\u{ord(sign[0]):04x}", text)


def _box_rows(chart: doc.Boxes, numbers: dict[str, int]) -> Iterator[list[object]]:
    """Yield each box as a JSON array: number of the parent (-1: none), texts, size, shade, mark and details."""
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
