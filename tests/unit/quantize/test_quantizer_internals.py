"""Agreement with the internals of ONNX Runtime's quantizers (docs/decisions/0004-private-seams.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnxruntime.quantization.calibrate import HistogramCollector
from onnxruntime.quantization.matmul_nbits_quantizer import (
    DefaultWeightOnlyQuantConfig,
    KQuantWeightOnlyQuantConfig,
    MatMulNBitsQuantizer,
)

from graphs import parse
from unit.quantize.qdq_graphs import measure_ranges, tagged_graph
from winml.modelkit.quantize.calibration.activation_statistics import (
    BINS,
    ENTROPY_BINS,
    PERCENTILE,
    QUANTIZED_BINS,
)
from winml.modelkit.quantize.engines.block_quantizers import BlockFormat, quantize_blocks


@pytest.mark.parametrize("method", ["entropy", "percentile"])
def test_ranges_of_histograms_equal_onnxruntime(method: Any) -> None:
    """Its collector makes the same of the values themselves as of our counts of them."""
    values = np.random.default_rng(0).standard_normal((400, 4)).astype(np.float32)
    model = tagged_graph("m (float[N, 4] x) => (float[N, 4] y) { y = MatMul (x, w1) }", ("/M/Up",), {"w1": (4, 4)})
    bins = {"entropy": ENTROPY_BINS, "percentile": BINS}[method]
    collector = HistogramCollector(method, True, bins, QUANTIZED_BINS, PERCENTILE, "same")
    collector.collect({"x": [values]})
    theirs = collector.compute_collection_result()["x"]
    ours = measure_ranges(model, ("x",), lambda _: [{"x": values[:100]}, {"x": values[100:]}], method)["x"]
    width = 2 * float(np.abs(values).max()) / bins
    assert np.allclose(np.array([float(theirs[0]), float(theirs[1])]), ours, atol=2 * width)


@pytest.mark.parametrize(
    ("algorithm", "config"),
    [
        ("rtn", DefaultWeightOnlyQuantConfig(block_size=32, is_symmetric=True, bits=4)),
        (
            "k_quant",
            KQuantWeightOnlyQuantConfig(
                customized_weight_config={"product": {"bits": 4, "group_size": 32, "scheme": "asym"}}
            ),
        ),
    ],
)
def test_blocks_equal_onnxruntime(algorithm: Any, config: Any, tmp_path: Path) -> None:
    """Its quantizer of graphs writes the same numbers."""
    weight = np.random.default_rng(1).standard_normal((64, 48)).astype(np.float32)
    model = parse("g (float[2, 64] x) => (float[2, 48] y) <float[64, 48] w = {0}> { y = MatMul (x, w) }")
    model.graph.initializers["w"].const_value = ir.tensor(weight, name="w")
    model.graph[0].name = "product"
    ir.save(model, tmp_path / "g.onnx")
    quantizer = MatMulNBitsQuantizer(onnx.load(tmp_path / "g.onnx"), 32, is_symmetric=True, algo_config=config)
    quantizer.process()
    theirs = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in quantizer.model.model.graph.initializer}
    packed, scales = (theirs[name] for name in quantizer.model.model.graph.node[0].input[1:3])

    ours = quantize_blocks(weight, BlockFormat(4, 32, is_symmetric=algorithm == "rtn", algorithm=algorithm))
    assert np.array_equal(packed, ours.packed)
    assert np.allclose(scales.ravel(), ours.scales.ravel(), rtol=1e-6)
