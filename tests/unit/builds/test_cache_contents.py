"""List of the cached builds, and their removal beside running builds."""

from __future__ import annotations

import io
import json
import os
from datetime import timedelta
from pathlib import Path

import filelock
import pytest
import torch

from winml.modelkit import build_onnx_model, export_pytorch
from winml.modelkit.builds.cache import list_cache, remove_builds, stored_bytes
from winml.modelkit.builds.cache_command import contents_document
from winml.modelkit.errors import WriteError
from winml.modelkit.file_names import BUILD_LOCK_NAME, BUILD_MANIFEST_NAME
from winml.modelkit.report.terminal import console_for, print_document


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with the builds of two models, the first of them a week old, and a foreign file."""
    root = tmp_path / "cache"
    monkeypatch.setenv("WINML_CACHE", str(root))
    for number in (1, 2):
        path = tmp_path / f"net{number}.onnx"
        export_pytorch(torch.nn.Linear(4, number), path, torch.randn(2, 4))
        folder = build_onnx_model(path, config={"quant": None, "compile": None}).folder
        if number == 1:
            for file in (folder, *folder.iterdir()):
                os.utime(file, (file.stat().st_atime, file.stat().st_mtime - 7 * 86_400))
    (root / "mine.txt").write_text("mine", encoding="utf-8")
    return root


def test_builds_are_listed_with_the_freed_bytes(cache: Path) -> None:
    """A file with several names in a folder counts once."""
    contents = list_cache()
    assert ["net2.onnx", "net1.onnx"] == [Path(build.model or "").name for build in contents.builds]
    assert all(build.is_finished for build in contents.builds)
    sizes = {file.stat().st_ino: file.stat().st_size for file in contents.builds[0].folder.iterdir()}
    assert sum(sizes.values()) == contents.builds[0].size_bytes
    notes = [path for name in ("stages", "digests") for path in (cache / name).glob("*")]
    assert sum(path.stat().st_size for path in notes) == contents.other_bytes
    json.dumps(contents.as_record())


def test_old_builds_are_removed_and_newer_builds_still_serve(cache: Path, tmp_path: Path) -> None:
    """Notes that lead to a removed build are removed with it."""
    removed = remove_builds(list_cache(timedelta(days=3)))
    assert ["net1.onnx"] == [Path(build.model or "").name for build in removed.builds]
    assert ["net2.onnx"] == [Path(build.model or "").name for build in list_cache().builds]
    for note in (cache / "stages").iterdir():
        assert Path(json.loads(note.read_text(encoding="utf-8"))["folder"]).is_dir()
    again = build_onnx_model(tmp_path / "net2.onnx", config={"quant": None, "compile": None})
    assert {"reused", "skipped"} == {stage.status for part in again.manifest.parts for stage in part.stages}
    build_onnx_model(tmp_path / "net1.onnx", config={"quant": None, "compile": None})


def test_emptied_cache_contains_foreign_files_only(cache: Path) -> None:
    """A foreign file stays, and the list of the emptied cache has no builds and no bytes."""
    assert 2 == len(remove_builds(list_cache()).builds)
    assert [cache / "mine.txt"] == list(cache.rglob("*"))
    assert ((), 0) == (list_cache().builds, list_cache().size_bytes)


def test_locked_build_stays(cache: Path) -> None:
    """A build with a held lock is not removed."""
    busy = list_cache().builds[1]
    with filelock.FileLock(busy.folder / BUILD_LOCK_NAME):
        removed = remove_builds(list_cache())
        assert [busy.folder] == [build.folder for build in removed.in_use]
        assert (busy.folder / "model.onnx").is_file()
    assert [busy.folder] == [build.folder for build in list_cache().builds]


def test_damaged_manifest_is_an_unfinished_build(cache: Path) -> None:
    """A build with a damaged manifest can be removed like any other."""
    folder = list_cache().builds[0].folder
    (folder / "build_manifest.json").write_text("[1", encoding="utf-8")
    damaged = next(build for build in list_cache().builds if build.folder == folder)
    assert (None, False) == (damaged.model, damaged.is_finished)
    assert 2 == len(remove_builds(list_cache()).builds)
    assert cache.is_dir()


def test_foreign_folders_and_notes_stay(cache: Path) -> None:
    """``WINML_CACHE`` may name a folder in which another program keeps ``builds`` and ``stages``."""
    named = cache / "builds" / "thesis-0123456789abcdef" / "text.md"  # named as ours, with no build in it
    other = cache / "builds" / "release" / BUILD_MANIFEST_NAME
    notes = [cache / "stages" / "plan.json", cache / "digests" / "mine" / "list.json"]
    for path in (named, other, *notes):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}", encoding="utf-8")
    assert 2 == len(remove_builds(list_cache()).builds)
    assert {named, other, *notes, cache / "mine.txt"} == {path for path in cache.rglob("*") if path.is_file()}


def test_files_vanishing_during_the_count_are_ignored(tmp_path: Path) -> None:
    """A build replaces its files while the cache is listed."""
    (tmp_path / "there").write_bytes(b"four")
    assert 4 == stored_bytes([tmp_path / "there", tmp_path / "gone"])


def test_unavailable_lock_is_reported(cache: Path) -> None:
    """A folder in place of the lock file is an error with a message."""
    folder = list_cache().builds[0].folder
    (folder / BUILD_LOCK_NAME).unlink(missing_ok=True)
    (folder / BUILD_LOCK_NAME).mkdir()
    with pytest.raises(WriteError, match="cannot remove"):
        remove_builds(list_cache())
    assert cache.is_dir()


def test_foreign_text_of_a_manifest_is_not_obeyed(cache: Path) -> None:
    """Control characters in a manifest change neither the terminal nor the order of writing."""
    manifest = list_cache().builds[0].folder / BUILD_MANIFEST_NAME
    record = json.loads(manifest.read_text(encoding="utf-8"))
    record["input"]["model"] = "a\x1b[31mb\u202ec\nd"
    manifest.write_text(json.dumps(record), encoding="utf-8")
    stream = io.StringIO()
    print_document(contents_document(list_cache()), console_for(stream))
    # The heading, both builds, an empty line, and the sum.
    assert 5 == len(stream.getvalue().splitlines())
    assert not {"\x1b", "\u202e"} & {*stream.getvalue()}
    assert str(cache) in stream.getvalue()
