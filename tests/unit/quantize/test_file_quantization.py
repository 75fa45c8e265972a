"""Quantization of a file, with a module for each node and a precision for each quantized node."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graphs import parse, run_onnx
from weighted_graphs import PERCEPTRON, weight
from winml.modelkit import optimize_onnx, quantize_onnx
from winml.modelkit.errors import (
    InputError,
    ModelPathError,
    OutputExistsError,
    QuantizeError,
    StageError,
    UsageError,
    VerificationError,
)
from winml.modelkit.inspect.onnx_inspection import inspect_onnx
from winml.modelkit.metadata_keys import QUANTIZATION_KEY, TAG_KEY
from winml.modelkit.quantize.pipeline import read_minimum
from winml.modelkit.quantize.records import QuantizedFile

TIED = f"""m (float[2, 64] x, int64[2] i) => (float[2, 64] g, float[2, 64] y, float[2, 64] z, float[2, 256] v)
    <{weight("w1", 64, 64)}, {weight("w_b", 64)}, {weight("w2", 64, 256)}> {{
    g = Gather (w1, i)
    y = Gemm <transB = 1> (x, w1, w_b)
    z = Gemm <alpha = 0.5> (x, w1, w_b)
    v = MatMul (x, w2) }}"""
"""An embedding, a head tied to it, one that is no plain product, and a larger product, by which the file shrinks."""


def save(body: str | ir.Model, path: Path, **options: Any) -> Path:
    """Write a graph."""
    ir.save(parse(body, **options) if isinstance(body, str) else body, path)
    return path


def quantized(body: str | ir.Model, folder: Path, **options: Any) -> QuantizedFile:
    """Quantize a graph."""
    return quantize_onnx(save(body, folder / "in.onnx"), folder / "out.onnx", **options)


def nodes(path: Path) -> list[tuple[str, str, dict[str, str] | None]]:
    """Return operator, tag and record of every node."""
    found = []
    for node in onnx.load(path).graph.node:
        metadata = {entry.key: entry.value for entry in node.metadata_props}
        record = json.loads(metadata[QUANTIZATION_KEY]) if QUANTIZATION_KEY in metadata else None
        found.append((node.op_type, metadata.get(TAG_KEY, ""), record))
    return found


def test_every_node_records_its_module_and_precision(tmp_path: Path) -> None:
    """A range belongs to the module of its value; casts have no precision."""
    result = quantized(PERCEPTRON, tmp_path)
    assert (2, {}, 100.0) == (result.quantized, result.left, result.coverage.percent)
    activation, operator = ({"precision": "int8", "kind": kind} for kind in ("activation", "operator"))
    found = nodes(tmp_path / "out.onnx")
    assert [
        ("DynamicQuantizeLinear", "/M/MatMul", activation),
        ("MatMulInteger", "/M/MatMul", operator),
        ("DynamicQuantizeLinear", "/M/Relu", activation),
        ("MatMulInteger", "/M/Gemm", operator),
    ] == [entry for entry in found if entry[2]]
    assert {"/M/MatMul", "/M/Relu", "/M/Gemm"} == {tag for _, tag, _ in found}
    onnx.checker.check_model(str(tmp_path / "out.onnx"))


def test_file_records_request_and_result(tmp_path: Path) -> None:
    """The record of the model is that of the result, module by module."""
    result = quantized(PERCEPTRON, tmp_path, exclude=("Gemm",), precision="uint8")
    metadata = {entry.key: entry.value for entry in onnx.load(tmp_path / "out.onnx").metadata_props}
    record = json.loads(metadata[QUANTIZATION_KEY])
    assert {"precision": "uint8", "exclude": ["Gemm"]} == record["requested"]
    assert [module.as_record() for module in result.modules] == record["modules"]
    assert {"/M/MatMul": ("uint8", "uint8"), "/M/Gemm": ("fp32", "fp32")} == {
        module.tag: (module.requested, module.actual) for module in result.modules
    }
    assert {"excluded by Gemm": 1} == result.left


def test_each_module_gets_its_own_precision(tmp_path: Path) -> None:
    """One precision is applied after the other; the metadata of each remain."""
    result = quantized(PERCEPTRON, tmp_path, per_module={"Gemm": "uint8"})
    assert (2, 100.0) == (result.quantized, result.coverage.percent)
    found = nodes(tmp_path / "out.onnx")
    precisions = {
        (tag, record["precision"]) for operator, tag, record in found if operator == "MatMulInteger" and record
    }
    assert {("/M/MatMul", "int8"), ("/M/Gemm", "uint8")} == precisions


def test_excluded_nodes_stay_unchanged(tmp_path: Path) -> None:
    """Operator, name, attributes and weights; ONNX Runtime's quantizer alone would take every Gemm apart."""
    quantized(TIED, tmp_path, exclude=("Gemm",))
    before, after = (
        [node for node in onnx.load(tmp_path / name).graph.node if node.op_type == "Gemm"]
        for name in ("in.onnx", "out.onnx")
    )
    assert before == after


def test_weight_read_in_two_directions_is_correct(tmp_path: Path) -> None:
    """The head reads the embedding transposed; both have a quantized weight, and a note names the float reader."""
    result = quantized(TIED, tmp_path)
    assert (3, {"dynamic does not support Gemm with alpha 0.5": 1}) == (result.quantized, result.left)
    assert result.fidelity is not None
    assert all(output.sqnr_db > 30 for output in result.fidelity.outputs)
    assert any("/gemm/Gemm_2" in note for note in result.notes)


@pytest.mark.parametrize("excluded", ["MatMul", "Gather"])
def test_excluded_reader_of_a_shared_weight_has_equal_outputs(excluded: str, tmp_path: Path) -> None:
    """The weight of the excluded reader stays the original one."""
    body = f"""m (float[2, 64] x, int64[2, 3] i) => (float[2, 3, 64] g, float[2, 64] y) <{weight("w1", 64, 64)}> {{
        g = Gather (w1, i) y = MatMul (x, w1) }}"""
    result = quantized(body, tmp_path, exclude=(excluded,))
    assert result.fidelity is not None
    ratios = {output.name: output.sqnr_db for output in result.fidelity.outputs}
    kept, other = ("y", "g") if excluded == "MatMul" else ("g", "y")
    assert ratios[kept] > 100 > ratios[other] > 30
    assert 1 == sum("stored unquantized" in note for note in result.notes)


@pytest.mark.parametrize("order", ["g = Gather (w1, i) y = MatMul (x, w1)", "y = MatMul (x, w1) g = Gather (w1, i)"])
def test_lookup_and_product_of_one_weight_have_scales_of_their_own(order: str, tmp_path: Path) -> None:
    """A lookup has one scale, a product has one for each column, regardless of their order."""
    body = f"""m (float[2, 64] x, int64[2, 3] i) => (float[2, 3, 64] g, float[2, 64] y) <{weight("w1", 64, 64)}> {{
        {order} }}"""
    quantized(body, tmp_path)
    written = onnx.load(tmp_path / "out.onnx").graph
    dims = {tensor.name: list(tensor.dims) for tensor in written.initializer}
    scales = [
        (node.op_type, dims[name])
        for node in written.node
        for name in node.input
        if name.endswith("_scale") and name in dims
    ]
    assert {("DequantizeLinear", ()), ("Mul", (64,))} == {(operator, tuple(shape)) for operator, shape in scales}


def test_weight_shared_by_equal_readers_is_held_once(tmp_path: Path) -> None:
    """Two calls of a module share one quantized weight."""
    body = (
        f"m (float[2, 64] x) => (float[2, 64] y) <{weight('w1', 64, 64)}> {{ a = MatMul (x, w1) y = MatMul (a, w1) }}"
    )
    result = quantized(body, tmp_path)
    assert (2, False) == (result.quantized, any("stored unquantized" in note for note in result.notes))
    sizes = {tensor.name: list(tensor.dims) for tensor in onnx.load(tmp_path / "out.onnx").graph.initializer}
    assert [[64, 64]] == [dims for dims in sizes.values() if len(dims) == 2]


@pytest.mark.parametrize("opset", [11, 12])
def test_older_opset_is_raised_with_a_note(opset: int, tmp_path: Path) -> None:
    """Integer operators exist earlier, but one scale a channel does not."""
    result = quantized(parse(PERCEPTRON, opset=opset), tmp_path)
    assert (opset, 13) == (result.before.opset, result.after.opset)
    assert f"Opset {opset} was raised to 13, which the quantized operators require." in result.notes
    assert (2, 100.0) == (result.quantized, result.coverage.percent)


def test_graph_without_tags_is_quantized_by_the_scopes_of_its_names(tmp_path: Path) -> None:
    """The notes say so, since scopes are not modules of PyTorch; coverage is unknown."""
    model = parse(PERCEPTRON)
    for node in model.graph:
        node.metadata_props.clear()
    result = quantized(model, tmp_path, exclude=("gemm",))
    assert (1, False, None) == (result.quantized, result.is_tagged, result.as_record()["coverage"]["percent"])
    assert any("node names" in note for note in result.notes)


@pytest.mark.parametrize("names", [[""] * 3, ["n0", "n1", "n2"]])
def test_graph_without_scopes_is_quantized_as_a_whole(names: list[str], tmp_path: Path) -> None:
    """Nodes without names get names, and a note says that module information is missing."""
    model = parse(PERCEPTRON)
    for node, name in zip(model.graph, names, strict=True):
        node.metadata_props.clear()
        node.name = name
    result = quantized(model, tmp_path)
    assert 2 == result.quantized
    assert any("module information" in note for note in result.notes)


def test_nodes_of_equal_names_are_distinguished(tmp_path: Path) -> None:
    """ONNX Runtime refuses the source, so the result can only be written without verification."""
    model = parse(PERCEPTRON)
    for node in model.graph:
        node.name = "same"
    with pytest.raises(StageError, match="not run"):
        quantized(model, tmp_path)
    assert 2 == quantized(model, tmp_path, verify=False).quantized


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_weight_is_refused_with_its_module(value: float, tmp_path: Path) -> None:
    """An infinite weight would make its whole channel zero; an excluded infinite weight does not matter."""
    model = parse(PERCEPTRON)
    values = model.graph.initializers["w2"].const_value.numpy().copy()
    values[3, 4] = value
    model.graph.initializers["w2"].const_value = ir.tensor(values, name="w2")
    with pytest.raises(QuantizeError, match=r"1 of 2048 .* w2 .* /M/Gemm"):
        quantized(model, tmp_path)
    assert ["in.onnx"] == [path.name for path in tmp_path.iterdir()]
    assert 1 == quantized(model, tmp_path, exclude=("Gemm",), verify=False).quantized


def test_large_finite_weights_are_numbers(tmp_path: Path) -> None:
    """Their sum is not."""
    model = parse(PERCEPTRON)
    model.graph.initializers["w1"].const_value = ir.tensor(np.full((64, 64), 3e38, np.float32), name="w1")
    assert 2 == quantized(model, tmp_path, verify=False).quantized


def again(folder: Path) -> None:
    quantize_onnx(folder / "in.onnx", folder / "few.onnx")
    (folder / "few.onnx").replace(folder / "in.onnx")


def source_missing(folder: Path) -> None:
    (folder / "in.onnx").unlink()


def no_model(folder: Path) -> None:
    (folder / "in.onnx").write_text("This is no model.", encoding="utf-8")


def data_missing(folder: Path) -> None:
    ir.save(ir.load(folder / "in.onnx"), folder / "in.onnx", external_data="weights.data", size_threshold_bytes=0)
    (folder / "weights.data").unlink()


def output_there(folder: Path) -> None:
    (folder / "out.onnx").write_bytes(b"something else")


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (again, InputError, "already quantized"),
        (source_missing, ModelPathError, "in.onnx"),
        (no_model, InputError, "in.onnx"),
        (data_missing, InputError, "weights.data"),
        (output_there, OutputExistsError, "out.onnx"),
    ],
)
def test_unusable_files_are_refused_without_changes(
    damage: Callable[[Path], None], error: type[Exception], words: str, tmp_path: Path
) -> None:
    """Each error has a class and a message of its own, and no file changes."""
    source = save(PERCEPTRON, tmp_path / "in.onnx")
    damage(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(error) as refused:
        quantize_onnx(source, tmp_path / "out.onnx")
    assert words in str(refused.value)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


@pytest.mark.parametrize("output", ["in.onnx", "weights.onnx"])
def test_quantization_never_replaces_its_inputs(output: str, tmp_path: Path) -> None:
    """Neither the source nor its weights file is replaced, even if the weights file has the name of a model."""
    source = tmp_path / "in.onnx"
    ir.save(parse(PERCEPTRON), source, external_data="weights.onnx", size_threshold_bytes=0)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UsageError, match=f"is the input .*{output}"):
        quantize_onnx(source, tmp_path / output, overwrite=True)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_insufficient_quality_is_refused(tmp_path: Path) -> None:
    """A result below the requested ratio is not written, unless verification is off."""
    with pytest.raises(VerificationError, match=r"^y .*SQNR of \d+\.\d+ dB.* 90 dB"):
        quantized(PERCEPTRON, tmp_path, min_sqnr_db=90.0)
    assert not (tmp_path / "out.onnx").exists()
    assert quantized(PERCEPTRON, tmp_path, min_sqnr_db=90.0, verify=False).fidelity is None


def test_open_sizes_are_compared_on_request(tmp_path: Path) -> None:
    """A name that no input has is refused."""
    assert quantized(PERCEPTRON, tmp_path, sizes={"N": 7}).quantized
    with pytest.raises((UsageError, StageError), match="rows"):
        quantized(PERCEPTRON, tmp_path, sizes={"rows": 7}, overwrite=True)


def test_dynamic_sizes_are_noted_for_a_provider_that_requires_fixed_ones(tmp_path: Path) -> None:
    """The note has the command that fixes the sizes of the written file."""
    result = quantized(PERCEPTRON, tmp_path, precision="w8a16", ep="qnn")
    (note,) = (note for note in result.notes if "fixed sizes" in note)
    assert f"winml export -m {tmp_path / 'out.onnx'} -o fixed.onnx --shape-config N=1" in note
    assert not any("fixed sizes" in note for note in quantized(PERCEPTRON, tmp_path, overwrite=True).notes)


BRANCHES = f"""m (float[2, 64] x, bool c) => (float[2, 64] y) <{weight("w1", 64, 64)}> {{
    h = MatMul (x, w1) r = f.Double (h)
    y = If (c) <then_branch = t () => (float[2, 64] a) <{weight("w2", 64, 64)}> {{ a = MatMul (r, w2) }},
                else_branch = e () => (float[2, 64] b) <{weight("w2", 64, 64)}> {{
                    n = MatMul (r, w2) b = Relu (n) }}> }}"""
DOUBLE = '<opset_import: ["" : 17], domain: "f">\nDouble (x) => (y) { y = Add (x, x) }'


@pytest.mark.parametrize(
    ("precision", "mode"), [("int8", "dynamic"), ("int8", "qdq"), ("int4", None), ("fp16", None), ("bf16", None)]
)
def test_branches_are_quantized_and_keep_tags(tmp_path: Path, precision: str, mode: str | None) -> None:
    """Weights inside branches, which may have the same name, are quantized like those of the main graph."""
    source = parse(BRANCHES, functions=DOUBLE, domains=', "f" : 1')
    result = quantized(source, tmp_path, precision=precision, mode=mode)
    assert (3, {}, 100.0) == (result.quantized, result.left, result.coverage.percent)
    assert result.after.size_bytes < 0.7 * result.before.size_bytes
    written = onnx.load(tmp_path / "out.onnx")
    assert ["Double"] == [item.name for item in written.functions]


def test_branches_stay_float_with_calibrated_ranges(tmp_path: Path) -> None:
    """Activations are measured in the main graph only; the outputs stay close."""
    result = quantized(parse(BRANCHES, functions=DOUBLE, domains=', "f" : 1'), tmp_path, precision="w8a8")
    assert (1, {"qdq does not quantize subgraphs and functions": 2}) == (result.quantized, result.left)


def test_function_with_a_weight_is_inlined(tmp_path: Path) -> None:
    """A weight that a function reads as an input is quantized."""
    body = f"""m (float[2, 64] x) => (float[2, 64] y) <{weight("w1", 64, 64)}, {weight("w2", 64, 64)}> {{
        h = f.Layer (x, w1) y = f.Layer (h, w2) }}"""
    function = '<opset_import: ["" : 17], domain: "f">\nLayer (x, w) => (y) { p = MatMul (x, w) y = Relu (p) }'
    result = quantized(parse(body, functions=function, domains=', "f" : 1'), tmp_path)
    assert (2, {}, 100.0) == (result.quantized, result.left, result.coverage.percent)
    assert not onnx.load(tmp_path / "out.onnx").functions


@pytest.mark.parametrize("mode", ["dynamic", "qdq"])
def test_half_precision_graph_computes_in_float32_around_integers(tmp_path: Path, mode: str) -> None:
    """The integers of both modes are made of float32; inputs and outputs stay float16."""
    body = f"""m (float16[2, 64] x) => (float16[2, 64] y) <{weight("w1", 64, 64)}, {weight("w2", 64, 64)}> {{
        h = MatMul (x, w1) r = Relu (h) y = MatMul (r, w2) }}""".replace("float[64", "float16[64")
    result = quantized(parse(body), tmp_path, precision="int8", mode=mode)
    assert (2, {}) == (result.quantized, result.left)
    assert result.fidelity is not None
    assert result.fidelity.worst.sqnr_db > 25
    graph = onnx.load(tmp_path / "out.onnx").graph
    kinds = {value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}
    assert {onnx.TensorProto.FLOAT16} == kinds


def test_weights_of_an_lstm_are_computed_before_they_are_quantized(tmp_path: Path) -> None:
    """Exporters of PyTorch reorder the gates of an LSTM with nodes."""
    body = """m (float[6, 2, 24] x) => (float[6, 1, 2, 32] y)
        <float[128, 24] w = {0}, float[1, 128, 32] wr = {0}, int64[1] zero = {0}, int64[1] half = {64},
         int64[1] end = {128}> {
        upper = Slice (w, zero, half, zero) lower = Slice (w, half, end, zero)
        joined = Concat <axis = 0> (lower, upper) wx = Unsqueeze (joined, zero)
        y = LSTM <hidden_size = 32> (x, wx, wr) }"""
    result = quantized(parse(body), tmp_path, min_sqnr_db=25.0)
    assert (1, {}) == (result.quantized, result.left)
    assert ["DynamicQuantizeLSTM"] == [node.op_type for node in onnx.load(tmp_path / "out.onnx").graph.node]


def test_weights_read_by_two_branches_are_quantized_once(tmp_path: Path) -> None:
    """Merged decoders of other exporters hold one decoder in two branches, with equal names and weights outside."""
    read = "h = Gemm <transB = 1> (x, w) g = Gather (w, i)"
    body = f"""m (float[2, 64] x, int64[2] i, bool c) => (float[2, 64] y) <{weight("w", 64, 64)}> {{
        y = If (c) <then_branch = t () => (float[2, 64] a) {{ {read} a = Add (h, g) }},
                    else_branch = e () => (float[2, 64] b) {{ {read} b = Sub (h, g) }}> }}"""
    result = quantized(body, tmp_path, precision="int4", min_sqnr_db=10.0)
    assert (4, {}) == (result.quantized, result.left)
    written = onnx.load(tmp_path / "out.onnx")
    onnx.checker.check_model(written)
    branches = [attribute.g for attribute in written.graph.node[-1].attribute]
    assert [["GatherBlockQuantized", "MatMulNBits"]] * 2 == [
        sorted({node.op_type for node in branch.node} - {"Add", "Sub", "Reshape"}) for branch in branches
    ]
    packed = [tensor for tensor in written.graph.initializer if tensor.data_type == onnx.TensorProto.UINT8]
    assert 2 == len(packed), "values and zero points of one weight"
    assert all(QUANTIZATION_KEY in {entry.key for entry in node.metadata_props}
               for branch in branches for node in branch.node if node.domain)  # fmt: skip


def test_branches_compute_in_float16(tmp_path: Path) -> None:
    """All float nodes of both branches do, weights outside are stored once, and returned values keep their type."""
    read = "h = Gemm <transB = 1> (z, w) g = Softmax (h)"
    body = f"""m (float[2, 64] x, bool c) => (float[2, 64] y) <{weight("w", 64, 64)}> {{
        z = Tanh (x)
        y = If (c) <then_branch = t () => (float[2, 64] a) {{ {read} a = Add (h, g) }},
                    else_branch = e () => (float[2, 64] b) {{ {read} b = Sub (h, z) }}> }}"""
    result = quantized(body, tmp_path, precision="fp16")
    assert (2, {}) == (result.quantized, result.left)
    written = onnx.load(tmp_path / "out.onnx")
    onnx.checker.check_model(written, full_check=True)
    half = onnx.TensorProto.FLOAT16
    assert [half] == [tensor.data_type for tensor in written.graph.initializer]
    [branching] = [node for node in written.graph.node if node.op_type == "If"]
    for branch in (attribute.g for attribute in branching.attribute):
        assert ["Cast"] == [node.op_type for node in branch.node if branch.output[0].name in node.output]
        assert 1 == [node.op_type for node in branch.node].count("Cast")
    # One Cast of the input, which Tanh and both branches read in float16.
    assert 1 == [node.op_type for node in written.graph.node].count("Cast")


@pytest.mark.parametrize("precision", ["int4", "int8"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_standard_operators_have_the_values_of_blocks(precision: str, symmetric: bool, tmp_path: Path) -> None:
    """DequantizeLinear of opset 21 before products, and tables in rows."""
    body = f"""m (float[2, 128] x, int64[2] i) => (float[2, 40] y, float[2, 64] z)
        <{weight("w1", 128, 64)}, {weight("w2", 40, 64)}> {{
        h = MatMul (x, w1) y = Gemm <transB = 1> (h, w2) g = Gather (w1, i) z = Neg (g) }}"""
    source = save(body, tmp_path / "in.onnx")
    options = {"precision": precision, "mode": "weight-only", "symmetric": symmetric, "min_sqnr_db": 5.0}
    outputs = []
    for name in ("onnxruntime", "standard"):
        path = tmp_path / f"{name}.onnx"
        quantize_onnx(source, path, weight_operators=name, **options)
        written = onnx.load(path)
        assert (name == "standard") == (not any(node.domain for node in written.graph.node))
        feeds = {"x": np.random.default_rng(0).standard_normal((2, 128)).astype(np.float32), "i": np.array([3, 0])}
        outputs.append(run_onnx(path, feeds, optimize=False)["y"])
    # MatMulNBits rounds activations to 8 bits.
    np.testing.assert_allclose(outputs[0], outputs[1], atol=0.02 * np.abs(outputs[0]).max(), rtol=0)


def test_unknown_option_is_refused(tmp_path: Path) -> None:
    """A misspelled option is refused by name."""
    with pytest.raises(UsageError, match="precison"):
        quantized(PERCEPTRON, tmp_path, precison="int8")


def test_fused_integer_product_belongs_to_the_module_of_its_weight(tmp_path: Path) -> None:
    """The optimizer fuses conversion and product, although the converted value belongs to another module."""
    quantized(PERCEPTRON, tmp_path)
    optimize_onnx(tmp_path / "out.onnx", tmp_path / "fused.onnx", level="full")
    tags = {operator: tag for operator, tag, _ in nodes(tmp_path / "fused.onnx")}
    assert {"DynamicQuantizeMatMul": "/M/Gemm", "Relu": "/M/Relu"} == tags


def test_rule_that_no_module_obeys_lowers_no_bar(tmp_path: Path) -> None:
    """Only precisions in use determine the minimum SQNR."""
    alone = quantized(PERCEPTRON, tmp_path, exclude=("/M/Gemm",))
    with_rule = quantized(PERCEPTRON, tmp_path, exclude=("/M/Gemm",), per_module={"/M/Gemm": "uint8"}, overwrite=True)
    assert alone.fidelity is not None
    assert with_rule.fidelity is not None
    assert with_rule.fidelity.least_sqnr_db == alone.fidelity.least_sqnr_db


def test_file_that_is_not_clearly_smaller_has_a_note(tmp_path: Path) -> None:
    """Exit code 0 does not tell whether the file became smaller."""

    def has_note(result: QuantizedFile) -> bool:
        return any("Compared with its source" in note for note in result.notes)

    large = f"m (float[2, 256] x) => (float[2, 256] y) <{weight('w1', 256, 256)}> {{ y = MatMul (x, w1) }}"
    assert not has_note(quantized(large, tmp_path))
    kept = f"""m (float[2, 256] x) => (float[2, 8] z) <{weight("w1", 256, 256)}, {weight("w2", 256, 8)}>
        {{ y = MatMul (x, w1)  z = Gemm (y, w2) }}"""
    assert has_note(quantized(kept, tmp_path, exclude=("/M/MatMul",), overwrite=True))


def test_4_bit_table_is_counted_by_its_elements(tmp_path: Path) -> None:
    """Two values are packed into a byte; each of them is a parameter all the same."""
    body = f"m (float[2, 64] x, int64[2] i) => (float[2, 64] g) <{weight('w1', 96, 64)}> {{ g = Gather (w1, i) }}"
    quantized(body, tmp_path, precision="int4", verify=False)
    assert ["GatherBlockQuantized"] == [operator for operator, _, _ in nodes(tmp_path / "out.onnx")]
    assert inspect_onnx(tmp_path / "out.onnx").total.weight_parameters == 96 * 64


MIXED = f"""m (float[2, 64] x) => (float[2, 64] y) <{weight("w1", 64, 64)}, {weight("w2", 64, 64)}> {{
    a = MatMul (x, w1)
    b = Relu (a)
    y = Gemm (b, w2) }}"""


def test_rest_of_a_file_with_int4_weights_becomes_float16(tmp_path: Path) -> None:
    """The 4-bit weights stay, and everything else is half as large; each module is listed with both precisions."""
    paths = [tmp_path / f"{name}.onnx" for name in ("float", "int4", "half")]
    save(MIXED, paths[0])
    quantize_onnx(paths[0], paths[1], precision="int4", exclude=["gemm"])
    result = quantize_onnx(paths[1], paths[2], precision="fp16")
    types = {tensor.name: tensor.data_type for tensor in onnx.load(paths[2]).graph.initializer}
    assert onnx.TensorProto.FLOAT not in types.values()
    assert {onnx.TensorProto.FLOAT16, onnx.TensorProto.UINT8} <= {*types.values()}
    assert ["MatMulNBits", "Relu", "Gemm"] == [name for name, *_ in nodes(paths[2]) if name != "Cast"]
    assert {("int4", 1), ("fp16", 1)} == {(module.requested, module.quantized) for module in result.modules}
    record = json.loads({entry.key: entry.value for entry in onnx.load(paths[2]).metadata_props}[QUANTIZATION_KEY])
    assert ("fp16", "int4") == (record["requested"]["precision"], record["earlier"]["precision"])
    with pytest.raises(InputError, match="already quantized") as refused:
        quantize_onnx(paths[1], tmp_path / "again.onnx", precision="int8")
    assert "precision fp16" in refused.value.hint


def test_source_of_an_opset_that_onnxruntime_does_not_run_is_compared_after_conversion(tmp_path: Path) -> None:
    """Add of opset 6 broadcasts along an axis that an attribute names."""
    generator = np.random.default_rng(0)
    arrays = {"w": generator.standard_normal((64, 64), np.float32), "b": generator.standard_normal(64, np.float32)}
    product = onnx.helper.make_node("MatMul", ["x", "w"], ["a"])
    total = onnx.helper.make_node("Add", ["a", "b"], ["y"], broadcast=1, axis=1)
    values = dict.fromkeys("xy", (1, 64)) | {name: array.shape for name, array in arrays.items()}
    info = {name: onnx.helper.make_tensor_value_info(name, 1, shape) for name, shape in values.items()}
    graph = onnx.helper.make_graph(
        [product, total],
        "old",
        [info["x"], info["w"], info["b"]],
        [info["y"]],
        [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    source, output = tmp_path / "old.onnx", tmp_path / "new.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 6)], ir_version=3), source)
    result = optimize_onnx(source, output, opset=17)
    assert result.comparison is not None
    assert any("at opset 7" in note for note in result.notes)
    x = generator.standard_normal((1, 64), np.float32)
    np.testing.assert_allclose(run_onnx(output, {"x": x})["y"], x @ arrays["w"] + arrays["b"], atol=1e-4)
    raised = optimize_onnx(source, tmp_path / "same.onnx")
    assert (6, 7, True) == (raised.before.opset, raised.after.opset, raised.comparison is not None)
    assert any("raised to 7" in note for note in raised.notes)


@pytest.mark.parametrize(("quantized", "least_db"), [(2, 30.0), (0, 12.0)])
def test_mixture_has_the_minimum_of_its_modules(quantized: int, least_db: float) -> None:
    """The mark of a mixture in a record is no request for the precision of the same name."""
    model = parse("m (float[2] x) => (float[2] y) { y = Relu (x) }")
    module = {"tag": "/M", "requested": "bf16", "quantized": quantized, "left": {}}
    record = {"requested": {"precision": "mixed"}, "modules": [module]}
    model.metadata_props[QUANTIZATION_KEY] = json.dumps(record)
    minimum = read_minimum(model)
    assert minimum is not None
    assert least_db == minimum.sqnr_db


def random_body(nodes: str) -> str:
    """A product with 0.01, and the random value ``r``."""
    return f"""m (float[2, 64] x) => (float[2, 64] y) <{weight("w", 64, 64)}, float c = {{0.01}}> {{
        p = MatMul (x, w) s = Mul (p, c) {nodes} y = Add (s, r) }}"""


def test_source_that_generates_random_numbers_is_named(tmp_path: Path) -> None:
    """No precision helps: the SQNR of two runs of the source is as low."""
    with pytest.raises(VerificationError, match=r"differs between two runs.*\(Bernoulli\)") as raised:
        quantized(random_body("z = Sigmoid (p) r = Bernoulli (z)"), tmp_path, precision="int8")
    assert "evaluation mode" not in raised.value.hint


def test_normal_and_uniform_numbers_are_fixed_in_the_comparison(tmp_path: Path) -> None:
    """Drawn numbers, a hundred times as large as the products, would hide them."""
    result = quantized(random_body("r = RandomNormalLike (p)"), tmp_path, precision="int8")
    assert result.comparison is not None
    assert result.comparison.worst.sqnr_db > 30
    assert any("random numbers" in note for note in result.notes)


HUGE = f"""m (float[2147483648, 1048576, 64] x) => (float[2147483648, 1048576, 64] y) <{weight("w", 64, 64)}> {{
    y = MatMul (x, w) }}"""
NOT_RUN = f"""m (float[2, 64] x) => (float[2, 64] y) <{weight("w", 64, 64)}, int64[1] shape = {{70368744177664}}> {{
    p = MatMul (x, w) z = ConstantOfShape (shape) s = Size (z) f = Cast <to = 1> (s) y = Add (p, f) }}"""


@pytest.mark.parametrize("body", [HUGE, NOT_RUN], ids=["too many values", "too much memory"])
def test_source_that_runs_on_no_generated_values_is_written_unchecked(body: str, tmp_path: Path) -> None:
    """One rule for quantized and optimized files."""
    result = quantized(body, tmp_path, precision="fp16")
    assert result.verification is None
    assert any(note.startswith("Not checked") for note in result.notes)


def test_weights_that_are_inputs_are_the_reason_for_a_file_that_is_not_smaller(tmp_path: Path) -> None:
    """The hint names the option that helps."""
    body = f"m (float[2, 64] x) => (float[2, 64] y) <{weight('w', 64, 64)}> {{ p = MatMul (x, w) y = Relu (p) }}"
    model = parse(body)
    model.graph.inputs.append(model.graph.initializers["w"])
    with pytest.raises(QuantizeError, match="not smaller") as refusal:
        quantized(model, tmp_path, precision="fp16")
    assert "freeze_inputs" in refusal.value.hint
    assert 1 == quantized(model, tmp_path, precision="fp16", freeze_inputs=True, verify=False).quantized


def test_non_finite_weight_without_a_module_names_no_checkpoint(tmp_path: Path) -> None:
    """A file of others has neither modules nor a checkpoint."""
    model = parse(f"m (float[2, 64] x) => (float[2, 64] y) <{weight('w', 64, 64)}> {{ y = MatMul (x, w) }}")
    for node in model.graph:
        node.metadata_props.clear()
    model.graph.initializers["w"].const_value = ir.tensor(np.full((64, 64), np.nan, np.float32), name="w")
    with pytest.raises(QuantizeError, match=r"weight w .* node ") as refusal:
        quantized(model, tmp_path, precision="fp16")
    assert "module" not in f"{refusal.value} {refusal.value.hint}"


def test_hint_without_modules_names_no_search_for_modules(tmp_path: Path) -> None:
    """A search refuses a file without module information."""
    model = parse(random_body("r = Sigmoid (p)"))
    for node in model.graph:
        node.metadata_props.clear()
        node.name = ""
    for precision, search in (("int8", "sensitivity"), ("fp16", "budget")):
        with pytest.raises(VerificationError) as raised:
            quantized(model.clone(), tmp_path, precision=precision, min_sqnr_db=200)
        assert search not in raised.value.hint


def test_hint_without_float_weights_names_no_precision(tmp_path: Path) -> None:
    """Operators for classical models have their numbers in attributes."""
    with pytest.raises(UsageError) as raised:
        quantized("m (float[2, 64] x) => (float[2, 64] y) { y = Sigmoid (x) }", tmp_path, precision="int8")
    assert "fp16" not in raised.value.hint
