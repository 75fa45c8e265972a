"""Copies of the files that readers expect next to a model: config, tokenizer, processors.

Files of other origin are never replaced. Standard library only.
"""

from __future__ import annotations

import contextlib
import filecmp
import json
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from winml.modelkit.errors import InternalError
from winml.modelkit.file_names import MODEL_SUFFIX, stays_inside
from winml.modelkit.onnx.files.content_digest import hash_file
from winml.modelkit.onnx.files.foreign_names import lies_within
from winml.modelkit.onnx.files.moving import remove_file
from winml.modelkit.onnx.files.output_files import OutputFiles


@dataclass(frozen=True)
class Companions:
    """Files next to a model, by name with ``/`` between parts."""

    names: tuple[str, ...] = ()
    """Files that were put there, now or by the run before."""
    size_bytes: int = 0
    """Total size."""
    foreign_names: tuple[str, ...] = ()
    """Files of other origin with one of the names, left unchanged."""
    sha256: Mapping[str, str] = field(default_factory=dict)
    """Name → SHA-256; the next run compares it to detect the user's changes."""
    damaged: tuple[str, ...] = ()
    """Files of ``names`` with the suffix ``.json`` that are not JSON."""

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence about existing files of other origin, and a sentence about damaged files."""
        notes = []
        if self.foreign_names:
            names = ", ".join(self.foreign_names)
            notes.append(
                f"Existing files were not replaced: {names}. They may not fit this model; use a separate folder."
            )
        if self.damaged:
            names = ", ".join(self.damaged)
            notes.append(
                f"Copied, but not JSON: {names}. Readers of the folder will fail; repair the files of the checkpoint."
            )
        return tuple(notes)


def reserve_companions(
    files: OutputFiles, directory: Path, sources: Mapping[str, Path], *, owned: Collection[str] = ()
) -> Companions:
    """Copy files next to a model before its commit.

    Args:
        files: The transaction.
        directory: The folder of the model.
        sources: Name in ``directory``, ``/`` between parts → file to copy.
        owned: Names of files of an earlier run; only these are replaced. A file that appears before the commit
            also stays: :func:`settled_companions` reports it.

    Raises:
        InternalError: a name leads out of the directory.
        WriteError: a file cannot be written.
    """
    digests: dict[str, str] = {}
    unchanged, size_bytes = [], 0
    for name, source in sources.items():
        if not stays_inside(name):
            raise InternalError(f"companion {name!r} of {source} leads out of {directory}")
        target = directory / name
        is_same, is_ours = _is_same_content(source, target), _can_be_ours(directory, name, owned)
        if not is_ours or (is_same and name not in owned):
            # Equal files that were there before, such as the checkpoint's own, do not become ours.
            unchanged += [] if is_same else [name]
            continue
        if not is_same:
            with files.explained_errors():
                shutil.copyfile(source, files.reserve(target, gives_way=True))
        digests[name] = hash_file(source)
        size_bytes += source.stat().st_size
    damaged = tuple(name for name in digests if name.endswith(".json") and not _may_be_json(sources[name]))
    return Companions(tuple(digests), size_bytes, tuple(unchanged), digests, damaged)


def _may_be_json(path: Path) -> bool:
    """Return False for a truncated file or another format; large files are not parsed for this."""
    content = path.read_bytes().strip()
    return (content[:1], content[-1:]) in ((b"{", b"}"), (b"[", b"]"))


def outdated_companions(
    directory: Path, sources: Mapping[str, Path], *, owned: Collection[str] = ()
) -> tuple[str, ...]:
    """Return the names of the files to be written by :func:`reserve_companions`, for the same arguments."""
    return tuple(
        name
        for name, source in sources.items()
        if _can_be_ours(directory, name, owned) and not _is_same_content(source, directory / name)
    )


def _can_be_ours(directory: Path, name: str, owned: Collection[str]) -> bool:
    """Return True if the name is not used by a file of other origin."""
    return not is_in_the_way(directory, name) and (name in owned or not os.path.lexists(directory / name))


def settled_companions(
    companions: Companions, directory: Path, sources: Mapping[str, Path], gave_way: Collection[Path]
) -> Companions:
    """Return the companions of a committed model, without files skipped by the commit.

    Args:
        companions: The reserved files.
        directory: The folder of the model.
        sources: Name → copied file.
        gave_way: Files of the transaction that were skipped because another file appeared.
    """
    lost = [name for name in companions.names if (directory / name).absolute() in gave_way]
    if not lost:
        return companions
    foreign_names = [name for name in lost if not _is_same_content(sources[name], directory / name)]
    return replace(
        companions,
        names=tuple(name for name in companions.names if name not in lost),
        size_bytes=companions.size_bytes - sum(sources[name].stat().st_size for name in lost),
        foreign_names=(*companions.foreign_names, *foreign_names),
        sha256={name: digest for name, digest in companions.sha256.items() if name not in lost},
    )


def remove_companions(directory: Path, names: Collection[str], models: Collection[Path]) -> None:
    """Remove companion files of an earlier run, not written by the current run.

    No file is removed if the directory holds another model, which may need the files.

    Args:
        directory: The folder of the model.
        names: The files to remove.
        models: The models of the current run.
    """
    own_names = {path.name for path in models}
    if any(path.name not in own_names for path in directory.glob(f"*{MODEL_SUFFIX}")):
        return
    for name in names:
        path = directory / name
        if is_in_the_way(directory, name):
            continue
        with contextlib.suppress(OSError):
            remove_file(path)
            if path.parent != directory:
                path.parent.rmdir()  # if empty now


def is_in_the_way(directory: Path, name: str) -> bool:
    """Return True if a companion's name is used by an irregular file, or a parent name by a file that is no folder."""
    target = directory / name
    if os.path.lexists(target) and (target.is_symlink() or not target.is_file()):
        return True
    above = [parent for parent in target.parents if directory in parent.parents]
    return any(os.path.lexists(parent) and (parent.is_symlink() or not parent.is_dir()) for parent in above)


def earlier_companions(sidecar: Path) -> tuple[str, ...]:
    """Return the companion files of the previous export, from its sidecar; ``()`` without a sidecar.

    Files changed since then are omitted: they belong to the user.
    """
    try:
        outputs = json.loads(sidecar.read_text(encoding="utf-8"))["outputs"]
        names, digests = outputs["companions"], outputs.get("companions_sha256")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return ()
    if not isinstance(names, list):
        return ()
    inner_names = (name for name in names if isinstance(name, str) and lies_within(sidecar.parent, name))
    # Sidecars of earlier versions hold no digests.
    known_digests = digests if isinstance(digests, dict) else {}
    return tuple(name for name in inner_names if not _is_changed(sidecar.parent / name, known_digests.get(name)))


def _is_changed(path: Path, digest: str | None) -> bool:
    """Return True if a file differs from a digest, or cannot be read; False without a digest or file."""
    try:
        return digest is not None and path.is_file() and hash_file(path) != digest
    except OSError:
        return True


def _is_same_content(source: Path, target: Path) -> bool:
    """Return True if both files exist with equal content."""
    try:
        return target.is_file() and filecmp.cmp(source, target, shallow=False)
    except OSError:
        return False
