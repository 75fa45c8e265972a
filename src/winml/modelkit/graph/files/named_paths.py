"""Turns the text a user gave into a path, and refuses text that no file system takes.

Too long, with a zero byte, of an unknown user, behind a folder that may not be looked into: pathlib raises a different
error for each, at the first question about the path. Does not ask whether something is there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from winml.modelkit.errors import ModelPathError
from winml.modelkit.graph.files.touched_files import record_read

__all__ = [
    "named_path",
    "restored_working_directory",
]


_SHOWN_CHARACTERS = 80
"""Chosen: enough of a name to find it in a command."""


def named_path(text: str | os.PathLike[str]) -> Path:
    """Return the path a text names, with ``~`` resolved.

    Raises:
        ModelPathError: nothing can be there, whatever the file system holds; names the reason.
    """
    try:
        path = Path(text).expanduser()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
        record_read(path)
        return path
    except (OSError, RuntimeError, ValueError) as error:
        displayed = os.fspath(text)
        displayed = displayed if len(displayed) <= _SHOWN_CHARACTERS else f"{displayed[:_SHOWN_CHARACTERS]}…"
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ModelPathError(
            f"{displayed}: cannot be a path: {reason}", hint="Give the path of a file or folder."
        ) from None


# --- Keeps the working directory where foreign code changes it, so that a relative path goes on meaning what it
# meant.


@contextlib.contextmanager
def restored_working_directory() -> Iterator[None]:
    """Return to the present working directory after the block, unless it is gone by then."""
    try:
        folder = Path.cwd()
    except OSError:
        yield  # it is gone already
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.chdir(folder)
