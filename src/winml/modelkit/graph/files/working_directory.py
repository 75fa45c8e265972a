"""Keeps the working directory where foreign code changes it, so that a relative path goes on meaning what it meant."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["working_directory_kept"]


@contextlib.contextmanager
def working_directory_kept() -> Iterator[None]:
    """Return to the present working directory after the block, unless it is gone by then."""
    try:
        folder = Path.cwd()
    except OSError:
        yield  # it is gone already
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.chdir(folder)
