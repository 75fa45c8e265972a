"""Conversion of operators of old opsets: broadcasts along an axis, and Scan with a batch axis."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from graphs import run_onnx
from winml.modelkit.errors import OptimizeError
from winml.modelkit.normalize.opset_conversion import convert_opset

SHAPE = (5, 4, 3, 8)
FUNCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "Add": np.add,
    "Div": np.divide,
    "PRelu": lambda x, slope: np.where(x < 0, slope * x, x),
}


@pytest.mark.parametrize(
    ("operator", "axis", "shape"),
    [
        ("Add", 0, (5, 4)),
        ("Add", 1, (4,)),
        ("Add", 1, (4, 3)),
        ("Add", -2, (3,)),
        ("Add", None, (3, 8)),
        ("Div", 2, (3, 8)),
        ("PRelu", 1, (4,)),
        ("PRelu", 1, (1,)),
    ],
)
def test_second_input_begins_at_its_axis(operator: str, axis: int | None, shape: tuple[int, ...]) -> None:
    """Opset 6 names the axis in an attribute, and PRelu has a slope for each channel; opset 7 broadcasts as numpy."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal(SHAPE, np.float32)
    b = generator.standard_normal(shape, np.float32) + 3
    attributes = {} if operator == "PRelu" else {"broadcast": 1} | ({} if axis is None else {"axis": axis})
    nodes = [
        onnx.helper.make_node(operator, ["x", "b"], ["a"], **attributes),
        onnx.helper.make_node(operator, ["a", "b"], ["y"], **attributes),
    ]
    info = [onnx.helper.make_tensor_value_info(name, 1, size) for name, size in (("x", SHAPE), ("b", shape))]
    result = onnx.helper.make_tensor_value_info("y", 1, SHAPE)
    graph = onnx.helper.make_graph(nodes, "g", info, [result])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 6)], ir_version=4)
    converted, _ = convert_opset(ir.from_proto(model), 7)
    start = len(SHAPE) - len(shape) if axis is None else axis % len(SHAPE)
    aligned = b if shape == (1,) else b.reshape((*shape, *(1,) * (len(SHAPE) - start - len(shape))))
    expected = FUNCTIONS[operator](FUNCTIONS[operator](x, aligned), aligned)
    np.testing.assert_array_equal(run_onnx(ir.to_proto(converted).SerializeToString(), {"x": x, "b": b})["y"], expected)


def test_scan_with_a_batch_axis_is_refused() -> None:
    """The converter of onnx changes only its version."""
    model = onnx.parser.parse_model(
        """<ir_version: 4, opset_import: ["" : 8]>
        g (float[2, 5, 3] x, float[2, 3] h) => (float[2, 3] z, float[2, 5, 3] y) {
            z, y = Scan <num_scan_inputs = 1, body = b (float[3] s, float[3] i) => (float[3] o, float[3] p) {
                o = Add (s, i) p = Neg (o) }> ("", h, x) }"""
    )
    with pytest.raises(OptimizeError, match="Scan has a batch axis in opset 8"):
        convert_opset(ir.from_proto(model), 13)
