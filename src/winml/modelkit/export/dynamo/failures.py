"""What could torch's dynamo exporter not do, and in which module?

Reads the exceptions torch raises, which hold the node it stumbled on; turns them into one error of ours.
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
"""How torch names a size in what it says about constraints."""
_MISSING_OPERATOR = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.]+)'")
_COMPLEX = re.compile(r"complex-valued|complex64|complex128")
_DATA_DEPENDENT = re.compile(r"data-dependent|DataDependent|unbacked symint|GuardOnDataDependent", re.IGNORECASE)
_T = TypeVar("_T")
_LIBRARIES = frozenset({"torch", "winml", "onnxscript", "onnx_ir"})
"""Folders of files whose lines nobody can change."""
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
        axes: ``(argument, axis)`` → name of the dimension that was to be left open, and of the input.
    """
    chain = tuple(_chain(error))
    node = _first(_failed_node(link) for link in chain)
    module = _module_of_node(node, stacks) if node is not None else None
    if module is None:
        module = _first(module_of_error(link, model) for link in chain)
    place = f" in module {module or '(the root)'}" if module is not None else ""
    if (missing := _first(_MISSING_OPERATOR.search(str(link)) for link in chain)) is not None:
        operator = missing[1].replace(".", "::")
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
    if fixed := _fixed_axes(error, axes):
        return ExportError(
            f"{fixed} cannot be left open with the dynamo exporter{place}: {_reason(error)}",
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
    failed = _operator_of(node)
    what = f"operator {failed} could not be converted" if failed else "the model could not be exported"
    return ExportError(
        f"{what}{place} with the dynamo exporter: {type(cause).__name__}: {first_line(cause)}",
        hint="The forward must run under torch.export with these inputs; --debug shows the full traceback.",
        operator=failed,
        module=module,
    )


def _first(found: Iterable[_T | None]) -> _T | None:
    return next((item for item in found if item is not None), None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those it was raised from, the first cause last."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__


def _failed_node(error: BaseException) -> torch.fx.Node | None:
    """Return the node torch was converting when it failed, or None if it was doing something else."""
    found = None
    step = error.__traceback__
    while step is not None:
        frame = step.tb_frame
        if frame.f_globals.get("__name__", "").startswith("torch.onnx."):
            node = frame.f_locals.get("node")
            found = node if isinstance(node, torch.fx.Node) else found
        step = step.tb_next
    return found


def _module_of_node(node: torch.fx.Node, stacks: ModuleStacks) -> str | None:
    paths = stacks.decode(name for name, _class in node.meta.get("nn_module_stack", {}).values())
    return paths[-1] if paths else None


def _operator_of(node: torch.fx.Node | None) -> str | None:
    if node is None or node.op != "call_function":
        return None
    target = node.target
    return target.name() if isinstance(target, torch._ops.OpOverload) else str(target)


def _fixed_axes(error: BaseException, axes: Mapping[tuple[str, int], tuple[str, str]]) -> str:
    """Return which of the dimensions to leave open torch complains about, in words; empty where it is none."""
    named = dict.fromkeys((match[1] or match[2], int(match[3])) for match in _FIXED_AXIS.finditer(str(error)))
    places = [f"{axes[key][0]} (axis {key[1]} of {axes[key][1]})" for key in named if key in axes]
    return " and ".join(places)


def _reason(error: BaseException) -> str:
    """Return the first line of what torch says about a constraint, without its own names for sizes."""
    for line in str(error).splitlines():
        if "specialized it to be a constant" in line or "is not valid" in line:
            return "the forward takes it for a constant" if "constant" in line else line.strip(" -")
    return first_line(error)


def _line_of(chain: Sequence[BaseException]) -> str:
    """Return the innermost line of Python outside torch in which it happened, without its folder, in brackets."""
    for error in chain:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not _LIBRARIES.intersection(Path(frame.filename).parts)]
        if own:
            return f" ({Path(own[-1].filename).name}:{own[-1].lineno})"
    return ""
