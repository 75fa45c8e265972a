"""Tables of a sweep: headings in words and sizes with units for people, names and numbers for programs."""

from __future__ import annotations

import csv
import io
import re

import pytest

from winml.modelkit.report.html import render_html
from winml.modelkit.report.terminal import console_for, print_document
from winml.modelkit.sweep.records import CellResult, SweepResult
from winml.modelkit.sweep.table import measure_heading, sweep_document, sweep_table

MEASURES = {"model_bytes": 8_514, "coverage_percent": 100.0, "latency_p50_ms": 0.3247, "sqnr_db": 200.0}


@pytest.fixture
def swept() -> SweepResult:
    """A sweep of one small model."""
    cell = CellResult("a", "model.onnx", {"optim.level": "full"}, "done", MEASURES, seconds=1.4, peak_bytes=300_000_000)
    return SweepResult("swept", {"do": ["build", "perf", "compare"]}, (cell,), total=1)


def test_table_of_a_terminal_has_words_and_sizes(swept: SweepResult) -> None:
    """The table has no measure names, and a small file is not 0.0 MB."""
    stream = io.StringIO()
    print_document(sweep_document(swept), console_for(stream))
    head, row, *_ = stream.getvalue().splitlines()
    assert "_" not in head
    assert [measure_heading(name) for name in MEASURES] == re.split(r"\s{2,}", head.strip())[3:7]
    assert ["8.5 kB", "100", "0.3247", "equal"] == re.split(r"\s{2,}", row.strip())[3:7]


def test_page_has_words_and_the_names_that_limits_take(swept: SweepResult) -> None:
    """The name is in the title of the heading; rows are sorted by the unrounded value."""
    page = render_html(sweep_document(swept))
    heads = dict(re.findall(r'class="number" title="(\w+)"><button type="button">([^<]+)</button>', page))
    assert {name: measure_heading(name) for name in (*MEASURES, "seconds", "peak_bytes")} == heads
    assert 'data-value="8514">8.5 kB<' in page
    assert 'data-value="300000000">300.0 MB<' in page


def test_table_for_programs_keeps_names_and_numbers(swept: SweepResult) -> None:
    """The names are those that the guide lists for ``--min`` and ``--max``."""
    (row,) = csv.DictReader(io.StringIO(sweep_table(swept)))
    assert {name: float(row[name]) for name in MEASURES} == MEASURES
