"""Completion or removal of the files of killed commands: journals, temporary folders, owners."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winml.modelkit import file_names
from winml.modelkit.onnx.files.moving import move_file, remove_file, remove_folder
from winml.modelkit.onnx.files.named_paths import record_settled
from winml.modelkit.words import message_words

if TYPE_CHECKING:
    import filelock

MOVED_ASIDE = "moved"
"""Subfolder of a hidden folder for earlier files that were moved away, if hard links are not supported."""

_VERSION = 1
"""Raised when a key changes its name or meaning."""

State = tuple[int, int] | None
"""Size and modification time of a file; None if it does not exist."""


def file_state(path: Path) -> State:
    """Return size and modification time of a file to detect changes; None if it does not exist.

    Raises:
        OSError: the file status cannot be read.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_size, status.st_mtime_ns


@dataclass(frozen=True)
class _Journal:
    """Planned changes of one directory."""

    moves: Mapping[str, tuple[int, State]]
    """Name of a finished file → its size, and the state of the file it replaces; in order."""
    removals: Mapping[str, State]
    """Name of a file to remove afterwards → its state."""


def write_journal(folder: Path, staged: Path, directory: Path, moves: Sequence[str], removals: Sequence[str]) -> None:
    """Write the planned changes to a journal, flushed to disk.

    At this point every file is complete, and none was moved.

    Args:
        folder: The hidden folder of the journal.
        staged: The folder of the finished files.
        directory: Their destination.
        moves: Names of the finished files, in order.
        removals: Names of files of the directory to remove afterwards.

    Raises:
        OSError: the journal cannot be written.
    """
    record = {
        "version": _VERSION,
        "moves": [
            {"name": name, "size_bytes": (staged / name).stat().st_size, "replaces": file_state(directory / name)}
            for name in moves
        ],
        "removals": [{"name": name, "state": file_state(directory / name)} for name in removals],
    }
    path = folder / file_names.JOURNAL_NAME
    unfinished = path.with_suffix(".new")
    with unfinished.open("w", encoding="utf-8", newline="\n") as file:
        json.dump(record, file)
        file.flush()
        os.fsync(file.fileno())
    move_file(unfinished, path)


@dataclass(frozen=True)
class _Settled:
    """Changes made for an ended process, by file name."""

    placed: tuple[str, ...] = ()
    """New files in their final location, moved now or before the process ended."""
    removed: tuple[str, ...] = ()
    """Weights that nothing names any more."""


def _complete_journal(folder: Path, staged: Path, directory: Path) -> _Settled | None:
    """Complete the planned changes of an ended process.

    If a file to be replaced has changed since, the journal is dropped.

    Returns:
        The changes made; None if the journal is of a newer version, damaged or not ours, and must not be touched.

    Raises:
        OSError: a file cannot be moved.
    """
    try:
        journal = _read_journal(folder / file_names.JOURNAL_NAME)
        waiting = _waiting_files(journal, staged)
    except (ValueError, OverflowError):
        return None
    if not all(_is_still_meant(journal, name, waiting[name], folder, directory) for name in waiting):
        return _Settled()
    for name in waiting:
        move_file(staged / name, directory / name)
    unchanged = [
        name for name, state in journal.removals.items() if state is not None and state == file_state(directory / name)
    ]
    if unchanged:
        from winml.modelkit.onnx.files.placing import remove_unused

        remove_unused(directory, unchanged)
    remove_journal(folder)
    return _Settled(tuple(journal.moves), tuple(name for name in unchanged if not os.path.lexists(directory / name)))


def _is_still_meant(journal: _Journal, name: str, written_bytes: int, folder: Path, directory: Path) -> bool:
    """Return True if a finished file is complete, and the file it replaces is unchanged.

    Raises:
        OSError: a file status cannot be read.
    """
    size_bytes, earlier = journal.moves[name]
    now = file_state(directory / name)
    # Without hard links, a kill may occur when the earlier file is moved away. Otherwise it was removed later.
    is_untouched = now == earlier or (now is None and os.path.lexists(folder / MOVED_ASIDE / name))
    return is_untouched and written_bytes == size_bytes


def _waiting_names(folder: Path, staged: Path, directory: Path) -> tuple[str, ...]:
    """Return the names of files to move or to restore by recovery in a directory.

    Changes nothing. ``()`` if the journal is of a newer version, damaged or not ours.
    """
    try:
        journal = _read_journal(folder / file_names.JOURNAL_NAME)
        waiting = _waiting_files(journal, staged)
        aside = [
            name
            for name in map(_output_name, _regular_files(folder / MOVED_ASIDE))
            if not os.path.lexists(directory / name)
        ]
        is_meant = all(_is_still_meant(journal, name, waiting[name], folder, directory) for name in waiting)
    except (OSError, ValueError, OverflowError):
        return ()
    return tuple(dict.fromkeys((*(waiting if is_meant else ()), *aside)))


def put_back(folder: Path, staged: Path, directory: Path) -> tuple[str, ...]:
    """Restore earlier files whose replacements were never moved; return their names.

    Raises:
        OSError: a file cannot be restored.
        ValueError: no command writes a file of such a name.
    """
    names = []
    for name in map(_output_name, _regular_files(folder / MOVED_ASIDE)):
        if os.path.lexists(staged / name) and not os.path.lexists(directory / name):
            move_file(folder / MOVED_ASIDE / name, directory / name)
            names.append(name)
    return tuple(names)


def _waiting_files(journal: _Journal, staged: Path) -> dict[str, int]:
    """Return the finished files that are not yet moved, in order, with their sizes.

    Raises:
        ValueError: a file is no regular file, or their folder is a link; this tool makes neither.
    """
    sizes = _regular_files(staged)
    for name in journal.moves:
        if os.path.lexists(staged / name) and name not in sizes:
            raise ValueError(name)
    return {name: sizes[name] for name in journal.moves if name in sizes}


def _regular_files(folder: Path) -> dict[str, int]:
    """Return the names and sizes of the regular files of a folder; `{}` if the folder does not exist.

    Raises:
        ValueError: the path is a link, or no folder.
    """
    if not os.path.lexists(folder):
        return {}
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise ValueError(folder)
    states = {path.name: path.lstat() for path in sorted(folder.iterdir())}
    return {name: state.st_size for name, state in states.items() if stat.S_ISREG(state.st_mode)}


def remove_journal(folder: Path) -> None:
    """Delete the journal."""
    remove_file(folder / file_names.JOURNAL_NAME)


def _read_journal(path: Path) -> _Journal:
    """Read a journal; empty if it does not exist.

    A downloaded folder may also hold a journal: only names that commands write are accepted, within one folder.

    Raises:
        ValueError, OverflowError: the journal is of another version, damaged, or removes files of no replaced model.
    """
    if not os.path.lexists(path):
        return _Journal({}, {})
    if not stat.S_ISREG(path.lstat().st_mode):
        raise ValueError(path)
    text = path.read_text(encoding="utf-8")
    try:
        record: Any = json.loads(text)
        if record["version"] != _VERSION:
            raise ValueError(record["version"])
        moves = {
            _output_name(entry["name"]): (int(entry["size_bytes"]), _parse_state(entry["replaces"]))
            for entry in record["moves"]
        }
        removals = {_output_name(entry["name"]): _parse_state(entry["state"]) for entry in record["removals"]}
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(path) from error
    models = [name for name in moves if name.lower().endswith(file_names.MODEL_SUFFIX)]
    for name in removals:
        if not any(file_names.is_data_of(model, name) for model in models):
            raise ValueError(name)
    return _Journal(moves, removals)


def _output_name(name: object) -> str:
    """Return a file name if commands write files of this name.

    Raises:
        ValueError: no command writes a file of this name.
    """
    if not isinstance(name, str) or not file_names.is_output_name(name):
        raise ValueError(name)
    return name


def _parse_state(value: Any) -> State:
    """Parse the state of a file from a journal; `None`: no file."""
    return None if value is None else (int(value[0]), int(value[1]))


_HELD = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextlib.contextmanager
def interruptions_held() -> Iterator[None]:
    """Delay Ctrl-C and termination requests until the block ends; effective in the main thread, which receives all
    signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def record_signal(number: int, _frame: object) -> None:
        received.append(number)

    # Handlers set outside Python (None) and ignored signals stay unchanged.
    handlers = {number: signal.getsignal(number) for number in _HELD}
    replaced = {number: handler for number, handler in handlers.items() if handler not in (None, signal.SIG_IGN)}
    for number in replaced:
        signal.signal(number, record_signal)
    try:
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)
        for number in dict.fromkeys(received):
            signal.raise_signal(number)


_FORGOTTEN_SECONDS = 86_400
"""Age from which a folder without a lock file is abandoned. Chosen: a day, since another version may be at work."""
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL})
"""Error numbers of file systems without locks."""


class OwnedFolder:
    """A folder of this process, until it is removed or the process ends.

    The owner holds an operating system lock on a file in its folder. The system releases the lock when the process ends
    in any manner, so a folder with a free lock has no owner.

    Attributes:
        path: The folder.
    """

    def __init__(self, path: Path, lock: filelock.BaseFileLock | None) -> None:
        """Wrap a locked folder; use :meth:`make`."""
        self.path = path
        self._lock = lock

    @classmethod
    def make(cls, directory: Path, prefix: str) -> OwnedFolder:
        """Create a new folder, readable only by this user, in an existing directory.

        Raises:
            OSError: the folder cannot be created.
        """
        while True:
            path = Path(tempfile.mkdtemp(prefix=prefix, dir=directory))
            try:
                lock = _acquire_lock(path)
            except (OSError, NotImplementedError):
                if path.exists():
                    return cls(path, None)  # locks are not supported here: no other process can detect our end
                continue  # taken away before it was locked
            if lock is not None:
                return cls(path, lock)

    def remove(self) -> None:
        """Remove the folder with its content.

        The lock is removed last, so that the next command can remove the remains of a kill, or a file in use.
        """
        with contextlib.suppress(OSError):
            for entry in list(os.scandir(self.path)):
                if entry.name == file_names.OWNER_LOCK_NAME:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    remove_folder(Path(entry.path))
                else:
                    remove_file(Path(entry.path))
            if any(path.name != file_names.OWNER_LOCK_NAME for path in self.path.iterdir()):
                self.release()
                return
        if sys.platform == "win32":
            self._unlock()  # an open file cannot be deleted there
        with contextlib.suppress(OSError):
            remove_file(self.path / file_names.OWNER_LOCK_NAME)
        self._unlock()
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def release(self) -> None:
        """Leave the folder unchanged, without an owner."""
        if self._lock is not None:
            self._unlock()
            with contextlib.suppress(OSError):
                # filelock 3.29 removes the file, without which no other process can detect that the owner ended.
                (self.path / file_names.OWNER_LOCK_NAME).touch()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release(force=True)


def abandoned_folders(directory: Path, prefix: str, *, with_unlocked: bool = False) -> Iterator[OwnedFolder]:
    """Yield the folders of a prefix whose owner ended, locked by this process.

    Args:
        directory: Directory to search; an unreadable directory yields nothing.
        prefix: Start of the names.
        with_unlocked: Include entries without a lock, of older versions of this tool or on a file system without locks,
            a day after their last change: yield folders, and remove files.
    """
    try:
        names = sorted(entry.name for entry in os.scandir(directory) if entry.name.startswith(prefix))
    except OSError:
        return
    for name in names:
        folder = _take_over(directory / name, with_unlocked=with_unlocked)
        if folder is not None:
            yield folder


def _take_over(path: Path, *, with_unlocked: bool) -> OwnedFolder | None:
    """Lock and return an abandoned folder; `None` for a folder with an owner, or of another user.

    Old files are removed.
    """
    try:
        status = path.lstat()
        if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
            return None
        is_forgotten = with_unlocked and time.time() - status.st_mtime > _FORGOTTEN_SECONDS
        if not stat.S_ISDIR(status.st_mode):
            if is_forgotten and stat.S_ISREG(status.st_mode):
                remove_file(path)
            return None
        if not _has_lock_file(path):
            with contextlib.suppress(OSError):
                path.rmdir()  # if empty: a process about to lock it creates another folder
                return None
            if not is_forgotten:
                return None
        lock = _acquire_lock(path)
    except (OSError, NotImplementedError) as error:
        # If no owner could lock it either, only the age decides.
        has_no_locks = isinstance(error, NotImplementedError) or error.errno in _NO_LOCKS
        return OwnedFolder(path, None) if has_no_locks and is_forgotten else None
    return OwnedFolder(path, lock) if lock is not None else None


def _has_lock_file(path: Path) -> bool:
    """Return True if a folder has a lock file.

    Raises:
        OSError: the lock file is a link, a device or another irregular file.
    """
    lock = path / file_names.OWNER_LOCK_NAME
    if not os.path.lexists(lock):
        return False
    if not stat.S_ISREG(lock.lstat().st_mode):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(lock))
    return True


def _acquire_lock(path: Path) -> filelock.BaseFileLock | None:
    """Acquire the lock of a folder; `None` if another process holds the lock.

    Raises:
        OSError, NotImplementedError: the folder is gone, or the file system has no locks.
    """
    import filelock

    lock = filelock.FileLock(path / file_names.OWNER_LOCK_NAME, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return None
    return lock


STAGED = "new"
"""Subfolder of a hidden folder for the new files, under their final names."""


def settle_interrupted(directory: Path) -> tuple[Path, ...]:
    """Complete the finished changes of ended commands in a directory, and remove their unfinished files.

    Files of a running command, and files that cannot be moved, are left untouched. Changes are noted for the user
    (``committed``).

    Returns:
        The files moved to their final location.
    """
    placed: list[Path] = []
    for folder in abandoned_folders(directory, file_names.PARTIAL_PREFIX, with_unlocked=True):
        settled, earlier = _settle_folder(folder.path, directory)
        _record_changes(directory, settled or _Settled(), earlier)
        if settled is None:
            folder.release()
            continue
        folder.remove()
        placed += [directory / name for name in settled.placed]
    return tuple(placed)


def unfinished_notes(paths: Iterable[Path]) -> tuple[str, ...]:
    """Describe unfinished work of commands in or next to the paths, one sentence per folder. Changes nothing."""
    notes: dict[str, str] = {}
    for path in paths:
        with contextlib.suppress(OSError):
            directory = path if path.is_dir() else path.parent
            notes.setdefault(os.path.realpath(directory), _unfinished_words(directory))
    return tuple(filter(None, notes.values()))


def _unfinished_words(directory: Path) -> str:
    """Return a sentence on files of a killed command, or on an unfinished build; ``""`` without unfinished work."""
    names = [name for interrupted in interrupted_in(directory) for name in interrupted.completes]
    if not names:
        return _unfinished_build_words(directory)
    return (
        f"{directory}: a command was killed or still runs; its unfinished files: "
        f"{', '.join(dict.fromkeys(names))}; the next command that writes here completes them"
    )


def _unfinished_build_words(directory: Path) -> str:
    """Return a sentence about a build whose manifest records an unfinished build; ``""`` for any other folder."""
    path = directory / file_names.BUILD_MANIFEST_NAME
    if not path.is_file():
        return ""
    from winml.modelkit.options import JsonError, read_json_file  # imports pydantic

    try:
        manifest = read_json_file(path)
    except (OSError, JsonError):
        return ""
    if not isinstance(manifest, dict) or manifest.get("status") != "unfinished":
        return ""
    stale = "so its models may be those of the build before"
    if isinstance(manifest.get("failed"), str):
        reason = f" ({manifest['reason']})" if isinstance(manifest.get("reason"), str) else ""
        return message_words(
            f"{directory}: the build failed in the stage {manifest['failed']}{reason}, {stale}; correct that, then run "
            "winml build again, which reuses the finished stages"
        )
    return f"{directory}: a build was killed or still runs, {stale}; the same winml build command finishes it"


@dataclass(frozen=True)
class Interrupted:
    """A hidden folder of a killed or running command."""

    folder: Path
    """The hidden folder, which lies in the directory that is written to. Recovery removes it."""
    completes: tuple[str, ...]
    """Names of files that recovery moves or restores in that directory, from the journal."""

    @property
    def directory(self) -> Path:
        """The directory that is written to."""
        return self.folder.parent


def interrupted_in(directory: Path) -> tuple[Interrupted, ...]:
    """List the unfinished work of commands in a directory; changes nothing and takes no lock.

    Only :func:`settle_interrupted`, which takes the lock, detects a running command and leaves its files unchanged. An
    unreadable directory yields ``()``.
    """
    try:
        hidden = [entry for entry in os.scandir(directory) if entry.name.startswith(file_names.PARTIAL_PREFIX)]
        folders = sorted(Path(entry.path) for entry in hidden if entry.is_dir(follow_symlinks=False))
    except OSError:
        return ()
    return tuple(Interrupted(folder, _waiting_names(folder, folder / STAGED, directory)) for folder in folders)


def _settle_folder(folder: Path, directory: Path) -> tuple[_Settled | None, tuple[str, ...]]:
    """Complete a hidden folder; return the changes, and restored names.

    The changes are `None` for an unknown journal.
    """
    try:
        settled = _complete_journal(folder, folder / STAGED, directory)
        if settled is None:
            return None, ()
        return settled, () if settled.placed else put_back(folder, folder / STAGED, directory)
    except (OSError, ValueError):
        return None, ()


def _record_changes(directory: Path, settled: _Settled, earlier: tuple[str, ...]) -> None:
    """Record the changes to the files of a killed command in a sentence."""
    changes = {"put in place": settled.placed, "removed": settled.removed, "put back": earlier}
    change_words = "; ".join(f"{verb} {', '.join(names)}" for verb, names in changes.items() if names)
    if change_words:
        record_settled(f"{directory}: an earlier command was killed; {change_words}")


@contextmanager
def temporary_folder(beside: Path | None = None) -> Iterator[Path]:
    """Yield a new folder, removed with its content when the block ends.

    Args:
        beside: A file to write; the folder is then hidden on the same file system, so that large files can be moved.
            The next command that writes there removes the remains of a kill. None: among the system's temporary files.

    Raises:
        OSError: the folder cannot be created.
    """
    if beside is None:
        directory, prefix = Path(tempfile.gettempdir()), file_names.TEMPORARY_PREFIX
    else:
        directory, prefix = _nearest_folder(beside), file_names.PARTIAL_PREFIX
        settle_interrupted(directory)
    for abandoned in abandoned_folders(directory, file_names.TEMPORARY_PREFIX):
        abandoned.remove()
    folder = OwnedFolder.make(directory, prefix)
    try:
        yield folder.path
    finally:
        folder.remove()


def _nearest_folder(path: Path) -> Path:
    """Return the nearest existing folder above a path.

    Raises:
        FileNotFoundError: no folder exists, as on a drive that is not connected.
    """
    absolute = path.absolute()
    for folder in absolute.parents:
        if folder.is_dir():
            return folder
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), absolute.anchor)
