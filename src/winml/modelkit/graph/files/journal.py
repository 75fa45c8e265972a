"""Writes down which finished files are to be put in place together, so that a kill between two of them is made good.

The journal is written when every file is complete and before the first is moved. Whoever finds one whose writer ended
completes it. Only plain names in one folder are ever read from it. Standard library only.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winml.modelkit.file_names import JOURNAL_NAME, MODEL_SUFFIX, is_data_of, is_plain_name

__all__ = [
    "MOVED_ASIDE",
    "Settled",
    "State",
    "complete_journal",
    "file_state",
    "put_back",
    "remove_journal",
    "waiting_names",
    "write_journal",
]

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
    path = folder / JOURNAL_NAME
    unfinished = path.with_suffix(".new")
    with unfinished.open("w", encoding="utf-8") as file:
        json.dump(record, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


@dataclass(frozen=True)
class Settled:
    """What became of the files of an ended process, by name."""

    placed: tuple[str, ...] = ()
    """New files that were put in place, now or before it ended."""
    removed: tuple[str, ...] = ()
    """Weights that nothing names any more."""


def complete_journal(folder: Path, staged: Path, directory: Path) -> Settled | None:
    """Do what an ended process left to do, if there is anything.

    Where a file that was to be replaced is no longer what it was, the user has gone on without us: nothing is done.

    Returns:
        What was done; None where the journal is of a newer version, damaged or not ours, and must be left alone.

    Raises:
        OSError: a file cannot be put in place.
    """
    try:
        journal = _read_journal(folder / JOURNAL_NAME)
        waiting = _waiting_files(journal, staged)
    except (ValueError, OverflowError):
        return None
    if not all(_is_still_meant(journal, name, waiting[name], folder, directory) for name in waiting):
        return Settled()
    for name in waiting:
        (staged / name).replace(directory / name)
    unchanged = [
        name for name, state in journal.removals.items() if state is not None and state == file_state(directory / name)
    ]
    if unchanged:
        from winml.modelkit.graph.files.orphaned_data import remove_unused

        remove_unused(directory, unchanged)
    remove_journal(folder)
    return Settled(tuple(journal.moves), tuple(name for name in unchanged if not os.path.lexists(directory / name)))


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


def waiting_names(folder: Path, staged: Path, directory: Path) -> tuple[str, ...]:
    """Return the files of a directory that are not what they are to be: new ones wait, or earlier ones are aside.

    Changes nothing. Empty where the journal is of a newer version, damaged or not ours.
    """
    try:
        journal = _read_journal(folder / JOURNAL_NAME)
        waiting = _waiting_files(journal, staged)
        aside = [name for name in _regular_files(folder / MOVED_ASIDE) if not os.path.lexists(directory / name)]
        is_meant = all(_is_still_meant(journal, name, waiting[name], folder, directory) for name in waiting)
    except (OSError, ValueError, OverflowError):
        return ()
    return tuple(dict.fromkeys((*(waiting if is_meant else ()), *aside)))


def put_back(folder: Path, staged: Path, directory: Path) -> tuple[str, ...]:
    """Put back earlier files whose places are empty since nothing new came there; returns their names.

    Raises:
        OSError: a file cannot be put back.
    """
    names = []
    for name in _regular_files(folder / MOVED_ASIDE):
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
    (folder / JOURNAL_NAME).unlink(missing_ok=True)


def _read_journal(path: Path) -> _Journal:
    """Return the journal, which is empty where nothing was ready to be put in place.

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
            _plain_name(entry["name"]): (int(entry["size_bytes"]), _state(entry["replaces"]))
            for entry in record["moves"]
        }
        removals = {_plain_name(entry["name"]): _state(entry["state"]) for entry in record["removals"]}
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(path) from error
    models = [name for name in moves if name.lower().endswith(MODEL_SUFFIX)]
    for name in removals:
        if not any(is_data_of(model, name) for model in models):
            raise ValueError(name)
    return _Journal(moves, removals)


def _plain_name(name: Any) -> str:
    """Return the name of a file, which leads out of no folder.

    Raises:
        ValueError: it may.
    """
    if not isinstance(name, str) or not is_plain_name(name):
        raise ValueError(name)
    return name


def _state(value: Any) -> State:
    return None if value is None else (int(value[0]), int(value[1]))
