"""Is the cache listed as it is, and emptied without disturbing anybody?"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path

import filelock
import pytest
import torch

from winml.modelkit import build_onnx_model, export_pytorch
from winml.modelkit.builds.cache_contents import list_cache, remove_builds
from winml.modelkit.file_names import BUILD_LOCK_NAME


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with the builds of two models, the first of them a week old, and a file of somebody else."""
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


def test_builds_are_listed_with_what_removing_them_frees(cache: Path) -> None:
    """A model that stands there under several names counts once."""
    contents = list_cache()
    assert ["net2.onnx", "net1.onnx"] == [Path(build.model or "").name for build in contents.builds]
    assert all(build.is_finished for build in contents.builds)
    sizes = {file.stat().st_ino: file.stat().st_size for file in contents.builds[0].folder.iterdir()}
    assert sum(sizes.values()) == contents.builds[0].size_bytes
    notes = [path for name in ("stages", "digests") for path in (cache / name).glob("*")]
    assert sum(path.stat().st_size for path in notes) == contents.other_bytes
    json.dumps(contents.as_record())


def test_old_builds_go_and_the_others_still_serve(cache: Path, tmp_path: Path) -> None:
    """Notes that lead to what was removed go with it."""
    removed = remove_builds(list_cache(timedelta(days=3)))
    assert ["net1.onnx"] == [Path(build.model or "").name for build in removed.builds]
    assert ["net2.onnx"] == [Path(build.model or "").name for build in list_cache().builds]
    for note in (cache / "stages").iterdir():
        assert Path(json.loads(note.read_text(encoding="utf-8"))["folder"]).is_dir()
    again = build_onnx_model(tmp_path / "net2.onnx", config={"quant": None, "compile": None})
    assert {"reused", "skipped"} == {stage.status for part in again.manifest.parts for stage in part.stages}
    build_onnx_model(tmp_path / "net1.onnx", config={"quant": None, "compile": None})


def test_emptied_cache_holds_only_what_is_not_ours(cache: Path) -> None:
    """And says so when it is listed."""
    assert 2 == len(remove_builds(list_cache()).builds)
    assert [cache / "mine.txt"] == list(cache.rglob("*"))
    assert ((), 0) == (list_cache().builds, list_cache().size_bytes)


def test_build_that_somebody_works_in_stays(cache: Path) -> None:
    """Its lock is held."""
    busy = list_cache().builds[1]
    with filelock.FileLock(busy.folder / BUILD_LOCK_NAME):
        removed = remove_builds(list_cache())
        assert [busy.folder] == [build.folder for build in removed.in_use]
        assert (busy.folder / "model.onnx").is_file()
    assert [busy.folder] == [build.folder for build in list_cache().builds]


def test_damaged_manifest_is_an_unfinished_build(cache: Path) -> None:
    """It can be removed like any other."""
    folder = list_cache().builds[0].folder
    (folder / "build_manifest.json").write_text("[1", encoding="utf-8")
    damaged = next(build for build in list_cache().builds if build.folder == folder)
    assert (None, False) == (damaged.model, damaged.is_finished)
    assert 2 == len(remove_builds(list_cache()).builds)
    assert cache.is_dir()
