"""Moves, links and removals of files, repeated while another program on Windows holds one of them for a moment.

No other module of the package moves, links or removes files. Standard library only.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

_DENIED, _SHARED, _LOCKED = 5, 32, 33
"""Specified: Windows' error codes for denied access, a sharing violation, and a locked part of a file. Replacing a file
that a program has open is denied; virus scanners and search indexers open each new file for a moment."""
_PAUSES = (0.02, 0.05, 0.1, 0.2, 0.4)
"""Chosen: seconds between attempts. Together shorter than a user waits for, and longer than a scanner reads a file."""


def move_file(source: Path, target: Path) -> None:
    """Move a file, replacing the target.

    Raises:
        OSError: the file cannot be moved; on Windows, after the pauses that a short use by another program needs.
    """
    _repeat(partial(source.replace, target), target)


def link_file(source: Path, target: Path) -> bool:
    """Create a hard link ``target`` to a file, or to a symbolic link itself; False if links are not supported.

    Raises:
        FileExistsError: the target exists.
    """
    try:
        os.link(source, target, follow_symlinks=False)
    except FileExistsError:
        raise
    except (OSError, NotImplementedError):
        return False
    return True


def remove_file(path: Path) -> None:
    """Remove a file if it exists; raises as :func:`move_file` does."""
    _repeat(partial(path.unlink, missing_ok=True), path)


def remove_folder(folder: Path, *, ignore_errors: bool = True) -> None:
    """Remove a folder with its content, or as much of it as possible; a missing folder is removed already.

    Raises:
        OSError: a file cannot be removed, and ``ignore_errors`` is False.
    """
    if not os.path.lexists(folder):
        return
    try:
        _repeat(partial(shutil.rmtree, folder))
    except OSError:
        if not ignore_errors:
            raise
        shutil.rmtree(folder, ignore_errors=True)


def _repeat(change: Callable[[], object], path: Path | None = None) -> None:
    """Call a function until no file is held.

    Args:
        change: Changes files.
        path: The file to change; None: the file that the error names.
    """
    for pause in _PAUSES:
        try:
            change()
        except OSError as error:  # noqa: PERF203  # the attempt is what is repeated
            if not is_held(error, path or Path(error.filename or "")):
                raise
            time.sleep(pause)
        else:
            return
    change()


def is_held(error: OSError, path: Path) -> bool:
    """Return True if another program has the file open, as Windows reports it for a change of ``path``."""
    code = getattr(error, "winerror", None)
    # Denied access also means a directory, or a file that may not be changed.
    return code in (_SHARED, _LOCKED) or (code == _DENIED and path.is_file() and os.access(path, os.W_OK))
