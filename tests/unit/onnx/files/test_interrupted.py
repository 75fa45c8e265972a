"""Completion of files that a killed command had finished, and removal of unfinished ones."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path

import pytest

from winml.modelkit.errors import OutputExistsError
from winml.modelkit.file_names import BUILD_MANIFEST_NAME, JOURNAL_NAME, OWNER_LOCK_NAME, PARTIAL_PREFIX, is_output_name
from winml.modelkit.onnx.files.foreign_files import COMPANION_NAMES
from winml.modelkit.onnx.files.named_paths import take_settled_changes
from winml.modelkit.onnx.files.output_files import OutputFiles, refuse_existing
from winml.modelkit.onnx.files.recovery import (
    MOVED_ASIDE,
    STAGED,
    settle_interrupted,
    unfinished_notes,
    write_journal,
)


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """The hidden folder of a command killed after its journal was written; one target existed before."""
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
    """All files are published, although the first already was; the hidden folder is removed."""
    (killed / STAGED / "a.json").replace(tmp_path / "a.json")
    with OutputFiles() as files:
        files.reserve(tmp_path / "other.json").write_text("other")
        files.commit()
    assert {"a.json": "new a.json", "b.json": "new b.json", "other.json": "other"} == _contents(tmp_path)
    assert not killed.exists()


def test_reader_gets_a_note_on_waiting_files_and_changes_nothing(tmp_path: Path, killed: Path) -> None:
    """A folder or a file in the folder is enough; completed or replaced files give no note."""
    before = sorted((path, path.lstat().st_mtime_ns) for path in tmp_path.rglob("*"))
    (note,) = unfinished_notes([tmp_path, tmp_path / "a.json"])
    assert "a.json, b.json" in note
    assert (note,) == unfinished_notes([tmp_path / "a.json"]) == unfinished_notes([tmp_path / "missing.json"])
    assert before == sorted((path, path.lstat().st_mtime_ns) for path in tmp_path.rglob("*"))
    (killed / STAGED / "a.json").replace(tmp_path / "a.json")
    assert "a.json" not in unfinished_notes([tmp_path])[0]
    (tmp_path / "b.json").write_text("made by hand since then")
    assert () == unfinished_notes([tmp_path])
    settle_interrupted(tmp_path)
    assert () == unfinished_notes([tmp_path])


def test_reader_gets_a_note_on_a_file_set_aside(tmp_path: Path, killed: Path) -> None:
    """An earlier file has no name at one moment on file systems without links."""
    (killed / JOURNAL_NAME).unlink()
    (killed / MOVED_ASIDE).mkdir()
    (tmp_path / "a.json").replace(killed / MOVED_ASIDE / "a.json")
    assert "a.json" in unfinished_notes([tmp_path])[0]


def test_refusal_counts_finished_files_and_changes_nothing(tmp_path: Path, killed: Path) -> None:
    """Finished but unpublished files count as existing; only a run recovers them."""
    before = sorted((path, path.lstat().st_mtime_ns) for path in tmp_path.rglob("*"))
    assert killed.exists()
    with pytest.raises(OutputExistsError, match=r"b\.json exists"):
        refuse_existing([tmp_path / "b.json"], overwrite=False)
    assert before == sorted((path, path.lstat().st_mtime_ns) for path in tmp_path.rglob("*"))


def test_unfinished_files_are_removed(tmp_path: Path, killed: Path) -> None:
    """The files may be incomplete without a journal."""
    (killed / JOURNAL_NAME).unlink()
    assert () == settle_interrupted(tmp_path)
    assert {"a.json": "old a"} == _contents(tmp_path)
    assert not killed.exists()


@pytest.mark.parametrize("changed", ["a.json", "b.json"])
def test_files_changed_since_the_interruption_stay(tmp_path: Path, killed: Path, changed: str) -> None:
    """A file replaced or made since then is newer than the staged one."""
    (tmp_path / changed).write_text("made by hand since then")
    expected = _contents(tmp_path)
    assert () == settle_interrupted(tmp_path)
    assert expected == _contents(tmp_path)
    assert not killed.exists()


def test_changed_staged_file_is_not_published(tmp_path: Path, killed: Path) -> None:
    """A machine that lost its power may have written the journal and not the file."""
    (killed / STAGED / "b.json").write_text("")
    assert () == settle_interrupted(tmp_path)
    assert {"a.json": "old a"} == _contents(tmp_path)


@pytest.mark.parametrize("name", ["../precious", "/etc/hostname", "..", "", "a/b", 7, "a\0b"])
def test_journal_never_leads_out_of_its_folder(tmp_path: Path, killed: Path, name: object) -> None:
    """No file is moved or removed, and the folder stays, for any content of the journal."""
    (tmp_path.parent / "precious").write_text("mine")
    record = json.loads((killed / JOURNAL_NAME).read_text())
    for key in ("moves", "removals"):
        changed = {**record, key: [{"name": name, "size_bytes": 4, "replaces": None, "state": [4, 0]}]}
        (killed / JOURNAL_NAME).write_text(json.dumps(changed))
        assert () == settle_interrupted(tmp_path)
    assert "mine" == (tmp_path.parent / "precious").read_text()
    assert killed.exists()


@pytest.mark.parametrize("name", [".bashrc", "conftest.py", "json.pyc", "run.sh", "Makefile", ".winml-build.lock"])
def test_journal_moves_no_file_that_no_command_writes(tmp_path: Path, killed: Path, name: str) -> None:
    """A downloaded folder may contain a journal: its staged files and files moved aside are ignored."""
    (killed / STAGED / name).write_text("theirs")
    (killed / MOVED_ASIDE).mkdir()
    record = json.loads((killed / JOURNAL_NAME).read_text())
    record["moves"].append({"name": name, "size_bytes": 6, "replaces": None})
    for text in (json.dumps(record), json.dumps({**record, "moves": []})):
        (killed / JOURNAL_NAME).write_text(text)
        assert () == unfinished_notes([tmp_path])
        assert () == settle_interrupted(tmp_path)
        (killed / MOVED_ASIDE / name).write_text("theirs")
    assert {"a.json": "old a"} == _contents(tmp_path)
    assert killed.exists()


def test_files_beside_models_and_weights_have_output_names() -> None:
    """Files that commands publish together are completed after a kill."""
    models = ["model.onnx", "m.onnx.0123456789ab.data", "model.onnx_data", "model.onnx_data_1", "french.onnx_adapter"]
    texts = ["model_htp_metadata.json", "build_manifest.json", "results.csv", "tune.html", "LICENSE", "values.npz"]
    assert [] == [name for name in (*models, *texts, *COMPANION_NAMES) if not is_output_name(name)]


@pytest.mark.parametrize("content", ["{", "[]", '{"version": 99}', "[" * 100_000])
def test_journal_of_another_version_is_left_for_that_version(tmp_path: Path, killed: Path, content: str) -> None:
    """The files of an unknown version are unknown too, so no file is removed."""
    (killed / JOURNAL_NAME).write_text(content)
    assert () == settle_interrupted(tmp_path)
    assert (killed / STAGED / "b.json").exists()


def test_infinite_size_is_ignored(tmp_path: Path, killed: Path) -> None:
    """JSON of Python has an infinity."""
    record = json.loads((killed / JOURNAL_NAME).read_text())
    record["moves"][1]["size_bytes"] = float("inf")
    (killed / JOURNAL_NAME).write_text(json.dumps(record))
    assert () == settle_interrupted(tmp_path)
    assert {"a.json": "old a"} == _contents(tmp_path)
    assert killed.exists()


def test_removals_are_limited_to_weights_of_moved_models(tmp_path: Path, killed: Path) -> None:
    """A journal in a downloaded folder cannot remove any other file."""
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    status = precious.stat()
    record = json.loads((killed / JOURNAL_NAME).read_text())
    record["removals"] = [{"name": precious.name, "state": [status.st_size, status.st_mtime_ns]}]
    (killed / JOURNAL_NAME).write_text(json.dumps(record))
    assert () == settle_interrupted(tmp_path)
    assert {"a.json": "old a", "precious.txt": "mine"} == _contents(tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
@pytest.mark.parametrize("what", [STAGED, f"{STAGED}/b.json", OWNER_LOCK_NAME, JOURNAL_NAME])
def test_links_in_a_hidden_folder_are_not_followed(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, killed: Path, what: str
) -> None:
    """The tool makes no links there; files and contents of another folder stay."""
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "there"
    (killed / what).rename(elsewhere)
    (killed / what).symlink_to(elsewhere)
    before = _contents(elsewhere) if elsewhere.is_dir() else elsewhere.read_text()
    assert () == settle_interrupted(tmp_path)
    assert before == (_contents(elsewhere) if elsewhere.is_dir() else elsewhere.read_text())
    assert {"a.json": "old a"} == _contents(tmp_path)


def test_file_that_the_user_deleted_does_not_come_back(tmp_path: Path, killed: Path) -> None:
    """A file deleted since the kill was not moved aside."""
    (tmp_path / "a.json").unlink()
    assert () == settle_interrupted(tmp_path)
    assert {} == _contents(tmp_path)
    assert not killed.exists()


def test_recovery_is_reported(tmp_path: Path, killed: Path) -> None:
    """The message names the folder and the files, and appears once."""
    assert killed.exists()
    take_settled_changes()
    settle_interrupted(tmp_path)
    (words,) = take_settled_changes()
    assert f"{tmp_path}: an earlier command was killed; put in place a.json, b.json" == words
    assert () == take_settled_changes()


def _replace_and_die(target: Path, number: int) -> None:
    """Replace a file without links, and kill the process when the N-th file has been moved."""

    def refusing(*_arguments: object, **_options: object) -> None:
        raise PermissionError("no links here")

    os.link = refusing
    replace, moved = Path.replace, []

    def counting(self: Path, place: Path) -> Path:
        done = replace(self, place)
        if JOURNAL_NAME != Path(place).name:
            moved.append(place)
        if len(moved) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    Path.replace = counting  # type: ignore[assignment,method-assign]
    with OutputFiles() as files:
        files.reserve(target).write_text("new")
        files.commit()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="kills a fork of this process")
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("is_damaged", [False, True])
def test_single_file_survives_a_kill_without_links(tmp_path: Path, number: int, is_damaged: bool) -> None:
    """The kill happens before or after the new file is published; a truncated new file is rolled back."""
    target = tmp_path / "model.onnx"
    target.write_text("old")
    child = multiprocessing.get_context("fork").Process(target=_replace_and_die, args=(target, number))
    child.start()
    child.join()
    assert -signal.SIGKILL == child.exitcode
    if is_damaged:
        for staged in tmp_path.glob(f"{PARTIAL_PREFIX}*/{STAGED}/*"):
            staged.write_text("")
    settle_interrupted(tmp_path)
    assert {"model.onnx": "old" if is_damaged and number == 1 else "new"} == _contents(tmp_path)
    assert ["model.onnx"] == [path.name for path in tmp_path.iterdir()]


@pytest.mark.parametrize(("content", "has_note"), [('{"status": "unfinished"}', True), ('{"status": "done"}', False)])
def test_reader_gets_a_note_on_an_unfinished_build(tmp_path: Path, content: str, has_note: bool) -> None:
    """A killed build leaves models of the build before."""
    (tmp_path / BUILD_MANIFEST_NAME).write_text(content)
    assert has_note == bool(unfinished_notes([tmp_path / "model.onnx"]))
    (tmp_path / BUILD_MANIFEST_NAME).write_text("{damaged")
    assert () == unfinished_notes([tmp_path])


@pytest.mark.parametrize(
    ("content", "is_finished_by_repeating"),
    [
        ({"status": "unfinished"}, True),
        ({"status": "unfinished", "failed": None, "reason": None}, True),
        ({"status": "unfinished", "failed": "quantize", "reason": "12 dB"}, False),
        ({"status": "unfinished", "failed": "quantize", "reason": 7}, False),
    ],
)
def test_failed_build_is_not_finished_by_repeating(
    tmp_path: Path, content: dict[str, object], is_finished_by_repeating: bool
) -> None:
    """The note advises to repeat the command only if repeating can finish the build."""
    (tmp_path / BUILD_MANIFEST_NAME).write_text(json.dumps(content))
    (note,) = unfinished_notes([tmp_path])
    assert is_finished_by_repeating == ("quantize" not in note)
    assert ("12 dB" in note) == (content.get("reason") == "12 dB")
