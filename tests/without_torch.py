"""Plug-in of pytest that skips a test as soon as it imports torch: ``-p without_torch``.

For systems where importing torch takes too long or is impossible. The importer raises pytest's own exception, which is
no ``Exception``, so no fallback of the code under test hides it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest


class _TorchRefused:
    """Finder of modules that skips the test in which torch is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return no module; skip the test if it is torch.

        Raises:
            pytest.skip.Exception: the module is torch.
        """
        if name == "torch":
            pytest.skip("needs torch", allow_module_level=True)
        return None


sys.meta_path.insert(0, _TorchRefused())
