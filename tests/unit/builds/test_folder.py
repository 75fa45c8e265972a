"""Does a build touch only what is its own, and only while it holds the folder?"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import filelock
import pytest

from winml.modelkit.builds.folder import BuildFolder, held_folder, refuse_input_as_output
from winml.modelkit.builds.identity import FileRecords
from winml.modelkit.builds.manifest_records import BuildManifest
from winml.modelkit.errors import OutputExistsError, UsageError, WriteError
from winml.modelkit.file_names import BUILD_LOCK_NAME, BUILD_MANIFEST_NAME, OWNER_LOCK_NAME
from winml.modelkit.onnx.files.recovery import OwnedFolder

NAMES = ("export.onnx", "model.onnx")


def silent(_words: str) -> None:
    """Nobody waits in this test."""


def manifest(folder: Path, **changes: object) -> None:
    """Write the manifest of a finished build of both files."""
    record = {"manifest_version": 1, "status": "done", "files": [*NAMES, BUILD_MANIFEST_NAME], **changes}
    (folder / BUILD_MANIFEST_NAME).write_text(json.dumps(record))


def names(folder: Path) -> set[str]:
    """Everything in a folder."""
    return {path.name for path in folder.iterdir()}


def test_folder_with_a_foreign_file_of_our_name_is_refused(tmp_path: Path) -> None:
    """What no manifest lists belongs to somebody else."""
    (tmp_path / "model.onnx").write_text("mine")
    with pytest.raises(OutputExistsError, match=r"model\.onnx exists"):
        BuildFolder(tmp_path, NAMES, is_cache=False)


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
def test_file_behind_a_link_is_not_ours_whatever_the_manifest_lists(tmp_path: Path) -> None:
    """A folder that somebody else made cannot have a file of another place removed."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "letter.txt").write_text("mine")
    place = tmp_path / "built"
    place.mkdir()
    (place / "link").symlink_to(tmp_path / "precious")
    (place / "old.onnx").touch()
    manifest(place, files=["old.onnx", "link/letter.txt", "../precious/letter.txt", BUILD_MANIFEST_NAME])
    with held_folder(place, NAMES, is_cache=False, tell=silent) as folder:
        folder.remove_all_but([])
    assert (tmp_path / "precious" / "letter.txt").exists()
    assert not (place / "old.onnx").exists()


def test_part_that_is_called_like_a_place_elsewhere_is_not_used(tmp_path: Path) -> None:
    """Names of files are made of it."""
    manifest(tmp_path, manifest_version=2, parts=[{"name": "../elsewhere"}])
    assert BuildFolder(tmp_path, NAMES, is_cache=False).manifest is None
    manifest(tmp_path, manifest_version=2, parts=[{"name": "encoder"}])
    assert BuildFolder(tmp_path, NAMES, is_cache=False).manifest is not None


@pytest.mark.parametrize("name", ["../export.onnx", "{place}/export.onnx"])
def test_recorded_file_that_lies_elsewhere_counts_as_changed(tmp_path: Path, name: str) -> None:
    """Its content is as recorded; a result that is not in the folder is made anew."""
    place = tmp_path / "built"
    place.mkdir()
    (tmp_path / "export.onnx").write_bytes(b"graph")
    record = FileRecords(tmp_path).of([tmp_path / "export.onnx"])[0]
    assert "" == FileRecords(tmp_path).first_changed([record])
    elsewhere = record.model_copy(update={"name": name.format(place=tmp_path)})
    assert elsewhere.name == FileRecords(place).first_changed([elsewhere])


def test_folder_with_other_foreign_files_is_fine(tmp_path: Path) -> None:
    """They have nothing to do with us."""
    (tmp_path / "notes.txt").write_text("mine")
    with held_folder(tmp_path, NAMES, is_cache=False, tell=silent) as folder:
        folder.announce()
        (tmp_path / "export.onnx").write_text("ours")
        folder.remove_all_but([])
    assert {"notes.txt", BUILD_MANIFEST_NAME} == names(tmp_path)


def test_only_listed_names_without_folders_are_removed(tmp_path: Path) -> None:
    """A manifest cannot make us remove files elsewhere."""
    (tmp_path / "out").mkdir()
    (tmp_path / "precious").write_text("mine")
    manifest(tmp_path / "out", files=["../precious", "export.onnx", BUILD_MANIFEST_NAME])
    BuildFolder(tmp_path / "out", NAMES, is_cache=False).remove_all_but([])
    assert (tmp_path / "precious").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"manifest_version": 7, "files": ["model.onnx"], "new": 1}', "version 7"),
        ('{"manifest_version": 0, "files": ["model.onnx"]}', "version 0"),
        ('{"manifest_version": 1, "files": ["model.onnx"], "status": "?"}', "is damaged"),
    ],
)
def test_manifest_that_is_not_ours_to_read_still_says_which_files_are(tmp_path: Path, content: str, words: str) -> None:
    """Other versions are not used again, and their files may be replaced."""
    (tmp_path / "model.onnx").write_text("older")
    (tmp_path / BUILD_MANIFEST_NAME).write_text(content)
    folder = BuildFolder(tmp_path, NAMES, is_cache=False)
    assert folder.manifest is None
    assert words in folder.notes[0]


def test_damaged_manifest_is_refused_except_in_the_cache(tmp_path: Path) -> None:
    """Without it nobody knows whose files these are; in the cache all are ours."""
    (tmp_path / "model.onnx").write_text("?")
    (tmp_path / BUILD_MANIFEST_NAME).write_text("{")
    with pytest.raises(OutputExistsError, match="is damaged"):
        BuildFolder(tmp_path, NAMES, is_cache=False)
    assert "is damaged" in BuildFolder(tmp_path, NAMES, is_cache=True).notes[0]


def test_announced_names_are_ours_after_a_kill(tmp_path: Path) -> None:
    """A file that was put in place just before a kill is known by the next build."""
    with held_folder(tmp_path, NAMES, is_cache=False, tell=silent) as folder:
        folder.announce()
        (tmp_path / "export.onnx").write_text("finished, not yet written down")
    again = BuildFolder(tmp_path, NAMES, is_cache=False)
    assert again.manifest is not None
    assert "unfinished" == again.manifest.status


def test_leftovers_of_a_killed_build_are_removed_and_others_kept(tmp_path: Path) -> None:
    """Hidden folders go where their owner ended, and only there."""
    manifest(tmp_path)
    (tmp_path / ".winml-partial-x").mkdir()
    (tmp_path / ".winml-partial-x" / OWNER_LOCK_NAME).touch()
    alive = OwnedFolder.make(tmp_path, ".winml-partial-")
    with held_folder(tmp_path, NAMES, is_cache=False, tell=silent):
        pass
    assert {BUILD_MANIFEST_NAME, alive.path.name} == names(tmp_path)
    alive.remove()


def test_held_folder_leaves_nothing_where_nothing_was_built(tmp_path: Path) -> None:
    """Folders that were made for it go again, and so does what was announced."""
    with held_folder(tmp_path / "a" / "b", NAMES, is_cache=False, tell=silent) as folder:
        folder.announce()
        folder.forget()
    assert set() == names(tmp_path)


def test_second_build_says_that_it_waits_and_then_sees_what_the_first_did(tmp_path: Path) -> None:
    """The lock is of the operating system; the manifest is read once it is held."""
    heard: list[str] = []
    seen: list[BuildManifest | None] = []

    def second() -> None:
        with held_folder(tmp_path, NAMES, is_cache=False, tell=heard.append) as folder:
            seen.append(folder.manifest)

    thread = threading.Thread(target=second)
    with held_folder(tmp_path, NAMES, is_cache=False, tell=silent) as folder:
        thread.start()
        wait_until(lambda: bool(heard))
        folder.save(BuildManifest(status="done", files=("model.onnx",)))
        assert [] == seen
    thread.join(timeout=30)
    assert [f"another build works in {tmp_path}: waiting for it to end"] == heard
    assert ["model.onnx"] == [name for found in seen if found is not None for name in found.files]
    assert {BUILD_MANIFEST_NAME} == names(tmp_path)


def wait_until(is_true: Callable[[], bool]) -> None:
    """Wait for something another thread does, for at most half a minute."""
    event = threading.Event()
    for _ in range(3000):
        if is_true():
            return
        event.wait(0.01)
    raise AssertionError("it did not happen")


def test_lock_of_a_process_that_ended_is_free(tmp_path: Path) -> None:
    """A lock file that is left behind holds nothing."""
    (tmp_path / BUILD_LOCK_NAME).write_text("")
    with held_folder(tmp_path, NAMES, is_cache=False, tell=silent), pytest.raises(filelock.Timeout):
        filelock.FileLock(tmp_path / BUILD_LOCK_NAME).acquire(timeout=0)


def test_input_is_never_the_output(tmp_path: Path) -> None:
    """Neither the checkpoint itself nor a file under one of our names."""
    (tmp_path / "model.onnx").write_text("input")
    with pytest.raises(UsageError, match="source model"):
        refuse_input_as_output(tmp_path, [tmp_path], NAMES)
    with pytest.raises(UsageError, match="would replace"):
        refuse_input_as_output(tmp_path, [tmp_path / "model.onnx"], NAMES)
    refuse_input_as_output(tmp_path / "out", [tmp_path, tmp_path / "model.onnx"], NAMES)


def test_place_that_cannot_hold_a_build_is_refused(tmp_path: Path) -> None:
    """A file where the folder should be, or above it."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="a file"):
        refuse_input_as_output(tmp_path / "file", [], NAMES)
    with pytest.raises(WriteError):
        refuse_input_as_output(tmp_path / "file" / "out", [], NAMES)
