"""Separation of activations that an optimizer fused into layers, with equal outputs."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from graphs import parse, run_onnx
from weighted_graphs import weight
from winml.modelkit.quantize.preparation import separate_activations
from winml.modelkit.tags.tagging import read_tag

DOMAINS = ', "com.microsoft" : 1'
CONVOLUTIONS = {
    "Relu": "",
    "Sigmoid": "",
    "Tanh": "",
    "LeakyRelu": ", activation_params = [0.3]",
    "HardSigmoid": ", activation_params = [0.3, 0.4]",
    "Clip": ", activation_params = [-0.5, 0.75]",
}
"""Activation → text of its parameters."""
PRODUCTS = {
    "Relu": "",
    "Softsign": "",
    "LeakyRelu": ", activation_alpha = 0.3",
    "Elu": ", activation_alpha = 0.6",
    "HardSigmoid": ", activation_alpha = 0.3, activation_beta = 0.4",
}


def convolution(activation: str, parameters: str = "", added: str = "") -> ir.Model:
    """A fused convolution without padding; ``added`` is the rest of its inputs."""
    inputs = "float[2, 3, 8, 8] x" + (", float[2, 4, 6, 6] z" if added else "")
    return parse(
        f"""m ({inputs}) => (float[2, 4, 6, 6] y) <{weight("w", 4, 3, 3, 3)}, {weight("w_b", 4)}> {{
        y = com.microsoft.FusedConv <kernel_shape = [3, 3], activation = "{activation}"{parameters}> (x, w, w_b{added})
        }}""",
        domains=DOMAINS,
    )


def product(activation: str, parameters: str = "") -> ir.Model:
    """A fused product with a transposed weight."""
    return parse(
        f"""m (float[2, 6] x) => (float[2, 4] y) <{weight("w", 4, 6)}, {weight("w_b", 4)}> {{
        y = com.microsoft.FusedGemm <transB = 1, activation = "{activation}"{parameters}> (x, w, w_b)
        }}""",
        domains=DOMAINS,
    )


def answer(model: ir.Model) -> np.ndarray:
    """Run a model on values around zero."""
    random = np.random.default_rng(1)
    feeds = {item.name: random.standard_normal(item.shape.numpy()).astype(np.float32) for item in model.graph.inputs}
    return run_onnx(ir.to_proto(model).SerializeToString(), feeds, optimize=False)["y"]


@pytest.mark.parametrize(
    ("model", "operators"),
    [
        *((convolution(name, text), ["Conv", name]) for name, text in CONVOLUTIONS.items()),
        *((product(name, text), ["Gemm", name]) for name, text in PRODUCTS.items()),
        (convolution("Relu", added=", z"), ["Conv", "Add", "Relu"]),
    ],
    ids=lambda item: "-".join(item) if isinstance(item, list) else "",
)
def test_separated_layer_has_the_same_outputs(model: ir.Model, operators: list[str]) -> None:
    """Each operator is one of ONNX, and the layer keeps its name and tag."""
    (fused,) = model.graph
    before, name, tag = answer(model), fused.name, read_tag(fused)
    assert {fused.op_type: 1} == separate_activations(model, {"Conv", "Gemm"})
    assert operators == [node.op_type for node in model.graph]
    assert {""} == {node.domain for node in model.graph}
    assert name == model.graph[0].name
    assert {tag} == {read_tag(node) for node in model.graph}
    np.testing.assert_allclose(answer(model), before, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "operators"),
    [
        (convolution("Relu"), {"Gemm", "MatMul"}),
        (product("Softmax"), {"Gemm"}),
        (parse(f"m (float[1, 3, 4, 4] x) => (float[1, 4, 2, 2] y) <{weight('w', 4, 3, 3, 3)}> {{ y = Conv (x, w) }}"),
         {"Conv"}),
    ],
    ids=["operator that no mode takes", "unknown activation", "not fused"],
)  # fmt: skip
def test_other_layers_stay(model: ir.Model, operators: set[str]) -> None:
    """A layer that cannot be quantized without the activation is not changed."""
    before = [node.op_type for node in model.graph]
    assert not separate_activations(model, operators)
    assert before == [node.op_type for node in model.graph]
