"""Puts the files that readers look for beside a model: config, tokenizer, processors.

A file of somebody else keeps its place. Standard library only.
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from winml.modelkit.graph.files.output_files import OutputFiles

__all__ = ["Companions", "earlier_companions", "reserve_companions"]


@dataclass(frozen=True)
class Companions:
    """What stands beside a model, by name with ``/`` between parts."""

    names: tuple[str, ...] = ()
    """Files that were put there, now or by the run before."""
    size_bytes: int = 0
    """Of all of them."""
    kept: tuple[str, ...] = ()
    """Files of somebody else that have one of the names, and were left as they are."""

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence about files of somebody else; empty where there are none."""
        if not self.kept:
            return ()
        names = ", ".join(self.kept)
        found = f"Other files of these names stay as they are: {names}."
        return (f"{found} Who opens the folder may take them for this model's; give the model a folder of its own.",)


def reserve_companions(
    files: OutputFiles, directory: Path, sources: Mapping[str, Path], *, owned: Collection[str] = ()
) -> Companions:
    """Copy files beside a model that is about to be put in place.

    Args:
        files: The transaction they become part of.
        directory: Where the model goes.
        sources: Name in ``directory``, ``/`` between parts → file to copy.
        owned: Names that an earlier run put there; those are replaced, others never.

    Raises:
        WriteError: a file cannot be written.
    """
    names, kept, size_bytes = [], [], 0
    for name, source in sources.items():
        target = directory / name
        is_there = os.path.lexists(target)
        if is_there and _is_same_content(source, target):
            # Equal files that were there before, such as the checkpoint's own, do not become ours.
            if name not in owned:
                continue
        elif is_there and (name not in owned or not target.is_file()):
            kept.append(name)
            continue
        else:
            with files.explained_errors():
                shutil.copyfile(source, files.reserve(target))
        names.append(name)
        size_bytes += source.stat().st_size
    return Companions(tuple(names), size_bytes, tuple(kept))


def earlier_companions(sidecar: Path) -> tuple[str, ...]:
    """Return the names that the export before this one put beside its model, as its sidecar says; empty without one."""
    try:
        names = json.loads(sidecar.read_text(encoding="utf-8"))["outputs"]["companions"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return ()
    return tuple(name for name in names if isinstance(name, str)) if isinstance(names, list) else ()


def _is_same_content(source: Path, target: Path) -> bool:
    try:
        return target.is_file() and filecmp.cmp(source, target, shallow=False)
    except OSError:
        return False
