"""Quantization of weights by the inputs of their layers, measured on samples."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from graphs import parse
from installed_versions import TWO_BITS
from weighted_graphs import weight
from winml.modelkit import quantize_onnx
from winml.modelkit.errors import QuantizeError, UsageError
from winml.modelkit.metadata_keys import QUANTIZATION_KEY, TAG_KEY
from winml.modelkit.quantize.calibration import layer_calibration
from winml.modelkit.quantize.records import QuantizedFile

_WEIGHTS = ", ".join([
    weight("w_q", 64, 64), weight("w_k", 64, 64), weight("w_up", 64, 96), weight("w_down", 96, 64), weight("w_g", 64),
])  # fmt: skip
NET = f"""m (float[N, 64] x) => (float[N, 64] y) <{_WEIGHTS}> {{
    n = Mul (x, w_g)
    q = MatMul (n, w_q)
    k = MatMul (n, w_k)
    s = Add (q, k)
    r = Relu (s)
    u = MatMul (r, w_up)
    t = Relu (u)
    y = MatMul (t, w_down) }}"""
"""Two products with one input behind a scale by channel, then two with inputs of their own."""

LEAST_GAIN_DB = 2.0
"""Chosen: least gain in decibels on samples with correlated channels."""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Samples with correlated channels of very different sizes."""
    generator = np.random.default_rng(0)
    mixing = generator.standard_normal((8, 64)) * np.exp(generator.standard_normal(64))
    (tmp_path / "data").mkdir()
    for number in range(16):
        rows = generator.standard_normal((20, 8)) @ mixing + 0.1 * generator.standard_normal((20, 64))
        np.savez(tmp_path / "data" / f"{number:02}.npz", x=rows.astype(np.float32))
    return tmp_path / "data"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The net in a file."""
    ir.save(parse(NET), tmp_path / "in.onnx")
    return tmp_path / "in.onnx"


def quantized(source: Path, data: Path, algorithm: str, **options: object) -> QuantizedFile:
    """Quantize the net; compared on the same data."""
    return quantize_onnx(
        source,
        source.with_name(f"{algorithm}.onnx"),
        precision="int4",
        algorithm=algorithm,
        calibration_data=str(data),
        min_sqnr_db=-100.0,
        overwrite=True,
        **options,
    )


def decibels(result: QuantizedFile) -> float:
    """Return the quality of a file."""
    assert result.fidelity is not None
    return result.fidelity.worst.sqnr_db


def rounded_decibels(source: Path, data: Path) -> float:
    """Return the quality of the file that is rounded to the nearest, on the same data."""
    from winml.modelkit.compare.fidelity import QualitySamples, measure_fidelity
    from winml.modelkit.ort.sessions import Session

    target = source.with_name("rtn.onnx")
    quantize_onnx(source, target, precision="int4", min_sqnr_db=-100.0, verify=False)
    samples = [dict(np.load(path)) for path in sorted(data.glob("*.npz"))]
    answers, outputs = ([Session(path).run(sample) for sample in samples] for path in (source, target))
    return measure_fidelity(answers, outputs, 0.0, QualitySamples("file", len(samples), 0)).worst.sqnr_db


@pytest.mark.parametrize("algorithm", ["gptq", "auto"])
def test_data_makes_outputs_better_at_the_same_size(source: Path, data: Path, algorithm: str) -> None:
    """The outputs are nearer than with rounding to the nearest; operators and tags are those of rounding."""
    result = quantized(source, data, algorithm)
    assert decibels(result) >= rounded_decibels(source, data) + LEAST_GAIN_DB
    assert 4 == result.quantized
    assert 100.0 == result.coverage.percent


def test_awq_is_folded_into_the_scale_before_and_else_multiplied(source: Path, data: Path) -> None:
    """The weight before several products of one input is divided by the scale; a Relu gets a tagged Mul instead."""
    result = quantized(source, data, "awq")
    assert decibels(result) >= rounded_decibels(source, data)
    nodes = onnx.load(result.model_path).graph.node
    before = [node for node in nodes if node.op_type == "Mul" and node.output[0] == "n"]
    assert ["w_g_divided"] == [name for node in before for name in node.input if name.startswith("w_g")]
    tags = [{entry.key: entry.value for entry in node.metadata_props} for node in nodes]
    assert all(TAG_KEY in metadata for metadata in tags)
    records = [json.loads(metadata[QUANTIZATION_KEY]) for metadata in tags if QUANTIZATION_KEY in metadata]
    assert {"awq"} <= {record["algorithm"] for record in records if record["kind"] == "operator"}


@pytest.mark.parametrize("options", [{"symmetric": True}, {"block_size": 128}, {"block_size": 16}], ids=str)
def test_block_formats_are_calibrated_with_data(source: Path, data: Path, options: dict[str, object]) -> None:
    """Blocks without a zero point, and such that divide no depth, are found with data as well."""
    assert 4 == quantized(source, data, "gptq", **options).quantized


@TWO_BITS
def test_two_bits_are_written(source: Path, data: Path) -> None:
    """ONNX Runtime runs products with weights in 2 bits."""
    target = source.with_name("two.onnx")
    done = quantize_onnx(
        source, target, precision="int2", algorithm="gptq", calibration_data=str(data), min_sqnr_db=-100.0
    )
    assert {2} == {
        attribute.i for node in onnx.load(target).graph.node for attribute in node.attribute if attribute.name == "bits"
    }
    assert decibels(done) > 0


def test_many_layers_are_quantized_like_one_layer(source: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All weights are quantized with one layer and with many, and the outputs are about equally exact."""
    several = decibels(quantized(source, data, "gptq"))
    monkeypatch.setattr(layer_calibration, "FEWEST_LAYERS", 1)
    assert several == pytest.approx(decibels(quantized(source, data, "gptq")), abs=3.0)


def test_weight_shared_with_a_table_is_quantized_once(tmp_path: Path) -> None:
    """A table that a product reads too has the blocks of the product; a table without a product is rounded."""
    weights = ", ".join([weight("w_e", 40, 64), weight("w_p", 16, 64)])
    body = f"""m (int64[5] i) => (float[5, 40] y) <{weights}> {{
        e = Gather (w_e, i)
        p = Gather (w_p, i)
        s = Add (e, p)
        t = Transpose <perm = [1, 0]> (w_e)
        y = MatMul (s, t) }}"""
    ir.save(parse(body), tmp_path / "in.onnx")
    (tmp_path / "data").mkdir()
    for number in range(4):
        np.savez(tmp_path / "data" / f"{number}.npz", i=(np.arange(5) * (number + 1)) % 16)
    result = quantized(tmp_path / "in.onnx", tmp_path / "data", "auto")
    assert 3 == result.quantized
    assert decibels(result) > 10


def test_data_with_nan_is_refused_by_weight_and_sample(source: Path, tmp_path: Path) -> None:
    """The message names the weight and the sample; nothing is written."""
    (tmp_path / "bad").mkdir()
    np.savez(tmp_path / "bad" / "0.npz", x=np.full((2, 64), np.nan, np.float32))
    with pytest.raises(QuantizeError) as caught:
        quantized(source, tmp_path / "bad", "gptq")
    assert all(word in caught.value.message for word in ("w_q", "sample 1"))
    assert not source.with_name("gptq.onnx").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "int4", "calibration_data": "data"},
        {"precision": "int8", "mode": "dynamic", "algorithm": "gptq"},
        {"precision": "fp16", "algorithm": "awq"},
    ],
    ids=str,
)
def test_unread_calibration_data_is_refused(source: Path, data: Path, options: dict[str, str]) -> None:
    """An algorithm without data takes none, and a mode without blocks has no algorithm."""
    values = {key: str(data) if key == "calibration_data" else value for key, value in options.items()}
    with pytest.raises(UsageError):
        quantize_onnx(source, source.with_name("out.onnx"), **values)


PADDED = f"""m (float[1, T, 64] x, int64[1, T] attention_mask) => (float[1, T, 64] y) <{weight("w_q", 64, 64)}> {{
    c = Cast <to = 1> (attention_mask)
    s = ReduceSum <keepdims = 0> (c)
    h = Mul (x, s)
    z = Sub (h, h)
    i = Add (x, z)
    y = MatMul (i, w_q) }}"""


def test_padding_does_not_count(tmp_path: Path) -> None:
    """Rows after the end of a text change no block, even with large values."""
    generator = np.random.default_rng(0)
    mixing = generator.standard_normal((64, 64)).astype(np.float32)
    ir.save(parse(PADDED), tmp_path / "in.onnx")
    for name, added in (("short", 0), ("padded", 8)):
        (tmp_path / name).mkdir()
        for number in range(4):
            values = np.random.default_rng(number).standard_normal((1, 20, 64)).astype(np.float32) @ mixing
            rows = np.pad(values, [(0, 0), (0, added), (0, 0)], constant_values=50.0)
            mask = np.pad(np.ones((1, 20), np.int64), [(0, 0), (0, added)])
            np.savez(tmp_path / name / f"{number}.npz", x=rows, attention_mask=mask)
        quantize_onnx(
            tmp_path / "in.onnx", tmp_path / f"{name}.onnx", precision="int4", algorithm="gptq",
            calibration_data=str(tmp_path / name), min_sqnr_db=-100.0,
        )  # fmt: skip
    short, padded = (
        {tensor.name: tensor.raw_data for tensor in onnx.load(tmp_path / f"{name}.onnx").graph.initializer}
        for name in ("short", "padded")
    )
    assert short == padded


def test_algorithm_of_a_module_overrides_the_default(source: Path, data: Path) -> None:
    """A module's algorithm is used for its product even if another product reads the same input."""
    weights = ", ".join([weight("w_q", 64, 64), weight("w_k", 64, 64), weight("w_b", 64)])
    net = f"""m (float[N, 64] x) => (float[N, 64] y) <{weights}> {{
        q = MatMul (x, w_q) k = Gemm (x, w_k, w_b) y = Add (q, k) }}"""
    ir.save(parse(net), source)
    result = quantized(source, data, "gptq", algorithms={"/M/Gemm": "hqq"})
    nodes = {node.name: node for node in onnx.load(result.model_path).graph.node if node.op_type == "MatMulNBits"}
    records = [{entry.key: entry.value for entry in node.metadata_props} for node in nodes.values()]
    found = {record[TAG_KEY]: json.loads(record[QUANTIZATION_KEY])["algorithm"] for record in records}
    assert {"/M/MatMul": "gptq", "/M/Gemm": "hqq"} == found
    assert result.calibration is not None
    assert "gptq" == result.calibration.record["method"]


def test_large_bias_of_a_channel_leaves_the_solved_integers_of_the_others(data: Path, tmp_path: Path) -> None:
    """The bias needs a larger scale in its channel alone."""
    integers = {}
    for name, algorithm, bias in (("solved", "gptq", 0.0), ("biased", "gptq", 300.0), ("nearest", "rtn", 300.0)):
        model = parse(f"m (float[N, 64] x) => (float[N, 8] y) <{weight('w', 64, 8)}, {weight('b', 8)}> {{"
                      "y = Gemm (x, w, b) }")  # fmt: skip
        values = np.random.default_rng(1).standard_normal((64, 8)).astype(np.float32)
        values[:, 2] *= 1e-9
        model.graph.initializers["w"].const_value = ir.tensor(values, name="w")
        biases = np.array([0, 0, bias, 0, 0, 0, 0, 0], np.float32)
        model.graph.initializers["b"].const_value = ir.tensor(biases, name="b")
        ir.save(model, tmp_path / "in.onnx")
        result = quantize_onnx(
            tmp_path / "in.onnx", tmp_path / f"{name}.onnx", precision="w8a8", mode="qdq", algorithm=algorithm,
            calibration_data=str(data), min_sqnr_db=-100.0,
        )  # fmt: skip
        assert (algorithm == "gptq") == any("1 product got integers" in note for note in result.notes)
        written = onnx.load(result.model_path)
        [stored] = [tensor for tensor in written.graph.initializer if tensor.name == "w_quantized"]
        integers[name] = np.delete(numpy_helper.to_array(stored), 2, axis=1)
    assert np.array_equal(integers["solved"], integers["biased"])
    assert not np.array_equal(integers["solved"], integers["nearest"])


def test_layers_in_qdq_beside_weights_of_awq_are_noted(data: Path, tmp_path: Path) -> None:
    """The algorithm has no integers with one zero point."""
    weights = f"{weight('w', 64, 64)}, {weight('v', 64, 64)}, {weight('b', 64)}"
    ir.save(
        parse(f"m (float[N, 64] x) => (float[N, 64] y) <{weights}> {{ a = MatMul (x, w) y = Gemm (a, v, b) }}"),
        tmp_path / "in.onnx",
    )
    result = quantize_onnx(
        tmp_path / "in.onnx", tmp_path / "both.onnx", precision="w8a8", per_module={"/M/MatMul": "int4"},
        algorithm="awq", calibration_data=str(data), min_sqnr_db=-100.0,
    )  # fmt: skip
    assert any(note.startswith("1 layer in qdq was rounded to nearest") and "awq" in note for note in result.notes)
