"""Renders a tuning: the winner and the table of candidates in a terminal, and as one HTML page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from winml.modelkit.compare.words import decibel_words
from winml.modelkit.report.module_page import (
    ModulePage,
    NumberInWords,
    Section,
    chart_html,
    chart_text,
    render_page,
)
from winml.modelkit.report.terminal import TextTable, print_rows
from winml.modelkit.results.tuning import Candidate, TunedCandidate, TuneResult
from winml.modelkit.words import size_words

__all__ = [
    "latency_cell",
    "limited_metrics",
    "print_tuning",
    "print_tuning_plan",
    "ratio_cell",
    "table_order",
    "tuning_facts",
    "tuning_page",
]


NUMBERS = ("latency ms", "of plain", "size", "memory", "session ms", "SQNR dB")
"""Columns of every answer that hold numbers; behind them stand the metrics that are limited."""


def print_tuning(result: TuneResult, console: Console) -> None:
    """Print the winner, and every candidate, in :func:`table_order`."""
    print_rows(tuning_facts(result), console)
    metrics = limited_metrics(result)
    columns = ("candidate", *NUMBERS, *metrics, "Pareto", "outcome")
    table = TextTable(columns, numbers=frozenset(range(1, len(columns) - 2)))
    for item in table_order(result):
        table.add(*_cells(item, metrics))
    console.print()
    table.print(console)


def print_tuning_plan(plan: Sequence[Candidate], console: Console) -> None:
    """Print what a tuning will try, in the order of preference."""
    table = TextTable(("candidate", "kind", "what it is"))
    for candidate in plan:
        table.add(candidate.name, candidate.kind, candidate.words)
    table.print(console)
    console.print(
        "Then, of the winner: levels below its precision, numbers of threads, fixed sizes, and a compiled file."
    )


def tuning_facts(result: TuneResult) -> Iterator[tuple[str, str]]:
    """Yield what is told of the winner and of the whole, a heading and a text each."""
    winner = result.winner
    yield "winner", f"{winner.name}: {result.won.candidate.words}"
    yield "why", winner.words
    yield "folder", winner.folder
    yield "again", winner.build_command
    if winner.perf_command is not None:
        yield "measure", winner.perf_command
    yield "target", f"{result.target}, right means {_limit_words(result)}"
    yield "inputs", ", ".join(f"{name} {list(shape)}" for name, shape in result.measured_shapes.items()) or "none"
    yield "machine", _machine_words(result)
    if result.resumed:
        yield "resumed", f"{result.resumed} candidates had been measured before"
    for note in result.notes:
        yield "note", note


def table_order(result: TuneResult) -> list[TunedCandidate]:
    """Return the candidates: the winner, then those that no other beats, then the others; each group by latency.

    Those that were not timed are last.
    """

    def place(item: TunedCandidate) -> tuple[bool, bool, bool, float]:
        ratio = item.latency.ratio.value if item.latency is not None and item.latency.ratio is not None else 1.0
        return item.status != "won", not item.is_on_front, item.latency is None, ratio

    return sorted(result.candidates, key=place)


def limited_metrics(result: TuneResult) -> tuple[str, ...]:
    """Return the metrics of the task that a candidate is judged by."""
    return tuple(result.limits["max_drop"])


def ratio_cell(item: TunedCandidate) -> str:
    """Return the time over that of the plain file, with its interval."""
    latency = item.latency
    if latency is None:
        return "–"
    ratio = latency.ratio
    if ratio is None:
        return "1"
    ends = f" [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio.low is not None and ratio.high is not None else ""
    return f"{ratio.value:.2f}{ends}"


def latency_cell(item: TunedCandidate) -> str:
    """Return the latency, with its interval."""
    latency = item.latency
    if latency is None:
        return "–"
    ends = ""
    if latency.low_ms is not None and latency.high_ms is not None:
        ends = f" [{latency.low_ms:.2f}, {latency.high_ms:.2f}]"
    return f"{latency.p50_ms:.2f}{ends}"


def _cells(item: TunedCandidate, metrics: Sequence[str]) -> tuple[str, ...]:
    facts = item.facts
    measured = ("–",) * 4
    if facts is not None:
        measured = (
            size_words(facts.size_bytes),
            size_words(facts.memory_bytes),
            f"{facts.session_creation_ms:.0f}",
            "–" if facts.sqnr_db is None else decibel_words(facts.sqnr_db),
        )
    scores = {} if facts is None else facts.scores
    reached = tuple(f"{scores[name]:.4f}" if name in scores else "–" for name in metrics)
    outcome = item.status if item.status == "won" or not item.reason else f"{item.status}: {item.reason}"
    front = "yes" if item.is_on_front else ""
    return (item.candidate.name, latency_cell(item), ratio_cell(item), *measured, *reached, front, outcome)


def _limit_words(result: TuneResult) -> str:
    least, drops = result.limits["min_sqnr_db"], result.limits["max_drop"]
    words = [] if least is None else [f"an SQNR of {least:g} dB beside the plain file"]
    words += [f"{name} drops by at most {most:g} on {result.limits['dataset']}" for name, most in drops.items()]
    return " and ".join(words)


def _machine_words(result: TuneResult) -> str:
    machine = result.machine
    cores = f"{machine['cores']} {'core' if machine['cores'] == 1 else 'cores'}"
    providers = ", ".join(machine["providers"])
    return f"{machine['processor']}, {cores}, ONNX Runtime {result.onnxruntime_version} with {providers}"


# --- Renders what a tuning found as one HTML page: a chart of time and quality, and a table of all candidates.


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
"""Chosen: the longest bar; beyond, the noise is that of rounding."""
ROOM = 1.9
"""Width of the panel of quality over its longest bar. Chosen: the words beside a bar fit on a telephone."""
MARK, LARGEST_MARK, STAR = 9, 20, 1.4
"""Chosen: pixels of the mark of an empty file and of the largest one; a star looks smaller than a circle."""
ROW_PIXELS = 38
"""Chosen: names of two lines do not touch."""
NAME_BREAKS = re.compile(r"(?<=-part)|(?=\+)")
"""Where a long name goes on in another line beside the chart."""


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
            "with the others. SQNR is the ratio of signal to quantization noise of the worst output.",
            facts=list(tuning_facts(result)),
            chart_heading="Time over that of the plain file, and quality; a larger mark is a larger file",
            chart=_chart(result),
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
        None if facts is None or facts.sqnr_db is None else NumberInWords(facts.sqnr_db, decibel_words(facts.sqnr_db)),
        *(None if facts is None else facts.scores.get(name) for name in metrics),
        f"{outcome}: {item.reason}" if item.reason else outcome,
        item.candidate.words,
    )


def _chart(result: TuneResult) -> str:
    """Return the chart: a row for each candidate that was timed, its time on the left and its quality on the right.

    Rows keep names apart wherever marks lie, and put the winner where it is seen first.
    """
    import plotly.graph_objects as charts
    from plotly.subplots import make_subplots

    items = [item for item in table_order(result) if item.latency is not None and item.facts is not None]
    titles = ("time over plain", "SQNR in dB")
    figure = make_subplots(1, 2, shared_yaxes=True, column_widths=[0.6, 0.4], horizontal_spacing=0.03)
    largest = max((item.facts.size_bytes for item in items if item.facts is not None), default=1)
    for status in STYLES:
        rows = [(number, item) for number, item in enumerate(items) if item.status == status]
        if rows:
            figure.add_trace(_times(charts, rows, status, largest), 1, 1)
            figure.add_trace(_qualities(charts, rows, status), 1, 2)
    least = result.limits["min_sqnr_db"]
    longest = max([least or 0.0, *map(_bar_db, items)], default=0.0)
    lowest = min([0.0, *map(_bar_db, items)])
    if least is not None:
        figure.add_vline(x=least, line_dash="dot", row=1, col=2, annotation_text=f"≥ {least:g}", annotation_y=1.0,
                         annotation_yanchor="bottom")  # fmt: skip
    figure.add_vline(x=1, line_dash="dot", row=1, col=1)
    for column, title in enumerate(titles, start=1):
        figure.update_xaxes(title={"text": title}, automargin=True, row=1, col=column)
    figure.update_xaxes(rangemode="tozero", row=1, col=1)
    figure.update_xaxes(range=[ROOM * lowest, ROOM * max(longest, 1.0)], row=1, col=2)
    figure.update_yaxes(
        tickvals=list(range(len(items))),
        ticktext=[_row_name(item) for item in items],
        range=[len(items) - 0.5, -0.5],
        automargin=True,
    )
    figure.update_layout(showlegend=False)
    return chart_html(figure, levels=len(items) + 2, level_pixels=ROW_PIXELS, top=24)


def _row_name(item: TunedCandidate) -> str:
    """Return the name of a row; that of the winner stands out without colour."""
    name = "<br>".join(map(chart_text, filter(None, NAME_BREAKS.split(item.candidate.name))))
    return f"<b>★ {name}</b>" if item.status == "won" else name


def _times(charts: Any, rows: Sequence[tuple[int, TunedCandidate]], status: str, largest: int) -> Any:
    """Return the marks of one outcome, with the intervals of their ratios."""
    symbol, colour = STYLES[status]
    ratios = [item.latency.ratio if item.latency is not None else None for _, item in rows]
    sizes = [item.facts.size_bytes if item.facts is not None else 0 for _, item in rows]
    scale = STAR if status == "won" else 1.0
    return charts.Scatter(
        x=[1.0 if ratio is None else ratio.value for ratio in ratios],
        y=[number for number, _ in rows],
        mode="markers",
        name=status,
        text=[chart_text(item.candidate.name) for _, item in rows],
        customdata=[
            [chart_text(item.candidate.words), chart_text(latency_cell(item)), size_words(size)]
            for (_, item), size in zip(rows, sizes, strict=True)
        ],
        hovertemplate="%{text}: %{customdata[0]}<br>%{customdata[1]} ms, %{x:.2f} of the plain file"
        "<br>%{customdata[2]}<extra>" + status + "</extra>",
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [0.0 if ratio is None or ratio.high is None else ratio.high - ratio.value for ratio in ratios],
            "arrayminus": [0.0 if ratio is None or ratio.low is None else ratio.value - ratio.low for ratio in ratios],
        },
        marker={
            "symbol": symbol,
            "color": colour,
            "size": [scale * (MARK + (LARGEST_MARK - MARK) * size / largest) for size in sizes],
        },
    )


def _qualities(charts: Any, rows: Sequence[tuple[int, TunedCandidate]], status: str) -> Any:
    """Return the bars of one outcome, each with its ratio in words."""
    words = [
        "–" if item.facts is None or item.facts.sqnr_db is None else decibel_words(item.facts.sqnr_db)
        for _, item in rows
    ]
    return charts.Bar(
        x=[_bar_db(item) for _, item in rows],
        y=[number for number, _ in rows],
        orientation="h",
        name=status,
        text=words,
        textposition="outside",
        cliponaxis=False,
        hovertext=[chart_text(f"{item.candidate.name}: {word}") for (_, item), word in zip(rows, words, strict=True)],
        hoverinfo="text",
        marker={"color": STYLES[status][1]},
        width=0.6,
    )


def _bar_db(item: TunedCandidate) -> float:
    """Return the length of a bar: none of what cannot be compared, and no more of what is near enough to equal."""
    ratio = None if item.facts is None else item.facts.sqnr_db
    return 0.0 if ratio is None else min(ratio, MOST_SHOWN_DB)
