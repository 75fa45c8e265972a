"""Makes the folders for temporary files, and removes those that killed commands left."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from winml.modelkit.file_names import TEMPORARY_PREFIX
from winml.modelkit.graph.files.owned_folders import OwnedFolder, abandoned_folders

__all__ = ["temporary_folder"]


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a new folder among the system's temporary files, removed with all that is in it when the block ends.

    Raises:
        OSError: it cannot be made.
    """
    directory = Path(tempfile.gettempdir())
    for abandoned in abandoned_folders(directory, TEMPORARY_PREFIX):
        abandoned.remove()
    folder = OwnedFolder.make(directory, TEMPORARY_PREFIX)
    try:
        yield folder.path
    finally:
        folder.remove()
