"""What is in the cache, and what was removed from it? The records of ``winml cache``."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

__all__ = ["CacheContents", "CachedBuild"]


@dataclass(frozen=True)
class CachedBuild:
    """One build in the cache."""

    folder: Path
    model: str | None
    """As it was named when it was built; None where the manifest does not say."""
    is_finished: bool
    size_bytes: int
    """What removing it frees: a file under several names counts once."""
    written: datetime
    """When it was last written to, in local time."""

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready form."""
        return {
            "folder": str(self.folder),
            "model": self.model,
            "is_finished": self.is_finished,
            "size_bytes": self.size_bytes,
            "written": self.written.isoformat(timespec="seconds"),
        }


@dataclass(frozen=True)
class CacheContents:
    """Builds in the cache: those that are there, or those that were removed."""

    root: Path
    builds: tuple[CachedBuild, ...]
    """The one written last comes first."""
    other_bytes: int
    """Of notes about results and digests."""
    in_use: tuple[CachedBuild, ...] = ()
    """Builds that were to be removed and stay, since somebody works in them."""

    @property
    def size_bytes(self) -> int:
        """Of all of it."""
        return sum(build.size_bytes for build in self.builds) + self.other_bytes

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready form; sizes in bytes."""
        return {
            "root": str(self.root),
            "size_bytes": self.size_bytes,
            "other_bytes": self.other_bytes,
            "builds": [build.as_record() for build in self.builds],
            "in_use": [build.as_record() for build in self.in_use],
        }
