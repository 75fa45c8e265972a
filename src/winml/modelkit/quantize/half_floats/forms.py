"""Which nodes of a graph can compute in 16-bit floating point?

By what the installed ONNX Runtime says of each operator's types; where a provider has no kernel for such an operator,
ONNX Runtime computes it in float32 by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import onnx_ir as ir

__all__ = ["half_nodes"]

WIDE_OPERATORS = frozenset({
    "Exp", "Log", "Pow", "Reciprocal", "ReduceL2", "ReduceLogSumExp", "ReduceMean", "ReduceSum", "ReduceSumSquare",
    "Sqrt",
})  # fmt: skip
"""Operators that stay float32. Chosen: the square of 256 is more than float16 holds, and norms square activations."""
_CARRYING = frozenset({"Add", "Sub", "Mul", "Div"})
"""Operators that stay float32 between those, such as the sum with epsilon before a square root."""
_TYPED_BY_ATTRIBUTE = frozenset({
    "Bernoulli", "Constant", "EyeLike", "If", "Loop", "Multinomial", "RandomNormal", "RandomNormalLike",
    "RandomUniform", "RandomUniformLike", "Scan", "SequenceEmpty",
})  # fmt: skip
"""Operators whose types an attribute says, or a graph inside. They stay float32."""
_FLOAT, _HALF = "tensor(float)", "tensor(float16)"


def half_nodes(model: ir.Model, names: frozenset[str]) -> frozenset[ir.Node]:
    """Return the nodes of the main graph, among the named ones, that can compute in float16 and do so safely.

    Values without a type get the one that follows from the operators, in place: onnx knows no operators of others.
    """
    _complete_types(model)
    halves: set[ir.Node] = set()
    wide: set[ir.Node] = set()
    for node in model.graph:
        if node.name not in names or node.op_identifier() in model.functions:
            continue
        if node.op_type in WIDE_OPERATORS or (node.op_type in _CARRYING and _is_all_wide(node, wide)):
            wide.add(node)
        elif _has_half_form(node, model.opset_imports):
            halves.add(node)
    return frozenset(halves)


def _complete_types(model: ir.Model) -> None:
    for node in model.graph:
        if all(value.dtype is not None for value in node.outputs):
            continue
        schema = _schema_of(node, model.opset_imports)
        if schema is None:
            continue
        known = {name: value.dtype for name, value in _formal_types(node, schema) if value.dtype is not None}
        for name, value in _formal_types(node, schema):
            if value.dtype is None and (dtype := known.get(name)) is not None:
                value.type = ir.TensorType(dtype)


def _is_all_wide(node: ir.Node, wide: set[ir.Node]) -> bool:
    """Say whether what a node computes from comes from wide nodes only."""
    makers = [value.producer() for value in node.inputs if value is not None and not value.is_initializer()]
    return bool(makers) and all(maker in wide for maker in makers)


def _has_half_form(node: ir.Node, opsets: Mapping[str, int]) -> bool:
    """Say whether every float32 value that a node reads or makes may be float16."""
    if node.op_type in _TYPED_BY_ATTRIBUTE:
        return False
    schema = _schema_of(node, opsets)
    if schema is None:
        return False
    allowed = {item.type_param_str: set(item.allowed_type_strs) for item in schema.type_constraints}
    types = {name for name, value in _formal_types(node, schema) if value.dtype == ir.DataType.FLOAT}
    return bool(types) and all(_HALF in allowed.get(name, {name}) for name in types)


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
