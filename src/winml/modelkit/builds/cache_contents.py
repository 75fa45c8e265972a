"""What is in the cache, and how is it removed without disturbing a build that runs?

Only folders that the cache makes are looked at: whatever else stands where ``WINML_CACHE`` points stays.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import filelock

from winml.modelkit.builds.cache import cache_root
from winml.modelkit.errors import WriteError
from winml.modelkit.file_names import BUILD_LOCK_NAME, BUILD_MANIFEST_NAME
from winml.modelkit.results.cache_contents import CacheContents, CachedBuild

__all__ = ["BUILDS_FOLDER", "NOTE_FOLDERS", "list_cache", "remove_builds", "stored_bytes"]

BUILDS_FOLDER = "builds"
NOTE_FOLDERS = ("stages", "digests", "open_sizes")
"""Small files: which result is where, digests of files, and which sizes models take."""


def list_cache(older_than: timedelta | None = None) -> CacheContents:
    """Return what is in the cache.

    Args:
        older_than: Only builds that were last written longer ago than this.
    """
    root = cache_root()
    builds = [_build_in(folder) for folder in _folders(root / BUILDS_FOLDER)]
    now = datetime.now().astimezone()
    chosen = [build for build in builds if older_than is None or now - build.written > older_than]
    chosen.sort(key=lambda build: build.written, reverse=True)
    notes = (path for name in NOTE_FOLDERS for path in (root / name).rglob("*") if path.is_file())
    return CacheContents(root, tuple(chosen), 0 if older_than is not None else stored_bytes(notes))


def remove_builds(contents: CacheContents) -> CacheContents:
    """Remove builds, and the notes about them; return what was removed.

    A build that somebody works in stays. Digests of files are removed with the last build.

    Raises:
        WriteError: a folder cannot be removed.
    """
    removed: list[CachedBuild] = []
    in_use: list[CachedBuild] = []
    for build in contents.builds:
        (removed if _remove_folder(build.folder) else in_use).append(build)
    root = contents.root
    is_empty = not any(_folders(root / BUILDS_FOLDER))
    dead_notes = [
        path
        for name in NOTE_FOLDERS
        for path in (root / name).glob("*.json")
        if is_empty or (name == "stages" and not _place_of_note(path).is_dir())
    ]
    freed = stored_bytes(dead_notes)
    for path in dead_notes:
        path.unlink(missing_ok=True)
    for name in (*NOTE_FOLDERS, BUILDS_FOLDER):
        with contextlib.suppress(OSError):
            (root / name).rmdir()  # where it is empty
    return CacheContents(root, tuple(removed), freed, tuple(in_use))


def _folders(parent: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from sorted(path for path in parent.iterdir() if path.is_dir() and not path.is_symlink())


def _build_in(folder: Path) -> CachedBuild:
    manifest: Any = {}
    with contextlib.suppress(OSError, ValueError, RecursionError):
        manifest = json.loads((folder / BUILD_MANIFEST_NAME).read_text(encoding="utf-8"))
    manifest = manifest if isinstance(manifest, dict) else {}
    described = manifest.get("input")
    model = described.get("model") if isinstance(described, dict) else None
    files = [path for path in folder.rglob("*") if path.is_file()]
    newest = max((path.stat().st_mtime for path in (folder, *files)), default=0.0)
    return CachedBuild(
        folder=folder,
        model=model if isinstance(model, str) else None,
        is_finished=manifest.get("status") == "done",
        size_bytes=stored_bytes(files),
        written=datetime.fromtimestamp(newest).astimezone(),
    )


def stored_bytes(files: Iterable[Path]) -> int:
    """Return the bytes of files; one that has several names counts once."""
    states = (path.stat() for path in files)
    return sum({(state.st_dev, state.st_ino): state.st_size for state in states}.values())


def _place_of_note(path: Path) -> Path:
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        return Path(json.loads(path.read_text(encoding="utf-8"))["folder"])
    return path / "nowhere"  # a damaged note says nothing


def _remove_folder(folder: Path) -> bool:
    """Remove the folder of a build, unless somebody holds it."""
    lock = filelock.FileLock(folder / BUILD_LOCK_NAME)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return False
    try:
        # Without a manifest, nobody takes what is left for a result if this is interrupted.
        (folder / BUILD_MANIFEST_NAME).unlink(missing_ok=True)
        if sys.platform == "win32":
            lock.release(force=True)  # there, an open file cannot be removed
        shutil.rmtree(folder)
    except OSError as error:
        raise WriteError(
            f"cannot remove {error.filename or folder}: {error.strerror}", hint="Correct its permissions, or close it."
        ) from error
    finally:
        lock.release(force=True)
    return True
