"""Converts a graph to another opset and keeps its tags."""

from __future__ import annotations

import logging
import re

import onnx
import onnx_ir as ir

from winml.modelkit.errors import OptimizeError, UsageError, first_line
from winml.modelkit.hierarchy.carry.carrying import carry_tags

__all__ = ["OLDEST_OPSET", "convert_opset", "refuse_unknown_opset"]

OLDEST_OPSET = 7
"""Chosen: the oldest opset whose operators broadcast as today's do, and the oldest ONNX Runtime supports."""

_ASSERTION = re.compile(r"^\S+:\d+: (?:\w+: )?(?:Assertion `.*` failed: )?")
"""Location of an error in onnx's own source, which does not help the user."""


def refuse_unknown_opset(target: int | None) -> None:
    """Refuse a version of ONNX's operators that is not among those the installed onnx knows.

    Raises:
        UsageError: names the versions there are.
    """
    newest = onnx.defs.onnx_opset_version()
    if target is not None and not OLDEST_OPSET <= target <= newest:
        raise UsageError(
            f"opset {target}: no such version of ONNX's operators",
            hint=f"Give one from {OLDEST_OPSET} to {newest}, which onnx {onnx.__version__} knows.",
        )


def convert_opset(model: ir.Model, target: int) -> tuple[ir.Model, tuple[str, ...]]:
    """Return the model at another opset, newer or older, and notes on its tags.

    onnxscript converts what it can, and onnx's own converter the rest. The latter drops all metadata, so tags are
    carried across. Local functions are inlined. The given model is not changed.

    Args:
        model: The model.
        target: Version of the operators of ONNX itself.

    Raises:
        OptimizeError: neither can convert some operator.
    """
    current_opset = model.opset_imports.get("")
    if current_opset == target:
        return model, ()
    converted = model.clone()
    reason = _convert_in_place(converted, target)
    if converted.opset_imports.get("") != target:
        raise OptimizeError(
            f"cannot convert opset {current_opset} to {target}: {reason}",
            hint="Choose an opset nearer to the model's own, or export the model at the requested one.",
        )
    return converted, carry_tags(model, converted).notes


def _convert_in_place(model: ir.Model, target: int) -> str:
    """Convert in place as far as possible; return the last failure, for the case that the opset was not reached."""
    # Imported where it is needed: most graphs keep their opset, and the library takes a third of a second.
    from onnxscript import version_converter

    failures: list[str] = []

    def collect(log_record: logging.LogRecord) -> bool:
        # The library only logs its failure and returns the model unchanged.
        if log_record.exc_info and log_record.exc_info[1]:
            failures.append(_failure_reason(log_record.exc_info[1]))
        return False

    logger = logging.getLogger(version_converter.__name__)
    logger.addFilter(collect)
    try:
        version_converter.convert_version(model, target, fallback=True)
    except (ValueError, RuntimeError) as error:
        failures.append(_failure_reason(error))
    finally:
        logger.removeFilter(collect)
    return failures[-1] if failures else "no converter knows both versions"


def _failure_reason(error: BaseException) -> str:
    return _ASSERTION.sub("", first_line(error)) or type(error).__name__
