"""Paths that a foreign file may reference: files and folders below its own folder.

Manifests, indices, states, configs, metadata tables and models refer to further files. Such names were chosen by the
author of the file, not by the user, so they must not reach the rest of the machine. Every reader of such a name uses
these functions. Opens no file. Standard library only.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Literal

from winml.modelkit.errors import InputError
from winml.modelkit.file_names import stays_inside

NameProblem = Literal["no name", "outside", "missing", "unusable", "not regular"]
"""Problem of a name.

``no name``: it is no text, or empty. ``outside``: it leads out of the folder, directly or by a link. ``missing``: the
path does not exist. ``unusable``: the system cannot look it up. ``not regular``: it is a device, a pipe or of the other
kind.
"""
Kind = Literal["file", "folder"]
_KIND_WORDS = {"file": "regular file", "folder": "folder"}


class ForeignNameError(ValueError):
    """A name leads to no readable file; the message gives the reason, without the name.

    Attributes:
        problem: Problem of the name.
    """

    def __init__(self, problem: NameProblem, reason: str) -> None:
        super().__init__(reason)
        self.problem = problem


def file_below(folder: Path, name: object, *, kind: Kind = "file") -> Path:
    """Return the regular file, or the folder, below ``folder`` for a name from another file.

    The name may use the separators of any system. A name that leads out of the folder is not looked up. Links are
    followed if they stay below the folder, or lead from a snapshot to a blob of the same repository in the Hub's cache.

    Args:
        folder: The folder that the name is relative to.
        name: The value in the other file, of any type.
        kind: The expected kind.

    Raises:
        ForeignNameError: the name is no text, leads out of the folder, or leads to no path of the kind.
    """
    if not isinstance(name, (str, Path)) or not str(name).strip():
        raise ForeignNameError("no name", "is not a name")
    path = folder / name
    if _leads_out(str(name)):
        raise ForeignNameError("outside", "leads out of the folder")
    try:
        real_folder, target = (Path(os.path.realpath(unresolved, strict=True)) for unresolved in (folder, path))
        mode = target.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise ForeignNameError("missing", f"no such {kind}") from None
    except (OSError, ValueError):  # ValueError: a character that no name has
        raise ForeignNameError("unusable", "cannot be looked up") from None
    if not target.is_relative_to(real_folder) and not _is_hub_blob(real_folder, target):
        raise ForeignNameError("outside", "is a link that leads out of the folder")
    _refuse_other_kind(mode, kind)
    return path


def file_within(
    folder: Path,
    name: object,
    holder: Path | str,
    *,
    kind: Kind = "file",
    missing_ok: bool = False,
    error: type[InputError] = InputError,
) -> Path:
    """Resolve a name as :func:`file_below`; errors name the file that holds the name.

    Args:
        folder: The folder that the name is relative to.
        name: The value in the other file, of any type.
        holder: The file that holds the name, with the key or the row if there are many; for the message.
        kind: The expected kind.
        missing_ok: Return the path even if it does not exist.
        error: Type of the error.

    Raises:
        InputError: of the type ``error``; names the holder, the name, and the expected kind.
    """
    try:
        return file_below(folder, name, kind=kind)
    except ForeignNameError as problem:
        if missing_ok and problem.problem == "missing":
            return folder / str(name)
        raise error(
            f"{holder}: names {name!r} ({problem}); expected the name of a {kind} below {folder}",
            hint=f"Put the {kind} there and reference it by its path from that folder, or download it again.",
        ) from None


def name_problem(folder: Path, name: object, *, kind: Kind = "file") -> NameProblem | None:
    """Return the problem of a name in another file; `None` if :func:`file_below` finds the file."""
    try:
        file_below(folder, name, kind=kind)
    except ForeignNameError as error:
        return error.problem
    return None


def refuse_special_file(path: Path) -> None:
    """Refuse an irregular file: opening a pipe without a writer would wait forever.

    Raises:
        ForeignNameError: the path is missing, a folder, a pipe, a socket or a device.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        raise ForeignNameError("missing", "no such file") from None
    _refuse_other_kind(mode, "file")


def lies_within(folder: Path, name: str) -> bool:
    """Return True if a file with a name from another file may be written to, or removed from, a folder.

    The name must have the form of our file names, with ``/`` between parts, and no parent folder may lead out by a
    link.
    The file itself may be a link: a link is replaced or removed, never followed.
    """
    above = str(PurePosixPath(name).parent)
    return stays_inside(name) and name_problem(folder, above, kind="folder") in (None, "missing")


def _refuse_other_kind(mode: int, kind: Kind) -> None:
    """Refuse a file mode of another kind.

    Raises:
        ForeignNameError: the mode is of no regular file, or of no folder.
    """
    if not (stat.S_ISREG(mode) if kind == "file" else stat.S_ISDIR(mode)):
        is_folder = kind == "file" and stat.S_ISDIR(mode)
        raise ForeignNameError("not regular", "is a folder" if is_folder else f"is not a {_KIND_WORDS[kind]}")


def _leads_out(name: str) -> bool:
    """Return True if a name is absolute, names a drive or goes up, on any system."""
    return any(path.anchor or ".." in path.parts for path in (PurePosixPath(name), PureWindowsPath(name)))


def _is_hub_blob(folder: Path, target: Path) -> bool:
    """Return True if a file is a blob of the Hub repository with a snapshot at or above a folder."""
    return any(
        above.parent.name == "snapshots" and target.parent == above.parent.parent / "blobs"
        for above in (folder, *folder.parents)
    )
