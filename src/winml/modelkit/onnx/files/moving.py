"""Moves of files, repeated while another program on Windows holds one of them for a moment."""

from __future__ import annotations

import os
import time
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
    for pause in _PAUSES:
        try:
            source.replace(target)
        except OSError as error:  # noqa: PERF203  # the attempt is what is repeated
            if not is_held(error, target):
                raise
            time.sleep(pause)
        else:
            return
    source.replace(target)


def is_held(error: OSError, path: Path) -> bool:
    """Return True if another program has the file open, as Windows reports it for a change of ``path``."""
    code = getattr(error, "winerror", None)
    # Denied access also means a directory, or a file that may not be changed.
    return code in (_SHARED, _LOCKED) or (code == _DENIED and path.is_file() and os.access(path, os.W_OK))
