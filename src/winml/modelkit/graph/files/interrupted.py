"""Completes or removes what commands that were killed left in a folder. Standard library and filelock only."""

from __future__ import annotations

from pathlib import Path

from winml.modelkit.file_names import PARTIAL_PREFIX
from winml.modelkit.graph.files.committed import record_settled
from winml.modelkit.graph.files.journal import Settled, complete_journal, put_back
from winml.modelkit.graph.files.owned_folders import abandoned_folders

__all__ = ["STAGED", "settle_interrupted"]

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
