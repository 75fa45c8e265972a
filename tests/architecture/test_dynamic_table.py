"""Is the table of the guide what the matrix runs?"""

from __future__ import annotations

from pathlib import Path

from dynamic_matrix import table

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "dynamic.md"


def test_guide_shows_the_table_that_is_tested() -> None:
    """Whoever changes the matrix pastes the new table into the guide: ``dynamic_matrix.table()`` prints it."""
    assert table() in GUIDE.read_text(encoding="utf-8")
