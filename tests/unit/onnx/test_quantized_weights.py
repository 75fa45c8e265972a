"""Parameters of the floating-point model, recovered from files quantized by several tools."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graphs import parse
from weighted_graphs import weight
from winml.modelkit.inspect.onnx_inspection import inspect_onnx
from winml.modelkit.transform.retag import carry_between, write_transfer

_WEIGHTS = ", ".join([weight("w1", 64, 64), weight("w2", 64, 32), weight("w3", 9, 64)])
BODY = f"""m (float[2, 64] x, int64[2] i) => (float[2, 32] y) <{_WEIGHTS}>
    {{ e = Gather (w3, i) s = Add (x, e) a = MatMul (s, w1) r = Tanh (a) y = MatMul (r, w2) }}"""
PARAMETERS = 64 * 64 + 64 * 32 + 9 * 64


def dynamic(source: Path, target: Path) -> None:
    """Weights in 8 bits, ranges of activations while running."""
    from onnxruntime.quantization import quantize_dynamic

    quantize_dynamic(source, target, per_channel=True)


def static(source: Path, target: Path) -> None:
    """Weights and activations in 8 bits, as ``QuantizeLinear`` and ``DequantizeLinear``."""
    from onnxruntime.quantization import CalibrationDataReader, quantize_static

    class Once(CalibrationDataReader):  # type: ignore[misc]
        feeds = iter([{"x": np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64), "i": np.array([1, 2])}])

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.feeds, None)

    quantize_static(source, target, Once(), per_channel=True)


def blocks(bits: int) -> Callable[[Path, Path], None]:
    """Weights of products in blocks of 32, several in a byte."""

    def run(source: Path, target: Path) -> None:
        from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer

        config = DefaultWeightOnlyQuantConfig(block_size=32, is_symmetric=True, bits=bits)
        quantizer = MatMulNBitsQuantizer(onnx.load(source), algo_config=config)
        quantizer.process()
        quantizer.model.save_model_to_file(str(target), False)

    return run


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("tool", "kinds", "bits"),
    [
        (dynamic, {"int8": 6144, "uint8": 576}, pytest.approx(8, abs=1)),
        (static, {"int8": 6720}, pytest.approx(8, abs=1)),
        # A scale in float32 for 32 values is one bit each; the lookup keeps its table.
        (blocks(4), {"uint4": 6144, "float32": 576}, pytest.approx((6144 * 5 + 576 * 32) / 6720)),
        (blocks(8), {"uint8": 6144, "float32": 576}, pytest.approx((6144 * 9 + 576 * 32) / 6720)),
    ],
)
def test_files_of_other_quantizers_have_the_parameters_of_the_model(
    tool: Callable[[Path, Path], None], kinds: dict[str, int], bits: float, tmp_path: Path
) -> None:
    """Tags come back with ``retag``; packed values count as the parameters they stand for, scales as none, and every
    operation is counted.
    """
    onnx.save(onnx.shape_inference.infer_shapes(ir.to_proto(parse(BODY))), tmp_path / "in.onnx")
    tool(tmp_path / "in.onnx", tmp_path / "made.onnx")
    paths = [tmp_path / f"{name}.onnx" for name in ("in", "made", "out")]
    write_transfer(carry_between(*paths, overwrite=False), overwrite=False)
    before, after = inspect_onnx(tmp_path / "in.onnx"), inspect_onnx(tmp_path / "out.onnx")
    assert after.coverage.is_complete
    assert (PARAMETERS, 32) == (before.total.parameters, before.total.bits)
    summaries = {kind: summary.parameters for kind, summary in after.weight_summaries.items() if summary.parameters}
    assert kinds == summaries
    assert bits == after.total.bits
    costs = {module.tag: module.total for module in after.modules}
    assert before.total.macs == after.total.macs
    for module in before.modules:
        assert module.total.parameters == costs[module.tag].parameters, module.tag


def test_low_bit_weights_without_a_recording_node_are_counted(tmp_path: Path) -> None:
    """Types of ONNX with less than a byte take their bits."""
    body = f"""m (float[2, 16] x) => (float[2, 16] y) <float[1] s = {{0.5}}, {weight("w", 16, 16)}>
        {{ y = MatMul (x, w) }}"""
    model = parse(body, opset=21)
    ir.save(model, tmp_path / "in.onnx")
    proto = onnx.load(tmp_path / "in.onnx")
    proto.graph.initializer.append(onnx.helper.make_tensor("q", onnx.TensorProto.INT4, [16, 16], [1] * 256))
    proto.graph.node.insert(0, onnx.helper.make_node("DequantizeLinear", ["q", "s"], ["w_float"], name="dequantize"))
    proto.graph.node[1].input[1] = "w_float"
    onnx.save(proto, tmp_path / "in.onnx")
    summaries = inspect_onnx(tmp_path / "in.onnx").weight_summaries
    assert (256, 128) == (summaries["int4"].parameters, summaries["int4"].size_bytes)
