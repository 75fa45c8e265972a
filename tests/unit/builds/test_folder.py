"""Ownership of the files in a build folder, and its lock."""

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
    """Fail on a message about waiting."""


def manifest(folder: Path, **changes: object) -> None:
    """Write the manifest of a finished build with both files."""
    record = {"manifest_version": 1, "status": "done", "files": [*NAMES, BUILD_MANIFEST_NAME], **changes}
    (folder / BUILD_MANIFEST_NAME).write_text(json.dumps(record))


def names(folder: Path) -> set[str]:
    """Return the names of all files in a folder."""
    return {path.name for path in folder.iterdir()}


def test_folder_with_a_foreign_file_of_our_name_is_refused(tmp_path: Path) -> None:
    """A file that no manifest lists belongs to the user."""
    (tmp_path / "model.onnx").write_text("mine")
    with pytest.raises(OutputExistsError, match=r"model\.onnx exists"):
        BuildFolder(tmp_path, NAMES, is_cache=False)


@pytest.mark.skipif(sys.platform == "win32", reason="links need rights there")
def test_file_behind_a_link_is_foreign_despite_the_manifest(tmp_path: Path) -> None:
    """The manifest of a foreign folder cannot cause the removal of a file elsewhere."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "letter.txt").write_text("mine")
    place = tmp_path / "built"
    place.mkdir()
    (place / "link").symlink_to(tmp_path / "precious")
    (place / "old.onnx").touch()
    manifest(place, files=["old.onnx", "link/letter.txt", "../precious/letter.txt", BUILD_MANIFEST_NAME])
    with held_folder(place, NAMES, is_cache=False, notify=silent) as folder:
        folder.remove_all_but([])
    assert (tmp_path / "precious" / "letter.txt").exists()
    assert not (place / "old.onnx").exists()


def test_part_name_with_a_path_is_refused(tmp_path: Path) -> None:
    """The name of a part becomes a file name, so a name with a path invalidates the manifest."""
    manifest(tmp_path, manifest_version=2, parts=[{"name": "../elsewhere"}])
    assert BuildFolder(tmp_path, NAMES, is_cache=False).manifest is None
    manifest(tmp_path, manifest_version=2, parts=[{"name": "encoder"}])
    assert BuildFolder(tmp_path, NAMES, is_cache=False).manifest is not None


@pytest.mark.parametrize("name", ["../export.onnx", "{place}/export.onnx"])
def test_recorded_file_outside_the_folder_counts_as_changed(tmp_path: Path, name: str) -> None:
    """The content is as recorded, but a result outside of the folder is made anew."""
    place = tmp_path / "built"
    place.mkdir()
    (tmp_path / "export.onnx").write_bytes(b"graph")
    record = FileRecords(tmp_path).of([tmp_path / "export.onnx"])[0]
    assert "" == FileRecords(tmp_path).first_changed([record])
    elsewhere = record.model_copy(update={"name": name.format(place=tmp_path)})
    assert elsewhere.name == FileRecords(place).first_changed([elsewhere])


def test_folder_with_other_foreign_files_is_fine(tmp_path: Path) -> None:
    """A foreign file under a name that builds do not use stays."""
    (tmp_path / "notes.txt").write_text("mine")
    with held_folder(tmp_path, NAMES, is_cache=False, notify=silent) as folder:
        folder.announce()
        (tmp_path / "export.onnx").write_text("ours")
        folder.remove_all_but([])
    assert {"notes.txt", BUILD_MANIFEST_NAME} == names(tmp_path)


def test_only_listed_names_without_folders_are_removed(tmp_path: Path) -> None:
    """A manifest cannot make a build remove files elsewhere."""
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
def test_manifest_of_another_version_lists_replaceable_files(tmp_path: Path, content: str, words: str) -> None:
    """A build of another manifest version is not reused, and its files may be replaced."""
    (tmp_path / "model.onnx").write_text("older")
    (tmp_path / BUILD_MANIFEST_NAME).write_text(content)
    folder = BuildFolder(tmp_path, NAMES, is_cache=False)
    assert folder.manifest is None
    assert words in folder.notes[0]


def test_damaged_manifest_is_refused_except_in_the_cache(tmp_path: Path) -> None:
    """Without the manifest the owner of the files is unknown; in the cache all files are ours."""
    (tmp_path / "model.onnx").write_text("?")
    (tmp_path / BUILD_MANIFEST_NAME).write_text("{")
    with pytest.raises(OutputExistsError, match="is damaged"):
        BuildFolder(tmp_path, NAMES, is_cache=False)
    assert "is damaged" in BuildFolder(tmp_path, NAMES, is_cache=True).notes[0]


def test_announced_names_are_recognized_after_a_kill(tmp_path: Path) -> None:
    """A file that was put in place just before a kill is known to the next build."""
    with held_folder(tmp_path, NAMES, is_cache=False, notify=silent) as folder:
        folder.announce()
        (tmp_path / "export.onnx").write_text("finished, not yet written down")
    again = BuildFolder(tmp_path, NAMES, is_cache=False)
    assert again.manifest is not None
    assert "unfinished" == again.manifest.status


def test_leftovers_of_a_killed_build_are_removed_and_other_folders_stay(tmp_path: Path) -> None:
    """Hidden folders are removed if their owner has ended, and only then."""
    manifest(tmp_path)
    (tmp_path / ".winml-partial-x").mkdir()
    (tmp_path / ".winml-partial-x" / OWNER_LOCK_NAME).touch()
    alive = OwnedFolder.make(tmp_path, ".winml-partial-")
    with held_folder(tmp_path, NAMES, is_cache=False, notify=silent):
        pass
    assert {BUILD_MANIFEST_NAME, alive.path.name} == names(tmp_path)
    alive.remove()


def test_held_folder_is_removed_if_no_stage_ran(tmp_path: Path) -> None:
    """The folders made for the build are removed, and so is the announcement."""
    with held_folder(tmp_path / "a" / "b", NAMES, is_cache=False, notify=silent) as folder:
        folder.announce()
        folder.forget()
    assert set() == names(tmp_path)


def test_second_build_waits_and_reads_the_first_manifest(tmp_path: Path) -> None:
    """The lock is one of the operating system; the manifest is read once the lock is held."""
    heard: list[str] = []
    seen: list[BuildManifest | None] = []

    def second() -> None:
        with held_folder(tmp_path, NAMES, is_cache=False, notify=heard.append) as folder:
            seen.append(folder.manifest)

    thread = threading.Thread(target=second)
    with held_folder(tmp_path, NAMES, is_cache=False, notify=silent) as folder:
        thread.start()
        wait_until(lambda: bool(heard))
        folder.save(BuildManifest(status="done", files=("model.onnx",)))
        assert [] == seen
    thread.join(timeout=30)
    assert [f"another build works in {tmp_path}: waiting for it to end"] == heard
    assert ["model.onnx"] == [name for found in seen if found is not None for name in found.files]
    assert {BUILD_MANIFEST_NAME} == names(tmp_path)


def wait_until(is_true: Callable[[], bool]) -> None:
    """Wait at most half a minute until a condition holds in another thread."""
    event = threading.Event()
    for _ in range(3000):
        if is_true():
            return
        event.wait(0.01)
    raise AssertionError("it did not happen")


def test_lock_of_a_process_that_ended_is_free(tmp_path: Path) -> None:
    """A leftover lock file locks nothing."""
    (tmp_path / BUILD_LOCK_NAME).write_text("")
    with held_folder(tmp_path, NAMES, is_cache=False, notify=silent), pytest.raises(filelock.Timeout):
        filelock.FileLock(tmp_path / BUILD_LOCK_NAME).acquire(timeout=0)


def test_input_is_never_the_output(tmp_path: Path) -> None:
    """The output is neither the checkpoint itself nor a model file under one of our names."""
    (tmp_path / "model.onnx").write_text("input")
    with pytest.raises(UsageError, match="source model"):
        refuse_input_as_output(tmp_path, [tmp_path], NAMES)
    with pytest.raises(UsageError, match="would replace"):
        refuse_input_as_output(tmp_path, [tmp_path / "model.onnx"], NAMES)
    refuse_input_as_output(tmp_path / "out", [tmp_path, tmp_path / "model.onnx"], NAMES)


def test_place_that_cannot_hold_a_build_is_refused(tmp_path: Path) -> None:
    """A file in place of the folder, or above it, is refused."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="a file"):
        refuse_input_as_output(tmp_path / "file", [], NAMES)
    with pytest.raises(WriteError):
        refuse_input_as_output(tmp_path / "file" / "out", [], NAMES)
