"""Placement of quantized values around selected layers and between integer kernels."""

from __future__ import annotations

import pytest

from unit.quantize.qdq_graphs import tagged_graph
from winml.modelkit.quantize.qdq_placement import QdqPlacement, place_quantized_values

KERNEL = {"w1": (4, 2, 3, 3), "w2": (4, 4, 1, 1)}
HEAD = "m (float[1, 2, 8, 8] x) => (float[?, ?, ?, ?] y)"


def _place(nodes: str, *, left_out: str = "") -> QdqPlacement:
    """Place the values of a graph with all operator types but one selected."""
    count = nodes.count("=") - nodes.count("<")
    model = tagged_graph(f"{HEAD} {{ {nodes} }}", ["/M"] * count, KERNEL)
    names = {node.name or "" for node in model.graph if node.op_type != left_out}
    layers = frozenset(name for name in names if name.startswith("conv_"))
    return place_quantized_values(model.graph, layers, frozenset(names - layers))


@pytest.mark.parametrize(
    ("nodes", "left_out", "measured", "companions"),
    [
        ("y = Conv (x, w1)", "", ["x", "y"], set()),
        ("c = Conv (x, w1) y = Relu (c)", "", ["x", "y"], {"relu_1"}),
        ("c = Conv (x, w1) y = Relu (c)", "Relu", ["x", "c"], set()),
        ("c = Conv (x, w1) r = Relu (c) y = Add (c, r)", "", ["x", "c"], set()),
        ("c = Conv (x, w1) y = Sigmoid (c)", "", ["x", "c"], set()),
        ("c = Conv (x, w1) d = Conv (c, w2) y = Add (c, d)", "", ["x", "c", "d", "y"], {"add_2"}),
        ("c = Conv (x, w1) d = Conv (c, w2) y = Add (c, d)", "Add", ["x", "c", "d"], set()),
        ("c = Conv (x, w1) e = Exp (c) y = Add (c, e)", "", ["x", "c"], set()),
        ("y = Relu (x)", "", [], set()),
    ],
)
def test_values_around_and_between_layers(nodes: str, left_out: str, measured: list[str], companions: set[str]) -> None:
    """A sum is quantized if both operands are, an activation if no other node reads the layer."""
    placement = _place(nodes, left_out=left_out)
    assert (measured, companions) == (list(placement.measured), placement.companions)


def test_rearranged_value_shares_the_scale() -> None:
    """The range of the rearranged value is not measured."""
    placement = _place("c = Conv (x, w1) t = Transpose (c) y = MaxPool <kernel_shape = [2, 2]> (t)")
    assert ["x", "c"] == list(placement.measured)
    assert {"t": "c", "y": "c"} == {value.name: value.same_as for value in placement.values if value.same_as}


def test_value_that_no_kernel_makes_is_read_quantized_by_layers_only() -> None:
    """The sum still reads the float value."""
    placement = _place("e = Exp (x) c = Conv (e, w1) s = Neg (e) y = Mul (c, s)")
    readers = {value.name: value.readers for value in placement.values}
    assert {"e": frozenset({"conv_1"}), "c": None} == readers
