"""Tells where a trace needs values that a model without weights does not have.

TorchScript records what a forward calls. What it computes is not needed for that, so the tensors may be fake, unless
Python reads one of them, or one becomes a constant of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from winml.modelkit.errors import ExportError
from winml.modelkit.export.fake_parameters import is_fake
from winml.modelkit.hierarchy.tracing import module_of_error

__all__ = ["missing_value_error", "refuse_missing_constants"]

_HINT = "Let the forward decide by shapes only (torch.where in place of if), or export without --no-dynamo."


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


def refuse_missing_constants(graph: Any, decode: Callable[[Iterable[str]], tuple[str, ...]]) -> None:
    """Refuse a traced graph that holds a constant without values.

    Args:
        graph: What TorchScript traced.
        decode: Returns the module paths of the segments of a scope.

    Raises:
        ExportError: names the module that made it of weights.
    """
    for node in graph.nodes():
        if node.kind() == "prim::Constant" and _holds_no_values(node):
            path = (decode(node.scopeName().split("/")) or ("",))[-1]
            raise ExportError(
                f"a tensor that module {path or '(the root)'} uses was computed from weights outside of the forward, "
                "and the weights are not in memory",
                hint="Let the forward compute it, or register it as a buffer.",
                module=path,
            )
        for block in node.blocks():
            refuse_missing_constants(block, decode)


def _holds_no_values(constant: Any) -> bool:
    return constant.hasAttribute("value") and constant.kindOf("value") == "t" and is_fake(constant.t("value"))
