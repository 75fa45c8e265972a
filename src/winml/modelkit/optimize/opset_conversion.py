"""How does a graph come to another version of ONNX's operators, with its tags?"""

from __future__ import annotations

import logging

import onnx_ir as ir
from onnxscript import version_converter

from winml.modelkit.errors import OptimizeError, first_line
from winml.modelkit.hierarchy.carry import carry_tags

__all__ = ["convert_opset"]


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
            hint="Choose an opset nearer to the model's own, or export it with --opset.",
        )
    return converted, carry_tags(model, converted).notes


def _convert(model: ir.Model, target: int) -> str:
    """Convert in place as far as it goes; return why not, or an empty string."""
    failures: list[str] = []

    def collect(record: logging.LogRecord) -> bool:
        # The library logs its failure and returns the model as if nothing had been asked.
        if record.exc_info and record.exc_info[1]:
            failures.append(first_line(record.exc_info[1]))
        return False

    logger = logging.getLogger(version_converter.__name__)
    logger.addFilter(collect)
    try:
        version_converter.convert_version(model, target, fallback=True)
    except (ValueError, RuntimeError) as error:
        failures.append(first_line(error))
    finally:
        logger.removeFilter(collect)
    return failures[-1] if failures else "no converter knows both versions"
