"""What does an exporter hand over?

A record only: which graph was captured, and in which module each of its nodes ran. Says nothing of how.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

__all__ = ["Capture"]


@dataclass(frozen=True)
class Capture:
    """One graph fresh from an exporter."""

    model: ir.Model
    """The graph, weights attached by reference."""
    scopes: Mapping[ir.Node, tuple[str, ...]]
    """Paths of the modules each node ran in, outermost first; empty where the exporter kept none."""
    unused_inputs: tuple[str, ...]
    """Names of the graph inputs that nothing reads."""
    fixed_choices: tuple[str, ...] = ()
    """Lines of the user's own Python (``net.py:8``) that read a tensor's value: the graph holds what it was then."""
