"""Do the commands and blocks of Python on the pages run as they stand, and print what the pages show?"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from docs.shown_pages import PageRun, blocks_of, matches
from e2e.in_process import run_here
from e2e.workplace import Outcome
from house.sources import REPOSITORY
from winml.modelkit.cli.main import COMMANDS

HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"
EXPORT = ("export", "-m", HUB_ID, "-o", "model.onnx")
"""What most pages begin with; it is run once for all of them."""

_FOLDERS = ("how_to", "coming_from")
_PAGES = sorted(path for folder in _FOLDERS for path in (REPOSITORY / "docs" / folder).glob("*.md"))
_RUNS = [path for path in _PAGES if re.search(r"^```(sh|python|text)$", path.read_text(encoding="utf-8"), re.MULTILINE)]


@pytest.fixture(scope="module")
def exported(minilm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """The folder in which MiniLM was exported, and what the command answered."""
    folder = tmp_path_factory.mktemp("exported")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        outcome = run_here(*(word.replace(HUB_ID, str(minilm_folder)) for word in EXPORT))
    return folder, outcome


@pytest.mark.usefixtures("libraries_may_warn")
@pytest.mark.parametrize("page", _RUNS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_examples_of_a_page_run_and_print_what_it_shows(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    minilm_folder: Path,
    exported: tuple[Path, Outcome],
) -> None:
    """From top to bottom in one empty folder; the Hub id is answered by the same checkpoint on this disk."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WINML_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(*words: str) -> Outcome:
        if words == EXPORT:
            # Links: whatever replaces a file puts another in its place.
            shutil.copytree(exported[0], tmp_path, dirs_exist_ok=True, copy_function=os.link)
            return exported[1]
        return run_here(*(word.replace(HUB_ID, str(minilm_folder)) for word in words))

    PageRun(run).check(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", _PAGES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_pages_show_commands_in_blocks_that_are_run(page: Path) -> None:
    """No indented block, and no command in a block of another kind."""
    text = page.read_text(encoding="utf-8")
    assert [] == re.findall(r"^    +(?:winml|\$|python) .*$", text, re.MULTILINE)
    kinds = {"sh", "text", "python", "json", "html"}
    assert set() == {block.kind for block in blocks_of(text)} - kinds
    assert text.count("\n```") == 2 * len(blocks_of(text))


def test_verbs_beside_those_of_winml_cli_are_all_there_are() -> None:
    """Those of the same name, and those that only one of the two has."""
    page = (REPOSITORY / "docs" / "coming_from" / "winml_cli.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.*) \|$", page.partition("## Verbs")[2].partition("\n## ")[0], re.MULTILINE)
    (same,) = (row for row in rows if row.endswith("| the same names"))
    (ours,) = (row for row in rows if row.startswith("| `"))
    assert sorted(COMMANDS) == sorted(re.findall(r"`(\w+)`", same + ours))


def test_text_that_nothing_printed_is_refused() -> None:
    """A block of output stands behind what prints it."""
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
        ("2.6e-07 of scale", "1.0e-08 of scale", True, True),
        ("222 of 222 nodes tagged", "3 of 222 nodes tagged", True, False),
        ("blocks.2: 1.5 dB", "blocks.3: 1.5 dB", True, False),
        ("no \n\n", "no", False, True),
    ],
)
def test_what_a_page_shows_is_compared_line_by_line(shown: str, printed: str, measured: bool, expected: bool) -> None:
    """An ellipsis stands for what is left out; numbers of a measurement are not compared."""
    assert expected == matches(shown, printed, measured=measured)
