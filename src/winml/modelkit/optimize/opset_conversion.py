"""How does a graph come to another version of ONNX's operators, with its tags?"""

from __future__ import annotations

import logging
import re

import onnx
import onnx_ir as ir

from winml.modelkit.errors import OptimizeError, UsageError, first_line
from winml.modelkit.hierarchy.carry.carrying import carry_tags

__all__ = ["OLDEST_OPSET", "convert_opset", "refuse_unknown_opset"]

OLDEST_OPSET = 7
"""Chosen: the oldest whose operators broadcast as today's do, and the oldest ONNX Runtime promises to run."""

_ASSERTION = re.compile(r"^\S+:\d+: (?:\w+: )?(?:Assertion `.*` failed: )?")
"""Where in onnx's own source an error was found, which says nothing to whoever has the model."""


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
    """Return the model at another opset, upwards or downwards, and what is to be known about its tags.

    onnxscript converts what it can, and onnx's own converter the rest, which drops all metadata: tags are carried
    across. Local functions are inlined. The model given stays as it is.

    Args:
        model: The model.
        target: Version of the operators of ONNX itself.

    Raises:
        OptimizeError: neither has a way from the one version to the other for some operator.
    """
    source = model.opset_imports.get("")
    if source == target:
        return model, ()
    converted = model.clone()
    reason = _convert(converted, target)
    if converted.opset_imports.get("") != target:
        raise OptimizeError(
            f"cannot convert opset {source} to {target}: {reason}",
            hint="Choose an opset nearer to the model's own, or export the model at the wanted one.",
        )
    return converted, carry_tags(model, converted).notes


def _convert(model: ir.Model, target: int) -> str:
    """Convert in place as far as it goes; return why not, or an empty string."""
    # Imported where it is needed: most graphs keep their opset, and the library takes a third of a second.
    from onnxscript import version_converter

    failures: list[str] = []

    def collect(record: logging.LogRecord) -> bool:
        # The library logs its failure and returns the model as if nothing had been asked.
        if record.exc_info and record.exc_info[1]:
            failures.append(_reason(record.exc_info[1]))
        return False

    logger = logging.getLogger(version_converter.__name__)
    logger.addFilter(collect)
    try:
        version_converter.convert_version(model, target, fallback=True)
    except (ValueError, RuntimeError) as error:
        failures.append(_reason(error))
    finally:
        logger.removeFilter(collect)
    return failures[-1] if failures else "no converter knows both versions"


def _reason(error: BaseException) -> str:
    return _ASSERTION.sub("", first_line(error)) or type(error).__name__
