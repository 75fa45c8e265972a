"""Table of a sweep, as comma-separated values and as a document."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from typing import Any

from winml.modelkit.file_names import SWEEP_PAGE_NAME, SWEEP_RESULTS_NAME, SWEEP_TABLE_NAME
from winml.modelkit.report import document as doc
from winml.modelkit.sweep.records import CellResult, SweepResult, measure_names, settings_words, sweep_summary
from winml.modelkit.words import decibel_words, size_words

_MAIN_COLUMNS = ("latency_p50_ms", "model_bytes", "sqnr_db", "coverage_percent", "relative_diff")
"""Chosen: measures printed in a terminal, if a cell has them; the files contain all measures."""
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Prefixes of a text that a spreadsheet would evaluate."""
_HEADINGS = {"model_bytes": "model size", "peak_bytes": "peak memory", "top1_agreement": "top-1 agreement"}
"""Measure → heading, if not derived from its name; each number in bytes is printed with its unit."""
_WORDS = {"sqnr": "SQNR", "db": "dB", "percent": "%", "seconds": "s", "sec": "s", "per": "/"}
"""Word of a name → its usual spelling."""


def _setting_names(result: SweepResult) -> tuple[str, ...]:
    """Return the keys that differ between cells, in the order of the plan."""
    return tuple(dict.fromkeys(key for cell in result.cells for key in cell.settings))


def sweep_table(result: SweepResult) -> str:
    """Return the table as comma-separated values."""
    settings, measures = _setting_names(result), measure_names(result.cells)
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    tail = ("seconds", "peak_bytes", "tries", "node", "step", "problem", "artifacts")
    writer.writerow(["model", *settings, "state", *measures, *tail])
    for cell in result.cells:
        cell_settings = [cell.settings.get(key) for key in settings]
        values = [cell.measures.get(name) for name in measures]
        fields = [cell.model, *cell_settings, cell.state, *values, *(getattr(cell, name) for name in tail)]
        writer.writerow([_escape_field(value) for value in fields])
    return stream.getvalue()


def _escape_field(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(_FORMULA):
        return f"'{value}"
    return "" if value is None else value


def measure_heading(name: str) -> str:
    """Format the name of a measure; the last word is the unit.

    >>> measure_heading("latency_p50_ms"), measure_heading("sqnr_db"), measure_heading("seconds")
    ('latency p50 ms', 'SQNR dB', 'seconds')
    >>> measure_heading("model_bytes"), measure_heading("coverage_percent"), measure_heading("samples_per_sec")
    ('model size', 'coverage %', 'samples / s')
    """
    if name in _HEADINGS or "_" not in name:
        return _HEADINGS.get(name, name)
    return " ".join(_WORDS.get(word, word) for word in name.split("_"))


def _measure_words(name: str, value: Any) -> str:
    """Format a measure.

    >>> _measure_words("latency_p50_ms", 1.23456), _measure_words("nodes", 91), _measure_words("cosine", None)
    ('1.235', '91', '')
    >>> _measure_words("model_bytes", 8514), _measure_words("sqnr_db", 200.0)
    ('8.5 kB', 'equal')
    """
    if value is None:
        return ""
    if name.endswith("_bytes"):
        return size_words(value)
    if name == "seconds":
        return f"{value:.1f}"
    if name == "sqnr_db":
        return decibel_words(value)
    if isinstance(value, float):
        return f"{value:.3e}" if value and abs(value) < 1e-3 else f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return str(value)


def sweep_document(result: SweepResult) -> doc.Document:
    """Describe the cells, the overall result, and the locations of the files."""
    main_columns = {*_MAIN_COLUMNS, *result.plan.get("min", {}), *result.plan.get("max", {}), "seconds"}
    settings, measures = _setting_names(result), (*measure_names(result.cells), "seconds", "peak_bytes")
    configurations = tuple(dict.fromkeys(settings_words(cell.settings) for cell in result.cells))
    columns = [
        doc.Column("model", "name"),
        *(doc.Column(key) for key in settings),
        doc.Column("state", tones={"done": "good", "failed": "bad"}),
        *(
            # The kind only affects the alignment: each measure is formatted by its name.
            doc.Column(
                measure_heading(name), "count", doc.Detail.ALWAYS if name in main_columns else doc.Detail.PAGE, key=name
            )
            for name in measures
        ),
        doc.Column("problem"),
    ]
    table = doc.Table(
        columns,
        [
            [
                cell.model,
                *(str(cell.settings.get(key, "")) for key in settings),
                cell.state,
                *_measure_cells(result, cell, measures),
                _problem_cell(cell),
            ]
            for cell in result.cells
        ],
        name="cells",
        is_searched=True,
        variants=[(cell.model, settings_words(cell.settings)) for cell in result.cells],
        references=[
            *([doc.EARLIER] if result.against is not None else []),
            *(configurations if len(configurations) > 1 else ()),
        ],
    )
    return doc.Document(
        [table],
        doc.Fields(list(_fields(result))),
        title=f"Sweep: {result.folder}",
        subject=f"{result.total} cells",
        introduction="Each row is a model in one configuration.",
        figures=list(_figures(result)),
        links=[
            doc.Linked("– the results as JSON", SWEEP_RESULTS_NAME, SWEEP_RESULTS_NAME),
            doc.Linked("– the table as comma-separated values", SWEEP_TABLE_NAME, SWEEP_TABLE_NAME),
        ],
    )


def _figures(result: SweepResult) -> Iterator[doc.Figure]:
    states = [cell.state for cell in result.cells]
    num_done = states.count("done")
    meaning = f"{len({cell.model for cell in result.cells})} models, each in every configuration"
    yield doc.Figure("cells done", f"{num_done} of {result.total}", meaning, "good" if num_done == result.total else "")
    if failed := states.count("failed"):
        yield doc.Figure("failed", str(failed), "the last column says which step failed, and why", "bad")
    yield doc.Figure("time", f"{sum(cell.seconds for cell in result.cells):.0f} s", "sum over the cells")


def _fields(result: SweepResult) -> Iterator[doc.Field]:
    yield from sweep_summary(result)
    yield "steps", ", ".join(result.plan["do"]), doc.Detail.PAGE
    yield "made with", ", ".join(f"{name} {version}" for name, version in result.versions.items()), doc.Detail.PAGE
    memory = result.machine.get("memory_bytes")
    if memory:
        yield "machine", f"{result.machine['cores']} cores, {memory / 1e9:.1f} GB of memory", doc.Detail.PAGE
    if result.against is not None:
        yield doc.EARLIER, result.against.folder, doc.Detail.PAGE
    yield "table", f"{result.folder}: {SWEEP_PAGE_NAME}, {SWEEP_TABLE_NAME}, {SWEEP_RESULTS_NAME}"


def _measure_cells(result: SweepResult, cell: CellResult, measures: tuple[str, ...]) -> Iterator[doc.Cell]:
    earlier_cell = result.earlier(cell)
    values, earlier = _all_measures(cell), {} if earlier_cell is None else _all_measures(earlier_cell)
    for name in measures:
        value, words = values.get(name), _measure_words(name, values.get(name))
        yield doc.Number(value, words, earlier.get(name)) if isinstance(value, (int, float)) else words


def _all_measures(cell: CellResult) -> Mapping[str, Any]:
    return {**cell.measures, "seconds": round(cell.seconds, 1), "peak_bytes": cell.peak_bytes}


def _problem_cell(cell: CellResult) -> doc.Cell:
    tries = f" ({cell.tries} tries)" if cell.tries > 1 else ""
    problem = f"{cell.step}: {cell.problem}{tries}" if cell.problem else tries.strip()
    if cell.problem and cell.artifacts and "://" not in cell.artifacts:
        return doc.Linked(problem, "log", f"cells/{cell.cell_id}/log.txt")
    return problem
