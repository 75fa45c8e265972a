"""Writes down which finished files are to be put in place together, so that a kill between two of them is made good.

The journal is written when every file is complete and before the first is moved. Whoever finds one whose writer ended
completes it. Only plain names in one folder are ever read from it. Standard library only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winml.modelkit.file_names import JOURNAL_NAME

__all__ = ["State", "complete_journal", "file_state", "remove_journal", "write_journal"]

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


def complete_journal(folder: Path, staged: Path, directory: Path) -> tuple[str, ...] | None:
    """Do what an ended process left to do, if there is anything.

    Where a file that was to be replaced is no longer what it was, the user has gone on without us: nothing is done.

    Returns:
        The names put in place; None where the journal is of a newer version or damaged, and must be left alone.

    Raises:
        OSError: a file cannot be put in place.
    """
    try:
        journal = _read_journal(folder / JOURNAL_NAME)
    except ValueError:
        return None
    waiting = {name: entry for name, entry in journal.moves.items() if os.path.lexists(staged / name)}
    for name, (size_bytes, earlier) in waiting.items():
        # Where there are no hard links, a kill may come when the earlier file is moved aside.
        is_untouched = file_state(directory / name) in (earlier, None)
        if not is_untouched or (staged / name).stat().st_size != size_bytes:
            return ()
    for name in waiting:
        (staged / name).replace(directory / name)
    unchanged = [name for name, state in journal.removals.items() if state == file_state(directory / name)]
    if unchanged:
        from winml.modelkit.graph.files.orphaned_data import remove_unused

        remove_unused(directory, unchanged)
    remove_journal(folder)
    return tuple(journal.moves)


def remove_journal(folder: Path) -> None:
    """Say that all is done."""
    (folder / JOURNAL_NAME).unlink(missing_ok=True)


def _read_journal(path: Path) -> _Journal:
    """Return the journal, which is empty where nothing was ready to be put in place.

    Raises:
        ValueError: it is of another version, or damaged.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return _Journal({}, {})
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
    return _Journal(moves, removals)


def _plain_name(name: Any) -> str:
    """Return the name of a file, which leads out of no folder.

    Raises:
        ValueError: it may.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
        raise ValueError(name)
    return name


def _state(value: Any) -> State:
    return None if value is None else (int(value[0]), int(value[1]))
