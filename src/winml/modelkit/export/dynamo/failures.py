"""Translates the exceptions of torch's dynamo exporter into an ExportError with operator and module.

Reads the failed node from the stack frames of the exceptions.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from winml.modelkit.errors import ExportError, first_line
from winml.modelkit.export.dynamo.module_stacks import ModuleStacks
from winml.modelkit.hierarchy.tracing import module_of_error

__all__ = ["export_error"]

_FIXED_AXIS = re.compile(r"(?:L\['(\w+)'\]\.size\(\)|inputs\['(\w+)'\]\.shape)\[(\d+)\]")
"""How torch names a size in messages about constraints."""
_MISSING_OPERATOR = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.]+)'")
_COMPLEX = re.compile(r"complex-valued|complex64|complex128")
_DATA_DEPENDENT = re.compile(r"data-dependent|DataDependent|unbacked symint|GuardOnDataDependent", re.IGNORECASE)
_T = TypeVar("_T")
_LIBRARIES = frozenset({"torch", "winml", "onnxscript", "onnx_ir"})
"""Packages whose lines are not reported, since the user cannot change them."""
_SIZE_HINT = "Fix the size (leave the dynamic option out), or let the forward take sizes from x.shape only."


def export_error(
    error: Exception,
    model: nn.Module,
    stacks: ModuleStacks,
    axes: Mapping[tuple[str, int], tuple[str, str]],
) -> ExportError:
    """Return our error for what torch raised.

    Args:
        error: What torch raised.
        model: The module that was exported.
        stacks: Reads the modules of torch's nodes.
        axes: ``(argument, axis)`` → name of the dimension to leave open, and of the input.
    """
    chain = tuple(_cause_chain(error))
    node = _first_not_none(_failed_node(link) for link in chain)
    module = _module_of_node(node, stacks) if node is not None else None
    if module is None:
        module = _first_not_none(module_of_error(link, model) for link in chain)
    place = f" in module {module or '(the root)'}" if module is not None else ""
    if (missing_operator := _first_not_none(_MISSING_OPERATOR.search(str(link)) for link in chain)) is not None:
        operator = missing_operator[1].replace(".", "::")
        is_complex = any(_COMPLEX.search(str(link)) for link in chain)
        return ExportError(
            f"the dynamo exporter has no ONNX form of {operator}{' on complex numbers' if is_complex else ''}{place}",
            hint=(
                "Compute with real and imaginary parts there (torch.view_as_real)."
                if is_complex
                else "Replace the operator in that module's forward by others."
            ),
            operator=operator,
            module=module,
        )
    if fixed_dimensions := _fixed_axes(error, axes):
        return ExportError(
            f"{fixed_dimensions} cannot be left open with the dynamo exporter{place}: {_constraint_reason(error)}",
            hint=_SIZE_HINT,
            module=module,
        )
    cause = chain[-1]
    if any(_DATA_DEPENDENT.search(f"{type(link).__name__}: {first_line(link)}") for link in chain):
        return ExportError(
            f"the forward decides by the value of a tensor{place}{_line_of(chain)}, which the dynamo exporter cannot "
            f"follow: {first_line(cause)}",
            hint="Use torch.where or torch.cond there, or --no-dynamo, which keeps the way the traced inputs went.",
            module=module,
        )
    failed_operator = _operator_of(node)
    summary = (
        f"operator {failed_operator} could not be converted" if failed_operator else "the model could not be exported"
    )
    return ExportError(
        f"{summary}{place} with the dynamo exporter: {type(cause).__name__}: {first_line(cause)}",
        hint="The forward must run under torch.export with these inputs; --debug shows the full traceback.",
        operator=failed_operator,
        module=module,
    )


def _first_not_none(items: Iterable[_T | None]) -> _T | None:
    return next((item for item in items if item is not None), None)


def _cause_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes, the first cause last."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__


def _failed_node(error: BaseException) -> torch.fx.Node | None:
    """Return the node torch was converting when it failed, or None if it failed elsewhere."""
    failed_node = None
    entry = error.__traceback__
    while entry is not None:
        frame = entry.tb_frame
        if frame.f_globals.get("__name__", "").startswith("torch.onnx."):
            node = frame.f_locals.get("node")
            failed_node = node if isinstance(node, torch.fx.Node) else failed_node
        entry = entry.tb_next
    return failed_node


def _module_of_node(node: torch.fx.Node, stacks: ModuleStacks) -> str | None:
    paths = stacks.decode(name for name, _class in node.meta.get("nn_module_stack", {}).values())
    return paths[-1] if paths else None


def _operator_of(node: torch.fx.Node | None) -> str | None:
    if node is None or node.op != "call_function":
        return None
    target = node.target
    return target.name() if isinstance(target, torch._ops.OpOverload) else str(target)


def _fixed_axes(error: BaseException, axes: Mapping[tuple[str, int], tuple[str, str]]) -> str:
    """Return the dimensions named in torch's message about constraints, as text; ``""`` for none."""
    axis_keys = dict.fromkeys((match[1] or match[2], int(match[3])) for match in _FIXED_AXIS.finditer(str(error)))
    places = [f"{axes[key][0]} (axis {key[1]} of {axes[key][1]})" for key in axis_keys if key in axes]
    return " and ".join(places)


def _constraint_reason(error: BaseException) -> str:
    """Return the reason in torch's message about a constraint, without torch's names of sizes."""
    for line in str(error).splitlines():
        if "specialized it to be a constant" in line or "is not valid" in line:
            return "the forward takes it for a constant" if "constant" in line else line.strip(" -")
    return first_line(error)


def _line_of(chain: Sequence[BaseException]) -> str:
    """Return file name and line of the innermost frame outside the libraries, in brackets: `` (net.py:8)``."""
    for error in chain:
        frames = traceback.extract_tb(error.__traceback__)
        user_frames = [frame for frame in frames if not _LIBRARIES.intersection(Path(frame.filename).parts)]
        if user_frames:
            return f" ({Path(user_frames[-1].filename).name}:{user_frames[-1].lineno})"
    return ""
