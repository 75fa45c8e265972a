"""Digests, versions and atomic files of the cache."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import pytest

from winml.modelkit.builds.cache import digest, file_digest
from winml.modelkit.onnx.files.named_paths import cache_root
from winml.modelkit.onnx.files.resumable_results import write_atomically


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for one test."""
    monkeypatch.setenv("WINML_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def old_file(path: Path, content: bytes) -> Path:
    """Write a file with a time of an hour ago."""
    path.write_bytes(content)
    os.utime(path, (time.time() - 3600,) * 2)
    return path


def test_cache_root_follows_the_variable(cache: Path) -> None:
    assert cache == cache_root()


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="this system keeps caches elsewhere")
def test_cache_root_without_the_variable_is_the_platforms(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The root is the XDG cache folder on Linux."""
    monkeypatch.delenv("WINML_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tmp_path / "winml" == cache_root()


def test_digest_depends_on_values_and_not_on_key_order() -> None:
    """Equal records have equal digests, and different records have different ones."""
    assert digest({"a": 1, "b": {"c": [1, 2]}}) == digest({"b": {"c": [1, 2]}, "a": 1})
    assert digest({"a": 1}) != digest({"a": "1"})
    assert digest([1, 2]) != digest([2, 1])


def test_file_digest_is_sha256_and_remembered(tmp_path: Path, cache: Path) -> None:
    """The second call does not read the content.

    The stored digest is used while size and time of the file are the same.
    """
    path = old_file(tmp_path / "weights", b"one")
    assert hashlib.sha256(b"one").hexdigest() == file_digest(path)
    (note,) = (cache / "digests").iterdir()
    note.write_text(json.dumps({**json.loads(note.read_text()), "sha256": "noted"}))
    assert "noted" == file_digest(path)
    old_file(path, b"two!")
    assert hashlib.sha256(b"two!").hexdigest() == file_digest(path)


def test_file_digest_of_a_file_just_written_is_not_remembered(tmp_path: Path, cache: Path) -> None:
    """Within a tick of the clock the file could change again without a new time."""
    (tmp_path / "weights").write_bytes(b"one")
    file_digest(tmp_path / "weights")
    assert not (cache / "digests").exists()


def test_file_digest_survives_a_damaged_note_and_a_read_only_cache(tmp_path: Path, cache: Path) -> None:
    """The cache only saves time, so a damaged note is no error."""
    path = old_file(tmp_path / "weights", b"one")
    expected = file_digest(path)
    (note,) = (cache / "digests").iterdir()
    note.write_text("{")
    assert expected == file_digest(path)
    for file in (cache / "digests").iterdir():
        file.unlink()
    (cache / "digests").rmdir()
    (cache / "digests").write_text("a file where a folder is needed")
    assert expected == file_digest(path)


def test_write_atomically_keeps_the_earlier_file_on_failure(tmp_path: Path) -> None:
    """A text that cannot be encoded changes nothing and leaves no temporary file."""
    write_atomically(tmp_path / "a.json", "one")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "a.json", "\ud800")
    assert {"a.json": "one"} == {path.name: path.read_text() for path in tmp_path.iterdir()}
