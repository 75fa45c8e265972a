"""Computes digests of the content of files. Standard library only."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import TypeVar

_PIECE_BYTES = 1 << 24
"""Bytes digested at a time by one thread. Part of the definition of the digest."""
_BLOCK_BYTES = 1 << 20
_MOST_THREADS = 8
"""Chosen: from there on reading takes longer than computing."""
REMEMBERED_BYTES = 1 << 26
"""Minimum size of files whose hash is remembered. Chosen: hashing takes longer than the coarsest clock tick of file
times in use, 16 ms, within which a change would not be visible.
"""

_WRITTEN: dict[tuple[int, int, int, int], str] = {}
"""SHA-256 of large files that this process wrote: device, file, size and time of change → digest. A rename or a hard
link changes no part of the key.
"""


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file's current content.

    The file is read, unless it is large, was written by this process and is unchanged since.

    Raises:
        OSError: the file cannot be read.
    """
    if (known_digest := _WRITTEN.get(_file_key(path))) is not None:
        return known_digest
    hasher = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        _hash_next(file, sys.maxsize, hasher.update)
    return hasher.hexdigest()


def _hash_next(file: FileIO, byte_count: int, update: Callable[[bytes], None]) -> int:
    """Hash the next ``byte_count`` bytes of a file, or up to its end; return the number of bytes."""
    remaining = byte_count
    while remaining and (block := file.read(min(_BLOCK_BYTES, remaining))):
        update(block)
        remaining -= len(block)
    return byte_count - remaining


def _file_key(path: Path) -> tuple[int, int, int, int]:
    """Return device, inode, size and modification time of a file."""
    status = path.stat()
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


_T = TypeVar("_T", bound="_InThreads")


class _InThreads:
    """Hashes in threads that end with the block; work not started by then is dropped."""

    def __init__(self, path: Path, threads: int) -> None:
        self._path = path
        self._threads = ThreadPoolExecutor(max_workers=threads)

    def __enter__(self: _T) -> _T:  # noqa: PYI019 - typing has Self from Python 3.11 on
        """Return itself."""
        return self

    def __exit__(self, *_error: object) -> None:
        """End the threads."""
        self._threads.shutdown(cancel_futures=True)


class WrittenFileHash(_InThreads):
    """SHA-256 of a file written sequentially, computed in a thread during writing.

    Once the file is complete and closed, :func:`hash_file` returns it without reading.
    """

    def __init__(self, path: Path) -> None:
        """Prepare the hash without reading; the file need not exist yet."""
        super().__init__(path, threads=1)
        self._hasher = hashlib.sha256()
        self._hashed = 0
        self._runs: list[Future[None]] = []

    def complete_up_to(self, size: int) -> None:
        """Hash the first ``size`` bytes, which are final and have left the buffers of this process."""
        self._runs.append(self._threads.submit(self._hash_up_to, size))

    def remember(self) -> None:
        """Remember the digest of the complete, closed file for :func:`hash_file`.

        Raises:
            OSError: the file cannot be read.
        """
        state = _file_key(self._path)
        _, _, size, _ = state
        self.complete_up_to(size)
        for run in self._runs:
            run.result()
        if self._hashed == size >= REMEMBERED_BYTES and _file_key(self._path) == state:
            _WRITTEN[state] = self._hasher.hexdigest()

    def _hash_up_to(self, size: int) -> None:
        """Hash the bytes from the last position up to ``size``, if there are any."""
        with self._path.open("rb", buffering=0) as file:
            file.seek(self._hashed)
            self._hashed += _hash_next(file, max(0, size - self._hashed), self._hasher.update)


def content_digest(path: Path) -> str:
    """Return a digest of a file's content, used in the names of data files: 64 hexadecimal digits.

    The digest is the SHA-256 of the SHA-256s of its pieces, which are computed in parallel.

    Raises:
        OSError: the file cannot be read.
    """
    with GrowingDigest(path, threads=_processor_count()) as digest:
        return digest.finish()


def _processor_count() -> int:
    return os.cpu_count() or 1


class GrowingDigest(_InThreads):
    """The :func:`content_digest` of a file that is still written; pieces that are complete are digested meanwhile."""

    def __init__(self, path: Path, *, threads: int | None = None) -> None:
        """Prepare the digest without reading; the file need not exist yet.

        Args:
            path: The file.
            threads: Number of threads; None: half of the processors, because other threads are writing.
        """
        # Measured on two processors: with two threads beside two that write, 14.5 GB take an eighth longer.
        count = max(1, _processor_count() // 2) if threads is None else threads
        super().__init__(path, min(_MOST_THREADS, count))
        self._places = [path]
        self._pieces: list[Future[bytes]] = []

    def set_temporary_path(self, temporary_path: Path) -> None:
        """Set the temporary path of the file until it is complete."""
        self._places = [temporary_path, self._path]

    def complete_up_to(self, size: int) -> None:
        """Start digests of the whole pieces in the first ``size`` bytes, which are final."""
        while (start := len(self._pieces) * _PIECE_BYTES) + _PIECE_BYTES <= size:
            self._pieces.append(self._threads.submit(_piece_digest, self._places, start))

    def finish(self) -> str:
        """Complete the pieces and return the digest of the whole file.

        Raises:
            OSError: the file cannot be read.
        """
        size = self._path.stat().st_size
        self.complete_up_to(size)
        if (start := len(self._pieces) * _PIECE_BYTES) < size:
            self._pieces.append(self._threads.submit(_piece_digest, self._places, start))
        return hashlib.sha256(b"".join(piece.result() for piece in self._pieces)).hexdigest()


def _piece_digest(paths: Sequence[Path], start: int) -> bytes:
    """Return the SHA-256 of a piece of a file."""
    hasher = hashlib.sha256()
    with _open_first(paths) as file:
        file.seek(start)
        _hash_next(file, _PIECE_BYTES, hasher.update)
    return hasher.digest()


def _open_first(paths: Sequence[Path]) -> FileIO:
    """Open a file at its first existing path; a file may be renamed to the next path at any time."""
    for path in paths[:-1]:
        with contextlib.suppress(FileNotFoundError):
            return path.open("rb", buffering=0)
    return paths[-1].open("rb", buffering=0)
