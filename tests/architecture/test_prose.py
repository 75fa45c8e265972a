"""Length of the lines of prose in documents."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from architecture.sources import REPOSITORY, repository_files

LONGEST_LINE = 150
"""Characters of a line of prose. Chosen: the width that fits beside a tree of files on a laptop."""

_FENCE = re.compile(r"^\s*(```|~~~)")
_ONLY_LINKS = re.compile(r"^[\s*·|,.-]*(!?\[[^\]]*\]\([^)]*\)[\s*·|,.-]*)+$")


def _documents() -> list[str]:
    return [path.relative_to(REPOSITORY).as_posix() for path in repository_files() if path.suffix == ".md"]


def prose_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of prose: no tables, no code blocks, no lines with links alone."""
    in_code = False
    for number, line in enumerate(text.splitlines(), start=1):
        if _FENCE.match(line):
            in_code = not in_code
        elif not (in_code or line.startswith(("|", "    ")) or _ONLY_LINKS.match(line)):
            yield number, line


@pytest.mark.parametrize("document", _documents())
def test_lines_of_prose_are_short(document: str) -> None:
    """No line of prose is longer than the limit."""
    text = (REPOSITORY / Path(document)).read_text(encoding="utf-8")
    assert [] == [f"{document}:{number}: {len(line)}" for number, line in prose_lines(text) if len(line) > LONGEST_LINE]


def test_prose_leaves_out_tables_code_and_links() -> None:
    """Tables, code blocks and lines of links are left out of a document; the words remain."""
    text = "words\n| a | b |\n```sh\ncode\n```\n    code\n[link](to.md) · [other](there.md)\n* more words\n"
    assert [(1, "words"), (8, "* more words")] == list(prose_lines(text))
