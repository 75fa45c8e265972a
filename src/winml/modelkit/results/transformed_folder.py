"""What came of a verb that makes files of files, over the folder of a build: one record for each part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["TransformedFolder"]


class _Record(Protocol):
    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready form."""


RecordT = TypeVar("RecordT", bound=_Record)


@dataclass(frozen=True)
class TransformedFolder(Generic[RecordT]):
    """A folder that was made of another one."""

    source: Path
    folder: Path
    parts: Mapping[str, RecordT]
    """Name of the part → what was done with it; of those that were changed."""
    unchanged: Mapping[str, str]
    """Name of a part that came along as it is → why."""
    companions: tuple[str, ...]
    """Names of the files that came along for readers of the folder."""
    size_bytes: int
    """Of all files that were written."""

    @property
    def is_of_one_part(self) -> bool:
        """Whether the model has one part only, so that its record says everything."""
        return len(self.parts) + len(self.unchanged) == 1

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready form: the record of the only part and the folder, or the records by part."""
        if self.is_of_one_part:
            (record,) = self.parts.values()
            return {**record.as_record(), "folder": str(self.folder), "companions": list(self.companions)}
        return {
            "schema_version": 1,
            "source": str(self.source),
            "folder": str(self.folder),
            "parts": {part: record.as_record() for part, record in self.parts.items()},
            "unchanged": dict(self.unchanged),
            "companions": list(self.companions),
        }
