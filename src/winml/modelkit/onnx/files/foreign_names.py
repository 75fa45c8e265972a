"""Which paths may a foreign file reference? Files and folders below its own folder.

Manifests, indices, states, configs, metadata tables and models name further files. Whoever made such a file chose the
name, and not the user, so it must not reach the rest of the machine. Every reader of such a name asks here. Opens
nothing. Standard library only.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Literal

from winml.modelkit.errors import InputError
from winml.modelkit.file_names import stays_inside

NameProblem = Literal["no name", "outside", "missing", "unusable", "not regular"]
"""What is wrong with a name. ``no name``: it is no text, or empty. ``outside``: it leads out of the folder, by itself
or by a link. ``missing``: nothing is there. ``unusable``: the system does not look it up. ``not regular``: it is a
device, a pipe or of the other kind."""
Kind = Literal["file", "folder"]
_KIND_WORDS = {"file": "regular file", "folder": "folder"}


class ForeignNameError(ValueError):
    """A name leads to nothing that may be read; the message says why, without the name.

    Attributes:
        problem: What is wrong with it.
    """

    def __init__(self, problem: NameProblem, words: str) -> None:
        super().__init__(words)
        self.problem = problem


def file_below(folder: Path, name: object, *, kind: Kind = "file") -> Path:
    """Return the regular file (or the folder) below ``folder`` that a name in another file leads to.

    The name may use the separators of any system. What leads out of the folder by itself is not looked up. Links are
    followed as long as they stay below the folder, or lead from a snapshot to a blob of one repository of the Hub's
    cache, which is how it is built.

    Args:
        folder: What the name is relative to.
        name: As the other file holds it, of whatever type.
        kind: What is expected there.

    Raises:
        ForeignNameError: the name is no text, leads out of the folder, or nothing of the kind is there.
    """
    if not isinstance(name, (str, Path)) or not str(name).strip():
        raise ForeignNameError("no name", "is not a name")
    path = folder / name
    if _leads_out(str(name)):
        raise ForeignNameError("outside", "leads out of the folder")
    try:
        place, target = (Path(os.path.realpath(item, strict=True)) for item in (folder, path))
        mode = target.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise ForeignNameError("missing", f"no such {kind}") from None
    except (OSError, ValueError):  # ValueError: a character that no name has
        raise ForeignNameError("unusable", "cannot be looked up") from None
    if not target.is_relative_to(place) and not _is_hub_blob(place, target):
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
    """Return what :func:`file_below` returns, or say which file holds the name.

    Args:
        folder: What the name is relative to.
        name: As the other file holds it, of whatever type.
        holder: The file that holds the name, with the key or the row where there are many; for the message.
        kind: What is expected there.
        missing_ok: Return the path also where nothing is there.
        error: What to raise.

    Raises:
        InputError: of the type ``error``; names the holder, the name, and what is expected.
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
    """Return what is wrong with a name that another file holds; None where :func:`file_below` finds the file."""
    try:
        file_below(folder, name, kind=kind)
    except ForeignNameError as error:
        return error.problem
    return None


def refuse_special_file(path: Path) -> None:
    """Refuse what is no regular file: opening a pipe that nobody writes to would wait for ever.

    Raises:
        ForeignNameError: it is missing, a folder, a pipe, a socket or a device.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        raise ForeignNameError("missing", "no such file") from None
    _refuse_other_kind(mode, "file")


def lies_within(folder: Path, name: str) -> bool:
    """Say whether a file of a name that another file holds may be written to a folder, or removed from it.

    The name is one that this tool writes, with ``/`` between parts, and no folder in it leads out of this one by a
    link. What the name itself leads to does not count: it is replaced or removed, never followed.
    """
    above = str(PurePosixPath(name).parent)
    return stays_inside(name) and name_problem(folder, above, kind="folder") in (None, "missing")


def _refuse_other_kind(mode: int, kind: Kind) -> None:
    if not (stat.S_ISREG(mode) if kind == "file" else stat.S_ISDIR(mode)):
        is_folder = kind == "file" and stat.S_ISDIR(mode)
        raise ForeignNameError("not regular", "is a folder" if is_folder else f"is not a {_KIND_WORDS[kind]}")


def _leads_out(name: str) -> bool:
    """Say whether a name is absolute, names a drive or goes up, on any system."""
    return any(path.anchor or ".." in path.parts for path in (PurePosixPath(name), PureWindowsPath(name)))


def _is_hub_blob(place: Path, target: Path) -> bool:
    """Say whether a file is a blob of the repository that a folder is a snapshot of, or lies in one."""
    return any(
        above.parent.name == "snapshots" and target.parent == above.parent.parent / "blobs"
        for above in (place, *place.parents)
    )
