"""Makes folders for unfinished files that belong to one process, and finds those whose process ended.

The owner holds a lock of the operating system on a file in its folder. The system releases it when the process ends,
however that happens, so that a folder whose lock is free has no owner. Standard library and filelock only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from winml.modelkit.file_names import OWNER_LOCK_NAME

if TYPE_CHECKING:
    import filelock

__all__ = ["OwnedFolder", "abandoned_folders"]

_FORGOTTEN_SECONDS = 86_400
"""Age from which what has no lock file is abandoned. Chosen: a day. Another version of this tool may be at work."""
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL})
"""How systems say that a file system has no locks."""


class OwnedFolder:
    """A folder of this process, until it is removed or the process ends.

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
                if entry.name == OWNER_LOCK_NAME:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    Path(entry.path).unlink(missing_ok=True)
            if any(path.name != OWNER_LOCK_NAME for path in self.path.iterdir()):
                self.release()
                return
        if sys.platform == "win32":
            self._unlock()  # an open file cannot be deleted there
        with contextlib.suppress(OSError):
            (self.path / OWNER_LOCK_NAME).unlink(missing_ok=True)
        self._unlock()
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def release(self) -> None:
        """Leave the folder as it is, without an owner."""
        if self._lock is not None:
            self._unlock()
            with contextlib.suppress(OSError):
                # filelock 3.29 takes the file away, without which nobody can tell that the owner is gone.
                (self.path / OWNER_LOCK_NAME).touch()

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
    lock = path / OWNER_LOCK_NAME
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

    lock = filelock.FileLock(path / OWNER_LOCK_NAME, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return None
    return lock
