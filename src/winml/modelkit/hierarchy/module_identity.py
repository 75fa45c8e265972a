"""Identifies one call of one module, in records and in sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["ModuleIdentity"]


@dataclass(frozen=True)
class ModuleIdentity:
    """One call of one module."""

    module: str
    """Dotted module path; ``""`` is the root."""
    tag: str
    class_name: str
    call: int = 1
    """Number of the call, from 1."""
    calls: int = 1
    """Number of calls in the graph."""

    @property
    def words(self) -> str:
        """Its name in sentences: ``encoder.layer.0``, ``head, call 2 of 3``."""
        name = self.module or self.tag
        return name if self.calls == 1 else f"{name}, call {self.call} of {self.calls}"

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready form."""
        return {
            "module": self.module,
            "tag": self.tag,
            "class": self.class_name,
            "call": self.call,
            "calls": self.calls,
        }
