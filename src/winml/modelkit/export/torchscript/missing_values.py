"""Lets TorchScript trace tensors without values, and tells where a trace needs the values.

TorchScript records what a forward calls. What it computes is not needed for that, so the tensors may be fake, unless
Python reads one of them, or one becomes a constant of the graph.

NOTE: patches how torch computes the shapes of fake tensors (docs/decisions/0004-private-seams.md).
``tests/unit/export/torchscript/test_missing_values.py`` fails when that moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from winml.modelkit.errors import ExportError
from winml.modelkit.export.fake_parameters import is_fake
from winml.modelkit.hierarchy.tracing import module_of_error

__all__ = ["missing_value_error", "refuse_missing_constants", "untraced_shape_computation"]

_TRACER: Any = torch._C._parse_dispatch_key("Tracer")
_HINT = "Export without --no-dynamo: dynamo needs no values."


@contextmanager
def untraced_shape_computation() -> Iterator[None]:
    """Keep what torch does to find the shape of a fake tensor out of a trace, for the time of the block.

    torch's Python for it takes sizes of tensors, and in a trace a size is a tensor, for which there are no answers.
    """
    dispatch = FakeTensorMode.dispatch

    def dispatch_untraced(mode: FakeTensorMode, *args: Any, **kwargs: Any) -> Any:
        tracing: Any = torch._C._get_tracing_state()
        if tracing is None:
            return dispatch(mode, *args, **kwargs)
        _set_tracing_state(None)
        try:
            return dispatch(mode, *args, **kwargs)
        finally:
            _set_tracing_state(tracing)

    FakeTensorMode.dispatch = dispatch_untraced  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        FakeTensorMode.dispatch = dispatch  # type: ignore[method-assign]


def _set_tracing_state(state: object) -> None:
    """Set what is traced, also inside an operator, which the tracer is kept out of: there torch refuses to set it."""
    is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(_TRACER)
    torch._C._dispatch_tls_set_dispatch_key_excluded(_TRACER, False)
    try:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]  # its stub misses it
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_TRACER, is_excluded)


def missing_value_error(error: Exception, model: nn.Module) -> ExportError | None:
    """Return our error where a forward read a value there is not; None for other errors."""
    if not isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return None
    path = module_of_error(error, model)
    place = f" in module {path or '(the root)'}" if path is not None else ""
    return ExportError(
        f"the forward reads the value of a tensor{place} ({error.func}), and the weights are not in memory",
        hint=_HINT,
        module=path,
    )


def refuse_missing_constants(graph: Any) -> None:
    """Refuse a traced graph that holds a constant without values.

    torch records some operators by what they call only, convolutions among them, and fake tensors end before that; and
    a forward may use what was computed of weights before it was called.

    Args:
        graph: What TorchScript traced.

    Raises:
        ExportError: there is one.
    """
    for node in graph.nodes():
        if node.kind() == "prim::Constant" and _holds_no_values(node):
            shape = list(node.t("value").shape)
            raise ExportError(
                f"TorchScript recorded no computation of a tensor {shape} (as of a convolution), and the weights are "
                "not in memory",
                hint=_HINT,
            )
        for block in node.blocks():
            refuse_missing_constants(block)


def _holds_no_values(constant: Any) -> bool:
    return constant.hasAttribute("value") and constant.kindOf("value") == "t" and is_fake(constant.t("value"))
