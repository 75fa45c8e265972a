"""Compares the files of a build with their records by digest; each file is read once per build."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from winml.modelkit.builds.cache import hash_file
from winml.modelkit.graph.files.foreign_names import ForeignNameError, file_below
from winml.modelkit.results.build_manifest import FileRecord

__all__ = ["FileRecords"]


class FileRecords:
    """The files of one folder."""

    def __init__(self, folder: Path) -> None:
        """Start without having read any."""
        self._folder = folder
        self._digests: dict[tuple[int, int, int, int], str] = {}

    def of(self, paths: Iterable[Path]) -> tuple[FileRecord, ...]:
        """Return the records of files in the folder, as they are now.

        Raises:
            OSError: one cannot be read.
        """
        return tuple(
            FileRecord(
                name=path.relative_to(self._folder).as_posix(),
                size_bytes=path.stat().st_size,
                sha256=self._read_digest(path),
            )
            for path in paths
        )

    def first_changed(self, records: Sequence[FileRecord]) -> str:
        """Return the name of the first file that is missing, outside of the folder or not as recorded, or ``""``."""
        for record in records:
            try:
                path = file_below(self._folder, record.name)
                is_same = path.stat().st_size == record.size_bytes and self._read_digest(path) == record.sha256
            except (OSError, ForeignNameError):
                is_same = False
            if not is_same:
                return record.name
        return ""

    def _read_digest(self, path: Path) -> str:
        # Several names of one file, as hard links make them, are read once.
        status = path.stat()
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if identity not in self._digests:
            self._digests[identity] = hash_file(path)
        return self._digests[identity]
