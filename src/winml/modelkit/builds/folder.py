"""Manages a build folder, and records the files of builds in the folder.

One build at a time holds a folder, by a lock that the operating system releases with the process. A file belongs to
builds only if the manifest lists its name; other files are never changed. Knows no stage.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import filelock

from winml.modelkit.builds import manifest_records
from winml.modelkit.errors import OutputExistsError, UsageError, opt
from winml.modelkit.file_names import BUILD_LOCK_NAME, BUILD_MANIFEST_NAME
from winml.modelkit.onnx.files.foreign_names import lies_within
from winml.modelkit.onnx.files.moving import remove_file
from winml.modelkit.onnx.files.output_files import (
    refuse_existing,
    refuse_special,
    waiting_files,
    write_error,
    write_errors_of,
)
from winml.modelkit.onnx.files.recovery import settle_interrupted
from winml.modelkit.onnx.files.resumable_results import write_atomically
from winml.modelkit.options import read_json_file


class BuildFolder:
    """Content of a build folder. Changes require its lock (:func:`held_folder`).

    Attributes:
        path: The folder.
        manifest: Manifest of the earlier build; None if it is missing or not readable.
        notes: Notes on the earlier content, one sentence each.
    """

    def __init__(self, path: Path, names: Iterable[str], *, is_cache: bool) -> None:
        """Read the manifest and refuse existing files that no build wrote.

        Args:
            path: The folder.
            names: Every name that a build may write.
            is_cache: True if only this tool writes into the folder, so that a damaged manifest may be replaced.

        Raises:
            OutputExistsError: a file with such a name exists and no build wrote it.
            UsageError: a file with such a name is a link, a device or the like.
        """
        self.path = path
        self.manifest: manifest_records.BuildManifest | None = None
        self.notes: list[str] = []
        self._names = tuple(names)
        self._owned: set[str] = set()
        self._was_built = (path / BUILD_MANIFEST_NAME).exists()
        self._is_cache = is_cache
        self._read_manifest(is_cache=is_cache)
        self._refuse_foreign_files(self._names)

    def refuse_other_model(self, model: str, files: Callable[[], object], *, rebuild: bool) -> None:
        """Refuse to replace the finished build of another model.

        Models with equal names or equal files count as the same model.

        Args:
            model: Name of the model to build.
            files: Returns the digests of its files; None if they are unknown.
            rebuild: True if the build runs all stages and may replace any build.

        Raises:
            OutputExistsError: the folder contains the build of another model; names both.
        """
        earlier = self.manifest
        if self._is_cache or rebuild or earlier is None or earlier.status != "done":
            return
        earlier_model = str(earlier.input.get("model", model))
        if earlier_model == model or Path(earlier_model).resolve() == Path(model).resolve():
            return
        if (digests := earlier.input.get("files")) is None or digests != files():
            raise OutputExistsError(
                f"output {self.path} holds the build of {earlier_model}, and {model} is requested",
                hint=f"Choose another folder, or replace the build with {opt.rebuild}.",
            )

    def claim(self, names: Sequence[str]) -> None:
        """Add file names to those of the build once the parts are known, and write the manifest.

        Raises:
            OutputExistsError: a file with such a name exists and no build wrote it.
            WriteError: the manifest cannot be written.
        """
        self._refuse_foreign_files(names)
        self._names = (*self._names, *names)
        self.announce()

    def disown(self, names: Iterable[str]) -> None:
        """Remove files from those of the build: they are neither replaced nor removed from now on."""
        lost = {*names}
        self._names = tuple(name for name in self._names if name not in lost)
        self._owned -= lost

    def _refuse_foreign_files(self, names: Iterable[str]) -> None:
        """Refuse names of existing files that no build wrote.

        Raises:
            OutputExistsError: such a file exists, outside of the cache.
            UsageError: one of the paths is a link, a device or the like.
        """
        names = tuple(names)
        refuse_special(self.path / name for name in names)
        waiting = waiting_files([self.path / BUILD_MANIFEST_NAME])  # recovered before a build that holds the folder
        paths = {name: self.path / name for name in names if name not in self._owned}
        foreign = [name for name, path in paths.items() if os.path.lexists(path) or path in waiting]
        if foreign and not self._is_cache:
            raise OutputExistsError(
                f"output {self.path / foreign[0]} exists and was not written by a build",
                hint="Move it away, or choose another folder.",
            )

    def _read_manifest(self, *, is_cache: bool) -> None:
        """Read the earlier manifest and the names of its files; note a manifest that cannot be used.

        Raises:
            OutputExistsError: the manifest is damaged, outside of the cache.
        """
        path = self.path / BUILD_MANIFEST_NAME
        if not path.exists():
            return
        version, files = _version_and_files(path)
        if version is None and not is_cache:
            raise OutputExistsError(
                f"{path} is damaged, so the files of builds beside it cannot be identified",
                hint="Delete the folder, or choose another.",
            )
        self._owned = {BUILD_MANIFEST_NAME, *files} if version is not None else set(self._names)
        if version in manifest_records.READABLE_VERSIONS:
            self.manifest = manifest_records.find_manifest(self.path)
        if self.manifest is None:
            problem = (
                "is damaged"
                if version is None or version in manifest_records.READABLE_VERSIONS
                else f"has version {version}; this winml reads {manifest_records.MANIFEST_VERSION}"
            )
            self.notes.append(f"{path} {problem}: no result of the earlier build is reused.")

    def announce(self) -> None:
        """Write a manifest with every name of the build, so a kill at any moment leaves no unknown file.

        Raises:
            WriteError: the manifest cannot be written.
        """
        earlier = self.manifest or manifest_records.BuildManifest(status="unfinished", files=())
        values = {"status": "unfinished", "failed": None, "reason": None, "files": self.owned_names()}
        self.save(earlier.model_copy(update=values))

    def save(self, manifest: manifest_records.BuildManifest) -> None:
        """Write the manifest.

        Raises:
            WriteError: the manifest cannot be written.
        """
        path = self.path / BUILD_MANIFEST_NAME
        with write_errors_of(path):
            write_atomically(path, json.dumps(manifest.as_record(), indent=2, ensure_ascii=False) + "\n")
        self.manifest = manifest
        self._owned = {BUILD_MANIFEST_NAME, *manifest.files}

    def remove_all_but(self, current_names: Iterable[str]) -> None:
        """Remove the files of earlier builds except the retained ones."""
        from winml.modelkit.onnx.files.placing import remove_unused, replaceable_data  # imports onnx

        outdated = self._owned - {BUILD_MANIFEST_NAME, *current_names}
        # The manifest of a killed build may lack the data files of its last model.
        data = [data_file for name in outdated for data_file in replaceable_data(self.path / name)]
        for name in outdated:
            path = self.path / name
            remove_file(path)
            if path.parent != self.path:
                with contextlib.suppress(OSError):
                    path.parent.rmdir()  # if it is empty now
        remove_unused(self.path, data)

    def forget(self) -> None:
        """Remove the manifest of :meth:`announce` if the build wrote no file and the folder had no manifest before.

        An interruption may follow the placing of files that no record lists; the manifest then stays and lists them.
        """
        is_empty = not any(os.path.lexists(self.path / name) for name in self._names)
        if not self._was_built and is_empty:
            remove_file(self.path / BUILD_MANIFEST_NAME)

    def owned_names(self) -> tuple[str, ...]:
        """Return every file name that belongs to builds."""
        return tuple(sorted({*self._owned, *self._names}))


def _version_and_files(path: Path) -> tuple[int | None, tuple[str, ...]]:
    """Return version and files of a manifest of any version; ``(None, ())`` if damaged."""
    try:
        value: Any = read_json_file(path)
        version, files = value["manifest_version"], value["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return None, ()
    if not isinstance(version, int) or not isinstance(files, list) or not all(isinstance(name, str) for name in files):
        return None, ()
    return version, tuple(name for name in files if lies_within(path.parent, name))


def refuse_input_as_output(folder: Path, inputs: Iterable[Path], names: Iterable[str]) -> None:
    """Refuse a folder if the build would overwrite its input.

    Args:
        folder: Folder of the build.
        inputs: Files and folders of the model.
        names: Every name that a build may write.

    Raises:
        UsageError: the folder is a file or the checkpoint itself, or contains the input under one of the names.
        WriteError: the folder cannot be written to.
    """
    target = folder.resolve()
    if _path_exists(folder) and not folder.is_dir():
        raise UsageError(f"output {folder} is a file", hint="Pass a folder: a build writes several files.")
    for source in inputs:
        if source.resolve() == target:
            raise UsageError(f"output {folder} is the folder of the source model", hint="Choose another folder.")
        outputs = {target / name for name in names}
        if source.resolve() in outputs or source.absolute() in outputs:
            raise UsageError(
                f"output {folder} holds the input {source}, which the build would replace",
                hint="Choose another folder.",
            )
    refuse_existing([folder / BUILD_MANIFEST_NAME], overwrite=True)


def _path_exists(folder: Path) -> bool:
    """Return True if a path exists; raises WriteError if the path cannot be examined."""
    try:
        folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise write_error(folder, error) from error
    return True


@contextmanager
def held_folder(
    path: Path, names: Iterable[str], *, is_cache: bool, notify: Callable[[str], None]
) -> Iterator[BuildFolder]:
    """Lock a folder for one build; a missing folder is created, and removed again if it stays empty.

    Args:
        path: The folder.
        names: Every name that a build may write.
        is_cache: True if only this tool writes into the folder.
        notify: Receives a message if the build waits for another one.

    Raises:
        OutputExistsError: see :class:`BuildFolder`.
        WriteError: the folder cannot be created or written to.
    """
    new_folders = [parent for parent in (path, *path.parents) if not parent.exists()]
    try:
        lock = _acquire_lock(path, notify)
        try:
            settle_interrupted(path)
            yield BuildFolder(path, names, is_cache=is_cache)
        finally:
            _release_lock(lock)
    finally:
        for parent in new_folders:
            with contextlib.suppress(OSError):
                parent.rmdir()  # if it is still empty


def _acquire_lock(path: Path, notify: Callable[[str], None]) -> filelock.BaseFileLock:
    """Acquire the lock of a folder; a missing folder is created.

    If another build holds the lock, ``notify`` is called and the function waits.

    Raises:
        WriteError: the folder cannot be created or locked.
    """
    lock = filelock.FileLock(path / BUILD_LOCK_NAME)
    with write_errors_of(path):
        path.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            notify(f"another build works in {path}: waiting for it to end")
            # The other build removes the folder if it created it and wrote nothing.
            with contextlib.suppress(FileNotFoundError):
                lock.acquire()
            path.mkdir(parents=True, exist_ok=True)
            lock.acquire()
    return lock


def _release_lock(lock: filelock.BaseFileLock) -> None:
    """Release the lock of a folder, and remove its file except on Windows."""
    if sys.platform != "win32":
        # The file is removed while the lock is held: a waiting build sees that the file is gone and creates a new one.
        remove_file(Path(lock.lock_file))
    lock.release(force=True)
