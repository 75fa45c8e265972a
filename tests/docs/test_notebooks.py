"""Committed outputs of the notebooks, compared with a run in the environment of the README."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from architecture.test_prose import LONGEST_LINE
from notebook_outputs import NOTEBOOKS, code_cells, is_measured, read_notebook, run_cells, source_of, text_of

_NAMES = sorted(path.name for path in NOTEBOOKS.glob("*.ipynb"))


@pytest.fixture
def _restored_logging() -> Iterator[None]:
    """Restore the logging level that a notebook changes."""
    disabled = logging.root.manager.disable
    yield
    logging.disable(disabled)


@pytest.mark.usefixtures("_restored_logging", "libraries_may_warn")
@pytest.mark.parametrize("name", _NAMES)
def test_notebook_reproduces_its_committed_outputs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs are compared cell by cell, without the numbers of measuring cells; ``scripts/notebook_outputs.py`` writes
    them.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("WINML_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", None)
    notebook = read_notebook(NOTEBOOKS / name)
    for cell, outputs in zip(code_cells(notebook), run_cells(notebook), strict=True):
        measured = is_measured(cell)
        assert text_of(cell["outputs"], measured=measured) == text_of(outputs, measured=measured), source_of(cell)


@pytest.mark.parametrize("name", _NAMES)
def test_lines_of_notebooks_are_short(name: str) -> None:
    """The limits are those of prose in documents and of code in files."""
    notebook = read_notebook(NOTEBOOKS / name)
    limits = {"markdown": LONGEST_LINE, "code": 120}
    lines = [(line, limits[cell["cell_type"]]) for cell in notebook["cells"] for line in source_of(cell).splitlines()]
    assert [] == [line for line, limit in lines if len(line) > limit and not line.startswith("|")]


@pytest.mark.parametrize("name", _NAMES)
def test_numbers_in_notebook_prose_occur_in_outputs(name: str) -> None:
    """A number of two digits or more in the prose also stands in an output."""
    notebook = read_notebook(NOTEBOOKS / name)
    prose = " ".join(source_of(cell) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    said = re.findall(r"(?<![\w-])\d[\d,]*\d(?![\w-])", re.sub(r"`[^`]*`|\([^)]*\)", "", prose))
    outputs = " ".join(text_of(cell["outputs"], measured=False) for cell in code_cells(notebook))
    printed = set(re.findall(r"(?<![\w.])\d(?:[\d,]*\d)?(?!\.?\d)", outputs))
    assert [] == [number for number in said if number not in printed]


def test_study_of_scopes_shows_forms_of_names_and_four_approaches() -> None:
    """The forms of a name, a map by hand, hooks and a pass have outputs; a table compares their pros and cons."""
    notebook = read_notebook(NOTEBOOKS / "module_scopes.ipynb")
    printed = [text_of(cell["outputs"], measured=False).splitlines() for cell in code_cells(notebook)]
    heads = [lines[0].split() for lines in printed if lines]
    assert ["path", "simple", "class", "full"] in heads
    approaches = ["torch's own map", "map by hand", "hooks", "graph pass with a sidecar"]
    (compared,) = (lines[1:] for lines in printed if lines and lines[0].startswith("approach"))
    assert approaches == [re.split(r"\s{2,}", line)[0] for line in compared]
    prose = "".join(source_of(cell) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    assert all(f"| {name} |" in prose.replace("| a ", "| ") for name in approaches)


@pytest.mark.parametrize("name", _NAMES)
def test_notebook_was_run_from_top_to_bottom(name: str) -> None:
    """Every cell was run once, in order, and each drawn image is in the outputs."""
    cells = code_cells(read_notebook(NOTEBOOKS / name))
    assert list(range(1, len(cells) + 1)) == [cell["execution_count"] for cell in cells]
    assert any("image/svg+xml" in output.get("data", {}) for cell in cells for output in cell["outputs"])


def test_ratio_with_an_interval_around_one_is_called_undecided() -> None:
    """The prose says "undecided" exactly if the interval of the committed run contains 1."""
    notebook = read_notebook(NOTEBOOKS / "deployed_int8.ipynb")
    printed = " ".join(text_of(cell["outputs"], measured=False) for cell in code_cells(notebook))
    ((low, high),) = re.findall(r"95 % interval ([\d.]+) to ([\d.]+)", printed)
    prose = " ".join(source_of(cell) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    assert (float(low) <= 1 <= float(high)) is ("undecided" in prose)
