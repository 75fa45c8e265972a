"""Conversion of an exported graph from opset 18 to an older opset.

torch's dynamo exporter writes at least opset 18. From 18 to 17, nodes are rewritten here one by one, so that metadata
and weights are retained. Below 17, onnx's converter runs, as far as every operator has an older form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import onnx
import onnx_ir as ir

from winml.modelkit.errors import opt
from winml.modelkit.export.declared_options import NEWEST_OPSET
from winml.modelkit.normalize.opset_conversion import convert_in_place

_INTERMEDIATE_OPSET = 17
"""Specified: the opset before the oldest the dynamo exporter writes."""

_REFUSED_OPERATOR = re.compile(r"^No (?:Previous Version of|Adapter \w+ Version \$?\d+ for) (\w+)")
"""Message of onnx's converter for an operator it cannot convert to an older opset."""


def lower_opset(model: ir.Model, requested_opset: int) -> tuple[ir.Model, str]:
    """Convert a model to an older opset as far as possible.

    Args:
        model: A normalized model of opset 18 without functions; changed in place, and not to be used afterwards.
        requested_opset: The opset to convert to.

    Returns:
        The model, and a note on the reason of a newer opset; ``""`` if the requested opset was reached.
    """
    nodes = [node for node in model.graph.all_nodes() if not node.domain]
    if form := next(filter(None, map(_find_missing_form, nodes)), ""):
        reason = f"{form} has no form in {_INTERMEDIATE_OPSET}"
        return model, _opset_note(model.opset_imports[""], requested_opset, reason)
    for node in nodes:
        _downgrade_node(node)
    model.graph.opset_imports[""] = _INTERMEDIATE_OPSET
    if requested_opset == _INTERMEDIATE_OPSET:
        return model, ""
    return _convert_further(model, requested_opset)


def bfloat16_opset(model: ir.Model, opset: int) -> tuple[int, str]:
    """Return the oldest opset from a given one on whose operators take bfloat16 where a graph has it, and a note.

    Opset 17 has no bfloat16 for Conv and poolings, for example, and ONNX Runtime opens no such file.

    Args:
        model: A model with the types of its values.
        opset: The requested opset; returned, with ``""``, if it fits or none fits.
    """
    nodes = [node for node in model.graph.all_nodes() if not node.domain]
    places = {
        (node.op_type, is_output, number)
        for node in nodes
        for is_output, values in ((False, node.inputs), (True, node.outputs))
        for number, value in enumerate(values)
        if value is not None and value.dtype is ir.DataType.BFLOAT16
    }
    unfit = sorted({place[0] for place in places if not _takes_bfloat16(*place, opset)})
    fitting = (
        newer for newer in range(opset, NEWEST_OPSET + 1) if all(_takes_bfloat16(*place, newer) for place in places)
    )
    if not unfit or (newer := next(fitting, None)) is None:
        return opset, ""
    return newer, f"The graph has opset {newer}: in {opset}, {', '.join(unfit)} cannot take bfloat16."


def _takes_bfloat16(op_type: str, is_output: bool, number: int, opset: int) -> bool:
    """Return True if an input or output of an operator may be bfloat16; for an unknown operator, too."""
    try:
        schema = onnx.defs.get_schema(op_type, opset)
    except onnx.defs.SchemaError:
        return True
    formal = schema.outputs if is_output else schema.inputs
    type_name = formal[min(number, len(formal) - 1)].type_str  # the last may stand for any number
    # `types` of a formal parameter cannot be read with onnx 1.20.
    allowed = {constraint.type_param_str: constraint.allowed_type_strs for constraint in schema.type_constraints}
    return "tensor(bfloat16)" in allowed.get(type_name, (type_name,))


def _find_missing_form(node: ir.Node) -> str:
    """Describe the operator or attribute of a node that opset 17 lacks; ``""`` if opset 17 has it."""
    if node.op_type in _NEW_OPERATORS:
        return node.op_type
    forms = _NEW_FORMS.get(node.op_type, ())
    return next((f"{node.op_type} {suffix}" for suffix, is_form in forms if is_form(node)), "")


def _downgrade_node(node: ir.Node) -> None:
    """Rewrite a node of opset 18 for opset 17, in place."""
    if node.op_type in _REDUCTIONS:
        if axes := _constant_axes(node):
            node.attributes["axes"] = ir.AttrInt64s("axes", axes)
        node.resize_inputs(1)
    for name in _NEW_ATTRIBUTES.get(node.op_type, ()):
        node.attributes.pop(name, None)


def _constant_axes(node: ir.Node) -> list[int] | None:
    """Return the axes of a reduction; `[]` without axes, `None` for computed axes."""
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    if axes is None:
        return []
    tensor = ir.convenience.get_const_tensor(axes)
    return None if tensor is None else [int(axis) for axis in tensor.numpy().reshape(-1)]


def _reduces_nothing(node: ir.Node) -> bool:
    return not _constant_axes(node) and bool(node.attributes.get_int("noop_with_empty_axes", 0))


def _has_unequal_parts(node: ir.Node) -> bool:
    part_count = node.attributes.get_int("num_outputs", 0)
    shape = node.inputs[0].shape if node.inputs[0] else None
    size = shape[node.attributes.get_int("axis", 0)] if shape is not None else None
    return bool(part_count) and (not isinstance(size, int) or size % part_count != 0)


_REDUCTIONS = (
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
    "ReduceSumSquare",
)  # fmt: skip
"""Specified: reductions whose axes became an input in opset 18."""
_NEW_OPERATORS = frozenset(
    {
        *("BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor"),
        *("CenterCropPad", "Col2Im", "GroupNormalization", "Mish"),
    }
)
"""Specified: operators that opset 18 added."""
_NEW_ATTRIBUTES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(_REDUCTIONS, ("noop_with_empty_axes",)),
    "Split": ("num_outputs",),
    "Resize": ("antialias", "keep_aspect_ratio_policy"),
}
"""Specified: attributes that opset 18 added."""
_Form = tuple[str, Callable[[ir.Node], bool]]
_SCATTER_FORMS: tuple[_Form, ...] = (
    ("of smallest or largest values", lambda node: node.attributes.get_string("reduction", "none") in ("min", "max")),
)
_NEW_FORMS: Mapping[str, tuple[_Form, ...]] = {
    **dict.fromkeys(
        _REDUCTIONS,
        (
            ("along computed axes", lambda node: _constant_axes(node) is None),
            ("that reduces nothing", _reduces_nothing),
        ),
    ),
    "Pad": (
        ("that wraps around", lambda node: node.attributes.get_string("mode", "constant") == "wrap"),
        ("along listed axes", lambda node: any(node.inputs[3:])),
    ),
    "Split": (("into unequal parts", _has_unequal_parts),),
    "Resize": (
        (
            "that smooths, or along listed axes",
            lambda node: bool(node.attributes.get_int("antialias", 0)) or "axes" in node.attributes,
        ),
        (
            "that keeps the aspect ratio",
            lambda node: node.attributes.get_string("keep_aspect_ratio_policy", "stretch") != "stretch",
        ),
    ),
    "LpPool": (
        (
            "with dilations or rounded up",
            lambda node: bool(node.attributes.get_int("ceil_mode", 0)) or "dilations" in node.attributes,
        ),
    ),
    "ScatterElements": _SCATTER_FORMS,
    "ScatterND": _SCATTER_FORMS,
}
"""Specified: forms of operators that opset 18 added."""


def _convert_further(model: ir.Model, requested_opset: int) -> tuple[ir.Model, str]:
    """Convert below opset 17 with onnx's converter, opset by opset; metadata is restored by value names."""
    metadata = {
        value.name: dict(node.metadata_props)
        for node in model.graph.all_nodes()
        for value in node.outputs
        if value.name
    }
    note = ""
    for opset in range(_INTERMEDIATE_OPSET - 1, requested_opset - 1, -1):
        reason = convert_in_place(model, opset)
        if (reached := model.opset_imports[""]) != opset:
            operator = _REFUSED_OPERATOR.search(reason)
            reason = f"{operator[1]} has no form in {opset} that onnx knows" if operator else reason
            note = _opset_note(reached, requested_opset, reason)
            break
    for node in model.graph.all_nodes():
        for value in node.outputs:
            node.metadata_props.update(metadata.get(value.name or "", {}))
    return model, note


def _opset_note(reached: int, requested_opset: int, reason: str) -> str:
    return (
        f"The graph stays at opset {reached}: {reason}. {opt.no_dynamo} builds at {requested_opset} itself, where "
        "TorchScript has a form of every operator."
    )
