"""Separates activations from the convolutions and products that an optimizer fused them into.

Before / After::

    x → FusedConv(activation=Relu) → y        x → Conv → Relu → y
    x → FusedGemm(activation=Relu) → y        x → Gemm → Relu → y

Must not fire when the activation is not in :data:`_PARAMETERS`, or the node is in a subgraph or a function.
Tags: both nodes have the metadata of the fused node; the layer keeps its name, the last node its output.
Why it is safe: the schemas of ONNX Runtime define the fused operators by these nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping

import onnx_ir as ir

from winml.modelkit.onnx.fresh_names import FreshNames
from winml.modelkit.onnx.weights import add_initializer
from winml.modelkit.quantize.planning import SEPARABLE_LAYERS

_DOMAIN = "com.microsoft"
_ADDED = 3
"""Specified: index of the input of FusedConv that is added before the activation."""
_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "Relu": (), "Sigmoid": (), "Tanh": (), "Softplus": (), "Softsign": (), "LeakyRelu": ("alpha",), "Elu": ("alpha",),
    "ThresholdedRelu": ("alpha",), "HardSigmoid": ("alpha", "beta"), "Selu": ("alpha", "gamma"), "Clip": ("min", "max"),
}  # fmt: skip
"""Specified: activation → its parameters in the order of ``activation_params`` of FusedConv; FusedGemm has an attribute
for each, such as ``activation_alpha``."""


def separate_activations(model: ir.Model, operators: Container[str]) -> Counter[str]:
    """Separate the fused layers of the main graph that contain one of these operators, in place.

    Returns:
        Number of separated nodes by fused operator.
    """
    separated: Counter[str] = Counter()
    fresh: FreshNames | None = None
    for node in list(model.graph):
        activation = node.attributes.get_string("activation", "")
        is_fused = node.domain == _DOMAIN and SEPARABLE_LAYERS.get(node.op_type) in operators
        if not is_fused or activation not in _PARAMETERS:
            continue
        fresh = fresh or FreshNames.of_graph(model.graph)
        _separate(node, activation, fresh)
        separated[node.op_type] += 1
    return separated


def _separate(fused: ir.Node, activation: str, fresh: FreshNames) -> None:
    graph, output = fused.graph, fused.outputs[0]
    assert isinstance(graph, ir.Graph)  # a node of the main graph
    inputs, added = list(fused.inputs[:_ADDED]), fused.inputs[_ADDED:]
    attributes = [item for name, item in fused.attributes.items() if not name.startswith("activation")]
    nodes = [ir.Node("", SEPARABLE_LAYERS[fused.op_type], inputs, attributes, name=fused.name)]
    nodes += [ir.node("Add", [nodes[-1].outputs[0], value]) for value in added if value is not None]
    parameters = _parameters(fused, activation)
    constants = []
    if activation == "Clip":
        for name, number in parameters.items():
            tensor = ir.tensor(number, output.dtype or ir.DataType.FLOAT, fresh.take(f"{fused.name}_{name}"))
            constants.append(add_initializer(graph, tensor))
        parameters = {}
    nodes.append(ir.node(activation, [nodes[-1].outputs[0], *constants], parameters))
    for node in nodes:
        node.metadata_props.update(fused.metadata_props)
        node.name = node.name or fresh.take(f"{fused.name}/{node.op_type}")
        value = node.outputs[0]
        value.name, value.type, value.shape = fresh.take(f"{node.name}_output"), output.type, output.shape
    ir.convenience.replace_nodes_and_values(graph, fused, [fused], nodes, [output], [nodes[-1].outputs[0]])


def _parameters(fused: ir.Node, activation: str) -> dict[str, float]:
    """Return the parameters that a fused node states for its activation."""
    names = _PARAMETERS[activation]
    if "activation_params" in fused.attributes:
        return dict(zip(names, fused.attributes["activation_params"].as_floats(), strict=False))
    given = {name: fused.attributes.get(f"activation_{name}") for name in names}
    return {name: attribute.as_float() for name, attribute in given.items() if attribute is not None}
