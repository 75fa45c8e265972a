"""Fixing of dynamic dimensions, without other changes."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from winml.modelkit.errors import UsageError
from winml.modelkit.onnx.pinning import open_dimensions, pin_dimensions, sizes_of_dimensions
from winml.modelkit.onnx.specs import resolve_names


def model() -> ir.Model:
    """Return ``x[batch, 3, samples]`` → Relu → Relu → ``y``, with an expression as its last size."""
    text = """
        <ir_version: 10, opset_import: ["" : 17]>
        agraph (float[batch, 3, samples] x, float[batch] z) => (float[batch, 3, frames] y)
        <float[batch, 3, samples] h>
        { h = Relu(x)
          y = Relu(h) }
    """
    pinned_model = ir.serde.deserialize_model(onnx.parser.parse_model(text))
    pinned_model.graph.outputs[0].shape = ir.Shape(["batch", 3, "(samples - 25)//80"])
    return pinned_model


def dims(value: ir.Value) -> list[int | str | None]:
    """Return a shape in plain Python."""
    return [size if isinstance(size, int) else size.value for size in value.shape or ()]


def test_open_dimensions_are_named_with_their_inputs() -> None:
    """The names are in order, with the inputs and axes that have them."""
    assert {"batch": ["x:0", "z:0"], "samples": ["x:2"]} == open_dimensions(model().graph)


def test_pinned_sizes_reach_inputs_outputs_and_expressions() -> None:
    """Numbers replace the names everywhere; derived shapes inside the graph are removed."""
    pinned_model = model()
    pin_dimensions(pinned_model, {"batch": 2, "samples": 16_000})
    assert [[2, 3, 16_000], [2]] == [dims(value) for value in pinned_model.graph.inputs]
    assert [2, 3, 199] == dims(pinned_model.graph.outputs[0])
    assert pinned_model.graph.node(0).outputs[0].shape is None


def test_names_left_out_stay_open() -> None:
    """An expression is computed only if all its names are known."""
    pinned_model = model()
    pin_dimensions(pinned_model, {"batch": 2})
    assert [2, 3, "samples"] == dims(pinned_model.graph.inputs[0])
    assert [2, 3, "(samples - 25)//80"] == dims(pinned_model.graph.outputs[0])


def test_unparsable_size_names_stay() -> None:
    """A name that cannot be parsed as an expression is kept."""
    pinned_model = model()
    pinned_model.graph.outputs[0].shape = ir.Shape(["batch", 3, "what/ever+"])
    pin_dimensions(pinned_model, {"batch": 2})
    assert [2, 3, "what/ever+"] == dims(pinned_model.graph.outputs[0])


def test_sizes_may_be_named_by_key_of_shape_config() -> None:
    """The conventional name of a key is as good as the name."""
    assert {"batch": 4, "samples": 9} == resolve_names({"batch_size": 4, "samples": 9}, ["batch", "samples"])


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"bach": 1}, "'batch'?"),
        ({"batch": 1, "batch_size": 2}, "two sizes, 1 and 2"),
    ],
)
def test_name_the_graph_lacks_and_two_sizes_are_refused(wanted: dict[str, int], words: str) -> None:
    """The message lists the existing names."""
    with pytest.raises(UsageError) as caught:
        resolve_names(wanted, ["batch", "samples"])
    assert words in str(caught.value)


def test_graph_without_open_dimensions_is_refused() -> None:
    """The graph has no dimension left to pin."""
    with pytest.raises(UsageError, match="none;"):
        resolve_names({"batch": 1}, [])


def test_dimension_without_a_name_is_pinned_by_its_place() -> None:
    """The name is ``input:axis``, as in every command that takes sizes."""
    text = '<ir_version: 10, opset_import: ["" : 17]>\ng (float[?, 3] x) => (float[?, 3] y) { y = Relu(x) }'
    nameless = ir.serde.deserialize_model(onnx.parser.parse_model(text))
    assert {"x:0": ["x:0"]} == open_dimensions(nameless.graph)
    pin_dimensions(nameless, sizes_of_dimensions(nameless.graph, {"x:0": 4}))
    assert [4, 3] == dims(nameless.graph.inputs[0])
