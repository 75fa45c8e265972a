"""Renders a sweep as one HTML page: a table to sort, to filter, and to compare configurations or runs in.

Readable without a network. Computes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

from winml.modelkit.report.sweep_table import measure_heading, setting_names, shown_measure
from winml.modelkit.results.sweep_result import CellResult, SweepResult, measure_names, settings_words, sweep_summary
from winml.modelkit.words import printable

__all__ = ["sweep_page"]

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
