"""Imports the parts of transformers that a model needs, without those that only a training calls."""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from types import ModuleType
from typing import Any

_ASSIGNMENT = ("scipy.optimize", "linear_sum_assignment")
"""What the losses of object detectors match boxes with: its module and its name."""


def import_losses() -> None:
    """Import the losses of transformers, which every model class does, without ``scipy.optimize``.

    One function of it is called where an object detector is trained; importing it takes 0.3 s of the 3 s that a model
    class takes (measured). The losses get a function that imports it when it is called.
    """
    name, _ = _ASSIGNMENT
    if name in sys.modules or "transformers.loss.loss_utils" in sys.modules:
        return
    standing_in = _StandingIn(name)
    sys.modules[name] = standing_in
    try:
        # A version without this module imports its losses with the model class.
        with suppress(ImportError):
            importlib.import_module("transformers.loss.loss_utils")
    finally:
        if sys.modules.get(name) is standing_in:
            del sys.modules[name]


class _StandingIn(ModuleType):
    """Stands for ``scipy.optimize`` until anything but the assignment is asked of it."""

    def __getattr__(self, name: str) -> Any:
        if name == _ASSIGNMENT[1]:
            return _assigned
        if name.startswith("__"):  # asked by the import itself
            raise AttributeError(name)
        sys.modules.pop(self.__name__, None)
        return getattr(importlib.import_module(self.__name__), name)


def _assigned(*arguments: Any, **named: Any) -> Any:
    """Call scipy's ``linear_sum_assignment``."""
    module, name = _ASSIGNMENT
    return getattr(importlib.import_module(module), name)(*arguments, **named)
