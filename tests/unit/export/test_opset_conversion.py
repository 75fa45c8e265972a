"""Conversion of a graph of opset 18 to an older opset: same outputs, same metadata, no weight read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graphs import run_onnx
from winml.modelkit.export.opset_conversion import lower_opset

CHANGED = """<ir_version: 10, opset_import: ["": 18]>
graph (float[2, 6] x, float[40, 40] held) => (float[2, 1] y, float[2, 3] a, float[2, 3] b, float[40, 40] c)
<int64[1] axes = {1}, int64[4] pads = {0, 0, 0, 0}> {
    mean = ReduceMean <keepdims = 1, noop_with_empty_axes = 0> (x, axes)
    y = Pad (mean, pads)
    a, b = Split <axis = 1, num_outputs = 2> (x)
    c = Neg (held)
}"""
"""Graph with operators that opset 18 changed."""


def tagged(text: str) -> ir.Model:
    """Parse a graph and tag every node."""
    model = ir.serde.deserialize_model(onnx.parser.parse_model(text))
    for position, node in enumerate(model.graph.all_nodes()):
        node.metadata_props["winml.hierarchy.tag"] = f"/Model/{position}"
    return model


def give(model: ir.Model, name: str, weight: np.ndarray) -> None:
    """Turn a graph input into a weight."""
    value = next(value for value in model.graph.inputs if value.name == name)
    model.graph.inputs.remove(value)
    value.const_value = ir.tensor(weight)
    model.graph.register_initializer(value)


def marks(model: ir.Model) -> list[str]:
    """Return the tags of the nodes."""
    return [node.metadata_props["winml.hierarchy.tag"] for node in model.graph.all_nodes()]


@pytest.mark.parametrize("wanted", [17, 15])
def test_lowered_graph_has_equal_outputs_and_metadata(wanted: int, tmp_path: Path) -> None:
    """Down to 17 nodes are converted one by one, below 17 by onnx's converter; the file is valid."""
    weight = np.ones((40, 40), dtype=np.float32)
    model = tagged(CHANGED)
    give(model, "held", weight)
    expected_marks = marks(model)
    feeds = {"x": np.arange(12, dtype=np.float32).reshape(2, 6)}
    ir.save(model, tmp_path / "before.onnx")
    lowered, note = lower_opset(model, wanted)
    assert "" == note
    assert wanted == lowered.opset_imports[""]
    assert expected_marks == marks(lowered)
    assert ["x"] == [value.name for value in lowered.graph.inputs]
    assert lowered.graph.initializers["held"].const_value is not None
    ir.save(lowered, tmp_path / "after.onnx")
    onnx.checker.check_model(str(tmp_path / "after.onnx"), full_check=True)
    before, after = run_onnx(tmp_path / "before.onnx", feeds), run_onnx(tmp_path / "after.onnx", feeds)
    for name, value in before.items():
        np.testing.assert_array_equal(value, after[name])


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ("y = Mish (x)", "Mish"),
        ('y = Pad <mode = "wrap"> (x, pads)', "Pad that"),
        ("shape = Shape (x)  axes = Mul (shape, shape)  y = ReduceMean (x, axes)", "ReduceMean along"),
        ("y, rest = Split <axis = 1, num_outputs = 2> (x)", "Split into"),
    ],
)
def test_operator_without_an_older_version_keeps_the_graph(node: str, words: str) -> None:
    """The note names the operator, and the opset stays."""
    text = f"""<ir_version: 10, opset_import: ["": 18]>
    graph (float[2, 5] x) => (y) <int64[4] pads = {{0, 1, 0, 1}}> {{ {node} }}"""
    model = tagged(text)
    before = ir.serde.serialize_model(model)
    lowered, note = lower_opset(model, 17)
    assert words in note
    assert before == ir.serde.serialize_model(lowered)


def test_unconvertible_graph_stays_at_17_with_its_weights() -> None:
    """An operator of opset 17 cannot be converted below it."""
    model = tagged("""<ir_version: 10, opset_import: ["": 18]>
    graph (float[2, 2000] x, float[2000] scale) => (y) { y = LayerNormalization (x, scale) }""")
    give(model, "scale", np.ones(2000, dtype=np.float32))
    lowered, note = lower_opset(model, 13)
    assert "opset 17" in note
    assert "LayerNormalization" in note
    assert 17 == lowered.opset_imports[""]
    assert ["x"] == [value.name for value in lowered.graph.inputs]
    assert ["scale"] == list(lowered.graph.initializers)


def test_partly_convertible_graph_gets_the_oldest_reachable_opset() -> None:
    """Pow is the same in 15 and 16, and onnx cannot convert it from 15 to 14: weights and tags reach 15."""
    model = tagged("""<ir_version: 10, opset_import: ["": 18]>
    graph (float[2, 2000] x, float[2000] scale) => (y) { a = Pow (x, x)  y = Mul (a, scale) }""")
    give(model, "scale", np.ones(2000, dtype=np.float32))
    lowered, note = lower_opset(model, 13)
    assert 15 == lowered.opset_imports[""]
    assert "15: Pow" in note
    assert "--no-dynamo builds at 13" in note
    assert ["/Model/0", "/Model/1"] == marks(lowered)
    assert ["x"] == [value.name for value in lowered.graph.inputs]
    assert lowered.graph.initializers["scale"].const_value is not None
