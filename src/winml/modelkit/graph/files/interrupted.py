"""Completes or removes what commands that were killed left in a folder. Standard library and filelock only."""

from __future__ import annotations

from pathlib import Path

from winml.modelkit.file_names import PARTIAL_PREFIX
from winml.modelkit.graph.files.journal import complete_journal
from winml.modelkit.graph.files.owned_folders import abandoned_folders

__all__ = ["STAGED", "settle_interrupted"]

STAGED = "new"
"""Subfolder of a hidden folder that holds the files to be put in place, under their own names."""


def settle_interrupted(directory: Path) -> tuple[Path, ...]:
    """Put in place what ended commands had finished in a directory, and remove what they had not.

    What belongs to a command that still runs is left alone, and so is what cannot be put in place.

    Returns:
        The files put in place.
    """
    placed: list[Path] = []
    for folder in abandoned_folders(directory, PARTIAL_PREFIX, with_unlocked=True):
        try:
            names = complete_journal(folder.path, folder.path / STAGED, directory)
        except OSError:
            names = None
        if names is None:
            folder.release()
            continue
        folder.remove()
        placed += [directory / name for name in names]
    return tuple(placed)
