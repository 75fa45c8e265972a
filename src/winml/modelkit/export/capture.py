"""Records of one capture: the options an exporter is given, and the graph it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from winml.modelkit.export.config import DEFAULT_OPSETS

__all__ = ["Capture", "CaptureOptions"]


@dataclass(frozen=True)
class CaptureOptions:
    """How a prepared module is captured; the same record for both exporters."""

    opset_version: int = DEFAULT_OPSETS["torchscript"]
    """Default opset of the graph. The dynamo exporter writes 18 at least."""
    dynamic_axes: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    """Input → axis → name, for the sizes that are left open; all others become fixed."""
    keep_stack_traces: bool = False
    """Keep on every node the lines of Python it came from; these contain local paths."""
    weights: Mapping[str, ir.TensorProtocol] | None = None
    """Parameter or buffer → its values, for a model whose parameters are fake tensors."""
    time_limit_s: float | None = None
    """Longest time torch may take; None: unlimited. dynamo only."""


@dataclass(frozen=True)
class Capture:
    """One graph as an exporter returned it."""

    model: ir.Model
    """The graph, weights attached by reference."""
    scopes: Mapping[ir.Node, tuple[str, ...]]
    """Paths of the modules each node ran in, outermost first; empty where the exporter recorded none."""
    unused_inputs: tuple[str, ...]
    """Names of the graph inputs that nothing reads."""
    fixed_choices: tuple[str, ...] = ()
    """Lines of the user's Python (``net.py:8``) that read a tensor's value: the graph contains the traced value."""
    notes: tuple[str, ...] = ()
    """What else is to be said of how it was made."""
