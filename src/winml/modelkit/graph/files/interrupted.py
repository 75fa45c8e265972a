"""Completes or removes what commands that were killed left in a folder, or says what. Standard library and filelock."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from winml.modelkit.file_names import PARTIAL_PREFIX
from winml.modelkit.graph.files.committed import record_settled
from winml.modelkit.graph.files.journal import Settled, complete_journal, put_back, waiting_names
from winml.modelkit.graph.files.owned_folders import abandoned_folders

__all__ = ["STAGED", "settle_interrupted", "unfinished_notes"]

STAGED = "new"
"""Subfolder of a hidden folder that holds the files to be put in place, under their own names."""


def settle_interrupted(directory: Path) -> tuple[Path, ...]:
    """Put in place what ended commands had finished in a directory, and remove what they had not.

    What belongs to a command that still runs is left alone, and so is what cannot be put in place. What was done is
    noted for the user (``committed``).

    Returns:
        The files put in place.
    """
    placed: list[Path] = []
    for folder in abandoned_folders(directory, PARTIAL_PREFIX, with_unlocked=True):
        settled, earlier = _settle(folder.path, directory)
        _note(directory, settled or Settled(), earlier)
        if settled is None:
            folder.release()
            continue
        folder.remove()
        placed += [directory / name for name in settled.placed]
    return tuple(placed)


def unfinished_notes(paths: Iterable[Path]) -> tuple[str, ...]:
    """Say what commands left unfinished in folders, or beside files: one sentence for each folder. Changes nothing."""
    notes: dict[str, str] = {}
    for path in paths:
        with contextlib.suppress(OSError):
            directory = path if path.is_dir() else path.parent
            notes.setdefault(os.path.realpath(directory), _unfinished_words(directory))
    return tuple(filter(None, notes.values()))


def _unfinished_words(directory: Path) -> str:
    hidden = [entry for entry in os.scandir(directory) if entry.name.startswith(PARTIAL_PREFIX)]
    folders = sorted(Path(entry.path) for entry in hidden if entry.is_dir(follow_symlinks=False))
    names = [name for folder in folders for name in waiting_names(folder, folder / STAGED, directory)]
    if not names:
        return ""
    return (
        f"{directory}: a command that was killed, or still runs, has not put everything in place here: "
        f"{', '.join(dict.fromkeys(names))}; the next command that writes here finishes it"
    )


def _settle(folder: Path, directory: Path) -> tuple[Settled | None, tuple[str, ...]]:
    """Return what was done with new files, None where the folder must be left alone, and the names put back."""
    try:
        settled = complete_journal(folder, folder / STAGED, directory)
        if settled is None:
            return None, ()
        return settled, () if settled.placed else put_back(folder, folder / STAGED, directory)
    except (OSError, ValueError):
        return None, ()


def _note(directory: Path, settled: Settled, earlier: tuple[str, ...]) -> None:
    done = {"put in place": settled.placed, "removed": settled.removed, "put back": earlier}
    words = "; ".join(f"{verb} {', '.join(names)}" for verb, names in done.items() if names)
    if words:
        record_settled(f"{directory}: a command that was killed had not finished here; {words}")
