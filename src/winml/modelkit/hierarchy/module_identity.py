"""Which module is meant, and which call of it?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["ModuleIdentity"]


@dataclass(frozen=True)
class ModuleIdentity:
    """Which call of which module."""

    module: str
    """Dotted module path; ``""`` is the root."""
    tag: str
    class_name: str
    call: int = 1
    """Which call, from 1."""
    calls: int = 1
    """How many calls the graph holds."""

    @property
    def words(self) -> str:
        """What it is called in sentences."""
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
