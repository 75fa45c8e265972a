"""Infers the shape and type of every value."""

from __future__ import annotations

import logging

import onnx_ir as ir
from onnx_ir.passes import common

__all__ = ["InferredShapesPass"]


class InferredShapesPass(ir.passes.InPlacePass):
    """Give every value the shape and type onnx infers for it, constants propagated. Works in place.

    onnx_ir's pass does the work, without serializing weights. It only logs a failure and continues; here a failure is
    an error.

    Before / After::

        x[1,16] → Reshape([4,4]) → y          x[1,16] → Reshape([4,4]) → y[4,4]

    Must not fire when onnx infers no more than the graph states. An operator unknown to onnx does not stop the
    inference of the others.

    Tags: keeps. Nodes are not changed.

    Why it is safe: shapes are a statement about values, not part of how they are computed.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Infer shapes.

        Raises:
            RuntimeError: onnx could not process the model.
        """
        failures: list[logging.LogRecord] = []

        def collect(log_record: logging.LogRecord) -> bool:
            failures.append(log_record)
            return False

        logger = logging.getLogger(common.ShapeInferencePass.__module__)
        logger.addFilter(collect)
        try:
            # Not strict: one operator without an inference function would stop the inference of all others.
            inference = common.ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)
            result = inference(model)
        finally:
            logger.removeFilter(collect)
        for log_record in failures:
            if log_record.levelno >= logging.WARNING and log_record.exc_info:
                raise RuntimeError(f"onnx cannot infer shapes: {log_record.exc_info[1]}") from log_record.exc_info[1]
        return ir.passes.PassResult(model, result.modified)
