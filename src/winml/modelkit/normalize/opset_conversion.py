"""Convert a graph to another opset."""

from __future__ import annotations

import logging
import re

import onnx_ir as ir

from winml.modelkit.errors import OptimizeError, first_line
from winml.modelkit.onnx.map_types import attach_maps, detach_maps
from winml.modelkit.tags.carry.carrying import carry_tags

_ASSERTION = re.compile(r"^\S+:\d+: (?:\w+: )?(?:Assertion `.*` failed: )?")
"""Location of an error in onnx's own source, which does not help the user."""


def convert_opset(model: ir.Model, target: int) -> tuple[ir.Model, tuple[str, ...]]:
    """Convert a model to a newer or older opset; return the new model and notes on its tags.

    onnxscript converts supported operators, and onnx's converter the rest. onnx's converter drops all metadata, so tags
    are transferred. Local functions are inlined. The original model is not changed.

    Args:
        model: The model.
        target: Version of the ONNX operators.

    Raises:
        OptimizeError: an operator cannot be converted.
    """
    current_opset = model.opset_imports.get("")
    if current_opset == target:
        return model, ()
    converted = model.clone()
    reason = _convert_in_place(converted, target)
    if converted.opset_imports.get("") != target:
        raise OptimizeError(
            f"cannot convert opset {current_opset} to {target}: {reason}",
            hint="Choose an opset nearer to that of the model, or export the model with the requested opset.",
        )
    return converted, carry_tags(model, converted).notes


def _convert_in_place(model: ir.Model, target: int) -> str:
    """Convert in place as far as possible; return the last failure, in case the opset was not reached."""
    # Imported on demand: most graphs retain their opset, and the import takes a third of a second.
    from onnxscript import version_converter

    failures: list[str] = []

    def collect_failure(log_record: logging.LogRecord) -> bool:
        # The library only logs its failure and returns the model unchanged.
        if log_record.exc_info and log_record.exc_info[1]:
            failures.append(_failure_reason(log_record.exc_info[1]))
        return False

    logger = logging.getLogger(version_converter.__name__)
    logger.addFilter(collect_failure)
    # The converters read no types of maps.
    makers, imports = detach_maps(model), dict(model.opset_imports)
    try:
        version_converter.convert_version(model, target, fallback=True)
    except (ValueError, RuntimeError) as error:
        failures.append(_failure_reason(error))
    finally:
        logger.removeFilter(collect_failure)
        attach_maps(model, makers, imports)
    return failures[-1] if failures else "no converter supports both versions"


def _failure_reason(error: BaseException) -> str:
    return _ASSERTION.sub("", first_line(error)) or type(error).__name__
