"""Where may a name lead that another file holds? To a regular file or a folder below the folder it is relative to.

Manifests, indices, states, configs, metadata tables and models name further files. Whoever made such a file chose the
name, and not the user, so it must not reach the rest of the machine. Every reader of such a name asks here. Opens
nothing. Standard library only.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Literal

from winml.modelkit.errors import InputError
from winml.modelkit.file_names import stays_inside

__all__ = [
    "ForeignNameError",
    "FoundName",
    "NameProblem",
    "file_below",
    "file_within",
    "lies_within",
    "look_up_name",
    "refuse_special_file",
]

NameProblem = Literal["no name", "outside", "missing", "unusable", "not regular"]
"""What is wrong with a name. ``no name``: it is no text, or empty. ``outside``: it leads out of the folder, by itself
or by a link. ``missing``: nothing is there. ``unusable``: the system does not look it up. ``not regular``: it is a
device, a pipe or of the other kind."""


class ForeignNameError(ValueError):
    """A name leads to no file that may be read; the message says why, without the name."""


@dataclass(frozen=True)
class FoundName:
    """Where a name leads."""

    path: Path
    """The folder and the name. Only to be opened where nothing is wrong."""
    problem: NameProblem | None
    size_bytes: int | None = None
    """Of a file; None where anything is wrong, or it is a folder."""


def file_within(
    folder: Path,
    name: Any,
    holder: Path | str,
    *,
    kind: Literal["file", "folder"] = "file",
    missing_ok: bool = False,
    error: type[InputError] = InputError,
) -> Path:
    """Return the regular file (or the folder) below ``folder`` that a name in another file leads to.

    Args:
        folder: What the name is relative to.
        name: As the other file holds it, of whatever type.
        holder: The file that holds the name, with the key or the row where there are many; for the message.
        kind: What is expected there.
        missing_ok: Return the path also where nothing is there.
        error: What to raise.

    Raises:
        InputError: the name is no text, leads out of the folder, or such a file is not there; of the type ``error``.
    """
    found = look_up_name(folder, name, kind=kind)
    if found.problem is None or (missing_ok and found.problem == "missing"):
        return found.path
    raise error(
        f"{holder}: names {name!r}, which {_in_words(found.problem, kind)}; expected the name of a {kind} "
        f"below {folder}",
        hint=f"Put the {kind} there and name it by its path from that folder, or get {holder} again from who made it.",
    )


def file_below(folder: Path, name: str | os.PathLike[str]) -> Path:
    """Return the regular file below a folder that a cell, a row or an entry of another file names.

    For readers of many names, which say themselves in which row the name stands and go on with the next.

    Raises:
        ForeignNameError: the name leads out of the folder, or to no regular file.
    """
    found = look_up_name(folder, os.fspath(name))
    if found.problem is not None:
        raise ForeignNameError(_in_words(found.problem, "file"))
    return found.path


def refuse_special_file(path: Path) -> None:
    """Refuse what is no regular file: opening a pipe that nobody writes to would wait for ever.

    Raises:
        ForeignNameError: it is missing, a folder, a pipe, a socket or a device.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        raise ForeignNameError(_in_words("missing", "file")) from None
    if not stat.S_ISREG(mode):
        raise ForeignNameError("is a folder" if stat.S_ISDIR(mode) else _in_words("not regular", "file"))


def look_up_name(folder: Path, name: Any, *, kind: Literal["file", "folder"] = "file") -> FoundName:
    """Return where a name in another file leads, and what is wrong with it.

    The name may use the separators of any system. What leads out of the folder by itself is not looked up. Links are
    followed as long as they stay below the folder, or lead from a snapshot to a blob of one repository of the Hub's
    cache, which is how it is built.

    Args:
        folder: What the name is relative to.
        name: As the other file holds it, of whatever type.
        kind: What is expected there.
    """
    if not isinstance(name, (str, Path)) or not str(name).strip():
        return FoundName(folder, "no name")
    path = folder / name
    if _leads_out(str(name)):
        return FoundName(path, "outside")
    try:
        place, target = (Path(os.path.realpath(item, strict=True)) for item in (folder, path))
        status = target.stat()
    except (FileNotFoundError, NotADirectoryError):
        return FoundName(path, "missing")
    except (OSError, ValueError):  # ValueError: a character that no name has
        return FoundName(path, "unusable")
    if not target.is_relative_to(place) and not _is_hub_blob(place, target):
        return FoundName(path, "outside")
    if kind == "folder":
        return FoundName(path, None if stat.S_ISDIR(status.st_mode) else "not regular")
    return FoundName(path, None, status.st_size) if stat.S_ISREG(status.st_mode) else FoundName(path, "not regular")


def lies_within(folder: Path, name: str) -> bool:
    """Say whether a file of a name that another file holds may be written to a folder, or removed from it.

    The name is one that this tool writes, with ``/`` between parts, and no folder in it leads out of this one by a
    link. What the name itself leads to does not count: it is replaced or removed, never followed.
    """
    above = str(PurePosixPath(name).parent)
    return stays_inside(name) and look_up_name(folder, above, kind="folder").problem in (None, "missing")


def _in_words(problem: NameProblem, kind: Literal["file", "folder"]) -> str:
    return {
        "no name": "is no name",
        "outside": "leads out of the folder; it was not read",
        "missing": "is not there",
        "unusable": "cannot be looked up",
        "not regular": f"is no {'regular file' if kind == 'file' else 'folder'}",
    }[problem]


def _leads_out(name: str) -> bool:
    """Say whether a name is absolute, names a drive or goes up, on any system."""
    return any(path.anchor or ".." in path.parts for path in (PurePosixPath(name), PureWindowsPath(name)))


def _is_hub_blob(place: Path, target: Path) -> bool:
    """Say whether a file is a blob of the repository that a folder is a snapshot of, or lies in one."""
    return any(
        above.parent.name == "snapshots" and target.parent == above.parent.parent / "blobs"
        for above in (place, *place.parents)
    )
