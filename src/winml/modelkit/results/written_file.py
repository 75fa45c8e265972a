"""One written file and its size."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["WrittenFile"]


@dataclass(frozen=True)
class WrittenFile:
    """A file that a verb wrote."""

    path: Path
    size_bytes: int

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready form."""
        return {"path": str(self.path), "size_bytes": self.size_bytes}
