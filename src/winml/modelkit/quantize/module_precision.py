"""The record of what was asked for and what came of it in one module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from winml.modelkit.quantize.precisions import FLOAT32

__all__ = ["ModulePrecision"]


@dataclass(frozen=True)
class ModulePrecision:
    """What was asked for and what came of it in one module, those below it not included."""

    tag: str
    requested: str
    """Name of the precision."""
    quantized: int
    """Nodes with a weight that have the precision."""
    left: Mapping[str, int]
    """Why others keep theirs → how many."""

    @property
    def actual(self) -> str:
        """Return the precision its weights have now: one name, or two where some nodes were left."""
        if not self.quantized:
            return FLOAT32
        return f"{self.requested}, {FLOAT32}" if self.left else self.requested

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready form."""
        return {
            "tag": self.tag,
            "requested": self.requested,
            "actual": self.actual,
            "quantized": self.quantized,
            "left": dict(self.left),
        }
