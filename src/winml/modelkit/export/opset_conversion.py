"""Converts an exported graph from opset 18 to an older one.

torch's dynamo exporter writes opset 18 at least. From 18 to 17, nodes are rewritten here one by one, so that metadata
and weights are kept. Below 17, onnx's own converter runs on a copy without weights, as far as every operator has an
older form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import onnx
import onnx_ir as ir
from onnx import version_converter  # noqa: TID251 - the metadata it wipes is put back below

_INTERMEDIATE_OPSET = 17
"""Specified: the opset before the oldest the dynamo exporter writes."""
_LARGEST_HELD_ELEMENTS = 1024
"""Chosen: larger than any list of axes or sizes, which the converter reads, and smaller than weights."""

_REFUSED_OPERATOR = re.compile(r"^No (?:Previous Version of|Adapter \w+ Version \$?\d+ for) (\w+)")
"""How onnx's converter names an operator it cannot convert to an older opset."""


class _NoOlderFormError(Exception):
    """A node has no form in the older opset; the text names the operator."""


def lower_opset(model: ir.Model, requested_opset: int) -> tuple[ir.Model, str]:
    """Convert a model to an older opset as far as possible.

    Args:
        model: A normalized model of opset 18 without functions; changed in place, and not to be used afterwards.
        requested_opset: The opset to convert to.

    Returns:
        The model, and a note on why it has a newer opset; empty where it has the requested one.
    """
    try:
        changes = [(node, change) for node in model.graph.all_nodes() if (change := _downgrade_of(node)) is not None]
    except _NoOlderFormError as reason:
        return model, _opset_note(
            model.opset_imports[""], requested_opset, f"{reason} has no form in {_INTERMEDIATE_OPSET}"
        )
    for node, change in changes:
        change(node)
    model.graph.opset_imports[""] = _INTERMEDIATE_OPSET
    if requested_opset == _INTERMEDIATE_OPSET:
        return model, ""
    return _convert_further(model, requested_opset)


Downgrade = Callable[[ir.Node], None]


def _downgrade_of(node: ir.Node) -> Downgrade | None:
    """Return the change that makes a node of opset 18 one of opset 17; None where it needs none.

    Raises:
        _NoOlderFormError: the node has no form in opset 17.
    """
    if node.domain:
        return None
    if node.op_type in _NEW_OPERATORS:
        raise _NoOlderFormError(node.op_type)
    check = _CHANGED_OPERATORS.get(node.op_type)
    return check(node) if check is not None else None


def _downgrade_reduction(node: ir.Node) -> Downgrade | None:
    """In opset 17, axes are an attribute."""
    axes = _constant_integers(node, 1)
    if not axes and _integer_attribute(node, "noop_with_empty_axes"):
        raise _NoOlderFormError(f"{node.op_type} that reduces nothing")

    def change(node: ir.Node) -> None:
        node.attributes.pop("noop_with_empty_axes", None)
        if axes:
            node.attributes["axes"] = ir.AttrInt64s("axes", axes)
        node.resize_inputs(1)

    return change


def _downgrade_pad(node: ir.Node) -> Downgrade | None:
    """In opset 17, the padded axes cannot be listed."""
    if node.attributes.get_string("mode", "constant") == "wrap":
        raise _NoOlderFormError("Pad that wraps around")
    if len(node.inputs) < 4 or node.inputs[3] is None:
        return None
    raise _NoOlderFormError("Pad along listed axes")


def _downgrade_split(node: ir.Node) -> Downgrade | None:
    """In opset 17, the number of parts is the number of outputs, and the parts are equal."""
    part_count = _integer_attribute(node, "num_outputs")
    if not part_count:
        return None
    shape, axis = node.inputs[0].shape if node.inputs[0] else None, _integer_attribute(node, "axis")
    size = shape[axis] if shape is not None else None
    if not isinstance(size, int) or size % part_count:
        raise _NoOlderFormError("Split into unequal parts")

    def change(node: ir.Node) -> None:
        node.attributes.pop("num_outputs", None)

    return change


def _downgrade_resize(node: ir.Node) -> Downgrade | None:
    """In opset 17, there is neither antialiasing nor a list of axes."""
    if _integer_attribute(node, "antialias") or "axes" in node.attributes:
        raise _NoOlderFormError("Resize that smooths, or along listed axes")
    if node.attributes.get_string("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise _NoOlderFormError("Resize that keeps the aspect ratio")

    def change(node: ir.Node) -> None:
        for name in ("antialias", "keep_aspect_ratio_policy"):
            node.attributes.pop(name, None)

    return change


def _downgrade_scatter(node: ir.Node) -> Downgrade | None:
    """In opset 17, values can be added and multiplied only."""
    if node.attributes.get_string("reduction", "none") in ("min", "max"):
        raise _NoOlderFormError(f"{node.op_type} of smallest or largest values")
    return None


def _downgrade_pool(node: ir.Node) -> Downgrade | None:
    if _integer_attribute(node, "ceil_mode") or "dilations" in node.attributes:
        raise _NoOlderFormError("LpPool with dilations or rounded up")
    return None


_NEW_OPERATORS = frozenset(
    {
        *("BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor"),
        *("CenterCropPad", "Col2Im", "GroupNormalization", "Mish"),
    }
)
"""Specified: operators that opset 18 added."""

_CHANGED_OPERATORS: Mapping[str, Callable[[ir.Node], Downgrade | None]] = {
    **dict.fromkeys(
        ("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin"),
        _downgrade_reduction,
    ),
    **dict.fromkeys(("ReduceProd", "ReduceSumSquare"), _downgrade_reduction),
    **dict.fromkeys(("ScatterElements", "ScatterND"), _downgrade_scatter),
    "Pad": _downgrade_pad,
    "Split": _downgrade_split,
    "Resize": _downgrade_resize,
    "LpPool": _downgrade_pool,
}
"""Specified: operators that opset 18 changed."""


def _integer_attribute(node: ir.Node, name: str) -> int:
    return node.attributes[name].as_int() if name in node.attributes else 0


def _constant_integers(node: ir.Node, position: int) -> list[int] | None:
    """Return the integers of a constant input, or None where it is absent.

    Raises:
        _NoOlderFormError: the input is computed.
    """
    value = node.inputs[position] if position < len(node.inputs) else None
    if value is None:
        return None
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None:
        raise _NoOlderFormError(f"{node.op_type} along computed axes")
    return [int(item) for item in tensor.numpy().reshape(-1)]


def _convert_further(model: ir.Model, requested_opset: int) -> tuple[ir.Model, str]:
    """Convert below opset 17 with onnx's converter, without weights; metadata is restored by value names."""
    metadata = {
        value.name: dict(node.metadata_props)
        for node in model.graph.all_nodes()
        for value in node.outputs
        if value.name
    }
    weights = [
        value
        for value in model.graph.initializers.values()
        if value.const_value is not None and value.const_value.size > _LARGEST_HELD_ELEMENTS
    ]
    for value in weights:
        assert value.name is not None  # an initializer has a name
        del model.graph.initializers[value.name]
        model.graph.inputs.append(value)
    proto, reason = _convert_stepwise(ir.serde.serialize_model(model), requested_opset)
    if proto is None:
        del model.graph.inputs[len(model.graph.inputs) - len(weights) :]
        for value in weights:
            model.graph.register_initializer(value)
        return model, _opset_note(_INTERMEDIATE_OPSET, requested_opset, reason)
    converted = ir.serde.deserialize_model(proto)
    tensors = {value.name: value.const_value for value in weights}
    for value in [value for value in converted.graph.inputs if value.name in tensors]:
        converted.graph.inputs.remove(value)
        value.const_value = tensors[value.name]
        converted.graph.register_initializer(value)
    for node in converted.graph.all_nodes():
        for value in node.outputs:
            node.metadata_props.update(metadata.get(value.name or "", {}))
    return converted, _opset_note(converted.opset_imports[""], requested_opset, reason) if reason else ""


def _convert_stepwise(proto: onnx.ModelProto, requested_opset: int) -> tuple[onnx.ModelProto | None, str]:
    """Return the model at the oldest opset reached, None where no step succeeded, and why no older was reached."""
    reached = None
    for version in range(_INTERMEDIATE_OPSET - 1, requested_opset - 1, -1):
        try:
            converted = version_converter.convert_version(proto if reached is None else reached, version)
            onnx.checker.check_model(converted)
        except (RuntimeError, onnx.checker.ValidationError, version_converter.ConvertError) as error:
            text = str(error).strip().splitlines()[0].rpartition("failed: ")[2]
            operator = _REFUSED_OPERATOR.search(text)
            return reached, f"{operator[1]} has no form in {version} that onnx knows" if operator else text
        reached = converted
    return reached, ""


def _opset_note(reached: int, requested_opset: int, reason: str) -> str:
    return (
        f"The graph stays at opset {reached}: {reason}. --no-dynamo builds at {requested_opset} itself, where "
        "TorchScript has a form of every operator."
    )
