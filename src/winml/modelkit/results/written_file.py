"""Which file was written, and how large is it?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["WrittenFile"]


@dataclass(frozen=True)
class WrittenFile:
    """One file of the result."""

    path: Path
    size_bytes: int

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready form."""
        return {"path": str(self.path), "size_bytes": self.size_bytes}
