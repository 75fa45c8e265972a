"""Examples on the pages, run unchanged and compared with the shown output."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from architecture.sources import REPOSITORY
from benchmark_page import saved_results
from docs.page_runs import PageRun, blocks_of, matches, supplies_of
from docs.supplies import Supplies
from e2e.in_process import run_here
from winml import modelkit
from winml.modelkit.cli.main import COMMANDS

_FOLDERS = ("guide", "how_to", "coming_from", "reference")
_PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "docs" / "architecture.md",
    REPOSITORY / "benchmarks" / "README.md",
    *sorted(path for folder in _FOLDERS for path in (REPOSITORY / "docs" / folder).glob("*.md")),
]
_RUNS = [path for path in _PAGES if re.search(r"^```(sh|python|text)$", path.read_text(encoding="utf-8"), re.MULTILINE)]
NOT_RUN = {
    "docs/guide/build": 1,
    "README": 2,
    "benchmarks/README": 1,
    "docs/coming_from/optimum": 1,
    "docs/guide/compile": 1,
    "docs/guide/data_sets": 1,
    "docs/guide/diffusion": 3,
    "docs/guide/eval": 2,
    "docs/guide/sweep": 1,
    "docs/guide/tune": 4,
    "docs/how_to/extend": 8,
    "docs/how_to/webgpu": 4,
    "docs/reference/architectures": 1,
    "docs/reference/building": 1,
    "docs/reference/compiling": 4,
    "docs/reference/measuring": 2,
    "docs/reference/sweeping": 2,
    "docs/reference/tuning": 1,
    "docs/reference/benchmarks": len(saved_results()),
}
"""Page → number of its blocks that are not run; the reason stands before each block."""


def _name(page: Path) -> str:
    return page.relative_to(REPOSITORY).with_suffix("").as_posix()


@pytest.fixture(scope="module")
def supplies(minilm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Supplies:
    """Supplies of the pages, made once."""
    return Supplies(tmp_path_factory.mktemp("supplies"), minilm_folder)


@pytest.mark.usefixtures("libraries_may_warn")
@pytest.mark.parametrize("page", _RUNS, ids=_name)
def test_page_examples_run_with_the_printed_output(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, supplies: Supplies
) -> None:
    """The blocks run from top to bottom in one folder; the Hub id resolves to a local checkpoint."""
    text = page.read_text(encoding="utf-8")
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("WINML_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(here))
    for name, path in supplies_of(text):
        supplies.place(name, here / path)
    PageRun(supplies.run).check(text)


def test_skipped_blocks_have_a_reason_and_are_counted() -> None:
    """Every such block has a reason on the page and counts in ``NOT_RUN``."""
    reasons = {
        _name(page): [block.why_not for block in blocks_of(page.read_text(encoding="utf-8")) if block.why_not]
        for page in _PAGES
    }
    assert NOT_RUN == {page: len(found) for page, found in reasons.items() if found}
    assert [] == [reason for found in reasons.values() for reason in found if len(reason.split()) < 3]


@pytest.mark.parametrize("page", _PAGES, ids=_name)
def test_pages_show_commands_in_executed_blocks(page: Path) -> None:
    """No page has an indented block, or a command in a block of another kind."""
    text = page.read_text(encoding="utf-8")
    assert [] == re.findall(r"^\n    +(\S.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.MULTILINE)
    kinds = {"sh", "text", "python", "json", "html", "toml", "mermaid", "bash", "zsh", "fish", "powershell", "console"}
    assert set() == {block.kind for block in blocks_of(text)} - kinds
    of_shells = [block.text for block in blocks_of(text) if block.kind in {"bash", "zsh", "fish", "powershell"}]
    usages = [block.text for block in blocks_of(text) if block.kind == "console"]
    assert [] == [usage for usage in usages if not re.fullmatch(r"winml [a-z ]+ \[OPTIONS\].*\n", usage)]
    assert [] == [shown for shown in of_shells if re.search(r"^(\$ )?winml ", shown, re.MULTILINE)]
    assert text.count("\n```") == 2 * len(blocks_of(text))


def test_examples_of_public_functions_are_lines_of_the_pages() -> None:
    """Every public function, and the class that opens models, has an example, whose lines a block of a page runs."""
    blocks = [block for page in _PAGES for block in blocks_of(page.read_text(encoding="utf-8"))]
    lines = {line.strip() for block in blocks if block.kind == "python" for line in block.text.splitlines()}
    functions = {
        name: function
        for name in set(dir(modelkit)) & set(modelkit.__all__)  # without former names
        if inspect.isfunction(function := getattr(modelkit, name)) or function is modelkit.WinMLAutoModel
    }
    assert functions
    examples = {
        name: re.findall(r"^Example:\n +```python\n(.*?)```$", inspect.getdoc(function) or "", re.DOTALL | re.MULTILINE)
        for name, function in functions.items()
    }
    assert [] == [name for name, found in examples.items() if not found]
    assert [] == [
        line
        for found in examples.values()
        for line in found[0].splitlines()
        if line.strip() and line.strip() not in lines
    ]


def test_table_lists_all_verbs_of_both_tools() -> None:
    """The table lists the shared names and the names that only one tool has."""
    page = (REPOSITORY / "docs" / "coming_from" / "winml_cli.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.*) \|$", page.partition("## Verbs")[2].partition("\n## ")[0], re.MULTILINE)
    (same,) = (row for row in rows if row.endswith("| the same names"))
    (ours,) = (row for row in rows if row.startswith("| `"))
    assert sorted(COMMANDS) == sorted(re.findall(r"`(\w+)`", same + ours))


def test_unprinted_output_text_is_refused() -> None:
    """A block of output needs a preceding block that prints."""
    with pytest.raises(AssertionError, match="nothing printed"):
        PageRun(run_here).check("```text\nsaid by nobody\n```\n")


@pytest.mark.parametrize(
    ("shown", "printed", "measured", "expected"),
    [
        ("a\nb", "a\nb\n", False, True),
        ("a\nb", "a\nc", False, False),
        ("a\n…\nd", "a\nb\nc\nd", False, True),
        ("a\n…", "a\nb\nc", False, True),
        ("a\n…\nd", "a\nb\nc", False, False),
        ("a … c", "a b c", False, True),
        ("1.5 ms", "2.25 ms", True, True),
        ("1.5 ms", "2.25 ms", False, False),
        ("1.5 ms", "2.25 s", True, False),
        ("12 ms, 8%", "9 ms, 11%", True, True),
        ("SQNR -3.5 dB", "SQNR 7 dB", True, True),
        ("difference 2.6e-07", "difference 1.0e-08", True, True),
        ("222 of 222 nodes tagged", "3 of 222 nodes tagged", True, False),
        ("blocks.2: 1.5 dB", "blocks.3: 1.5 dB", True, False),
        ("no \n\n", "no", False, True),
    ],
)
def test_page_output_is_compared_line_by_line(shown: str, printed: str, measured: bool, expected: bool) -> None:
    """An ellipsis stands for omitted text; numbers of a measurement are not compared."""
    assert expected == matches(shown, printed, measured=measured)
