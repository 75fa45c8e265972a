"""Optimization of float16 graphs: the same operators as in float32, with float16 inputs, outputs and weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from checkpoints import build_model
from graphs import operators, parse
from winml.modelkit import HTPExporter
from winml.modelkit.export.config import WinMLExportConfig
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.onnx.widening import widen_floats
from winml.modelkit.optimize.capabilities import ATTENTION_VARIANT
from winml.modelkit.optimize.float32_twin import Float32Twin
from winml.modelkit.optimize.options import OptimizeOptions
from winml.modelkit.optimize.pipeline import OptimizeResult, optimize
from winml.modelkit.ort.sessions import Session
from winml.modelkit.tags.tagging import measure_coverage

DECODER, FULL = OptimizeOptions().with_decoder_fusions(), OptimizeOptions(level="full")
TOLERANCE = 1e-2
"""Share of the largest value. Chosen ten times above the step of float16, which is 2^-10."""
_SIZES = {"batch_size": 1, "sequence_length": 5, "past_sequence_length": 3}


def _export(folder: Path, model: Any, dtype: str, exporter: str) -> Path:
    model.save_pretrained(folder / "checkpoint")
    config = WinMLExportConfig(exporter=exporter, verify=False)  # type: ignore[arg-type]  # a name of one
    request = ModelRequest(str(folder / "checkpoint"), dtype=dtype)
    return HTPExporter(config).export_checkpoint(request, folder / f"{dtype}.onnx").only_part.model_path


def _interface(model: ir.Model) -> list[tuple[str | None, ir.DataType | None]]:
    return [(value.name, value.dtype) for value in (*model.graph.inputs, *model.graph.outputs)]


def _run(model: ir.Model) -> dict[str, Any]:
    """Run a graph on drawn values: ones as masks, positions from zero."""
    session = Session(ir.to_proto(model).SerializeToString())
    generator = np.random.default_rng(0)
    feeds: dict[str, Any] = {}
    for value in model.graph.inputs:
        assert value.shape is not None
        assert value.dtype is not None
        shape = [size if isinstance(size, int) else _SIZES.get(str(size.value), 8) for size in value.shape]
        drawn = generator.integers(0, 2, shape)  # tokens, and types of tokens
        if value.dtype.is_floating_point():
            drawn = generator.standard_normal(shape)
        elif value.name == "attention_mask":
            drawn = np.ones(shape)
        elif value.name == "position_ids":
            drawn = np.arange(3, 3 + shape[1])[None]
        feeds[str(value.name)] = drawn.astype(value.dtype.numpy())
    return session.run(feeds)


def _optimize_both(
    folder: Path, kind: str, options: OptimizeOptions, exporter: str, **settings: Any
) -> tuple[ir.Model, OptimizeResult, OptimizeResult]:
    """Return the float16 graph before, and the optimized graphs in float16 and float32."""
    model = build_model(kind, **settings)
    paths = [_export(folder, model, dtype, exporter) for dtype in ("fp16", "fp32")]
    half, full = (optimize(ir.load(path), options) for path in paths)
    return ir.load(paths[0]), half, full


@pytest.mark.parametrize(
    ("kind", "options", "exporter", "settings"),
    [
        ("llama", DECODER, "torchscript", {"num_hidden_layers": 1, "head_dim": 16}),
        ("llama", DECODER, "dynamo", {"num_hidden_layers": 1, "head_dim": 16}),
        ("gpt2", FULL, "torchscript", {"n_layer": 1, "n_head": 2, "n_embd": 32}),
        ("bert", FULL, "torchscript", {}),
        ("vit", FULL, "torchscript", {}),
    ],
    ids=["llama", "llama_dynamo", "gpt2", "bert", "vit"],
)
def test_float16_graph_has_the_operators_of_float32(
    tmp_path: Path, kind: str, options: OptimizeOptions, exporter: str, settings: dict[str, Any]
) -> None:
    """Apart from casts, of which two may remain; names and types of inputs and outputs, tags and weights stay."""
    before, half, full = _optimize_both(tmp_path, kind, options, exporter, **settings)
    counts = [Counter(operators(result.model)) for result in (half, full)]
    casts = [count.pop("Cast", 0) for count in counts]
    assert counts[0] == counts[1]
    assert casts[0] <= casts[1] + 2
    assert half.fired == full.fired
    assert any(half.fired.values())
    assert _interface(half.model) == _interface(before)
    assert measure_coverage(half.model).is_complete
    large = [value.const_value for value in half.model.graph.initializers.values() if value.const_value.size > 64]
    assert {tensor.dtype for tensor in large if tensor.dtype.is_floating_point()} == {ir.DataType.FLOAT16}
    expected, answer = _run(before), _run(half.model)
    for name, value in expected.items():
        assert value.dtype == answer[name].dtype
        np.testing.assert_allclose(answer[name], value, rtol=0, atol=TOLERANCE * float(np.abs(value).max()))


def test_bfloat16_decoder_is_fused_for_providers_with_kernels(tmp_path: Path) -> None:
    """CUDA has kernels for bfloat16; elsewhere the decoder stays as exported. Both run with float32 activations."""
    path = _export(tmp_path, build_model("llama", num_hidden_layers=1, head_dim=16), "bf16", "torchscript")
    before = ir.load(path)
    plain = optimize(ir.load(path), DECODER.model_copy(update={"ep": "cpu"}))
    assert "GroupQueryAttention" not in operators(plain.model)
    fused = optimize(ir.load(path), OptimizeOptions(ep="cuda").with_decoder_fusions(ATTENTION_VARIANT)).model
    assert {"GroupQueryAttention", "SkipSimplifiedLayerNormalization"} <= set(operators(fused))
    assert "Softmax" not in operators(fused)
    assert _interface(fused) == _interface(before)
    assert measure_coverage(fused).is_complete
    for model in (before, fused):
        widen_floats(model, ir.DataType.BFLOAT16)
    expected, answer = _run(before), _run(fused)
    for name, value in expected.items():
        # The step of bfloat16, in which the cosines by position are stored, is 2^-7.
        np.testing.assert_allclose(answer[name], value, rtol=0, atol=2**-6 * float(np.abs(value).max()))


def test_nodes_that_computed_in_float32_still_do() -> None:
    """A softmax between casts stays float32; output and input of the graph keep name and type."""
    text = """m (float16[2, 8] x) => (float16[2, 8] y, float[2, 8] z) {
        wide = Cast <to = 1> (x)
        z = Softmax <axis = -1> (wide)
        narrow = Cast <to = 10> (z)
        y = Mul (narrow, x)
    }"""
    before, model = parse(text), parse(text)
    model = optimize(model, FULL).model
    assert _interface(model) == _interface(before)
    assert next(node for node in model.graph if node.op_type == "Softmax").outputs[0].dtype == ir.DataType.FLOAT
    assert next(node for node in model.graph if node.op_type == "Mul").outputs[0].dtype == ir.DataType.FLOAT16
    expected, answer = _run(before), _run(model)
    np.testing.assert_allclose(answer["z"], expected["z"], rtol=1e-6)
    np.testing.assert_allclose(answer["y"], expected["y"], rtol=1e-3)


_FLOAT16 = np.finfo(np.float16)
_CASES = {
    "residual in float32": """m (float16[2, 8] x, float[2, 8] r) => (float16[2, 8] y)
        <float[2, 8] s, float[2, 8] p, float[2, 1] a, float[2, 8] n, float two = {2}, float e = {0.1}, float one = {1},
         float[8] w = {1, 1, 1, 1, 1, 1, 1, 1}> {
        wide = Cast <to = 1> (x)
        s = Add (wide, r)
        p = Pow (s, two)
        m = ReduceMean <axes = [-1], keepdims = 1> (p)
        a = Add (m, e) q = Sqrt (a) i = Div (one, q) n = Mul (s, i) o = Mul (w, n)
        y = Cast <to = 10> (o)
    }""",
    "predicates": """m (float16[2, 8] x, float[2, 8] r) => (float16[2, 8] y, bool[2, 8] z, int64[2, 1] k) {
        h = Sigmoid (x) y = Mul (x, h)
        z = IsInf (r)
        k = ArgMax <axis = 1> (r)
    }""",
}


@pytest.mark.parametrize("name", _CASES)
def test_values_beyond_float16_stay_float32(name: str) -> None:
    """What computed in float32 still does, however large its values are."""
    before = parse(_CASES[name])
    result = optimize(parse(_CASES[name]), FULL).model
    x = np.linspace(-3, 3, 16, dtype=np.float16).reshape(2, 8)
    feeds: dict[str, Any] = {"x": x, "r": np.linspace(1e5, 2e5, 16, dtype=np.float32).reshape(2, 8)}
    sessions = [Session(ir.to_proto(model).SerializeToString(), optimize=False) for model in (before, result)]
    expected, answer = (session.run(feeds) for session in sessions)
    assert _interface(result) == _interface(before)
    for key, value in expected.items():
        np.testing.assert_allclose(answer[key], value, rtol=float(_FLOAT16.eps) * 2)


@pytest.mark.parametrize(
    "text",
    ["""m (float16[2] x, bool f) => (float16[2] y) {
        y = If (f) <then_branch = t () => (float16[2] u) { u = Relu (x) },
                    else_branch = e () => (float16[2] v) { v = Neg (x) }>
     }""",
     "m (float16[2, 2] x) => (float16[2, 2] y) { h = EyeLike <dtype = 10> (x) y = Mul (h, x) }",
     "m (float16[2] x) => (float16[2] y, float16[2] x) { y = Neg (x) }"],
    ids=["subgraph", "attribute", "input_as_output"],
)  # fmt: skip
def test_graph_that_cannot_be_converted_back_is_not_widened(text: str) -> None:
    """Such a graph is optimized as it is."""
    assert Float32Twin.of(parse(text)) is None


@pytest.mark.parametrize("level", ["basic", "full"])
@pytest.mark.parametrize(
    "text",
    ["""m (float16[2, 8] x, bool f) => (float16[2, 8] y) {
        a = Softmax (x)
        b = If (f) <then_branch = t () => (float16[2, 8] u) { u = Erf (a) },
                    else_branch = e () => (float16[2, 8] v) { v = Neg (a) }>
        y = Add (b, x)
     }""",
     "m (float16[2, 8] x) => (float16[2, 8] y) { a = Softmax (x) b = Erf (a) y = Add (b, x) }"],
    ids=["subgraph", "plain"],
)  # fmt: skip
def test_float16_graph_gets_no_casts(text: str, level: Any) -> None:
    """ONNX Runtime casts around operators without float16 kernels, also in a graph that cannot be widened."""
    assert "Cast" not in operators(optimize(parse(text), OptimizeOptions(level=level)).model)


@pytest.mark.parametrize("level", ["basic", "full"])
@pytest.mark.parametrize(
    ("text", "value"),
    [("""m (int64[2] x) => (float[2] y) <float[2] w, float16[2] h, float[2] f> {
        w = Cast <to = 1> (x) h = Cast <to = 10> (w) f = Cast <to = 1> (h) y = Neg (f)
      }""", "int64"),
     ("""m (int64[2] x) => (float[2] y) <float16[2] h, float[2] f> {
        h = Cast <to = 10> (x) f = Cast <to = 1> (h) y = Neg (f)
      }""", "int64"),
     ("""m (float[2] x) => (float[2] y) <float16[2] h, float[2] f> {
        h = Cast <to = 10> (x) f = Cast <to = 1> (h) y = Neg (f)
      }""", "float32"),
     ("""m (float[2] x) => (float[2] y, float16[2] z) <float16[2] h, float[2] f> {
        h = Cast <to = 10> (x) f = Cast <to = 1> (h) y = Neg (f) z = Abs (h)
      }""", "float32"),
     ("""m (float[2] x) => (float[2] y) <float16[2] h, float[2] f, int32[2] i, float[2] g> {
        h = Cast <to = 10> (x) f = Cast <to = 1> (h) i = Cast <to = 6> (f) g = Cast <to = 1> (i) y = Neg (g)
      }""", "float32")],
    ids=["int64_float32", "int64", "float32", "two_readers", "int32_after"],
)  # fmt: skip
def test_rounding_by_casts_stays(text: str, value: str, level: Any) -> None:
    """A value cast to float16 and back is rounded: 2049 becomes 2048."""
    result = optimize(parse(text), OptimizeOptions(level=level)).model
    session = Session(ir.to_proto(result).SerializeToString(), optimize=False)
    assert session.run({"x": np.array([2049, 7], value)})["y"].tolist() == [-2048, -7]
