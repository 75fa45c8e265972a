"""Which shape has every value?"""

from __future__ import annotations

import logging

import onnx_ir as ir
from onnx_ir.passes import common

__all__ = ["InferredShapesPass"]


class InferredShapesPass(ir.passes.InPlacePass):
    """Give every value the shape and type onnx infers for it, constants followed through. Works in place.

    onnx_ir's pass does the work, without serializing weights. It logs its failure and goes on as if nothing had been
    found; here that is an error.

    Before / After::

        x[1,16] → Reshape([4,4]) → y          x[1,16] → Reshape([4,4]) → y[4,4]

    Must not fire when onnx knows no more than the graph says. An operator that onnx does not know costs no other its
    shape.

    Tags: keeps. Nodes are not touched.

    Why it is safe: shapes are a statement about values, not part of how they are computed.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Infer shapes.

        Raises:
            RuntimeError: onnx could not look at the model at all.
        """
        failures: list[logging.LogRecord] = []

        def collect(record: logging.LogRecord) -> bool:
            failures.append(record)
            return False

        logger = logging.getLogger(common.ShapeInferencePass.__module__)
        logger.addFilter(collect)
        try:
            # Not strict: one operator without an inference function would cost all others their shapes.
            inference = common.ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)
            result = inference(model)
        finally:
            logger.removeFilter(collect)
        for record in failures:
            if record.levelno >= logging.WARNING and record.exc_info:
                raise RuntimeError(f"onnx cannot infer shapes: {record.exc_info[1]}") from record.exc_info[1]
        return ir.passes.PassResult(model, result.modified)
