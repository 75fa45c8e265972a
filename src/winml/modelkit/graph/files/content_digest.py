"""Computes digests of the content of files. Standard library only."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["content_digest", "hash_file"]

_PIECE_BYTES = 1 << 24
"""Bytes digested by one thread at a time. Part of what the digest means."""
_BLOCK_BYTES = 1 << 20
_MOST_THREADS = 8
"""Chosen: from there on reading takes longer than computing."""


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file's content, read now.

    Raises:
        OSError: the file cannot be read.
    """
    hasher = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            hasher.update(block)
    return hasher.hexdigest()


def content_digest(path: Path) -> str:
    """Return a digest of a file's content, for the name of large ones: 64 hexadecimal digits.

    It is the SHA-256 of the SHA-256s of its pieces, which are computed side by side.

    Raises:
        OSError: the file cannot be read.
    """
    starts = range(0, path.stat().st_size, _PIECE_BYTES)
    with ThreadPoolExecutor(max_workers=min(_MOST_THREADS, os.cpu_count() or 1)) as threads:
        pieces = threads.map(lambda start: _piece_digest(path, start), starts)
        return hashlib.sha256(b"".join(pieces)).hexdigest()


def _piece_digest(path: Path, start: int) -> bytes:
    digest, left = hashlib.sha256(), _PIECE_BYTES
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while left and (block := file.read(min(_BLOCK_BYTES, left))):
            digest.update(block)
            left -= len(block)
    return digest.digest()
