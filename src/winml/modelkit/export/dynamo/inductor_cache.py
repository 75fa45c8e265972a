"""Keeps the cache folder that torch's compiler makes when it is imported out of the system's temporary files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from winml.modelkit.graph.files.temporary import temporary_folder

__all__ = ["inductor_cache_apart"]

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable of torch that names the folder; torch sets it where nobody has."""


@contextmanager
def inductor_cache_apart() -> Iterator[None]:
    """Let torch make its cache in a folder that is removed when the block ends; a folder that is named stays in use.

    An export compiles nothing, so nothing of use is ever in it.
    """
    if _VARIABLE in os.environ:
        yield
        return
    with temporary_folder() as folder:
        os.environ[_VARIABLE] = str(folder)
        try:
            yield
        finally:
            os.environ.pop(_VARIABLE, None)
