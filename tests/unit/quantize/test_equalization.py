"""Balancing of channels before quantization, without a change of the float outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common
import pytest

from graphs import parse
from unit.quantize.qdq_graphs import FixedSamples, modules_of, tagged_graph
from weighted_graphs import weight
from winml.modelkit.onnx.specs import InputTensorSpec
from winml.modelkit.ort.sessions import Session
from winml.modelkit.quantize.calibration.calibration_data import Calibration, CalibrationStatistics
from winml.modelkit.quantize.equalization import Equalization, equalize
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.pipeline import quantize
from winml.modelkit.quantize.precisions import KIND_RULES
from winml.modelkit.tags.tagging import read_tag

Array = np.ndarray[Any, Any]

RELATIVE = 2e-5
"""A factor and its inverse are each rounded once to float32, and sums are added in another order."""

NORMALIZED = """m (float[2, 5, 16] x) => (float[2, 5, 8] y) {
    h = LayerNormalization <axis = -1> (x, w_scale, w_shift)
    p = MatMul (h, w_up)
    r = Relu (p)
    y = MatMul (r, w_down)
}"""
NORMALIZED_WEIGHTS = {"w_scale": (16,), "w_shift": (16,), "w_up": (16, 12), "w_down": (12, 8)}
NORMALIZED_TAGS = ("/M/Norm", "/M/Up", "/M/Act", "/M/Down")

CONVOLUTIONS = """m (float[1, 3, 8, 8] x) => (float[1, 4, 1, 1] y) {
    a = Conv <kernel_shape = [3, 3]> (x, w_first, w_bias)
    b = Relu (a)
    c = Conv <kernel_shape = [3, 3], group = 6> (b, w_depth)
    d = Relu (c)
    e = Conv <kernel_shape = [1, 1]> (d, w_last)
    y = GlobalAveragePool (e)
}"""
CONVOLUTION_WEIGHTS = {"w_first": (6, 3, 3, 3), "w_bias": (6,), "w_depth": (6, 1, 3, 3), "w_last": (4, 6, 1, 1)}
CONVOLUTION_TAGS = ("/M/A", "/M/A", "/M/B", "/M/B", "/M/C", "/M/C")


def _graph(body: str, tags: tuple[str, ...], weights: Mapping[str, tuple[int, ...]]) -> ir.Model:
    """Return a graph with weights that differ from channel to channel by a factor of up to a hundred."""
    model = tagged_graph(body, tags, weights)
    generator = np.random.default_rng(7)
    for name, value in model.graph.initializers.items():
        shape = weights[name]
        values = generator.standard_normal(shape) * 10 ** generator.uniform(-1, 1, (shape[0], *[1] * (len(shape) - 1)))
        value.const_value = ir.Tensor(values.astype(np.float32), name=name)
    return ir.passes.common.ShapeInferencePass()(model).model  # integers are placed by the types of values


def _samples(shape: tuple[int, ...], count: int = 4) -> FixedSamples:
    generator = np.random.default_rng(1)
    scale = 10 ** generator.uniform(-1, 1, shape[-1])
    return FixedSamples([{"x": (generator.standard_normal(shape) * scale).astype(np.float32)} for _ in range(count)])


def _equalized(model: ir.Model, samples: FixedSamples, **options: Any) -> tuple[ir.Model, Equalization]:
    changed = model.clone()
    bits = {node.name or "": 8 for node in changed.graph if node.op_type in ("MatMul", "Conv", "Gemm")}
    settings = QuantizeOptions(precision="w8a8", **options)
    done = equalize(changed, bits, settings, samples, has_channel_scales=False)
    return changed, done


def _outputs(model: ir.Model, samples: FixedSamples) -> list[Array]:
    session = Session(ir.to_proto(model).SerializeToString())
    return [session.run(sample)["y"] for sample in samples.samples]


def _assert_same(model: ir.Model, changed: ir.Model, samples: FixedSamples) -> None:
    for before, after in zip(_outputs(model, samples), _outputs(changed, samples), strict=True):
        assert float(np.abs(before - after).max()) <= RELATIVE * float(np.abs(before).max())


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
def test_smoothing_changes_the_constants_before_and_keeps_outputs(strength: float) -> None:
    """A normalization and a product through ReLU take the factors: no node is new."""
    model, samples = _graph(NORMALIZED, NORMALIZED_TAGS, NORMALIZED_WEIGHTS), _samples((2, 5, 16))
    changed, done = _equalized(model, samples, smooth_quant=strength)
    assert 2 == done.count
    assert {"h", "r", "p"} == set(done.changes)
    assert [node.op_type for node in model.graph] == [node.op_type for node in changed.graph]
    _assert_same(model, changed, samples)


def test_smoothing_of_strength_one_makes_all_channels_of_an_activation_equal() -> None:
    """Every channel has the maximum 1 at strength 1; every row of the weights has at strength 0."""
    model, samples = _graph(NORMALIZED, NORMALIZED_TAGS, NORMALIZED_WEIGHTS), _samples((2, 5, 16))
    changed, _ = _equalized(model, samples, smooth_quant=1.0)
    assert np.allclose(1, samples.channel_maxima(changed, {"h": -1})["h"], rtol=RELATIVE)
    changed, _ = _equalized(model, samples, smooth_quant=0.0)
    weight = [node for node in changed.graph if node.op_type == "MatMul"][-1].inputs[1]
    assert weight is not None
    assert weight.const_value is not None
    assert np.allclose(1, np.abs(weight.const_value.numpy()).max(axis=1), rtol=RELATIVE)


def test_value_with_other_readers_gets_a_mul_in_the_producing_module() -> None:
    """A residual reads the normalization too, so its constants stay, and outliers are worth a node."""
    body = NORMALIZED.replace("y = MatMul (r, w_down)", "q = MatMul (r, w_down)\n y = Add (q, h)")
    body = body.replace("float[2, 5, 8] y", "float[2, 5, 16] y")
    model = _graph(body, (*NORMALIZED_TAGS, "/M"), {**NORMALIZED_WEIGHTS, "w_down": (12, 16)})
    samples = _samples((2, 5, 16))
    changed, done = _equalized(model, samples, smooth_quant=0.5)
    inserted = [node for node in changed.graph if node.op_type == "Mul"]
    assert 1 == len(inserted)
    tag = read_tag(inserted[0])
    assert tag is not None
    assert ("/M/Norm", "inherited") == (tag.tag, tag.source)
    assert "h" not in done.changes  # the residual reads the numbers it read before
    _assert_same(model, changed, samples)


def test_layers_of_convolutions_are_balanced_through_relu_and_depthwise() -> None:
    """Both sides of a pair have the same largest weight in every channel, and outputs stay."""
    model, samples = _graph(CONVOLUTIONS, CONVOLUTION_TAGS, CONVOLUTION_WEIGHTS), _samples((1, 3, 8, 8))
    changed, done = _equalized(model, samples, cross_layer_equalization=True)
    assert 2 == done.count
    _assert_same(model, changed, samples)
    first, depth, last = (node.inputs[1] for node in changed.graph if node.op_type == "Conv")
    assert first is not None and depth is not None and last is not None  # noqa: PT018 - three alike
    assert first.const_value is not None and depth.const_value is not None  # noqa: PT018
    ranges = [np.abs(weight.const_value.numpy()).max(axis=(1, 2, 3)) for weight in (first, depth) if weight.const_value]
    # Sweeps end before the chain of three is exactly balanced.
    assert np.allclose(ranges[0], ranges[1], rtol=0.1)


@pytest.mark.parametrize("between", ["Sigmoid (a)", "Clip (a)", "Add (a, a)"])
def test_layers_with_another_operator_between_are_left(between: str) -> None:
    """A bounded activation does not commute with a factor, and a value read twice is not only the next layer's."""
    body = CONVOLUTIONS.replace("b = Relu (a)", f"b = {between}").replace("d = Relu (c)", "d = Tanh (c)")
    model = tagged_graph(body, CONVOLUTION_TAGS, CONVOLUTION_WEIGHTS)
    changed, done = _equalized(model, _samples((1, 3, 8, 8)), cross_layer_equalization=True)
    assert 0 == done.count
    assert [value.name for value in model.graph.initializers.values()] == [
        value.name for value in changed.graph.initializers.values()
    ]
    assert "no two layers" in done.notes[0]


def test_excluded_module_keeps_its_weights() -> None:
    """Only layers to be quantized are balanced; neighbouring layers are not changed."""
    model, samples = _graph(NORMALIZED, NORMALIZED_TAGS, NORMALIZED_WEIGHTS), _samples((2, 5, 16))
    options = QuantizeOptions(precision="w8a8", ep="qnn", smooth_quant=0.5, exclude=("/M/Down",))
    result = quantize(model.clone(), options, modules_of(model), samples)
    down = next(node for node in result.model.graph if node.name == "matmul_3").inputs[1]
    assert down is not None
    assert "w_down" == down.name
    assert any("balanced 1 activations" in note for note in result.notes)


def test_quantized_outputs_improve_with_an_outlier_channel() -> None:
    """A channel of a hundred times the others takes up the range: smoothing gains 10 dB and more."""
    model = _graph(NORMALIZED, NORMALIZED_TAGS, NORMALIZED_WEIGHTS)
    scale = model.graph.initializers["w_scale"]
    values = np.ones(16, np.float32)
    values[3] = 100
    scale.const_value = ir.Tensor(values, name="w_scale")
    samples = _samples((2, 5, 16))
    expected = np.stack(_outputs(model, samples))

    def noise(**options: Any) -> float:
        # Scales of activations alone: 16-bit weights lose nothing that counts.
        settings = QuantizeOptions(precision="w8a8", ep="qnn", min_sqnr_db=-100, **options)
        result = quantize(model.clone(), settings, modules_of(model), samples)
        return float(((np.stack(_outputs(result.model, samples)) - expected) ** 2).sum())

    assert noise(smooth_quant=0.5) < noise() / 10


def test_smoothing_of_mixed_bits_is_judged_by_the_bits_of_each_layer() -> None:
    """With 16 bits, the weights decide, and one activation less is balanced."""
    model = _graph(NORMALIZED, NORMALIZED_TAGS, NORMALIZED_WEIGHTS)
    values = np.exp(np.random.default_rng(2).standard_normal(16)).astype(np.float32)
    model.graph.initializers["w_scale"].const_value = ir.Tensor(values, name="w_scale")

    def balanced(precision: str, **options: Any) -> list[str]:
        settings = QuantizeOptions(precision=precision, ep="qnn", smooth_quant=1.0, **options)
        notes = quantize(model.clone(), settings, modules_of(model), _samples((2, 5, 16))).notes
        return [note for note in notes if note.startswith("SmoothQuant")]

    assert balanced("w8a8") == balanced("mixed", activation_bits=dict.fromkeys(KIND_RULES, 8))
    assert balanced("w8a8") != balanced("w8a16")


def test_activation_before_a_worsened_layer_is_not_smoothed() -> None:
    """No factor helps a layer with outliers in every second token, where all channels grow together."""
    model = _graph(NORMALIZED, NORMALIZED_TAGS, NORMALIZED_WEIGHTS)
    samples = _samples((2, 5, 16))

    class WorstRows(FixedSamples):
        """Samples in which the channel with the largest maximum is the smallest, so the maxima mislead."""

        def channel_rows(self, model: ir.Model, names: Sequence[str]) -> Mapping[str, Array]:
            """Return rows with the maxima turned round."""
            maxima = self.channel_maxima(model, dict.fromkeys(names, -1))
            return {
                name: (found.max() ** 2 / np.maximum(found, found.max() / 1000))[None, :].repeat(8, axis=0)
                for name, found in maxima.items()
            }

    _, done = _equalized(model, WorstRows(samples.samples), smooth_quant=1.0)
    assert "h" not in done.changes
    assert any("not balanced" in note for note in done.notes)


def test_samples_are_walked_once_for_maxima_and_rows(tmp_path: Path) -> None:
    """SmoothQuant needs both; each walk runs every sample twice, first for the sizes of values."""
    walks = []

    class Counted(Calibration):
        def read_samples(self, inputs: Sequence[InputTensorSpec]) -> Iterator[dict[str, Array]]:
            walks.append(1)
            return super().read_samples(inputs)

    model = parse(f"m (float[4, 8] x) => (float[4, 8] y) <{weight('w', 8, 8)}> {{ h = Relu (x) y = MatMul (h, w) }}")
    options = QuantizeOptions(mode="qdq", samples=3)
    statistics = CalibrationStatistics(Counted(options, tmp_path, {}))
    maxima = statistics.channel_maxima(model, {"h": -1})["h"]
    rows = statistics.channel_rows(model, ["h"])["h"]
    assert 2 == len(walks)
    np.testing.assert_array_equal(maxima, np.abs(rows).max(axis=0))
    np.testing.assert_array_equal(rows, statistics.channel_rows(model, ["h"])["h"])
    assert 4 == len(walks)
