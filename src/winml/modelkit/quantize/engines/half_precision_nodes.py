"""Nodes of a graph that can compute in 16-bit floating point.

The installed ONNX Runtime lists the types of each operator; without a kernel of the provider, it computes such an
operator in float32. Positions stay float32 up to the sine or the index that is computed from them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

HALF_END = float(np.finfo(np.float16).max)
"""Largest value of float16."""
_WIDE_OPERATORS = frozenset({
    "Cos", "CumSum", "Exp", "Log", "Pow", "Range", "Reciprocal", "ReduceL2", "ReduceLogSumExp", "ReduceMean",
    "ReduceSum", "ReduceSumSquare", "Sin", "Sqrt",
})  # fmt: skip
"""Operators that stay float32. Chosen: the square of 256 is more than float16 holds, norms square activations, and
angles and counts beyond 2048 are no whole numbers any more."""
_CARRYING = frozenset({"Add", "Sub", "Mul", "Div"})
"""Operators that stay float32 between those, such as the sum with epsilon before a square root, and behind the
conversion of positions, whose differences float16 would lose."""
_EXACT_OPERATORS = frozenset({"Cos", "Sin"})
"""Operators that stay float32 with what computes their operand. Measured: of positions up to 2047 in float16, the
cosine of rotary embeddings is wrong by up to 0.32."""
_MOVING = frozenset({
    "Cast", "Concat", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Tile",
    "Transpose", "Unsqueeze",
})  # fmt: skip
_POSITIONAL = _CARRYING | _MOVING | {"Abs", "Einsum", "Floor", "MatMul", "Max", "Min", "Mod", "Neg", "Where"}
"""Operators that compute positions and angles, and stay float32 where that is what they do."""
_LARGEST_POSITIONAL_BYTES = 1 << 16
"""Chosen: an operator with a larger constant is a layer. Frequencies of a head take a few hundred bytes."""
_TYPED_BY_ATTRIBUTE = frozenset({
    "Bernoulli", "Constant", "EyeLike", "If", "Loop", "Multinomial", "RandomNormal", "RandomNormalLike",
    "RandomUniform", "RandomUniformLike", "Scan", "SequenceEmpty",
})  # fmt: skip
"""Operators whose types an attribute says, or a graph inside. They stay float32."""
_CASTS = ("Cast", "CastLike")
"""Operators that stay float32 unless that is what they make: one that makes indices is to read exact numbers."""
_INTEGERS = frozenset({ir.DataType.INT32, ir.DataType.INT64})
_HALF_NAME = "tensor(float16)"


def half_precision_nodes(model: ir.Model, names: frozenset[str]) -> frozenset[ir.Node]:
    """Return the nodes of the main graph, among the named ones, that can compute in float16 and do so safely.

    Values without a type get the one that follows from the operators, in place: onnx knows no operators of others.
    """
    _complete_types(model)
    halves: set[ir.Node] = set()
    wide = _positional_nodes(model.graph)
    for node in model.graph:
        if node.name not in names or node.op_identifier() in model.functions:
            continue
        if node in wide or _crashes_in_half(node):
            continue
        if node.op_type in _WIDE_OPERATORS or _counts(node) or (node.op_type in _CARRYING and _is_all_wide(node, wide)):
            wide.add(node)
        elif _has_half_form(node, model.opset_imports):
            halves.add(node)
    return frozenset(halves)


def _crashes_in_half(node: ir.Node) -> bool:
    """Return True for a Transpose that moves the first axis back, before a MatMul.

    Measured: in float16, ONNX Runtime 1.31 fuses the two into a FusedMatMul with ``transBatchA`` and crashes.
    """
    if node.op_type != "Transpose" or not any(user.op_type == "MatMul" for user, _ in node.outputs[0].uses()):
        return False
    order = list(node.attributes["perm"].as_ints()) if "perm" in node.attributes else []
    others = [axis for axis in order if axis != 0]
    return len(order) > 2 and order[0] != 0 and others == sorted(others)


def _positional_nodes(graph: ir.Graph) -> set[ir.Node]:
    """Return the nodes that compute what a sine, a cosine or a conversion to integers reads, these not included."""
    waiting = [
        node.inputs[0] for node in graph.all_nodes() if node.op_type in _EXACT_OPERATORS or _makes_integers(node)
    ]
    positional: set[ir.Node] = set()
    while waiting:
        value = waiting.pop()
        node = value.producer() if value is not None else None
        if node is None or value is None or value.dtype != ir.DataType.FLOAT or node in positional:
            continue
        if node.op_type in _POSITIONAL and not _is_layer(node):
            positional.add(node)
            waiting += node.inputs
    return positional


def _makes_integers(node: ir.Node) -> bool:
    """Say whether a node converts floats to integers, as where an index is computed."""
    read, created = node.inputs[0] if node.inputs else None, node.outputs[0].dtype if node.outputs else None
    return node.op_type == "Cast" and read is not None and read.dtype == ir.DataType.FLOAT and created in _INTEGERS


def _is_layer(node: ir.Node) -> bool:
    """Say whether a node has a weight, rather than some frequencies."""
    tensors = [value.const_value for value in node.inputs if value is not None and value.is_initializer()]
    return any(tensor is not None and tensor.nbytes > _LARGEST_POSITIONAL_BYTES for tensor in tensors)


def _complete_types(model: ir.Model) -> None:
    for node in model.graph:
        if all(value.dtype is not None for value in node.outputs):
            continue
        if node.op_type == "Cast":
            node.outputs[0].type = ir.TensorType(ir.DataType(node.attributes["to"].as_int()))
            continue
        schema = _schema_of(node, model.opset_imports)
        if schema is None:
            continue
        known = {name: value.dtype for name, value in _formal_types(node, schema) if value.dtype is not None}
        for name, value in _formal_types(node, schema):
            if value.dtype is None and (dtype := known.get(name)) is not None:
                value.type = ir.TensorType(dtype)


def _counts(node: ir.Node) -> bool:
    """Say whether a node converts integers that may be too many for float16, such as positions, to floats."""
    return node.op_type == "Cast" and node.inputs[0] is not None and node.inputs[0].dtype in _INTEGERS


def _is_all_wide(node: ir.Node, wide: set[ir.Node]) -> bool:
    """Say whether what a node computes from comes from wide nodes only, and float16 can hold what it computes with.

    The lowest number of float32, which masks are made of, becomes that of float16 in a node that computes in it, and
    minus infinity behind one that does not.
    """
    constants = [value.const_value for value in node.inputs if value is not None and value.is_initializer()]
    if any(tensor is None or _is_beyond_half(tensor) for tensor in constants):
        return False
    makers = [value.producer() for value in node.inputs if value is not None and not value.is_initializer()]
    return bool(makers) and all(maker in wide for maker in makers)


def _is_beyond_half(tensor: ir.TensorProtocol) -> bool:
    """Say whether a tensor has values that float16 does not hold, or too many to look at."""
    if tensor.nbytes > _LARGEST_POSITIONAL_BYTES:
        return True
    return bool((np.abs(tensor.numpy().astype(np.float32)) > HALF_END).any())


def _has_half_form(node: ir.Node, opsets: Mapping[str, int]) -> bool:
    """Say whether every float32 value that a node reads or makes may be float16."""
    if node.op_type in _TYPED_BY_ATTRIBUTE or (node.op_type in _CASTS and node.outputs[0].dtype != ir.DataType.FLOAT):
        return False
    schema = _schema_of(node, opsets)
    if schema is None:
        return False
    allowed = {item.type_param_str: set(item.allowed_type_strs) for item in schema.type_constraints}
    types = {name for name, value in _formal_types(node, schema) if value.dtype == ir.DataType.FLOAT}
    return bool(types) and all(_HALF_NAME in allowed.get(name, {name}) for name in types)


def _formal_types(node: ir.Node, schema: Any) -> Iterator[tuple[str, ir.Value]]:
    """Yield the values of a node with the type its operator's description gives them."""
    for values, formals in ((node.inputs, schema.inputs), (node.outputs, schema.outputs)):
        for position, value in enumerate(values):
            if value is not None and formals:
                yield formals[min(position, len(formals) - 1)].typeStr, value


def _schema_of(node: ir.Node, opsets: Mapping[str, int]) -> Any:
    version = opsets.get(node.domain, 1)
    versions = _schemas().get((node.domain, node.op_type), {})
    return versions.get(max((since for since in versions if since <= version), default=0))


@functools.cache
def _schemas() -> Mapping[tuple[str, str], Mapping[int, Any]]:
    """Return the descriptions of operators: by domain and name, those since each version."""
    from onnxruntime.capi import onnxruntime_pybind11_state

    schemas: dict[tuple[str, str], dict[int, Any]] = {}
    for schema in onnxruntime_pybind11_state.get_all_operator_schema():
        schemas.setdefault((schema.domain, schema.name), {})[schema.since_version] = schema
    return schemas
