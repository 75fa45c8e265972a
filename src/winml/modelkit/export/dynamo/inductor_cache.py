"""Removes the empty cache folder that torch's compiler makes among the temporary files when it is imported."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["without_empty_inductor_cache"]

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable of torch that names the folder; torch sets it where nobody has."""
_NAME_START = "torchinductor_"
"""Start of the name that torch chooses; the user's follows."""


@contextmanager
def without_empty_inductor_cache() -> Iterator[None]:
    """Remove torch's cache folder after the block, where torch chose the place and nothing is in it.

    An export compiles nothing. A cache that somebody uses is not empty, and torch makes the folder again when needed.
    """
    try:
        yield
    finally:
        folder = Path(os.environ.get(_VARIABLE, ""))
        if folder.name.startswith(_NAME_START) and folder.parent == Path(tempfile.gettempdir()):
            with contextlib.suppress(OSError):
                folder.rmdir()
