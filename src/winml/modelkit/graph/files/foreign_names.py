"""Where may a name lead that stands in a file from someone else? To a regular file below the folder of that file.

Standard library only; opens nothing.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePosixPath

from winml.modelkit.file_names import stays_inside

__all__ = ["ForeignNameError", "file_below", "refuse_special_file"]


class ForeignNameError(ValueError):
    """A name leads to no file that may be read; the message says why, without the name."""


def file_below(folder: Path, name: str | os.PathLike[str]) -> Path:
    """Return the regular file below a folder that a foreign file names.

    A link may lead to another place below the folder. In a snapshot of the Hub's cache, files are links into the
    ``blobs`` of the same repository, which belong to it.

    Args:
        folder: The folder of the file that names it.
        name: As it stands there.

    Raises:
        ForeignNameError: it is absolute, has a ``..`` or a scheme, leads out of the folder by a link, or is missing or
            no regular file, such as a pipe or a device.
    """
    text = PurePosixPath(os.fspath(name).replace(os.sep, "/")).as_posix()  # without "./" and "//"
    if not stays_inside(text):
        raise ForeignNameError("is no name of a file below the folder")
    path = folder / text
    try:
        real = path.resolve(strict=True)
        roots = _roots(folder.resolve())
    except (OSError, ValueError, RuntimeError):  # RuntimeError: links in a circle, before Python 3.13
        raise ForeignNameError("no such file") from None
    if not any(real.is_relative_to(root) for root in roots):
        raise ForeignNameError("is a link that leads out of the folder")
    refuse_special_file(real)
    return path


def refuse_special_file(path: Path) -> None:
    """Refuse what is no regular file: opening a pipe that nobody writes to would wait for ever.

    Raises:
        ForeignNameError: it is missing, a folder, a pipe, a socket or a device.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        raise ForeignNameError("no such file") from None
    if not stat.S_ISREG(mode):
        raise ForeignNameError("is a folder" if stat.S_ISDIR(mode) else "is no regular file")


def _roots(folder: Path) -> tuple[Path, ...]:
    return (folder, folder.parents[1] / "blobs") if folder.parent.name == "snapshots" else (folder,)
