"""Puts config, tokenizer and processor files beside a built model, and knows those that the user changed since.

A file is ours as long as its content is what a build wrote. What the user changed stays, and is ours no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from winml.modelkit.builds.folder import BuildFolder
from winml.modelkit.graph.files.companions import Companions, is_in_the_way, reserve_companions, settled_companions
from winml.modelkit.graph.files.content_digest import hash_file
from winml.modelkit.graph.files.output_files import OutputFiles
from winml.modelkit.results.build_manifest import FileRecord

__all__ = ["BuildCompanions"]


class BuildCompanions:
    """The companions in the folder of one build.

    Attributes:
        placed: What stands there; known once the models are placed.
        records: What the manifest says of them. Until the build is done, these may be two of one name: as the earlier
            build left it, and as this one does.
    """

    def __init__(self, folder: BuildFolder, sources: Mapping[str, Path]) -> None:
        """Take over what the earlier build wrote down.

        Args:
            folder: Held by the build.
            sources: Name in the folder, ``/`` between parts → file to copy.
        """
        self.placed = Companions()
        self.records = folder.manifest.companions if folder.manifest is not None else ()
        self._folder = folder
        self._sources = sources

    def reserve(self, files: OutputFiles) -> None:
        """Copy what is missing or outdated; the names are ours from now on, which the caller is to write down.

        Raises:
            WriteError: a file cannot be written.
        """
        folder = self._folder
        self._disown_changed()
        owned = folder.owned_names()
        self.placed = reserve_companions(files, folder.path, self._sources, owned=owned)
        folder.disown(self.placed.kept)
        new = [name for name in self.placed.names if name not in owned]
        if new:
            folder.claim(new)
        coming = (_record(name, self._sources[name]) for name in self.placed.names)
        self.records = tuple(dict.fromkeys((*self.records, *coming)))

    def settle(self, files: OutputFiles) -> None:
        """Take note of what became of them in the commit."""
        folder = self._folder
        reserved = self.placed.names
        self.placed = settled_companions(self.placed, folder.path, self._sources, files.gave_way)
        folder.disown([name for name in reserved if name not in self.placed.names])
        self.records = tuple(_record(name, folder.path / name) for name in self.placed.names)

    def _disown_changed(self) -> None:
        names = {record.name for record in self.records} & {*self._folder.owned_names()}
        changed = [name for name in names if self._is_changed(name)]
        self._folder.disown(changed)
        self.records = tuple(record for record in self.records if record.name in names and record.name not in changed)

    def _is_changed(self, name: str) -> bool:
        path = self._folder.path / name
        if is_in_the_way(self._folder.path, name):
            return True
        return path.exists() and _record(name, path) not in self.records


def _record(name: str, path: Path) -> FileRecord:
    return FileRecord(name=name, size_bytes=path.stat().st_size, sha256=hash_file(path))
