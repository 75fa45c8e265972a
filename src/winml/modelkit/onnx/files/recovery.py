"""What does a killed command leave, and how is it completed or removed? Journals, temporary folders, owners."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
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
from winml.modelkit.onnx.files.named_paths import record_settled
from winml.modelkit.words import message_words

if TYPE_CHECKING:
    import filelock

MOVED_ASIDE = "moved"
"""Subfolder of a hidden folder that holds earlier files that were taken from their places, where links fail."""

_VERSION = 1
"""Raised when a key changes its name or meaning."""

State = tuple[int, int] | None
"""Size and time of change of a file; None where there is none."""


def file_state(path: Path) -> State:
    """Return what tells whether a file is still the same; None where there is none.

    Raises:
        OSError: it cannot be looked at.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_size, status.st_mtime_ns


@dataclass(frozen=True)
class _Journal:
    """What is to be done in one directory."""

    moves: Mapping[str, tuple[int, State]]
    """Name of a finished file → its size, and the state of what it replaces; in order."""
    removals: Mapping[str, State]
    """Name of a file that goes afterwards → its state."""


def write_journal(folder: Path, staged: Path, directory: Path, moves: Sequence[str], removals: Sequence[str]) -> None:
    """Write down what is about to be done; it is on the disk when this returns.

    Every file is complete then, and none was moved.

    Args:
        folder: The hidden folder the journal goes to.
        staged: Where the finished files are.
        directory: Where they go.
        moves: Their names, in order.
        removals: Names of files of the directory that go afterwards.

    Raises:
        OSError: it cannot be written.
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
    unfinished.replace(path)


@dataclass(frozen=True)
class _Settled:
    """What became of the files of an ended process, by name."""

    placed: tuple[str, ...] = ()
    """New files that were put in place, now or before it ended."""
    removed: tuple[str, ...] = ()
    """Weights that nothing names any more."""


def _complete_journal(folder: Path, staged: Path, directory: Path) -> _Settled | None:
    """Do what an ended process left to do, if there is anything.

    Where a file that was to be replaced is no longer what it was, the user has gone on without us: nothing is done.

    Returns:
        What was done; None where the journal is of a newer version, damaged or not ours, and must be left alone.

    Raises:
        OSError: a file cannot be put in place.
    """
    try:
        journal = _read_journal(folder / file_names.JOURNAL_NAME)
        waiting = _waiting_files(journal, staged)
    except (ValueError, OverflowError):
        return None
    if not all(_is_still_meant(journal, name, waiting[name], folder, directory) for name in waiting):
        return _Settled()
    for name in waiting:
        (staged / name).replace(directory / name)
    unchanged = [
        name for name, state in journal.removals.items() if state is not None and state == file_state(directory / name)
    ]
    if unchanged:
        from winml.modelkit.onnx.files.placing import remove_unused

        remove_unused(directory, unchanged)
    remove_journal(folder)
    return _Settled(tuple(journal.moves), tuple(name for name in unchanged if not os.path.lexists(directory / name)))


def _is_still_meant(journal: _Journal, name: str, written_bytes: int, folder: Path, directory: Path) -> bool:
    """Say whether a finished file is whole, and what it replaces is as it was.

    Raises:
        OSError: it cannot be looked at.
    """
    size_bytes, earlier = journal.moves[name]
    now = file_state(directory / name)
    # Where links fail, a kill may come when the earlier file is moved aside. Else it was removed since then.
    is_untouched = now == earlier or (now is None and os.path.lexists(folder / MOVED_ASIDE / name))
    return is_untouched and written_bytes == size_bytes


def _waiting_names(folder: Path, staged: Path, directory: Path) -> tuple[str, ...]:
    """Return the files of a directory that are not what they are to be: new ones wait, or earlier ones are aside.

    Changes nothing. Empty where the journal is of a newer version, damaged or not ours.
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
    """Put back earlier files whose places are empty since nothing new came there; returns their names.

    Raises:
        OSError: a file cannot be put back.
        ValueError: no command writes a file of such a name.
    """
    names = []
    for name in map(_output_name, _regular_files(folder / MOVED_ASIDE)):
        if os.path.lexists(staged / name) and not os.path.lexists(directory / name):
            (folder / MOVED_ASIDE / name).replace(directory / name)
            names.append(name)
    return tuple(names)


def _waiting_files(journal: _Journal, staged: Path) -> dict[str, int]:
    """Return the finished files that are not in place yet, in order, with their sizes.

    Raises:
        ValueError: one is no regular file, or their folder is a link: nothing this tool makes.
    """
    sizes = _regular_files(staged)
    for name in journal.moves:
        if os.path.lexists(staged / name) and name not in sizes:
            raise ValueError(name)
    return {name: sizes[name] for name in journal.moves if name in sizes}


def _regular_files(folder: Path) -> dict[str, int]:
    """Return the names and sizes of the regular files of a folder; none where it is not there.

    Raises:
        ValueError: it is a link, or no folder.
    """
    if not os.path.lexists(folder):
        return {}
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise ValueError(folder)
    states = {path.name: path.lstat() for path in sorted(folder.iterdir())}
    return {name: state.st_size for name, state in states.items() if stat.S_ISREG(state.st_mode)}


def remove_journal(folder: Path) -> None:
    """Say that all is done."""
    (folder / file_names.JOURNAL_NAME).unlink(missing_ok=True)


def _read_journal(path: Path) -> _Journal:
    """Return the journal, which is empty where nothing was ready to be put in place.

    A downloaded folder may hold one as well: only names that commands write are accepted, within one folder.

    Raises:
        ValueError, OverflowError: it is of another version, damaged, or removes what belongs to no model it replaces.
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
            _output_name(entry["name"]): (int(entry["size_bytes"]), _state(entry["replaces"]))
            for entry in record["moves"]
        }
        removals = {_output_name(entry["name"]): _state(entry["state"]) for entry in record["removals"]}
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(path) from error
    models = [name for name in moves if name.lower().endswith(file_names.MODEL_SUFFIX)]
    for name in removals:
        if not any(file_names.is_data_of(model, name) for model in models):
            raise ValueError(name)
    return _Journal(moves, removals)


def _output_name(name: object) -> str:
    """Return the name of a file in a folder, as commands write them.

    Raises:
        ValueError: no command writes a file of this name.
    """
    if not isinstance(name, str) or not file_names.is_output_name(name):
        raise ValueError(name)
    return name


def _state(value: Any) -> State:
    return None if value is None else (int(value[0]), int(value[1]))


_HELD = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextlib.contextmanager
def interruptions_held() -> Iterator[None]:
    """Let Ctrl-C and requests to end wait until the block is done. Other threads than the main one get none anyway."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def note(number: int, _frame: object) -> None:
        received.append(number)

    # Those set from outside Python (None), or to be ignored, stay as they are.
    handlers = {number: signal.getsignal(number) for number in _HELD}
    held = {number: handler for number, handler in handlers.items() if handler not in (None, signal.SIG_IGN)}
    for number in held:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
        for number in dict.fromkeys(received):
            signal.raise_signal(number)


_FORGOTTEN_SECONDS = 86_400
"""Age from which what has no lock file is abandoned. Chosen: a day. Another version of this tool may be at work."""
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL})
"""How systems say that a file system has no locks."""


class OwnedFolder:
    """A folder of this process, until it is removed or the process ends.

    The owner holds a lock of the operating system on a file in its folder. The system releases it when the process
    ends, however that happens, so that a folder whose lock is free has no owner.

    Attributes:
        path: The folder.
    """

    def __init__(self, path: Path, lock: filelock.BaseFileLock | None) -> None:
        """Take a folder that is locked; use :meth:`make`."""
        self.path = path
        self._lock = lock

    @classmethod
    def make(cls, directory: Path, prefix: str) -> OwnedFolder:
        """Make a new folder, which nobody else can read, in a directory that exists.

        Raises:
            OSError: it cannot be made.
        """
        while True:
            path = Path(tempfile.mkdtemp(prefix=prefix, dir=directory))
            try:
                lock = _acquire(path)
            except (OSError, NotImplementedError):
                if path.exists():
                    return cls(path, None)  # locks do not work here: nobody can tell that we ended
                continue  # taken away before it was locked
            if lock is not None:
                return cls(path, lock)

    def remove(self) -> None:
        """Remove the folder with all that is in it.

        The lock goes last, so that the next command can remove what a kill leaves here, or a file that is in use.
        """
        with contextlib.suppress(OSError):
            for entry in list(os.scandir(self.path)):
                if entry.name == file_names.OWNER_LOCK_NAME:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    Path(entry.path).unlink(missing_ok=True)
            if any(path.name != file_names.OWNER_LOCK_NAME for path in self.path.iterdir()):
                self.release()
                return
        if sys.platform == "win32":
            self._unlock()  # an open file cannot be deleted there
        with contextlib.suppress(OSError):
            (self.path / file_names.OWNER_LOCK_NAME).unlink(missing_ok=True)
        self._unlock()
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def release(self) -> None:
        """Leave the folder as it is, without an owner."""
        if self._lock is not None:
            self._unlock()
            with contextlib.suppress(OSError):
                # filelock 3.29 takes the file away, without which nobody can tell that the owner is gone.
                (self.path / file_names.OWNER_LOCK_NAME).touch()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release(force=True)


def abandoned_folders(directory: Path, prefix: str, *, with_unlocked: bool = False) -> Iterator[OwnedFolder]:
    """Yield the folders of a prefix whose owner ended; they are ours then.

    Args:
        directory: Where to look; nothing is found where it cannot be read.
        prefix: Start of the names.
        with_unlocked: Also take what was left without a lock, by versions of this tool that had none or on a file
            system that has none, a day after it was changed last: yield folders, and remove files.
    """
    try:
        names = sorted(entry.name for entry in os.scandir(directory) if entry.name.startswith(prefix))
    except OSError:
        return
    for name in names:
        folder = _taken_over(directory / name, with_unlocked=with_unlocked)
        if folder is not None:
            yield folder


def _taken_over(path: Path, *, with_unlocked: bool) -> OwnedFolder | None:
    """Return an abandoned folder, locked by us; None where it has an owner or is not for us to remove."""
    try:
        status = path.lstat()
        if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
            return None
        is_forgotten = with_unlocked and time.time() - status.st_mtime > _FORGOTTEN_SECONDS
        if not stat.S_ISDIR(status.st_mode):
            if is_forgotten and stat.S_ISREG(status.st_mode):
                path.unlink()
            return None
        if not _has_lock_file(path):
            with contextlib.suppress(OSError):
                path.rmdir()  # where it is empty: whoever is about to lock it makes another
                return None
            if not is_forgotten:
                return None
        lock = _acquire(path)
    except (OSError, NotImplementedError) as error:
        # Where no owner could take a lock either, age alone tells.
        has_no_locks = isinstance(error, NotImplementedError) or error.errno in _NO_LOCKS
        return OwnedFolder(path, None) if has_no_locks and is_forgotten else None
    return OwnedFolder(path, lock) if lock is not None else None


def _has_lock_file(path: Path) -> bool:
    """Say whether a folder has one; a link or a device of its name is none of ours.

    Raises:
        OSError: such a thing is there.
    """
    lock = path / file_names.OWNER_LOCK_NAME
    if not os.path.lexists(lock):
        return False
    if not stat.S_ISREG(lock.lstat().st_mode):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(lock))
    return True


def _acquire(path: Path) -> filelock.BaseFileLock | None:
    """Return the lock of a folder, held by us; None where another has it.

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
"""Subfolder of a hidden folder that holds the files to be put in place, under their own names."""


def settle_interrupted(directory: Path) -> tuple[Path, ...]:
    """Put in place what ended commands had finished in a directory, and remove what they had not.

    What belongs to a command that still runs is left alone, and so is what cannot be put in place. What was done is
    noted for the user (``committed``).

    Returns:
        The files put in place.
    """
    placed: list[Path] = []
    for folder in abandoned_folders(directory, file_names.PARTIAL_PREFIX, with_unlocked=True):
        settled, earlier = _settle(folder.path, directory)
        _note(directory, settled or _Settled(), earlier)
        if settled is None:
            folder.release()
            continue
        folder.remove()
        placed += [directory / name for name in settled.placed]
    return tuple(placed)


def unfinished_notes(paths: Iterable[Path]) -> tuple[str, ...]:
    """Say what commands left unfinished in folders, or beside files: one sentence for each folder. Changes nothing."""
    notes: dict[str, str] = {}
    for path in paths:
        with contextlib.suppress(OSError):
            directory = path if path.is_dir() else path.parent
            notes.setdefault(os.path.realpath(directory), _unfinished_words(directory))
    return tuple(filter(None, notes.values()))


def _unfinished_words(directory: Path) -> str:
    names = [name for found in interrupted_in(directory) for name in found.completes]
    if not names:
        return _unfinished_build_words(directory)
    return (
        f"{directory}: a command was killed or still runs; its unfinished files: "
        f"{', '.join(dict.fromkeys(names))}; the next command that writes here completes them"
    )


def _unfinished_build_words(directory: Path) -> str:
    """Return a sentence about a build whose manifest says that it did not finish; empty for any other folder."""
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
    """A hidden folder that a command which was killed left, or one that still runs works in."""

    folder: Path
    """The hidden folder, which lies in the directory that is written to. Recovery removes it."""
    completes: tuple[str, ...]
    """Names of files in that directory that recovery puts in place, or back in place; the journal lists them."""

    @property
    def directory(self) -> Path:
        """The directory that is written to."""
        return self.folder.parent


def interrupted_in(directory: Path) -> tuple[Interrupted, ...]:
    """Return what commands left unfinished in a directory; changes nothing and takes no lock.

    Whether a command still runs shows only when :func:`settle_interrupted` takes its lock, which leaves it alone then.
    A directory that cannot be read holds nothing.
    """
    try:
        hidden = [entry for entry in os.scandir(directory) if entry.name.startswith(file_names.PARTIAL_PREFIX)]
        folders = sorted(Path(entry.path) for entry in hidden if entry.is_dir(follow_symlinks=False))
    except OSError:
        return ()
    return tuple(Interrupted(folder, _waiting_names(folder, folder / STAGED, directory)) for folder in folders)


def _settle(folder: Path, directory: Path) -> tuple[_Settled | None, tuple[str, ...]]:
    """Return what was done with new files, None where the folder must be left alone, and the names put back."""
    try:
        settled = _complete_journal(folder, folder / STAGED, directory)
        if settled is None:
            return None, ()
        return settled, () if settled.placed else put_back(folder, folder / STAGED, directory)
    except (OSError, ValueError):
        return None, ()


def _note(directory: Path, settled: _Settled, earlier: tuple[str, ...]) -> None:
    done = {"put in place": settled.placed, "removed": settled.removed, "put back": earlier}
    words = "; ".join(f"{verb} {', '.join(names)}" for verb, names in done.items() if names)
    if words:
        record_settled(f"{directory}: an earlier command was killed; {words}")


@contextmanager
def temporary_folder(beside: Path | None = None) -> Iterator[Path]:
    """Yield a new folder, removed with all that is in it when the block ends.

    Args:
        beside: A file that is to be written; the folder is then on its file system, so that what is in it can be moved
            there however large it is. It is hidden, and what a kill leaves goes with the next command that writes
            there. None: among the system's temporary files.

    Raises:
        OSError: it cannot be made.
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
    absolute = path.absolute()
    for folder in absolute.parents:
        if folder.is_dir():
            return folder
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), absolute.anchor)
