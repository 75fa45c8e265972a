"""Renders what a tuning found as one HTML page: latency against quality, and the table of all candidates to sort."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from winml.modelkit.report.module_page import ModulePage, Section, chart_html, chart_text, render_page
from winml.modelkit.report.tuning import (
    MOST_DB,
    latency_cell,
    limited_metrics,
    ratio_cell,
    table_order,
    tuning_facts,
)
from winml.modelkit.results.tuning import TunedCandidate, TuneResult
from winml.modelkit.words import size_words

__all__ = ["tuning_page"]

MEASURED = (
    ("latency ms", True), ("of plain", True), ("interval", False), ("size MB", True), ("memory MB", True),
    ("session ms", True), ("SQNR dB", True),
)  # fmt: skip
"""Name of each column of every answer, and whether it holds numbers; behind them stand the metrics that are limited."""
STYLES = {
    "won": ("star", "#0b6e4f"), "right": ("circle", "#1f5fbf"), "slower": ("circle-open", "#1f5fbf"),
    "wrong": ("x", "#b3261e"),
}  # fmt: skip
"""Outcome → symbol and colour. Chosen: symbols tell them apart without colour."""
MOST_SHOWN_DB = 80.0
"""Chosen: the top of the chart; beyond, the noise is that of rounding."""
ROOM_DB = 8.0
"""Chosen: above the highest mark and below the lowest there is room for the name."""
LEVELS = 8
"""Height of the chart, in the units of charts of trees. Chosen: as high as wide on a laptop."""


def tuning_page(result: TuneResult) -> str:
    """Return the page."""
    metrics = limited_metrics(result)
    rows = [_row(item, metrics) for item in table_order(result)]
    limited = [(name, True) for name in metrics]
    columns = (("candidate", False), *MEASURED, *limited, ("outcome", False), ("what it is", False))
    return render_page(
        ModulePage(
            title=Path(result.model).name,
            subject="the fastest file that is still right",
            introduction="Every candidate was made from one export, run in a process of its own, and timed in turns "
            "with the others. SQNR is the ratio of signal to quantization noise of the worst output; "
            f"{MOST_DB:g} dB: equal.",
            facts=list(tuning_facts(result)),
            chart_heading="Time over that of the plain file, against quality; the size of a mark is that of the file",
            chart=_scatter(result),
            sections=[Section("candidates", "Candidates", columns, rows)],
            filter_words="Filter by candidate or outcome",
        )
    )


def _row(item: TunedCandidate, metrics: Sequence[str]) -> tuple[Any, ...]:
    facts, latency = item.facts, item.latency
    ratio = None if latency is None else 1.0 if latency.ratio is None else latency.ratio.value
    outcome = f"{item.status}, Pareto" if item.is_on_front else item.status
    return (
        item.candidate.name,
        None if latency is None else latency.p50_ms,
        ratio,
        ratio_cell(item).partition(" ")[2],
        None if facts is None else facts.size_bytes / 1e6,
        None if facts is None else facts.memory_bytes / 1e6,
        None if facts is None else facts.session_creation_ms,
        None if facts is None else facts.sqnr_db,
        *(None if facts is None else facts.scores.get(name) for name in metrics),
        f"{outcome}: {item.reason}" if item.reason else outcome,
        item.candidate.words,
    )


def _scatter(result: TuneResult) -> str:
    """Return the chart: one mark for each candidate that was timed, one series for each outcome."""
    import plotly.graph_objects as charts

    figure = charts.Figure()
    places = _text_places(result)
    largest = max((item.facts.size_bytes for item in result.candidates if item.facts is not None), default=1)
    for status, (symbol, colour) in STYLES.items():
        items = [
            item
            for item in result.candidates
            if item.status == status and item.latency is not None and item.facts is not None
        ]
        if items:
            series = _series(charts, items, status, {"symbol": symbol, "color": colour}, largest)
            series.textposition = [places[item.candidate.name] for item in items]
            figure.add_trace(series)
    least = result.limits["min_sqnr_db"]
    if least is not None:
        figure.add_hline(y=least, line_dash="dot", annotation_text=f"asked for: {least:g} dB")
    lowest = min([0.0 if least is None else least, *(_shown_db(item) for item in result.candidates if item.latency)])
    figure.update_layout(
        xaxis={"title": {"text": "time over that of the plain file"}, "automargin": True, "rangemode": "tozero"},
        yaxis={
            "title": {"text": f"SQNR in dB (equal: {MOST_SHOWN_DB:g})"},
            "automargin": True,
            "range": [lowest - ROOM_DB, MOST_SHOWN_DB + ROOM_DB],
        },
        legend={"orientation": "h"},
    )
    return chart_html(figure, levels=LEVELS)


def _series(charts: Any, items: list[TunedCandidate], status: str, marker: dict[str, Any], largest: int) -> Any:
    """Return the marks of one outcome, with the intervals of their ratios."""
    ratios = [item.latency.ratio if item.latency is not None else None for item in items]
    values = [1.0 if ratio is None else ratio.value for ratio in ratios]
    shown = [_shown_db(item) for item in items]
    above = [0.0 if ratio is None or ratio.high is None else ratio.high - ratio.value for ratio in ratios]
    below = [0.0 if ratio is None or ratio.low is None else ratio.value - ratio.low for ratio in ratios]
    sizes = [item.facts.size_bytes if item.facts is not None else 0 for item in items]
    return charts.Scatter(
        x=values,
        y=shown,
        mode="markers+text",
        name=status,
        text=[chart_text(item.candidate.name) for item in items],
        customdata=[
            [chart_text(item.candidate.words), chart_text(latency_cell(item)), size_words(size)]
            for item, size in zip(items, sizes, strict=True)
        ],
        hovertemplate="%{text}: %{customdata[0]}<br>%{customdata[1]} ms, %{x:.2f} of the plain file"
        "<br>%{y:.1f} dB<br>%{customdata[2]}<extra></extra>",
        error_x={"type": "data", "symmetric": False, "array": above, "arrayminus": below},
        marker={**marker, "size": [10 + 20 * size / largest for size in sizes]},
    )


def _shown_db(item: TunedCandidate) -> float:
    """Return the height of a mark: what is equal stands at the top, what cannot be compared at the bottom."""
    ratio = None if item.facts is None else item.facts.sqnr_db
    if ratio is None:
        return 0.0
    return MOST_SHOWN_DB if ratio >= MOST_DB else min(ratio, MOST_SHOWN_DB)


def _text_places(result: TuneResult) -> dict[str, str]:
    """Return where the name of each candidate stands: of neighbours, one above its mark and one below."""

    def place(item: TunedCandidate) -> tuple[float, float]:
        ratio = None if item.latency is None else item.latency.ratio
        return (1.0 if ratio is None else ratio.value), _shown_db(item)

    ordered = sorted(result.candidates, key=place)
    return {item.candidate.name: ("top center", "bottom center")[index % 2] for index, item in enumerate(ordered)}
