"""The site in a browser, opened from disk: page widths, sorting of tables, search."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from architecture.sources import REPOSITORY
from browser import Browser
from readers import folder_of

pytestmark = [pytest.mark.slow, pytest.mark.reader("site")]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built for this test."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(folder_of("site"))}
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, timeout=300)
    return folder


@pytest.mark.parametrize("width", [390, 1280])
def test_no_page_is_wider_than_its_window(site: Path, browser: Browser, width: int) -> None:
    """Wide tables and code scroll inside the page, and no docstring role is left as text."""
    wide: dict[str, list[str]] = {}
    pages = sorted(path for path in site.rglob("*.html") if path.name != "404.html")
    assert len(pages) > 50
    for path in pages:
        browser.open(path, width=width)
        roles = re.findall(r":(?:func|class|meth|attr|data|mod|exc):", browser.run("document.body.innerText"))
        if found := browser.wider_elements() + browser.problems + roles:
            wide[path.relative_to(site).as_posix()] = found
    assert {} == wide


def test_table_of_architectures_is_sorted_by_keys(site: Path, browser: Browser) -> None:
    """The Enter key on a column head of a long table sorts its rows, the second time in reverse."""
    browser.open(site / "reference" / "architectures.html")
    browser.run(
        "window.table = [...document.querySelectorAll('.md-typeset table')].find(t => t.tBodies[0].rows.length > 99); 0"
    )
    first = "[...table.tBodies[0].rows].map(row => row.cells[0].textContent)"
    before = browser.run(first)
    browser.run("table.querySelector('th button').focus()")
    browser.press("Enter", "Enter")
    after = browser.run(first)
    assert before[0] != after[0]
    assert sorted(before) == sorted(after)
    assert "descending" == browser.run("table.querySelector('th').getAttribute('aria-sort')")


def test_architectures_are_searched(site: Path, browser: Browser) -> None:
    """The page begins with a search, which leaves the rows with the text in its long tables."""
    browser.open(site / "reference" / "architectures.html")
    browser.run(
        "window.input = document.querySelector('h1 + .table-search input'); input.value = 'Qwen3';"
        "input.dispatchEvent(new Event('input')); 0"
    )
    tables = (
        "[...document.querySelectorAll('.md-typeset table')]"
        ".filter(table => table.tHead.rows[0].cells[0].textContent.trim() === 'model type')"
    )
    shown = browser.run(
        f"{tables}.flatMap(table => [...table.tBodies[0].rows]).filter(row => !row.hidden).map(row => row.textContent)"
    )
    assert shown
    assert all("qwen3" in row.lower() for row in shown)
    assert browser.run("document.querySelector('.table-search output').value").startswith(f"{len(shown)} of ")
    matches = browser.run("[...document.querySelectorAll('.table-matches li')].map(entry => entry.textContent)")
    assert matches[0].startswith("qwen3: Generation with a cache, ")


def test_wrapped_command_is_copied_as_one_line(site: Path, browser: Browser) -> None:
    """On a narrow window, a long command of a block with output wraps, and its text has no line break."""
    browser.open(site / "index.html", width=390)
    browser.run("window.lines = [...document.querySelectorAll('pre > code > .command')]; 0")
    assert any(height > 30 for height in browser.run("lines.map(line => line.getBoundingClientRect().height)"))
    browser.run("window.code = lines[0].closest('code'); code.dataset.mdCopying = ''; 0")  # as the button of the theme
    assert browser.run("code.innerText") == browser.run("code.textContent")


def test_search_finds_from_a_disk(site: Path, browser: Browser) -> None:
    """The search needs neither a server nor a script of another host."""
    browser.open(site / "index.html")
    browser.run("document.querySelector('[data-md-component=\"search-query\"]').focus()")
    browser.press(*"quantize")
    deadline = time.monotonic() + 30
    results = "document.querySelectorAll('.md-search-result__item').length"
    while not browser.run(results) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert browser.run(results) > 3
    assert [] == browser.problems
