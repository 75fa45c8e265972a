"""Chooses the size of one axis: the user's where given, else the model's, else a default.

An answer is a record that carries everything known about the size; nothing is remembered between two questions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from winml.modelkit.errors import UsageError
from winml.modelkit.load.inputs.option_names import SHAPE_CONFIG_OPTION

__all__ = ["InputSize", "InputSizes", "SizeBounds"]


@dataclass(frozen=True)
class SizeBounds:
    """Between which sizes a key may vary, as far as config and structure say."""

    min: int = 1
    max: int | None = None
    fixed: str = ""
    """Why it cannot vary at all, as a clause (``the model takes 80 only``); empty where it can."""


@dataclass(frozen=True)
class InputSize:
    """The size of one axis of an input."""

    value: int
    key: str | None = None
    """Its key of ``--shape-config``; None where the architecture decides the size."""
    bounds: SizeBounds | None = None
    """How far it may vary; None where nothing is known about that."""
    is_declared: bool = False
    """Whether config or processor files say the size."""
    notes: tuple[str, ...] = ()
    """Sentences the user should hear about it."""


@dataclass(frozen=True)
class InputSizes:
    """The sizes the user asked for."""

    requested: Mapping[str, int]
    """Key of ``--shape-config`` → size."""

    def choose(
        self, key: str, default: int, *, bounds: SizeBounds | None = None, is_declared: bool = False
    ) -> InputSize:
        """Return the user's size for ``key``, else ``default``."""
        return InputSize(self.requested.get(key, default), key, bounds, is_declared)

    def choose_exactly(self, key: str, declared: int | None, default: int) -> InputSize:
        """Return the size the config declares, which the user may repeat but not change; else theirs or a default.

        Raises:
            UsageError: the user wants another size than the declared one.
        """
        if declared is None:
            return self.choose(key, default)
        reason = f"the model takes {declared} only"
        size = self.choose(key, declared, bounds=SizeBounds(fixed=reason), is_declared=True)
        if size.value != declared:
            self.refuse(key, reason)
        return size

    def refuse(self, key: str, reason: str) -> NoReturn:
        """Refuse the size the user asked for.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"{SHAPE_CONFIG_OPTION}: {key} {self.requested[key]}: {reason}",
            hint=f"Leave {key} out, or give such a size.",
        )
