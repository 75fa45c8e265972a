"""How does a graph get an older opset than it was built with?

torch's dynamo exporter writes opset 18 at least. What 18 changed is said here in the words of 17, node by node, so that
metadata and weights stay as they are; from 17 downwards onnx's own converter goes on, on a copy without weights, as far
as every operator has an older form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import onnx
import onnx_ir as ir
from onnx import version_converter  # noqa: TID251 - the metadata it wipes is put back below

__all__ = ["lower_opset"]

_STEP_OPSET = 17
"""Specified: the opset before the oldest that the exporter builds."""
_LARGEST_HELD_ELEMENTS = 1024
"""Chosen: above every list of axes or sizes, which the converter reads, and below every weight."""

_REFUSED_OPERATOR = re.compile(r"^No (?:Previous Version of|Adapter \w+ Version \$?\d+ for) (\w+)")
"""How onnx's converter names an operator it cannot bring to an older opset."""


class _NoOlderFormError(Exception):
    """A node says something the older opset has no words for; the text names the operator."""


def lower_opset(model: ir.Model, wanted: int) -> tuple[ir.Model, str]:
    """Convert a model to an older opset as far as that goes.

    Args:
        model: A normalized model of opset 18 without functions; changed in place, and not to be used afterwards.
        wanted: The opset to get to.

    Returns:
        The model, and why it has a newer opset than wanted; empty where it has that one.
    """
    try:
        changes = [(node, change) for node in model.graph.all_nodes() if (change := _step_change(node)) is not None]
    except _NoOlderFormError as reason:
        return model, _note(model.opset_imports[""], wanted, f"{reason} has no form in {_STEP_OPSET}")
    for node, change in changes:
        change(node)
    model.graph.opset_imports[""] = _STEP_OPSET
    if wanted == _STEP_OPSET:
        return model, ""
    return _convert_further(model, wanted)


Change = Callable[[ir.Node], None]


def _step_change(node: ir.Node) -> Change | None:
    """Return what makes a node of opset 18 one of opset 17; None where they are the same.

    Raises:
        _NoOlderFormError: there is none.
    """
    if node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type in _NEW_OPERATORS:
        raise _NoOlderFormError(node.op_type)
    check = _CHANGED_OPERATORS.get(node.op_type)
    return check(node) if check is not None else None


def _reduction(node: ir.Node) -> Change | None:
    """Axes were an attribute."""
    axes = _constant(node, 1)
    if not axes and _integer(node, "noop_with_empty_axes"):
        raise _NoOlderFormError(f"{node.op_type} that reduces nothing")

    def change(node: ir.Node) -> None:
        node.attributes.pop("noop_with_empty_axes", None)
        if axes:
            node.attributes["axes"] = ir.AttrInt64s("axes", axes)
        node.resize_inputs(1)

    return change


def _pad(node: ir.Node) -> Change | None:
    """There was no list of the axes that are padded."""
    if node.attributes.get_string("mode", "constant") == "wrap":
        raise _NoOlderFormError("Pad that wraps around")
    if len(node.inputs) < 4 or node.inputs[3] is None:
        return None
    raise _NoOlderFormError("Pad along listed axes")


def _split(node: ir.Node) -> Change | None:
    """The number of parts was that of the outputs, and they were equal."""
    parts = _integer(node, "num_outputs")
    if not parts:
        return None
    shape, axis = node.inputs[0].shape if node.inputs[0] else None, _integer(node, "axis")
    size = shape[axis] if shape is not None else None
    if not isinstance(size, int) or size % parts:
        raise _NoOlderFormError("Split into unequal parts")

    def change(node: ir.Node) -> None:
        node.attributes.pop("num_outputs", None)

    return change


def _resize(node: ir.Node) -> Change | None:
    """There was neither smoothing nor a list of axes."""
    if _integer(node, "antialias") or "axes" in node.attributes:
        raise _NoOlderFormError("Resize that smooths, or along listed axes")
    if node.attributes.get_string("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise _NoOlderFormError("Resize that keeps the aspect ratio")

    def change(node: ir.Node) -> None:
        for name in ("antialias", "keep_aspect_ratio_policy"):
            node.attributes.pop(name, None)

    return change


def _scatter(node: ir.Node) -> Change | None:
    """Only sums and products could be scattered."""
    if node.attributes.get_string("reduction", "none") in ("min", "max"):
        raise _NoOlderFormError(f"{node.op_type} of smallest or largest values")
    return None


def _pool(node: ir.Node) -> Change | None:
    if _integer(node, "ceil_mode") or "dilations" in node.attributes:
        raise _NoOlderFormError("LpPool with dilations or rounded up")
    return None


_NEW_OPERATORS = frozenset(
    {
        *("BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor"),
        *("CenterCropPad", "Col2Im", "GroupNormalization", "Mish"),
    }
)
"""Specified: operators that opset 18 added."""

_CHANGED_OPERATORS: Mapping[str, Callable[[ir.Node], Change | None]] = {
    **dict.fromkeys(
        ("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin"), _reduction
    ),
    **dict.fromkeys(("ReduceProd", "ReduceSumSquare"), _reduction),
    **dict.fromkeys(("ScatterElements", "ScatterND"), _scatter),
    "Pad": _pad,
    "Split": _split,
    "Resize": _resize,
    "LpPool": _pool,
}
"""Specified: operators that opset 18 changed."""


def _integer(node: ir.Node, name: str) -> int:
    return node.attributes[name].as_int() if name in node.attributes else 0


def _constant(node: ir.Node, position: int) -> list[int] | None:
    """Return the integers of an input that is known, or None where it is left out.

    Raises:
        _NoOlderFormError: it is computed.
    """
    value = node.inputs[position] if position < len(node.inputs) else None
    if value is None:
        return None
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None:
        raise _NoOlderFormError(f"{node.op_type} along computed axes")
    return [int(item) for item in tensor.numpy().reshape(-1)]


def _convert_further(model: ir.Model, wanted: int) -> tuple[ir.Model, str]:
    """Let onnx's converter go below opset 17, on a model without weights; metadata is put back by value names."""
    metadata = {
        value.name: dict(node.metadata_props)
        for node in model.graph.all_nodes()
        for value in node.outputs
        if value.name
    }
    weights = [value for value in model.graph.initializers.values() if _is_weight(value)]
    for value in weights:
        assert value.name is not None  # an initializer has a name
        del model.graph.initializers[value.name]
        model.graph.inputs.append(value)
    proto, reason = _oldest(ir.serde.serialize_model(model), wanted)
    if proto is None:
        del model.graph.inputs[len(model.graph.inputs) - len(weights) :]
        for value in weights:
            model.graph.register_initializer(value)
        return model, _note(_STEP_OPSET, wanted, reason)
    converted = ir.serde.deserialize_model(proto)
    _put_weights_back(converted.graph, weights)
    for node in converted.graph.all_nodes():
        for value in node.outputs:
            node.metadata_props.update(metadata.get(value.name or "", {}))
    return converted, _note(converted.opset_imports[""], wanted, reason) if reason else ""


def _oldest(proto: onnx.ModelProto, wanted: int) -> tuple[onnx.ModelProto | None, str]:
    """Return the model at the oldest opset the converter gets it to, None for the one it has, and why no older."""
    reached = None
    for version in range(_STEP_OPSET - 1, wanted - 1, -1):
        try:
            converted = version_converter.convert_version(proto if reached is None else reached, version)
            onnx.checker.check_model(converted)
        except (RuntimeError, onnx.checker.ValidationError, version_converter.ConvertError) as error:
            text = str(error).strip().splitlines()[0].rpartition("failed: ")[2]
            operator = _REFUSED_OPERATOR.search(text)
            return reached, f"{operator[1]} has no form in {version} that onnx knows" if operator else text
        reached = converted
    return reached, ""


def _note(reached: int, wanted: int, reason: str) -> str:
    return (
        f"The graph stays at opset {reached}: {reason}. --no-dynamo builds at {wanted} itself, where TorchScript has a "
        "form of every operator."
    )


def _is_weight(value: ir.Value) -> bool:
    return value.const_value is not None and value.const_value.size > _LARGEST_HELD_ELEMENTS


def _put_weights_back(graph: ir.Graph, weights: list[ir.Value]) -> None:
    tensors = {value.name: value.const_value for value in weights}
    for value in [value for value in graph.inputs if value.name in tensors]:
        graph.inputs.remove(value)
        value.const_value = tensors[value.name]
        graph.register_initializer(value)
