"""Graphs with sequences and maps pass through the commands, with their types."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from winml.modelkit import compare_models, optimize_onnx, quantize_onnx, run_model

MAPS = helper.make_sequence_type_proto(
    helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
)


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    """Save a classifier like those of skl2onnx: labels, scores, and a map of the scores per row."""
    weight = np.random.default_rng(0).standard_normal((64, 3)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["scores"]),
        helper.make_node("ArgMax", ["scores"], ["label"], axis=1, keepdims=0),
        helper.make_node("ZipMap", ["scores"], ["by_class"], domain="ai.onnx.ml", classlabels_int64s=[0, 1, 2]),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, 64])]
    label = helper.make_tensor_value_info("label", TensorProto.INT64, [None])
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, [None, 3])
    graph = helper.make_graph(
        nodes,
        "g",
        inputs,
        [label, scores, helper.make_value_info("by_class", MAPS)],
        [onnx.numpy_helper.from_array(weight, "w")],
    )
    opsets = [helper.make_opsetid("", 12), helper.make_opsetid("ai.onnx.ml", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


def test_maps_keep_their_type_and_values(classifier: Path, tmp_path: Path) -> None:
    """Optimized, converted to another opset and quantized, the output is the same sequence of maps."""
    optimize_onnx(classifier, tmp_path / "fast.onnx", level="full", opset=17)
    quantize_onnx(classifier, tmp_path / "int8.onnx")
    feeds = {"x": np.random.default_rng(1).standard_normal((2, 64)).astype(np.float32)}
    expected = ort.InferenceSession(classifier).run(["by_class"], feeds)[0]
    for name, tolerance in (("fast", 1e-5), ("int8", 0.5)):  # chosen: int8 rounds products of 64 numbers
        written = onnx.load(tmp_path / f"{name}.onnx")
        types = {output.name: output.type for output in written.graph.output}
        assert ["label", "scores", "by_class"] == list(types)
        assert TensorProto.INT64 == types["by_class"].sequence_type.elem_type.map_type.key_type
        actual = ort.InferenceSession(tmp_path / f"{name}.onnx").run(["by_class"], feeds)[0]
        for row, other in zip(expected, actual, strict=True):
            assert other == pytest.approx(row, abs=tolerance)


def test_maps_are_compared_and_nodes_count_as_modules(classifier: Path, tmp_path: Path) -> None:
    """A wrong weight is found in the values of the maps, and at the node that reads it."""
    model = onnx.load(classifier)
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(np.ones((64, 3), np.float32), "w"))
    onnx.save(model, tmp_path / "other.onnx")
    result = compare_models(classifier, tmp_path / "other.onnx", by_module=True)
    assert {"by_class", "by_class.keys", "label", "scores"} == {output.fidelity.name for output in result.outputs}
    assert result.first_divergence is not None
    assert "scores" == result.first_divergence.identity.module


def test_sequences_are_compared_entry_by_entry(tmp_path: Path) -> None:
    """The entries of a sequence are outputs of their own."""
    text = """g (float[b, 4] x) => (seq(float[b, 2]) y) <int64 two = {2}> { y = SplitToSequence <axis = 1> (x, two) }"""
    onnx.save(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}'), tmp_path / "m.onnx")
    result = optimize_onnx(tmp_path / "m.onnx", tmp_path / "fast.onnx", level="full")
    assert result.verification is not None
    assert {"y[0]", "y[1]"} == {entry.name for entry in result.verification.comparisons}


def test_run_prints_the_likeliest_keys_of_each_row(classifier: Path, tmp_path: Path) -> None:
    """Text is printed as it is, and saved without pickled objects."""
    x = np.random.default_rng(1).standard_normal((2, 64)).astype(np.float32)
    result = run_model(classifier, {"x": x}, top=2)
    rows = ort.InferenceSession(classifier).run(["by_class"], {"x": x})[0]
    expected = [
        (f"row {number}", str(key), pytest.approx(score, abs=1e-6))
        for number, row in enumerate(rows, 1)
        for key, score in sorted(row.items(), key=lambda item: -item[1])[:2]
    ]
    assert expected == [(entry.input, entry.label, entry.score) for entry in result.entries]
    text = """g (float[1] x) => (float[1] y, string[2] names) {
        y = Neg (x) names = Constant <value_strings = ["setosa", "iris"]> () }"""
    onnx.save(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}'), tmp_path / "t.onnx")
    result = run_model(tmp_path / "t.onnx", {"x": x[0, :1]}, save=tmp_path / "t.npz")
    assert ["string", "setosa, iris"] == [result.entries[1].dtype, result.entries[1].text]
    assert ["setosa", "iris"] == np.load(tmp_path / "t.npz")["names"].tolist()
