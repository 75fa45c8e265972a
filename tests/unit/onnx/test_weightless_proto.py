"""Structure of a graph for libraries, without copies of its weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

from graphs import parse
from weighted_graphs import PERCEPTRON, weight
from winml.modelkit.onnx.weights import SMALLEST_BYTES, to_weightless


def counting_model() -> tuple[ir.Model, list[str]]:
    """Return a model with a recording first weight, and the list of its reads."""
    model, read = parse(PERCEPTRON), []
    value = model.graph.initializers["w1"]
    values = value.const_value.numpy()

    def evaluate() -> ir.TensorProtocol:
        read.append("w1")
        return ir.tensor(values, name="w1")

    value.const_value = ir.LazyTensor(evaluate, dtype=ir.DataType.FLOAT, shape=ir.Shape([64, 64]), name="w1")
    return model, read


def test_large_weights_travel_without_values_and_are_not_read() -> None:
    """Large initializers have type and shape only, small ones their values; the model keeps its tensors."""
    model, read = counting_model()
    tensors = {name: value.const_value for name, value in model.graph.initializers.items()}
    sent = to_weightless(model)
    assert {name: tensors[name] for name in ("w1", "w2")} == dict(sent.weights)
    assert sent.proto.ByteSize() < SMALLEST_BYTES
    assert tensors == {name: value.const_value for name, value in model.graph.initializers.items()}
    back = ir.serde.deserialize_model(sent.proto)
    assert [64, 64] == list(back.graph.initializers["w1"].const_value.shape)
    assert np.array_equal(tensors["w_b"].numpy(), back.graph.initializers["w_b"].const_value.numpy())
    assert [] == read


def test_subgraphs_keep_their_own_weights() -> None:
    """An initializer of a branch may be named as one of the main graph; each keeps its values."""
    branch = f"b () => (float[2, 64] t) <{weight('w1', 64, 64)}> {{ t = MatMul (x, w1) }}"
    model = parse(f"""m (float[2, 64] x, bool c) => (float[2, 64] y) <{weight("w1", 64, 64)}>
        {{ h = MatMul (x, w1) z = If (c) <then_branch = {branch}, else_branch = e () => (float[2, 64] e) {{
           e = Identity (h) }}> y = Add (z, h) }}""")
    inner = next(node for node in model.graph if node.op_type == "If").attributes["then_branch"].as_graph()
    expected = inner.initializers["w1"].const_value.numpy().copy()
    back = ir.serde.deserialize_model(to_weightless(model).proto)
    returned = next(node for node in back.graph if node.op_type == "If").attributes["then_branch"].as_graph()
    assert np.array_equal(expected, returned.initializers["w1"].const_value.numpy())


def test_small_weights_in_a_data_file_travel_whole(tmp_path: Path) -> None:
    """A library that writes the model elsewhere would not find the file, whether it is read in a branch or not."""
    branch = f"b () => (float[2, 64] t) <{weight('w2', 64)}> {{ t = Add (x, w2) }}"
    model = parse(f"""m (float[2, 64] x, bool c) => (float[2, 64] y) <{weight("w1", 64)}>
        {{ h = Add (x, w1) z = If (c) <then_branch = {branch}, else_branch = e () => (float[2, 64] e) {{
           e = Identity (h) }}> y = Add (z, h) }}""")
    ir.save(model, tmp_path / "in.onnx", external_data="in.data", size_threshold_bytes=0)
    model = ir.load(tmp_path / "in.onnx")
    for value in (value for graph in model.graphs() for value in graph.initializers.values()):
        if not isinstance(value.const_value, ir.ExternalTensor):
            value.const_value = _outside(value.const_value, tmp_path)
    text = str(to_weightless(model).proto)
    assert "external_data" not in text
    assert all(
        isinstance(value.const_value, ir.ExternalTensor)
        for graph in model.graphs()
        for value in graph.initializers.values()
    )


def _outside(tensor: ir.TensorProtocol, folder: Path) -> ir.ExternalTensor:
    (folder / "branch.data").write_bytes(tensor.tobytes())
    return ir.ExternalTensor(
        "branch.data", 0, tensor.nbytes, tensor.dtype, shape=tensor.shape, name=tensor.name or "", base_dir=folder
    )
