"""Finds and removes the weights that only a replaced model had.

A data file goes with the model that names it, and only where no other model of the folder names it as well.
"""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterable
from pathlib import Path

from winml.modelkit.file_names import MODEL_SUFFIX, is_data_of
from winml.modelkit.graph.files.placing import data_names

__all__ = ["remove_unused", "replaceable_data"]


def replaceable_data(model: Path) -> tuple[str, ...]:
    """Return the names of the data files in its folder that may go when a file is replaced or removed, there or not.

    These are what a model names and what is called after it. A file of another name may be what the model was made
    from, such as the weights of a checkpoint. A file that is no model, whatever it is, has none.
    """
    if model.suffix.lower() != MODEL_SUFFIX:
        return ()
    return tuple(name for name in _named_data(model) or () if is_data_of(model.name, name))


def _named_data(model: Path) -> tuple[str, ...] | None:
    """Return the data files a model names; None where it cannot be read as a model."""
    try:
        return data_names(model) if stat.S_ISREG(model.stat().st_mode) else ()
    except Exception:
        return None


def remove_unused(directory: Path, candidates: Iterable[str]) -> None:
    """Remove data files that no model of their folder names. Those that cannot be removed stay and do no harm.

    Nothing is removed where a model of the folder cannot be read: it may name any of them.
    """
    unused = set(candidates)
    with contextlib.suppress(OSError):
        for model in directory.iterdir() if unused else ():
            if model.suffix.lower() == MODEL_SUFFIX:
                names = _named_data(model)
                if names is None:
                    return
                unused -= set(names)
        for name in unused:
            (directory / name).unlink(missing_ok=True)
