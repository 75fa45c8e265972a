"""Small tagged graphs for tests of static quantization, and their quantization."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphs import parse
from winml.modelkit.arrays import Array
from winml.modelkit.onnx.cutting import GraphModules
from winml.modelkit.quantize.calibration.activation_statistics import (
    MeasuredValue,
    Ranges,
    SampleReader,
    measure_channels,
    measure_statistics,
    range_of,
)
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.pipeline import QuantizeResult, quantize
from winml.modelkit.quantize.precisions import CalibrationMethod
from winml.modelkit.tags.tagging import NodeTag, write_tag


def measure_ranges(
    model: ir.Model, names: Sequence[str], read_samples: SampleReader, method: CalibrationMethod, bits: int = 8
) -> Ranges:
    """Return the ranges of values over samples, of integers of ``bits``."""
    measured = measure_statistics(model, names, read_samples, with_histograms=method != "minmax")
    return {name: range_of(statistics, method, bits) for name, statistics in measured.items()}


class FixedSamples:
    """Statistics over fixed samples."""

    def __init__(self, samples: Sequence[Mapping[str, np.ndarray[Any, Any]]]) -> None:
        """Store the samples."""
        self.samples = samples

    def ranges(self, model: ir.Model, values: Sequence[MeasuredValue]) -> Mapping[str, tuple[float, float]]:
        """Return the smallest and largest values."""
        return measure_ranges(model, [value.name for value in values], lambda _: self.samples, "minmax")

    def channel_maxima(self, model: ir.Model, axes: Mapping[str, int]) -> Mapping[str, Array]:
        """Return the largest absolute value of each channel."""
        return measure_channels(model, axes, lambda _: self.samples).maxima

    def channel_rows(self, model: ir.Model, names: Sequence[str]) -> Mapping[str, Array]:
        """Return rows of values."""
        return measure_channels(model, dict.fromkeys(names, -1), lambda _: self.samples).rows

    def as_record(self) -> dict[str, Any]:
        """Return the record of the samples."""
        return {"data": "fixed", "samples": len(self.samples)}


def tagged_graph(body: str, tags: Sequence[str], weights: Mapping[str, Sequence[int]], opset: int = 17) -> ir.Model:
    """Return a graph with tagged nodes, named like ``conv_0``.

    Args:
        body: The graph as text, without its weights.
        tags: Tag of each node, in order.
        weights: Name, starting with ``w`` → shape; values are random.
        opset: Version of ONNX's operators.
    """
    zeros = {name: ",".join("0" * int(np.prod(shape))) for name, shape in weights.items()}
    declared = ", ".join(
        f"float[{','.join(map(str, shape))}] {name} = {{{zeros[name]}}}" for name, shape in weights.items()
    )
    if weights:
        body = body.replace("<", f"<{declared}, ", 1) if ") <" in body else body.replace("{", f"<{declared}> {{", 1)
    model = parse(body, opset=opset)
    for number, (node, tag) in enumerate(zip(model.graph, tags, strict=True)):
        node.name = f"{node.op_type.lower()}_{number}"
        write_tag(node, NodeTag(tag, tag.removeprefix("/M").removeprefix("/").replace("/", ".").lower(), "direct"))
    return model


def modules_of(model: ir.Model) -> GraphModules:
    """Return the modules of a tagged graph."""
    from winml.modelkit.quantize.file_quantization import graph_modules

    return graph_modules(model, "m")


def quantized(model: ir.Model, samples: Sequence[Mapping[str, Any]], **options: Any) -> QuantizeResult:
    """Return a model quantized by the ranges of samples."""
    requested = QuantizeOptions(**{"precision": "int8", "mode": "qdq", **options})
    return quantize(model, requested, modules_of(model), FixedSamples(samples))
