"""The table of the guide against the matrix of tests."""

from __future__ import annotations

from pathlib import Path

from dynamic_matrix import table

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "dynamic_dimensions.md"


def test_guide_has_the_tested_table() -> None:
    """After a change of the matrix, ``dynamic_matrix.table()`` prints the new table for the guide."""
    assert table() in PAGE.read_text(encoding="utf-8")
