"""Branches of adapters beside the product of their module."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from graphs import run_onnx
from winml.modelkit.errors import ExportError
from winml.modelkit.metadata_keys import ADAPTERS_KEY
from winml.modelkit.onnx.lora_branches import LoraBranch, add_branches
from winml.modelkit.tags.tagging import NodeTag, read_tag, write_tag

WEIGHT = np.arange(12, dtype=np.float32).reshape(4, 3)
A = np.linspace(-1, 1, 8, dtype=np.float32).reshape(4, 2)
B = np.linspace(1, 2, 6, dtype=np.float32).reshape(2, 3)


def graph(operator: str = "MatMul") -> ir.Model:
    """``x, weight → block/linear``, then ``→ Relu``; the product itself is an output as well."""
    is_table = operator == "Gather"
    x = ir.Value(
        name="x",
        type=ir.TensorType(ir.DataType.INT64 if is_table else ir.DataType.FLOAT),
        shape=ir.Shape([2] if is_table else [2, 4]),
    )
    weight = ir.Value(name="w", const_value=ir.tensor(WEIGHT, name="w"), shape=ir.Shape([4, 3]),
                      type=ir.TensorType(ir.DataType.FLOAT))  # fmt: skip
    product = ir.node(operator, [weight, x] if is_table else [x, weight], name=f"/block/linear/{operator}")
    last = ir.node("Relu", [product.outputs[0]], name="/block/Relu")
    for node, name in ((product, "product"), (last, "y")):
        node.outputs[0].name = name
        node.outputs[0].type, node.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([2, 3])
        write_tag(node, NodeTag("/Net/Block.block", "block", "direct"))
    outputs = [product.outputs[0], last.outputs[0]]
    inner = ir.Graph([x], outputs, nodes=[product, last], initializers=[weight], opset_imports={"": 20}, name="g")
    return ir.Model(inner, ir_version=10)


def branch(*, is_table: bool = False, is_switched: bool = False, path: str = "block.linear") -> LoraBranch:
    """Return LoRA of the product."""
    if is_switched:
        return LoraBranch(path, 4, 3, is_table)
    return LoraBranch(path, 4, 3, is_table, ir.tensor(A), ir.tensor(B))


def run(model: ir.Model, x: np.ndarray) -> dict[str, np.ndarray]:
    """Run the model."""
    return run_onnx(ir.to_proto(model).SerializeToString(), {"x": x})


@pytest.mark.parametrize("operator", ["MatMul", "Gemm", "Gather"])
def test_branch_adds_its_product_and_outputs_keep_their_names(operator: str) -> None:
    """Readers and the graph output get the sum."""
    model, is_table = graph(operator), operator == "Gather"
    x = np.array([3, 1]) if is_table else np.linspace(-2, 2, 8, dtype=np.float32).reshape(2, 4)
    before = run(model, x)
    add_branches(model, [branch(is_table=is_table)], [], is_whole=True)
    answer = run(model, x)
    expected = before["product"] + (A[x] @ B if is_table else x @ A @ B)
    assert ["product", "y"] == list(answer)
    np.testing.assert_allclose(answer["product"], expected, rtol=1e-5)
    np.testing.assert_allclose(answer["y"], np.maximum(expected, 0), rtol=1e-5)
    assert ["x"] == [value.name for value in model.graph.inputs]


def test_two_adapters_over_one_weight_add_up() -> None:
    """Each adapter has weights of its own."""
    model = graph()
    x = np.linspace(-2, 2, 8, dtype=np.float32).reshape(2, 4)
    before = run(model, x)["product"]
    add_branches(model, [branch(), branch()], [], is_whole=True)
    np.testing.assert_allclose(run(model, x)["product"], before + 2 * (x @ A @ B), rtol=1e-5)


def test_switched_branch_without_an_adapter_changes_no_value() -> None:
    """Its inputs have a default of rank 0, and the file names its modules."""
    model = graph()
    x = np.linspace(-2, 2, 8, dtype=np.float32).reshape(2, 4)
    before = run(model, x)
    add_branches(model, [branch(is_switched=True)], ["one"], is_whole=True)
    answer = run(model, x)
    assert all(np.array_equal(before[name], answer[name]) for name in before)
    names = ["x", "block.linear.lora_A.weight", "block.linear.lora_B.weight"]
    assert names == [value.name for value in model.graph.inputs]
    assert '{"names": ["one"], "modules": ["block.linear"]}' == model.metadata_props[ADAPTERS_KEY]


def test_new_nodes_bear_the_tag_of_the_product() -> None:
    """A branch belongs to its changed module."""
    model = graph()
    add_branches(model, [branch()], [], is_whole=True)
    assert 5 == len(model.graph)
    assert {"/Net/Block.block"} == {tag.tag for node in model.graph if (tag := read_tag(node)) is not None}
    assert all(read_tag(node) is not None for node in model.graph)


def test_module_without_a_product_of_its_own_is_refused_or_left_to_another_part() -> None:
    """The product of another module is not touched."""
    with pytest.raises(ExportError, match=r"block\.other: .* no separate product"):
        add_branches(graph(), [branch(path="block.other")], [], is_whole=True)
    model = graph()
    add_branches(model, [branch(path="block.other")], [], is_whole=False)
    assert 2 == len(model.graph)


def test_product_of_two_inputs_is_no_weight() -> None:
    """A product of activations in the module gets no branch."""
    model = graph()
    model.graph.inputs.append(model.graph.initializers["w"])
    model.graph.initializers.pop("w")
    with pytest.raises(ExportError, match="no separate product"):
        add_branches(model, [branch()], [], is_whole=True)
