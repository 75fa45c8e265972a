"""What is in the cache, and how is it removed without disturbing a build that runs?

Only folders that the cache makes are looked at: whatever else stands where ``WINML_CACHE`` points stays.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import filelock

from winml.modelkit.builds.cache import cache_root
from winml.modelkit.errors import WriteError, first_line
from winml.modelkit.file_names import BUILD_LOCK_NAME, BUILD_MANIFEST_NAME
from winml.modelkit.options import read_json_file
from winml.modelkit.results.cache_contents import CacheContents, CachedBuild

__all__ = ["BUILDS_FOLDER", "NOTE_FOLDERS", "list_cache", "remove_builds", "stored_bytes"]

BUILDS_FOLDER = "builds"
NOTE_FOLDERS = ("stages", "digests", "open_sizes")
"""Small files: which result is where, digests of files, and which sizes models take."""


_BUILD_NAME = re.compile(r"[\w.-]+-[0-9a-f]{16}")
"""Name of the model, and the start of a digest, as builds in the cache are called."""
_NOTE_NAME = re.compile(r"[0-9a-f]{64}\.json")


def list_cache(older_than: timedelta | None = None) -> CacheContents:
    """Return what is in the cache.

    Args:
        older_than: Only builds that were last written longer ago than this.
    """
    root = cache_root()
    builds = [_build_in(folder) for folder in _build_folders(root)]
    now = datetime.now().astimezone()
    chosen = [build for build in builds if older_than is None or now - build.written > older_than]
    chosen.sort(key=lambda build: build.written, reverse=True)
    notes = (path for name in NOTE_FOLDERS for path in _notes(root / name))
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
    is_empty = not any(_build_folders(root))
    dead_notes = [
        path
        for name in NOTE_FOLDERS
        for path in _notes(root / name)
        if is_empty or (name == "stages" and not _leads_somewhere(path))
    ]
    freed = stored_bytes(dead_notes)
    for path in dead_notes:
        with _removal_errors(path):
            path.unlink(missing_ok=True)
    for name in (*NOTE_FOLDERS, BUILDS_FOLDER):
        with contextlib.suppress(OSError):
            (root / name).rmdir()  # where it is empty
    return CacheContents(root, tuple(removed), freed, tuple(in_use))


def _build_folders(root: Path) -> Iterator[Path]:
    """Yield the folders that builds in the cache made; those of anybody else have another name, or hold no build."""
    for path in _entries(root / BUILDS_FOLDER, Path.is_dir):
        if _BUILD_NAME.fullmatch(path.name) and any(
            (path / name).is_file() for name in (BUILD_MANIFEST_NAME, BUILD_LOCK_NAME)
        ):
            yield path


def _notes(parent: Path) -> list[Path]:
    return [path for path in _entries(parent, Path.is_file) if _NOTE_NAME.fullmatch(path.name)]


def _entries(parent: Path, is_kind: Callable[[Path], bool]) -> list[Path]:
    """Return what a real folder holds of a kind, links left out; nothing where it cannot be read."""
    with contextlib.suppress(OSError):
        if not parent.is_symlink():
            return sorted(path for path in parent.iterdir() if not path.is_symlink() and is_kind(path))
    return []


def _build_in(folder: Path) -> CachedBuild:
    manifest: Any = {}
    with contextlib.suppress(OSError, ValueError):
        manifest = read_json_file(folder / BUILD_MANIFEST_NAME)
    manifest = manifest if isinstance(manifest, dict) else {}
    described = manifest.get("input")
    model = described.get("model") if isinstance(described, dict) else None
    files = [path for path in folder.rglob("*") if path.is_file()]
    newest = max((state.st_mtime for state in _states((folder, *files))), default=0.0)
    return CachedBuild(
        folder=folder,
        model=model if isinstance(model, str) else None,
        is_finished=manifest.get("status") == "done",
        size_bytes=stored_bytes(files),
        written=datetime.fromtimestamp(newest).astimezone(),
    )


def stored_bytes(files: Iterable[Path]) -> int:
    """Return the bytes of files; one that has several names counts once."""
    return sum({(state.st_dev, state.st_ino): state.st_size for state in _states(files)}.values())


def _states(files: Iterable[Path]) -> Iterator[os.stat_result]:
    """Yield the states of files; those that a build replaced meanwhile are left out."""
    for path in files:
        with contextlib.suppress(FileNotFoundError):
            yield path.stat()


def _leads_somewhere(note: Path) -> bool:
    """Say whether the result that a note is about may still be there; a damaged note is about none."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        return Path(read_json_file(note)["folder"]).is_dir()
    return False


def _remove_folder(folder: Path) -> bool:
    """Remove the folder of a build, unless somebody holds it."""
    lock = filelock.FileLock(folder / BUILD_LOCK_NAME)
    try:
        with _removal_errors(folder):
            lock.acquire(timeout=0)
    except filelock.Timeout:
        return False
    try:
        with _removal_errors(folder):
            # Without a manifest, nobody takes what is left for a result if this is interrupted.
            (folder / BUILD_MANIFEST_NAME).unlink(missing_ok=True)
            if sys.platform == "win32":
                lock.release(force=True)  # there, an open file cannot be removed
            shutil.rmtree(folder)
    finally:
        lock.release(force=True)
    return True


@contextlib.contextmanager
def _removal_errors(path: Path) -> Iterator[None]:
    """Let an error of the system inside the block become a WriteError; a lock that somebody holds is none."""
    try:
        yield
    except filelock.Timeout:
        raise
    except (OSError, NotImplementedError) as error:
        place = error.filename if isinstance(error, OSError) and error.filename else path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        hint = "Correct its permissions, or close it."
        raise WriteError(f"cannot remove {place}: {reason}", hint=hint) from error
