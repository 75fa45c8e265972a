"""What a killed command had finished is put in place; what it had not goes, and nothing else is ever touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from winml.modelkit.errors import OutputExistsError
from winml.modelkit.file_names import JOURNAL_NAME, OWNER_LOCK_NAME, PARTIAL_PREFIX
from winml.modelkit.graph.files.interrupted import STAGED, settle_interrupted
from winml.modelkit.graph.files.journal import write_journal
from winml.modelkit.graph.files.output_files import OutputFiles, refuse_existing


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """The hidden folder of a command that was killed when its journal was written: one file was there before."""
    (tmp_path / "a.json").write_text("old a")
    folder = tmp_path / f"{PARTIAL_PREFIX}x"
    (folder / STAGED).mkdir(parents=True)
    (folder / OWNER_LOCK_NAME).touch()
    for name in ("a.json", "b.json"):
        (folder / STAGED / name).write_text(f"new {name}")
    write_journal(folder, folder / STAGED, tmp_path, ["a.json", "b.json"], [])
    return folder


def _contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def test_finished_files_are_put_in_place_by_the_next_command(tmp_path: Path, killed: Path) -> None:
    """All of them, also where the first is in place already; the hidden folder goes."""
    (killed / STAGED / "a.json").replace(tmp_path / "a.json")
    with OutputFiles() as files:
        files.reserve(tmp_path / "other.json").write_text("other")
        files.commit()
    assert {"a.json": "new a.json", "b.json": "new b.json", "other.json": "other"} == _contents(tmp_path)
    assert not killed.exists()


def test_refusal_says_that_the_file_was_completed_just_now(tmp_path: Path, killed: Path) -> None:
    """Who runs the killed command again need not wonder where the file comes from."""
    assert killed.exists()
    with pytest.raises(OutputExistsError, match=r"b\.json exists already \(a command that was killed had finished it"):
        refuse_existing([tmp_path / "b.json"], overwrite=False)


def test_unfinished_files_are_removed(tmp_path: Path, killed: Path) -> None:
    """Without a journal not all of them were complete."""
    (killed / JOURNAL_NAME).unlink()
    assert () == settle_interrupted(tmp_path)
    assert {"a.json": "old a"} == _contents(tmp_path)
    assert not killed.exists()


@pytest.mark.parametrize("changed", ["a.json", "b.json"])
def test_files_of_somebody_who_went_on_are_left_alone(tmp_path: Path, killed: Path, changed: str) -> None:
    """A file that was replaced or made since then is newer than what was to be put there."""
    (tmp_path / changed).write_text("made by hand since then")
    expected = _contents(tmp_path)
    assert () == settle_interrupted(tmp_path)
    assert expected == _contents(tmp_path)
    assert not killed.exists()


def test_file_that_is_not_as_it_was_finished_is_not_put_in_place(tmp_path: Path, killed: Path) -> None:
    """A machine that lost its power may have written the journal and not the file."""
    (killed / STAGED / "b.json").write_text("")
    assert () == settle_interrupted(tmp_path)
    assert {"a.json": "old a"} == _contents(tmp_path)


@pytest.mark.parametrize("name", ["../precious", "/etc/hostname", "..", "", "a/b", 7])
def test_journal_never_leads_out_of_its_folder(tmp_path: Path, killed: Path, name: object) -> None:
    """Whoever wrote it: nothing is moved or removed, and the folder is left as it is."""
    (tmp_path.parent / "precious").write_text("mine")
    record = json.loads((killed / JOURNAL_NAME).read_text())
    for key in ("moves", "removals"):
        changed = {**record, key: [{"name": name, "size_bytes": 4, "replaces": None, "state": [4, 0]}]}
        (killed / JOURNAL_NAME).write_text(json.dumps(changed))
        assert () == settle_interrupted(tmp_path)
    assert "mine" == (tmp_path.parent / "precious").read_text()
    assert killed.exists()


@pytest.mark.parametrize("content", ["{", "[]", '{"version": 99}', "[" * 100_000])
def test_journal_of_another_version_is_left_for_that_version(tmp_path: Path, killed: Path, content: str) -> None:
    """Its files are not known, so none is removed."""
    (killed / JOURNAL_NAME).write_text(content)
    assert () == settle_interrupted(tmp_path)
    assert (killed / STAGED / "b.json").exists()
