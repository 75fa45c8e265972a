"""Import of the parts of transformers that a model needs, without parts used only in training."""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from types import ModuleType
from typing import Any

_OPTIMIZE = "scipy.optimize"


def import_losses() -> None:
    """Import the losses of transformers, which every model class imports, without ``scipy.optimize``.

    Only one of its functions is called, in training, to match boxes of object detectors; its import takes 0.3 s of the
    3 s that a model class takes (measured). The losses get a function that imports ``scipy.optimize`` on the first
    call.
    """
    if _OPTIMIZE in sys.modules or "transformers.loss.loss_utils" in sys.modules:
        return
    standing_in = _LazyOptimize(_OPTIMIZE)
    sys.modules[_OPTIMIZE] = standing_in
    try:
        # A version without this module imports its losses with the model class.
        with suppress(ImportError):
            importlib.import_module("transformers.loss.loss_utils")
    finally:
        if sys.modules.get(_OPTIMIZE) is standing_in:
            del sys.modules[_OPTIMIZE]


class _LazyOptimize(ModuleType):
    """Lazy stand-in for ``scipy.optimize``, which imports the module on the first other attribute access."""

    @staticmethod
    def linear_sum_assignment(*arguments: Any, **keywords: Any) -> Any:
        return importlib.import_module(_OPTIMIZE).linear_sum_assignment(*arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # read by the import system
            raise AttributeError(name)
        sys.modules.pop(_OPTIMIZE, None)
        return getattr(importlib.import_module(_OPTIMIZE), name)
