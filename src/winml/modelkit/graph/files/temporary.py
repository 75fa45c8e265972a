"""Makes the folders for temporary files, and removes those that killed commands left."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from winml.modelkit.file_names import PARTIAL_PREFIX, TEMPORARY_PREFIX
from winml.modelkit.graph.files.interrupted import settle_interrupted
from winml.modelkit.graph.files.owned_folders import OwnedFolder, abandoned_folders

__all__ = ["temporary_folder"]


@contextmanager
def temporary_folder(beside: Path | None = None) -> Iterator[Path]:
    """Yield a new folder, removed with all that is in it when the block ends.

    Args:
        beside: A file that is to be written; the folder is then on its file system, so that what is in it can be moved
            there however large it is. It is hidden, and what a kill leaves goes with the next command that writes
            there. None: among the system's temporary files.

    Raises:
        OSError: it cannot be made.
    """
    if beside is None:
        directory, prefix = Path(tempfile.gettempdir()), TEMPORARY_PREFIX
    else:
        directory, prefix = _nearest_folder(beside), PARTIAL_PREFIX
        settle_interrupted(directory)
    for abandoned in abandoned_folders(directory, TEMPORARY_PREFIX):
        abandoned.remove()
    folder = OwnedFolder.make(directory, prefix)
    try:
        yield folder.path
    finally:
        folder.remove()


def _nearest_folder(path: Path) -> Path:
    return next(folder for folder in path.absolute().parents if folder.is_dir())
