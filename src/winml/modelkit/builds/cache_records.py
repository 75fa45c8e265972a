"""What is in the cache, and what was removed from it? The records of ``winml cache``."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from winml.modelkit.records import Record, entry, recorded


@dataclass(frozen=True)
class CachedBuild(Record):
    """One build in the cache."""

    folder: Path
    model: str | None
    """As it was named when it was built; None where the manifest does not say."""
    is_finished: bool
    size_bytes: int
    """What removing it frees: a file under several names counts once."""
    written: datetime
    """When it was last written to, in local time."""


@dataclass(frozen=True)
class CacheContents(Record):
    """Builds in the cache: those that are there, or those that were removed."""

    root: Path
    builds: tuple[CachedBuild, ...]
    """The one written last comes first."""
    other_bytes: int = field(metadata=entry(before="builds"))
    """Of notes about results and digests."""
    in_use: tuple[CachedBuild, ...] = ()
    """Builds that were to be removed and stay, since somebody works in them."""

    @property
    @recorded(entry(before="other_bytes"))
    def size_bytes(self) -> int:
        """Of all of it."""
        return sum(build.size_bytes for build in self.builds) + self.other_bytes
