"""Minimum quality of an ONNX file relative to its PyTorch model, by the precisions in the file and its provider."""

from __future__ import annotations

import math
from pathlib import Path

import onnx_ir as ir

from winml.modelkit.compare.outputs import THRESHOLDS
from winml.modelkit.compare.quality_minimum import FLOAT32_PROVIDER_DB, QualityMinimum
from winml.modelkit.compile.declared_options import DEFAULT_MIN_SQNR_DB
from winml.modelkit.onnx.files.graph_reading import load_by_reference
from winml.modelkit.onnx.weights import QUANTIZED_OPERATORS
from winml.modelkit.onnx.widening import computes_in
from winml.modelkit.ort.devices import ChosenProvider
from winml.modelkit.quantize.pipeline import read_minimum
from winml.modelkit.quantize.precisions import PRECISIONS
from winml.modelkit.tags.tagging import all_nodes


def file_minimum(path: Path, provider: ChosenProvider | None = None) -> QualityMinimum:
    """Return the minimum quality of a file relative to PyTorch: that of its quantization, or of its float type.

    Args:
        path: The ONNX file.
        provider: Provider that runs it; ``None``: the CPU provider. Other providers may compute with fewer bits.

    Raises:
        InputError: the file is damaged.
    """
    model = load_by_reference(path)
    minimum = read_minimum(model)
    if minimum is None and any(node.op_type in QUANTIZED_OPERATORS for node in all_nodes(model)):
        # The precision of another quantizer is unknown.
        minimum = QualityMinimum.least_of(precision.minimum for precision in PRECISIONS.values())
    is_float = minimum is None
    if minimum is None:
        types = [name for name in ("float16", "bfloat16") if computes_in(model, ir.DataType[name.upper()])]
        minimum = QualityMinimum(-20 * math.log10(THRESHOLDS[types[-1] if types else "float32"]))
    if provider is None or provider.provider.name == "CPUExecutionProvider":
        return minimum
    most_db = FLOAT32_PROVIDER_DB if is_float and not provider.provider.compiles else DEFAULT_MIN_SQNR_DB
    return QualityMinimum(min(minimum.sqnr_db, most_db), minimum.agreement)
