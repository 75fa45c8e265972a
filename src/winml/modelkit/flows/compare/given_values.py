"""Which files of values does a path mean? One ``.npz`` file is one set of values, a folder of them several."""

from __future__ import annotations

from pathlib import Path

from winml.modelkit.errors import UsageError

__all__ = ["value_files"]


def value_files(path: Path, option: str = "--input-data") -> list[Path]:
    """Return the files of a folder that hold values, in their order; of a file, itself.

    Raises:
        UsageError: the folder has none.
    """
    if not path.is_dir():
        return [path]
    if files := sorted(path.glob("*.npz")):
        return files
    raise UsageError(f"{option} {path}: the folder has no .npz file", hint="Give an .npz file, or a folder of them.")
