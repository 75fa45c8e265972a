"""Layers between QuantizeLinear and DequantizeLinear nodes with tags of modules, without changes of other nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from graphs import run_onnx
from unit.quantize.qdq_graphs import quantized, tagged_graph
from winml.modelkit.errors import QuantizeError, UsageError
from winml.modelkit.metadata_keys import QUANTIZATION_KEY
from winml.modelkit.tags.tagging import read_tag

X = np.random.default_rng(2).standard_normal((3, 4)).astype(np.float32)
IMAGE = np.random.default_rng(3).standard_normal((1, 2, 8, 8)).astype(np.float32)

MLP = "m (float[N, 4] x) => (float[N, 4] y) { h = MatMul (x, w1) a = Relu (h) s = Add (a, x) y = MatMul (s, w2) }"
MLP_TAGS = ("/M/Up", "/M/Act", "/M", "/M/Down")
MLP_WEIGHTS = {"w1": (4, 4), "w2": (4, 4)}

CNN = """m (float[1, 2, 8, 8] x) => (float[1, 4] y) {
    c = Conv <pads = [1, 1, 1, 1]> (x, w1) r = Relu (c) d = Conv <pads = [1, 1, 1, 1]> (r, w2) s = Add (d, r)
    t = Relu (s) p = GlobalAveragePool (t) f = Flatten (p) y = Gemm (f, w3, wb) }"""
CNN_TAGS = ("/M/Stem", "/M/Stem", "/M/Block", "/M/Block", "/M/Block", "/M/Pool", "/M", "/M/Head")
CNN_WEIGHTS = {"w1": (4, 2, 3, 3), "w2": (4, 4, 3, 3), "w3": (4, 4), "wb": (4,)}


def _tags(model: ir.Model) -> dict[str, str]:
    return {node.name or "": tag.tag for node in model.graph if (tag := read_tag(node)) is not None}


def _operator_tags(model: ir.Model) -> list[tuple[str, str]]:
    """Return operator and tag of the nodes that convert, in the order of the graph."""
    return [
        (f"{node.op_type} {node.inputs[0].name}", _tags(model)[node.name or ""])
        for node in model.graph
        if node.op_type.endswith("Linear") and node.inputs[0] is not None
    ]


def _run(model: ir.Model, feeds: Mapping[str, Any], *, optimize: bool = True) -> np.ndarray[Any, Any]:
    return next(iter(run_onnx(ir.to_proto(model).SerializeToString(), feeds, optimize=optimize).values()))


def _sqnr_db(expected: np.ndarray[Any, Any], actual: np.ndarray[Any, Any]) -> float:
    return float(10 * np.log10((expected**2).sum() / ((expected - actual) ** 2).sum()))


def test_value_belongs_to_its_maker_and_weight_to_its_reader() -> None:
    """The pair of a graph input belongs to the module that reads the input, the pair of a value to its producer."""
    result = quantized(tagged_graph(MLP, MLP_TAGS, MLP_WEIGHTS), [{"x": X}])
    assert [
        ("QuantizeLinear x", "/M/Up"),
        ("DequantizeLinear x_QuantizeLinear_Output", "/M/Up"),
        ("DequantizeLinear w1_quantized", "/M/Up"),
        ("QuantizeLinear s", "/M"),
        ("DequantizeLinear s_QuantizeLinear_Output", "/M"),
        ("DequantizeLinear w2_quantized", "/M/Down"),
    ] == _operator_tags(result.model)
    assert 100.0 == result.coverage.percent
    kinds = {
        node.name: json.loads(node.metadata_props[QUANTIZATION_KEY])
        for node in result.model.graph
        if QUANTIZATION_KEY in node.metadata_props
    }
    assert {"precision": "int8", "kind": "activation"} == kinds["s_QuantizeLinear"]
    assert {"precision": "int8", "kind": "weight"} == kinds["w1_DequantizeLinear"]
    assert {"precision": "int8", "kind": "operator"} == kinds["matmul_0"]
    assert not {"relu_1", "add_2"} & kinds.keys()


def test_shared_input_belongs_to_the_common_module_of_its_readers() -> None:
    """A single pair serves both readers."""
    body = "m (float[N, 4] x) => (float[N, 4] y) { a = MatMul (x, w1) b = MatMul (x, w2) y = Add (a, b) }"
    model = tagged_graph(body, ("/M/Both/Left", "/M/Both/Right", "/M/Both"), MLP_WEIGHTS)
    tags = _tags(quantized(model, [{"x": X}]).model)
    assert "/M/Both" == tags["x_QuantizeLinear"] == tags["x_DequantizeLinear"]


def test_convolutions_stay_integer_through_joining_operators() -> None:
    """An activation is quantized after its ReLU; sum, pool and reshape stay integer, and the outputs stay close."""
    model = tagged_graph(CNN, CNN_TAGS, CNN_WEIGHTS)
    expected = _run(model, {"x": IMAGE}, optimize=False)
    result = quantized(model, [{"x": IMAGE}])
    made = [node.inputs[0].name for node in result.model.graph if node.op_type == "QuantizeLinear" and node.inputs[0]]
    assert ["x", "r", "d", "t", "p", "f"] == made
    (bias,) = (node for node in result.model.graph if node.name == "wb_DequantizeLinear")
    assert bias.inputs[0] is not None
    assert ir.DataType.INT32 == bias.inputs[0].dtype
    assert _sqnr_db(expected, _run(result.model, {"x": IMAGE})) > 25
    assert expected.shape == _run(result.model, {"x": IMAGE}).shape
    assert not {"w1", "w2", "w3", "wb"} & result.model.graph.initializers.keys()


def test_excluded_module_keeps_its_inputs() -> None:
    """Weight and float inputs of an excluded module stay, although other modules read both quantized."""
    body = """m (float[N, 4] x) => (float[N, 4] y) {
        a = MatMul (x, w1) b = MatMul (x, w1) c = MatMul (b, w2) y = Add (a, c) }"""
    model = tagged_graph(body, ("/M/Chosen", "/M/Kept", "/M/Kept", "/M"), MLP_WEIGHTS)
    result = quantized(model, [{"x": X}], exclude=("Kept",))
    nodes = {node.name: node for node in result.model.graph}
    read = {
        name: [value.name for value in nodes[name].inputs if value] for name in ("matmul_0", "matmul_1", "matmul_2")
    }
    assert {
        "matmul_0": ["x_DequantizeLinear_Output", "w1_DequantizeLinear_Output"],
        "matmul_1": ["x", "w1"],
        "matmul_2": ["b", "w2"],
    } == read
    assert 2 == sum(node.op_type == "DequantizeLinear" for node in nodes.values())


def test_shared_weight_is_stored_once() -> None:
    """Two layers of one weight read the same DequantizeLinear, tagged with the module of both layers."""
    body = "m (float[N, 4] x) => (float[N, 4] y) { a = MatMul (x, w1) b = MatMul (a, w1) y = Relu (b) }"
    model = tagged_graph(body, ("/M/Pair/One", "/M/Pair/Two", "/M/Pair"), {"w1": (4, 4)})
    result = quantized(model, [{"x": X}])
    stored = [name for name in result.model.graph.initializers if name.endswith("_quantized")]
    assert ["w1_quantized"] == stored
    assert "/M/Pair" == _tags(result.model)["w1_DequantizeLinear"]


@pytest.mark.parametrize("batch", ["2", "N"])
def test_bias_behind_a_product_is_an_integer_that_a_kernel_adds(batch: str, tmp_path: Path) -> None:
    """ONNX Runtime fuses product and sum of fixed sizes to a Gemm; its integer kernel requires an int32 bias."""
    body = f"""m (float[{batch}, 3, 4] x) => (float[{batch}, 3, 4] y) {{
        h = MatMul (x, w1) a = Add (wb, h) r = Sigmoid (a) i = MatMul (r, w2) b = Add (i, wb) y = Sigmoid (b) }}"""
    tags = ("/M/Up", "/M/Up", "/M", "/M/Down", "/M/Down", "/M")
    model = tagged_graph(body, tags, {**MLP_WEIGHTS, "wb": (4,)})
    x = np.random.default_rng(4).standard_normal((2, 3, 4)).astype(np.float32)
    expected = _run(model, {"x": x}, optimize=False)
    result = quantized(model, [{"x": x}])
    biases = [node for node in result.model.graph if node.inputs[0] and node.inputs[0].dtype == ir.DataType.INT32]
    assert ["/M/Up", "/M/Down"] == [_tags(result.model)[node.name or ""] for node in biases]
    assert "wb" not in result.model.graph.initializers
    assert _sqnr_db(expected, _run(result.model, {"x": x})) > 35
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(ir.to_proto(result.model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    operators = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    kernel = "QGemm" if batch == "2" else "MatMulIntegerToFloat"
    assert (2, 0) == (operators.count(kernel), operators.count("Gemm") + operators.count("MatMul"))


def test_bias_of_an_excluded_sum_stays() -> None:
    """The sum belongs to an excluded module, unlike the product."""
    body = "m (float[2, 3, 4] x) => (float[2, 3, 4] y) { h = MatMul (x, w1) y = Add (h, wb) }"
    model = tagged_graph(body, ("/M/Up", "/M/Kept"), {"w1": (4, 4), "wb": (4,)})
    x = np.ones((2, 3, 4), np.float32)
    assert "wb" in quantized(model, [{"x": x}], exclude=("Kept",)).model.graph.initializers


def test_output_of_the_graph_keeps_its_name() -> None:
    """The name stays even if an integer kernel computes the output."""
    body = "m (float[1, 2, 8, 8] x) => (float[1, 4, 6, 6] y) { y = Conv (x, w1) }"
    model = tagged_graph(body, ("/M/Stem",), {"w1": (4, 2, 3, 3)})
    expected = _run(model, {"x": IMAGE})
    result = quantized(model, [{"x": IMAGE}])
    assert ["y"] == [value.name for value in result.model.graph.outputs]
    assert _sqnr_db(expected, _run(result.model, {"x": IMAGE})) > 25
    assert {"/M/Stem"} == set(_tags(result.model).values())


def test_table_is_read_as_integers_and_its_rows_become_floats() -> None:
    """The table itself is not turned into floats at each run."""
    body = "m (int64[N] i) => (float[N, 4] y) { e = Gather (w1, i) y = MatMul (e, w2) }"
    model = tagged_graph(body, ("/M/Table", "/M/Head"), {"w1": (16, 4), "w2": (4, 4)})
    feeds = {"i": np.array([3, 0, 15])}
    expected = _run(model, feeds)
    result = quantized(model, [feeds])
    gather = next(node for node in result.model.graph if node.op_type == "Gather")
    assert gather.inputs[0] is not None
    assert ir.DataType.INT8 == gather.inputs[0].dtype
    assert _sqnr_db(expected, _run(result.model, feeds)) > 25
    assert "/M/Table" == _tags(result.model)["e_DequantizeLinear"]


@pytest.mark.parametrize(("opset", "domain"), [(17, "com.microsoft"), (21, "")])
def test_16_bit_activations_have_the_domain_of_their_opset(opset: int, domain: str) -> None:
    """ONNX's own operators take 16 bits from opset 21; ONNX Runtime's at any."""
    model = tagged_graph(MLP, MLP_TAGS, MLP_WEIGHTS, opset=opset)
    expected = _run(model, {"x": X})
    result = quantized(model, [{"x": X}], precision="w8a16")
    pair = [node for node in result.model.graph if node.name and node.name.startswith("s_")]
    assert [domain, domain] == [node.domain for node in pair]
    assert pair[0].inputs[2] is not None
    assert ir.DataType.UINT16 == pair[0].inputs[2].dtype
    eight = _run(quantized(tagged_graph(MLP, MLP_TAGS, MLP_WEIGHTS), [{"x": X}]).model, {"x": X})
    assert _sqnr_db(expected, _run(result.model, {"x": X})) > _sqnr_db(expected, eight) + 2


def test_modules_of_several_precisions_coexist() -> None:
    """Each group has pairs of its own type."""
    model = tagged_graph(MLP, MLP_TAGS, MLP_WEIGHTS)
    result = quantized(model, [{"x": X}], per_module={"Down": "w8a16"})
    assert ["int8", "w8a16"] == [module.actual for module in result.modules]
    values = {name: value.dtype for name, value in result.model.graph.initializers.items()}
    assert (ir.DataType.UINT8, ir.DataType.UINT16) == (values["x_zero_point"], values["s_zero_point"])
    assert np.isfinite(_run(result.model, {"x": X})).all()


@pytest.mark.parametrize(
    ("base", "rules"), [("w8a8", {"Head": "w8a16"}), ("w8a16", {"Stem": "w8a8"}), ("w8a16", {"Head": "w8a8"})]
)
def test_layer_behind_an_integer_kernel_of_another_precision_gets_its_own(base: str, rules: dict[str, str]) -> None:
    """The convolution keeps its pair, and that of the product is read behind it, whichever group works first."""
    body = (
        "m (float[1, 2, 8, 8] x) => (float[1, 4, 8, 4] y) { c = Conv <pads = [1, 1, 1, 1]> (x, w1) y = MatMul (c, w2) }"
    )
    model = tagged_graph(body, ("/M/Stem", "/M/Head"), {"w1": (4, 2, 3, 3), "w2": (8, 4)})
    expected = _run(model, {"x": IMAGE})
    result = quantized(model, [{"x": IMAGE}], precision=base, per_module=rules)
    wanted = {"/M/Stem": base, "/M/Head": base} | {f"/M/{name}": precision for name, precision in rules.items()}
    assert wanted == {module.tag: module.actual for module in result.modules}
    product = next(node for node in result.model.graph if node.name == "matmul_1")
    chain, value = [], product.inputs[0]
    while value is not None and (maker := value.producer()) is not None:
        kind = maker.inputs[2].dtype if maker.op_type.endswith("Linear") and maker.inputs[2] else None
        chain.append((maker.op_type, kind))
        value = maker.inputs[0]
    types = {"w8a8": ir.DataType.UINT8, "w8a16": ir.DataType.UINT16}
    assert [("DequantizeLinear", types[wanted["/M/Head"]]), ("QuantizeLinear", types[wanted["/M/Head"]])] == chain[:2]
    assert [("DequantizeLinear", types[wanted["/M/Stem"]]), ("QuantizeLinear", types[wanted["/M/Stem"]])] == chain[2:4]
    assert ("Conv", None) == chain[4]
    assert _sqnr_db(expected, _run(result.model, {"x": IMAGE})) > 25


def test_non_finite_weight_is_refused() -> None:
    """NaN has no scale."""
    model = tagged_graph(MLP, MLP_TAGS, MLP_WEIGHTS)
    array = np.zeros((4, 4), np.float32)
    array[1, 2] = np.nan
    model.graph.initializers["w2"].const_value = ir.tensor(array, name="w2")
    with pytest.raises(QuantizeError, match="w2"):
        quantized(model, [{"x": X}])


def test_zero_point_for_each_channel_is_refused() -> None:
    """Integer kernels take one zero point per tensor."""
    from winml.modelkit.quantize.options import QuantizeOptions

    with pytest.raises(UsageError, match="--asymmetric"):
        QuantizeOptions(precision="w8a8", symmetric=False).refuse_contradictions()
    QuantizeOptions(precision="w8a8", symmetric=False, per_channel=False).refuse_contradictions()


def test_layer_without_a_form_counts_as_left() -> None:
    """The Gemm reads a quantized value twice, but its only constant is the addend."""
    body = """m (float[1, 2, 8, 8] x) => (float[8, 8] y) <int64[2] s = {8, 36}> {
        c = Conv (x, w1) r = Reshape (c, s) y = Gemm <transB = 1> (r, r, w2) }"""
    model = tagged_graph(body, ("/M/Conv", "/M", "/M/Left"), {"w1": (8, 2, 3, 3), "w2": (8, 8)})
    left = {module.tag: dict(module.left) for module in quantized(model, [{"x": IMAGE}]).modules}
    assert {"/M/Conv": {}, "/M/Left": {"qdq does not support Gemm with its weight as input 3": 1}} == left


def test_untagged_graph_gets_no_tags() -> None:
    """A graph without modules is quantized without tags."""
    model = tagged_graph(MLP, MLP_TAGS, MLP_WEIGHTS)
    for node in model.graph:
        node.metadata_props.clear()
    result = quantized(model, [{"x": X}])
    assert {} == _tags(result.model)
    assert 2 == result.quantized


def test_source_model_stays_unchanged() -> None:
    """The engine works on a copy."""
    model = tagged_graph(MLP, MLP_TAGS, MLP_WEIGHTS)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    quantized(model, [{"x": X}])
    assert before == ir.to_proto(model).SerializeToString(deterministic=True)


@pytest.mark.parametrize("options", [{}, {"mode": "dynamic"}])
def test_head_tied_to_a_table_is_quantized(options: dict[str, Any]) -> None:
    """The product gets a weight of its own, with scales along its outputs; no Transpose is left to run."""
    body = """m (int64[N] i) => (float[N, 16] y) {
        e = Gather (w1, i) h = Tanh (e) t = Transpose (w1) y = MatMul (h, t) }"""
    model = tagged_graph(body, ("/M/Table", "/M", "/M/Head", "/M/Head"), {"w1": (16, 4)})
    feeds = {"i": np.array([3, 0, 15])}
    expected = _run(model, feeds)
    result = quantized(model, [feeds], **options)
    assert {"/M/Table": {}, "/M/Head": {}} == {module.tag: dict(module.left) for module in result.modules}
    assert "Transpose" not in [node.op_type for node in result.model.graph]
    tables = [value for value in result.model.graph.initializers.values() if len(value.shape or ()) == 2]
    assert [ir.DataType.INT8] == [table.dtype for table in tables if "transposed" in (table.name or "")]
    assert {1} == {table.dtype.itemsize for table in tables if table.dtype is not None}
    assert _sqnr_db(expected, _run(result.model, feeds)) > 25


def test_table_of_an_excluded_lookup_stays_beside_the_weight_of_its_head() -> None:
    """The lookup still reads float values."""
    body = "m (int64[N] i) => (float[N, 16] y) { e = Gather (w1, i) t = Transpose (w1) y = MatMul (e, t) }"
    model = tagged_graph(body, ("/M/Table", "/M/Head", "/M/Head"), {"w1": (16, 4)})
    result = quantized(model, [{"i": np.array([3, 0, 15])}], exclude=("Table",))
    gather = next(node for node in result.model.graph if node.op_type == "Gather")
    assert gather.inputs[0] is result.model.graph.initializers["w1"]
    assert ["Weight w1 (256 B) is also stored unquantized, for gather_0."] == list(result.notes)


def test_float16_weight_is_left_with_its_reason() -> None:
    """DequantizeLinear would return float32."""
    body = "m (float16[N, 4] x) => (float16[N, 4] y) <float16[4, 4] w1 = {0}> { y = MatMul (x, w1) }"
    with pytest.raises(UsageError, match=r"MatMul .*float16"):
        quantized(tagged_graph(body, ("/M",), {}), [{"x": X.astype(np.float16)}])


@pytest.mark.parametrize("precision", ["int8", "uint8"])
def test_channels_have_one_zero_point_and_a_scale_that_their_bias_fits_into(precision: str) -> None:
    """One of three channels is zero, and one has a bias too large for its weights; integer kernels run all of them."""
    body = "m (float[1, 2, 8, 8] x) => (float[1, 3, 6, 6] y) { y = Conv (x, w1, wb) }"
    model = tagged_graph(body, ("/M/Stem",), {"w1": (3, 2, 3, 3), "wb": (3,)})
    array = np.random.default_rng(5).standard_normal((3, 2, 3, 3)).astype(np.float32)
    array[1], array[2] = 0, array[2] * 1e-9
    model.graph.initializers["w1"].const_value = ir.tensor(array, name="w1")
    bias = np.array([0.5, -1.5, 300], np.float32)
    model.graph.initializers["wb"].const_value = ir.tensor(bias, name="wb")
    expected = _run(model, {"x": IMAGE})
    result = quantized(model, [{"x": IMAGE}], precision=precision, mode="qdq")
    values = result.model.graph.initializers
    tensors = {name: value.const_value.numpy() for name, value in values.items() if value.const_value is not None}
    assert [0 if precision == "int8" else 128] * 3 == tensors["w1_zero_point"].tolist()
    assert isinstance(values["w1_quantized"].const_value, ir.LazyTensor)
    assert 1.0 == tensors["w1_scale"][1]
    assert np.abs(tensors["wb_quantized"].astype(np.int64)).max() < 2**31 - 1
    assert _sqnr_db(expected, _run(result.model, {"x": IMAGE})) > 25


def test_weight_that_blocks_do_not_divide_is_noted() -> None:
    """The note names the depth, and the largest block that divides it."""
    body = "m (float[2, 48] x) => (float[2, 8] y) { a = MatMul (x, w1) y = MatMul (a, w2) }"
    model = tagged_graph(body, ("/M/A", "/M/B"), {"w1": (48, 32), "w2": (32, 8)}, opset=21)
    samples = [{"x": np.random.default_rng(0).standard_normal((2, 48)).astype(np.float32)}]
    [note] = [note for note in quantized(model, samples, precision="w4a16").notes if "without blocks" in note]
    assert note.startswith("1 product ")
    assert "depth of 48" in note
    assert " 16 does" in note


def test_range_of_16_bits_ends_at_the_bounds_of_a_clip() -> None:
    """Other data exceeds the range of the samples, but no bounds: QNN takes Conv and Clip as one unit only then."""
    constants = "float low = {0.0}, float high = {6.0}, float[1, 3, 6, 6] a"
    nodes = "a = Conv (x, w1) y = Clip (a, low, high)"
    body = f"m (float[1, 2, 8, 8] x) => (float[1, 3, 6, 6] y) <{constants}> {{ {nodes} }}"
    model = tagged_graph(body, ("/M", "/M"), {"w1": (3, 2, 3, 3)})
    result = quantized(model, [{"x": 9 * IMAGE}], precision="w8a16", ep="qnn")
    clip = next(node for node in result.model.graph if node.op_type == "Clip")
    [converted] = [node for node, _ in clip.outputs[0].uses() if node.op_type == "QuantizeLinear"]
    scale = converted.inputs[1].const_value  # type: ignore[union-attr]
    np.testing.assert_allclose(scale.numpy(), 6 / 65535, rtol=1e-6)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("size", "options", "expected"),
    [
        (1.0, {}, ["int16", "int16", "int8"]),
        (0.25, {}, ["int8", "int8", "int8"]),  # scores of a narrow range
        (1.0, {"block_size": 16}, ["int8", "int8", "int8"]),  # whose rounding is finer
        (1.0, {"precision": "w8a8"}, ["int8", "int8", "int8"]),
    ],
)
def test_queries_and_keys_of_wide_unscaled_scores_have_16_bit_weights(
    size: float, options: dict[str, Any], expected: list[str]
) -> None:
    """The Softmax amplifies the rounding of scores of 10 and more; values are not affected."""
    body = """m (float[1, 4, 16] x) => (float[1, 4, 16] y) <
        float[1,4,16] q, float[1,4,16] k, float[1,4,16] v, float[1,16,4] t, float[1,4,4] s, float[1,4,4] p> {
        q = MatMul (x, w1) k = MatMul (x, w2) v = MatMul (x, w3) t = Transpose <perm = [0, 2, 1]> (k)
        s = MatMul (q, t) p = Softmax (s) y = MatMul (p, v) }"""
    model = tagged_graph(body, ["/M/Q", "/M/K", "/M/V", *["/M"] * 4], dict.fromkeys(("w1", "w2", "w3"), (16, 16)), 21)
    samples = [{"x": size * np.random.default_rng(0).standard_normal((1, 4, 16)).astype(np.float32)}]
    result = quantized(model, samples, **{"precision": "w8a16", "ep": "qnn", **options})
    integers = [
        value.producer() for node in list(result.model.graph) if node.op_type == "MatMul" for value in node.inputs
    ]
    types = [
        node.inputs[0].dtype.name.lower()  # type: ignore[union-attr]
        for node in integers
        if node is not None and node.inputs[0] is not None and node.inputs[0].is_initializer()
    ]
    assert expected == types
    assert ("int16" in expected) == any("16-bit weights" in note and "q, k" in note for note in result.notes)


@pytest.mark.parametrize(("operator", "axis"), [("Conv", 0), ("ConvTranspose", 1)])
def test_convolution_of_4_bits_has_a_scale_for_each_output_channel(operator: str, axis: int) -> None:
    """A provider runs only formats that a graph asked for, so transposed convolutions are asked for, too."""
    body = f"agraph (float[1,4,6,6] x) => (float[1,N,H,H] y) {{ y = {operator} (x, w) }}"
    shape = (4, 4, 3, 3) if operator == "Conv" else (4, 6, 3, 3)
    model = tagged_graph(body, ["/M"], {"w": shape})
    samples = [{"x": np.random.default_rng(0).standard_normal((1, 4, 6, 6)).astype(np.float32)}]
    result = quantized(model, samples, precision="w4a16", ep="qnn")
    layer = next(node for node in result.model.graph if node.op_type == operator)
    weight = layer.inputs[1].producer()  # type: ignore[union-attr]
    assert weight is not None
    assert (axis, (shape[axis],)) == (weight.attributes.get_int("axis"), tuple(weight.inputs[1].shape or ()))  # type: ignore[union-attr]
