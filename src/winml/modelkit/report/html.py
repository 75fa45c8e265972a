"""Renders a document as one HTML page, readable without a network: the chart library plotly is inside.

Tables can be sorted; the rows of one can be filtered, and compared where it has variants.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from winml.modelkit.report import document as doc
from winml.modelkit.words import printable

if TYPE_CHECKING:
    from jinja2 import Template
    from plotly.graph_objects import Bar, Figure, Scatter

__all__ = ["render_html"]

TEMPLATE = "page.html"
LONG = 20
"""Chosen: characters from which a column of texts is as wide as a name needs."""


def render_html(document: doc.Document) -> str:
    """Return the page."""
    blocks = list(doc.visible(document.page_blocks, doc.Detail.PAGE))
    return _template().render(
        document=document, blocks=blocks, draw=_Drawing(), page=doc.Detail.PAGE, earlier=doc.EARLIER
    )


@cache
def _template() -> Template:
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, finalize=_finalized)
    kinds = (doc.Fields, doc.Table, doc.Tree, doc.Paragraph, doc.Section, doc.Boxes)
    environment.tests |= {kind.__name__.lower(): lambda value, kind=kind: isinstance(value, kind) for kind in kinds}
    environment.filters["cells"] = _cells
    return environment.from_string(files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8"))


def _finalized(value: Any) -> Any:
    """Return what stands on the page: texts with every character printable, and what is HTML already as it is."""
    return printable(value) if type(value) is str else value


@dataclass(frozen=True)
class _PageCell:
    pieces: Sequence[str]
    """Its words, in pieces between which a narrow column breaks them first: after dots and slashes."""
    style: str
    """Class of the cell; empty for none."""
    value: float | None
    """What it is sorted and compared by; None where it is no number."""
    earlier: float | None
    link: doc.Linked | None


def _cells(table: doc.Table) -> list[list[_PageCell]]:
    """Return the cells of a table, row by row."""
    columns = [
        (column, _style(column, [row[index] for row in table.rows])) for index, column in enumerate(table.columns)
    ]
    return [
        [_page_cell(column, style, cell) for (column, style), cell in zip(columns, row, strict=True)]
        for row in table.rows
    ]


def _style(column: doc.Column, cells: Sequence[doc.Cell]) -> str:
    if column.is_number:
        return "number"
    return "long" if any(len(column.words(cell)) > LONG for cell in cells) else ""


def _page_cell(column: doc.Column, style: str, cell: doc.Cell) -> _PageCell:
    number = cell if isinstance(cell, doc.Number) else doc.Number(cell if isinstance(cell, (int, float)) else None)
    value = number.value if column.is_number and number.value is not None and math.isfinite(number.value) else None
    words = column.words(cell)
    link = cell if isinstance(cell, doc.Linked) else None
    pieces = re.split(r"(?<=[./])(?=.)", words) if style == "long" else [words]
    return _PageCell(pieces, column.tones.get(words, style), value, number.earlier, link)


# --- Charts.


COLOURS = "YlOrRd"
"""Chosen: a plotly scale that darkens with the value, so it can be read without colour."""
OUTLINE = "#0b3d91"
"""Chosen: blue, which the scale does not have."""
LEVEL_PIXELS, ROW_PIXELS, LEAST_PIXELS = 60, 38, 320
"""Chosen: two lines of words fit into a box; names of two lines beside a chart do not touch."""
GRADES = {
    "best": ("star", "#0b6e4f"), "good": ("circle", "#1f5fbf"), "fair": ("circle-open", "#1f5fbf"),
    "bad": ("x", "#b3261e"),
}  # fmt: skip
"""Grade → symbol and colour. Chosen: symbols tell them apart without colour."""
ROOM = 1.9
"""Width of the panel of bars over its longest. Chosen: the words beside a bar fit on a telephone."""
MARK, LARGEST_MARK, STAR = 9, 20, 1.4
"""Chosen: pixels of the mark of size 0 and of the largest one; a star looks smaller than a circle."""
NAME_BREAKS = re.compile(r"(?<=-part)|(?=\+)")
"""Where a long name goes on in another line beside the chart."""


class _Drawing:
    """Draws the charts of one page; the first brings the chart library with it."""

    def __init__(self) -> None:
        self._has_library = False

    def __call__(self, chart: doc.Boxes | doc.Dots) -> str:
        from plotly.io import to_html

        figure = _boxes_figure(chart) if isinstance(chart, doc.Boxes) else _dots_figure(chart)
        displayed = {"displaylogo": False, "responsive": True}
        html: str = to_html(figure, include_plotlyjs=not self._has_library, full_html=False, config=displayed)
        self._has_library = True
        return html


def _chart_text(text: str) -> str:
    """Return a text for the chart, which reads some HTML in its texts."""
    return escape(printable(text))


def _set_height(figure: Figure, pixels: int, *, top: int) -> None:
    figure.update_layout(margin={"t": top, "l": 0, "r": 0, "b": 0}, height=max(LEAST_PIXELS, pixels))


def _boxes_figure(chart: doc.Boxes) -> Figure:
    """Return an icicle chart: one box for each module, the part without boxes inside it is its own size."""
    import plotly.graph_objects as charts

    shades, boxes = chart.shades, chart.boxes
    low, high = (None, None) if shades is None else (shades.low, shades.high)
    is_logarithmic = shades is not None and shades.is_logarithmic

    def shade(value: float) -> float:
        bounded = min(value if high is None else min(value, high), math.inf)
        bounded = bounded if low is None else max(bounded, low)
        return math.log10(bounded) if is_logarithmic else bounded

    marker: dict[str, Any] = {
        "colors": [shade(box.shade) for box in boxes],
        "colorscale": f"{COLOURS}_r" if shades is not None and shades.is_dark_low else COLOURS,
        "showscale": shades is not None,
    }
    if shades is not None:
        marker["colorbar"] = {"title": {"text": shades.title, "side": "right"}}
    if is_logarithmic and low is not None and high is not None:
        marker |= {"cmin": shade(low), "cmax": shade(high)}
        powers = range(round(shade(low)), round(shade(high)) + 1, 2)
        marker["colorbar"] |= {"tickvals": list(powers), "ticktext": [f"{10.0**power:.0e}" for power in powers]}
    if any(box.is_marked for box in boxes):
        marker["line"] = {
            "color": [OUTLINE if box.is_marked else "#ffffff" for box in boxes],
            "width": [4 if box.is_marked else 1 for box in boxes],
        }
    figure = charts.Figure(
        charts.Icicle(
            ids=[escape(box.key) for box in boxes],
            labels=[_chart_text(f"▶ {box.label}" if box.is_marked else box.label) for box in boxes],
            parents=[escape(box.parent) for box in boxes],
            # plotly adds up own sizes, so rounding cannot make the inner boxes exceed the one around them.
            values=[box.size for box in boxes],
            branchvalues="remainder",
            text=[_chart_text(box.words) for box in boxes],
            textinfo="label+text" if any(box.words for box in boxes) else "label",
            hovertext=["<br>".join(map(_chart_text, filter(None, box.lines))) for box in boxes],
            hoverinfo="text",
            marker=marker,
            tiling={"orientation": "v"},
            sort=False,
        )
    )
    parents = {box.key: box.parent for box in boxes}
    _set_height(figure, LEVEL_PIXELS * max((_depth(key, parents) for key in parents), default=1), top=10)
    return figure


def _depth(key: str, parents: dict[str, str]) -> int:
    depth = 0
    while key:
        key, depth = parents.get(key, ""), depth + 1
    return depth


def _dots_figure(chart: doc.Dots) -> Figure:
    """Return a chart with a row for each dot, its value on the left and its bar on the right.

    Rows keep names apart wherever marks lie, and put the best where it is seen first.
    """
    from plotly.subplots import make_subplots

    dots = list(enumerate(chart.dots))
    figure = make_subplots(1, 2, shared_yaxes=True, column_widths=[0.6, 0.4], horizontal_spacing=0.03)
    largest = max((dot.size for _, dot in dots), default=0) or 1
    for grade in GRADES:
        if rows := [(number, dot) for number, dot in dots if dot.grade == grade]:
            figure.add_trace(_marks(rows, grade, largest), 1, 1)
            figure.add_trace(_bars(rows, grade), 1, 2)
    bars = [dot.bar for _, dot in dots]
    if (limit := chart.bar_line) is not None:
        figure.add_vline(x=limit, line_dash="dot", row=1, col=2, annotation_text=f"≥ {limit:g}", annotation_y=1.0,
                         annotation_yanchor="bottom")  # fmt: skip
    figure.add_vline(x=chart.value_line, line_dash="dot", row=1, col=1)
    for column, title in enumerate((chart.value_title, chart.bar_title), start=1):
        figure.update_xaxes(title={"text": title}, automargin=True, row=1, col=column)
    figure.update_xaxes(rangemode="tozero", row=1, col=1)
    longest = max([limit or 0.0, *bars], default=0.0)
    figure.update_xaxes(range=[ROOM * min([0.0, *bars]), ROOM * max(longest, 1.0)], row=1, col=2)
    figure.update_yaxes(
        tickvals=[number for number, _ in dots],
        ticktext=[_row_name(dot) for _, dot in dots],
        range=[len(dots) - 0.5, -0.5],
        automargin=True,
    )
    figure.update_layout(showlegend=False)
    _set_height(figure, ROW_PIXELS * (len(dots) + 2), top=24)
    return figure


def _row_name(dot: doc.Dot) -> str:
    """Return the name of a row; that of the best stands out without colour."""
    name = "<br>".join(map(_chart_text, filter(None, NAME_BREAKS.split(dot.name))))
    return f"<b>★ {name}</b>" if dot.grade == "best" else name


def _marks(rows: Sequence[tuple[int, doc.Dot]], grade: str, largest: float) -> Scatter:
    """Return the marks of one grade, with the intervals of their values."""
    import plotly.graph_objects as charts

    symbol, colour = GRADES[grade]
    scale = STAR if grade == "best" else 1.0
    return charts.Scatter(
        x=[dot.value for _, dot in rows],
        y=[number for number, _ in rows],
        mode="markers",
        hovertext=["<br>".join(map(_chart_text, (dot.name, *dot.lines))) for _, dot in rows],
        hoverinfo="text",
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [0.0 if dot.high is None else dot.high - dot.value for _, dot in rows],
            "arrayminus": [0.0 if dot.low is None else dot.value - dot.low for _, dot in rows],
        },
        marker={
            "symbol": symbol,
            "color": colour,
            "size": [scale * (MARK + (LARGEST_MARK - MARK) * dot.size / largest) for _, dot in rows],
        },
    )


def _bars(rows: Sequence[tuple[int, doc.Dot]], grade: str) -> Bar:
    """Return the bars of one grade, each with its words."""
    import plotly.graph_objects as charts

    return charts.Bar(
        x=[dot.bar for _, dot in rows],
        y=[number for number, _ in rows],
        orientation="h",
        text=[_chart_text(dot.bar_words) for _, dot in rows],
        textposition="outside",
        cliponaxis=False,
        hovertext=[_chart_text(f"{dot.name}: {dot.bar_words}") for _, dot in rows],
        hoverinfo="text",
        marker={"color": GRADES[grade][1]},
        width=0.6,
    )
