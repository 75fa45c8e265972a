"""Renders a sweep: comma-separated values, a table for a terminal, and one HTML page."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

from rich.console import Console

from winml.modelkit.compare.words import decibel_words
from winml.modelkit.file_names import SWEEP_PAGE_NAME, SWEEP_RESULTS_NAME, SWEEP_TABLE_NAME
from winml.modelkit.report.terminal import TextTable, print_rows
from winml.modelkit.results.sweep import CellResult, SweepResult, measure_names, settings_words, sweep_summary
from winml.modelkit.words import printable, size_words

__all__ = [
    "measure_heading",
    "print_sweep",
    "setting_names",
    "shown_measure",
    "sweep_page",
    "sweep_table",
]


# --- Renders a sweep as comma-separated values, and as a table for a terminal: a row for each cell.


_SHOWN = ("latency_p50_ms", "model_bytes", "sqnr_db", "coverage_percent", "relative_diff")
"""Chosen: measures that stand in a terminal, where a cell has them; the files hold all of them."""
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Starts of a text that a spreadsheet would run."""
_HEADINGS = {"model_bytes": "model size", "peak_bytes": "peak memory", "top1_agreement": "top-1 agreement"}
"""Where the words of a name are not enough; the unit of bytes stands beside each number."""
_WORDS = {"sqnr": "SQNR", "db": "dB", "percent": "%", "seconds": "s", "sec": "s", "per": "/"}
"""Parts of a name that people write otherwise."""


def setting_names(result: SweepResult) -> tuple[str, ...]:
    """Return every key that differs between cells, in the order of the plan."""
    return tuple(dict.fromkeys(key for cell in result.cells for key in cell.settings))


def sweep_table(result: SweepResult) -> str:
    """Return the table as comma-separated values."""
    settings, measures = setting_names(result), measure_names(result.cells)
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    tail = ("seconds", "peak_bytes", "tries", "node", "step", "problem", "artifacts")
    writer.writerow(["model", *settings, "state", *measures, *tail])
    for cell in result.cells:
        own = [cell.settings.get(key) for key in settings]
        found = [cell.measures.get(name) for name in measures]
        fields = [cell.model, *own, cell.state, *found, *(getattr(cell, name) for name in tail)]
        writer.writerow([_field(value) for value in fields])
    return stream.getvalue()


def _field(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(_FORMULA):
        return f"'{value}"
    return "" if value is None else value


def measure_heading(name: str) -> str:
    """Return the name of a measure as people read it; the unit is its last word.

    >>> measure_heading("latency_p50_ms"), measure_heading("sqnr_db"), measure_heading("seconds")
    ('latency p50 ms', 'SQNR dB', 'seconds')
    >>> measure_heading("model_bytes"), measure_heading("coverage_percent"), measure_heading("samples_per_sec")
    ('model size', 'coverage %', 'samples / s')
    """
    if name in _HEADINGS or "_" not in name:
        return _HEADINGS.get(name, name)
    return " ".join(_WORDS.get(word, word) for word in name.split("_"))


def shown_measure(name: str, value: Any) -> str:
    """Return a measure as people read it.

    >>> shown_measure("latency_p50_ms", 1.23456), shown_measure("nodes", 91), shown_measure("cosine", None)
    ('1.235', '91', '')
    >>> shown_measure("model_bytes", 8514), shown_measure("sqnr_db", 200.0)
    ('8.5 kB', 'equal')
    """
    if value is None:
        return ""
    if name.endswith("_bytes"):
        return size_words(value)
    if name == "sqnr_db":
        return decibel_words(value)
    if isinstance(value, float):
        return f"{value:.3e}" if value and abs(value) < 1e-3 else f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return str(value)


def print_sweep(result: SweepResult, console: Console) -> None:
    """Print the table, what it says as a whole, and where the files are."""
    wanted = (*_SHOWN, *result.plan.get("min", {}), *result.plan.get("max", {}))
    names = [name for name in measure_names(result.cells) if name in wanted]
    columns = ("model", "configuration", "state", *map(measure_heading, names), "seconds", "problem")
    table = TextTable(columns, frozenset(range(3, 4 + len(names))))
    for cell in result.cells:
        found = (shown_measure(name, cell.measures.get(name)) for name in names)
        problem = f"{cell.step}: {cell.problem}" if cell.problem else ""
        table.add(cell.model, settings_words(cell.settings), cell.state, *found, f"{cell.seconds:.1f}", problem)
    table.print(console)
    files = (SWEEP_PAGE_NAME, SWEEP_TABLE_NAME, SWEEP_RESULTS_NAME)
    print_rows([*sweep_summary(result), ("table", f"{result.folder}: {', '.join(files)}")], console)


# --- Renders a sweep as one HTML page: a table to sort, to filter, and to compare configurations or runs in.
#
# Readable without a network. Computes nothing.


_TEMPLATE = "sweep_page.html"
_EARLIER = "earlier run"


def sweep_page(result: SweepResult) -> str:
    """Return the page."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, finalize=_shown)
    template = environment.from_string(files(__package__).joinpath(_TEMPLATE).read_text(encoding="utf-8"))
    settings, measures = setting_names(result), (*measure_names(result.cells), "seconds", "peak_bytes")
    configurations = tuple(dict.fromkeys(settings_words(cell.settings) for cell in result.cells))
    return template.render(
        result=result,
        facts=list(_facts(result)),
        settings=settings,
        measures=[(name, measure_heading(name)) for name in measures],
        rows=[_row(result, cell, settings, measures) for cell in result.cells],
        bases=[
            *([_EARLIER] if result.against is not None else []),
            *(configurations if len(configurations) > 1 else ()),
        ],
    )


def _shown(value: Any) -> Any:
    return printable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _facts(result: SweepResult) -> Iterator[tuple[str, str]]:
    yield from sweep_summary(result)
    yield "steps", ", ".join(result.plan["do"])
    yield "made with", ", ".join(f"{name} {version}" for name, version in result.versions.items())
    memory = result.machine.get("memory_bytes")
    if memory:
        yield "machine", f"{result.machine['cores']} cores, {memory / 1e9:.1f} GB of memory"
    if result.against is not None:
        yield _EARLIER, result.against.folder


def _row(result: SweepResult, cell: CellResult, settings: tuple[str, ...], measures: tuple[str, ...]) -> dict[str, Any]:
    before = result.earlier(cell)
    found, earlier = _measured(cell), {} if before is None else _measured(before)
    return {
        "model": cell.model,
        "configuration": settings_words(cell.settings),
        "state": cell.state,
        "settings": [cell.settings.get(key, "") for key in settings],
        "cells": [
            {
                "shown": shown_measure(name, found.get(name)),
                "value": found.get(name),
                "earlier": earlier.get(name),
                "is_number": isinstance(found.get(name), (int, float)),
            }
            for name in measures
        ],
        "problem": f"{cell.step}: {cell.problem}" if cell.problem else "",
        "log": f"cells/{cell.cell_id}/log.txt" if cell.artifacts and "://" not in cell.artifacts else "",
        "node": cell.node,
        "tries": cell.tries,
    }


def _measured(cell: CellResult) -> Mapping[str, Any]:
    return {**cell.measures, "seconds": round(cell.seconds, 1), "peak_bytes": cell.peak_bytes}
