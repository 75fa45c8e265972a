"""Which operators does torch's TorchScript exporter lack, or get wrong, that others of its own express exactly?

They are known to torch for the time of one export only. Operators that ONNX has no form of stay refused: those go to
the dynamo exporter, or are named to the user.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.onnx import symbolic_helper
from torch.onnx._internal.torchscript_exporter import (
    symbolic_opset9,
    symbolic_opset11,
    symbolic_opset13,
    symbolic_opset14,
)
from torch.onnx._internal.torchscript_exporter._type_utils import JitScalarType
from torch.onnx._internal.torchscript_exporter.registration import registry
from torch.onnx.errors import UnsupportedOperatorError

__all__ = ["further_operators"]

_SHORT = (JitScalarType.BOOL, JitScalarType.UINT8, JitScalarType.INT8, JitScalarType.INT16, JitScalarType.INT)
"""Specified: what torch adds up in 64 bits."""

_END = torch.iinfo(torch.int64).max
"""Specified: what Slice takes for the end of any axis."""


@contextmanager
def further_operators(opset_version: int) -> Iterator[None]:
    """Let an export inside the block use the forms below, except where the user registered one; undone at the end.

    Args:
        opset_version: The opset that is exported to.
    """
    known = registry.all_functions()
    names = [name for name in _FORMS if not _is_users_own(name, opset_version)]
    for name in names:
        registry.register(name, opset_version, _FORMS[name], custom=True)
    try:
        yield
    finally:
        for name in names:
            registry.unregister(name, opset_version)
            if name not in known:
                # torch itself would leave an entry without forms, over which its own error message stumbles.
                del registry._registry[name]


def _is_users_own(name: str, opset_version: int) -> bool:
    group = registry.get_function_group(name)
    form = group.get(opset_version) if group is not None else None
    return form is not None and not form.__module__.startswith("torch.onnx.")


@symbolic_helper.parse_args("v", "i", "i", "v", "v")
def _diff(graph: Any, values: Any, times: int, axis: int, before: Any, after: Any) -> Any:
    """Each value less the one before it, again and again; of booleans, whether they differ."""
    parts = [part for part in (before, values, after) if not symbolic_helper._is_none(part)]
    differences = graph.op("Concat", *parts, axis_i=axis) if len(parts) > 1 else values
    operator = "Xor" if symbolic_helper._is_bool(values) else "Sub"
    for _ in range(times):
        later = symbolic_helper._slice_helper(graph, differences, axes=[axis], starts=[1], ends=[_END])
        earlier = symbolic_helper._slice_helper(graph, differences, axes=[axis], starts=[0], ends=[-1])
        differences = graph.op(operator, later, earlier)
    return differences


def _cumsum(graph: Any, values: Any, axis: Any, dtype: Any = None) -> Any:
    """Like torch's own form, which leaves booleans and short integers what they are; torch counts in 64 bits."""
    kind = JitScalarType.from_value(values, JitScalarType.UNDEFINED)
    if (dtype is None or symbolic_helper._is_none(dtype)) and kind in _SHORT:
        values = graph.op("Cast", values, to_i=JitScalarType.INT64.onnx_type())
    return symbolic_opset11.cumsum(graph, values, axis, dtype)


@symbolic_helper.parse_args("v")
def _expm1(graph: Any, values: Any) -> Any:
    """``tanh(x / 2) * (exp(x) + 1)``: equal to ``exp(x) - 1``, and exact near 0, where that cancels."""
    half = graph.op("Div", values, _number(graph, 2.0, values))
    raised = graph.op("Add", graph.op("Exp", values), _number(graph, 1.0, values))
    return graph.op("Mul", graph.op("Tanh", half), raised)


def _as_strided(graph: Any, values: Any, *places: Any) -> Any:
    """Like torch's own form, which takes memory for contiguous, on the values in the order they lie in memory."""
    strides, sizes = values.type().strides(), values.type().sizes()
    if strides is None:
        return symbolic_opset9.as_strided(graph, values, *places)
    # An axis of size 1 may stand anywhere, and sizes are not known where the forward computes them from others.
    order = sorted(range(len(strides)), key=lambda axis: -strides[axis])
    if sizes is not None and not _fills_memory([(sizes[axis], strides[axis]) for axis in order]):
        raise UnsupportedOperatorError("aten::as_strided", graph.opset, None)
    ordered = values if order == sorted(order) else graph.op("Transpose", values, perm_i=order)
    return symbolic_opset9.as_strided(graph, ordered, *places)


def _fills_memory(axes: Sequence[tuple[int, int]]) -> bool:
    """Say whether ``(size, stride)`` from the outermost to the innermost axis leave no gap and count nothing twice."""
    expected = 1
    for size, stride in reversed(axes):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


@symbolic_helper.parse_args("v", "is")
def _permute(graph: Any, values: Any, axes: Sequence[int]) -> Any:
    """Like torch's own form, which writes axes counted from behind as they are; ONNX has none."""
    return symbolic_opset9.permute(graph, values, [axis % len(axes) for axis in axes])


@symbolic_helper.quantized_args(True)
def _reshape(graph: Any, values: Any, shape: Any) -> Any:
    """Like torch's own form, in which a size of 0 stands for that of the values, also where it means what it says."""
    wanted = symbolic_helper._maybe_get_const(shape, "is")
    if symbolic_helper._is_value(wanted):
        parts = symbolic_helper._unpack_list(wanted) if symbolic_helper._is_packed_list(wanted) else ()
        wanted = [symbolic_helper._maybe_get_const(part, "i") for part in parts]
    return symbolic_helper._reshape_helper(graph, values, shape, allowzero=int(graph.opset >= 14 and 0 in wanted))


def _repeat_interleave(graph: Any, values: Any, repeats: Any, axis: Any = None, *size: Any) -> Any:
    """Like torch's own form, which turns a negative axis into a positive one wherever else its number stands."""
    own = symbolic_opset13 if graph.opset >= 13 else symbolic_opset9
    number = None if axis is None or symbolic_helper._is_none(axis) else symbolic_helper._get_const(axis, "i", "dim")
    if (symbolic_helper._get_tensor_sizes(repeats) or [None])[0] not in (None, 1):
        return _repeated_by_counts(graph, values, repeats, number)
    axis = axis if number is None else graph.op("Constant", value_t=torch.tensor(number))
    return own.repeat_interleave(graph, values, repeats, axis, *size)


def _repeated_by_counts(graph: Any, values: Any, counts: Any, axis: int | None) -> Any:
    """Repeat each place as often as its count says; torch's own form repeats once what is to be left out."""
    integer = JitScalarType.INT64.onnx_type()
    first, step = (graph.op("Constant", value_t=torch.tensor(number)) for number in (0, 1))
    counts = graph.op("Cast", counts, to_i=integer)
    total = symbolic_helper._reducesum_helper(graph, counts, axes_i=[0], keepdims_i=0)
    column = symbolic_helper._unsqueeze_helper(graph, graph.op("Range", first, total, step), [1])
    is_over = graph.op("Not", graph.op("Greater", graph.op("CumSum", counts, first), column))
    places = symbolic_helper._reducesum_helper(graph, graph.op("Cast", is_over, to_i=integer), axes_i=[1], keepdims_i=0)
    flat = symbolic_helper._reshape_helper(graph, values, [-1]) if axis is None else values
    return graph.op("Gather", flat, places, axis_i=axis or 0)


def _index_put(graph: Any, values: Any, places: Any, given: Any, adds: Any = None) -> Any:
    """Like torch's own form, which ends the process where nothing is given (it divides by the number of elements)."""
    indices = symbolic_helper._unpack_list(places)
    if 0 not in (given.type().sizes() or ()):
        return symbolic_opset11.index_put(graph, values, places, given, *(() if adds is None else (adds,)))
    kind = JitScalarType.from_value(indices[0], JitScalarType.UNDEFINED)
    is_plain = len(indices) == 1 and symbolic_helper._get_tensor_rank(indices[0]) == 1 and kind == JitScalarType.INT64
    if not is_plain or symbolic_helper._maybe_get_const(adds, "b"):
        raise UnsupportedOperatorError("aten::index_put", graph.opset, None)
    return graph.op("ScatterND", values, symbolic_helper._unsqueeze_helper(graph, indices[0], [-1]), given)


def _attention(graph: Any, query: Any, key: Any, value: Any, *options: Any) -> Any:
    """Like torch's own form, which does not know that several heads of the query may share one of key and value."""
    if symbolic_helper._get_const(options[-1], "b", "enable_gqa"):
        heads = symbolic_helper._get_tensor_dim_size(query, -3)
        key, value = (_with_heads(graph, part, heads) for part in (key, value))
    return symbolic_opset14.scaled_dot_product_attention(graph, query, key, value, *options[:-1])


def _with_heads(graph: Any, values: Any, heads: int | None) -> Any:
    """Repeat each head as often as it takes to have so many."""
    rank, own = symbolic_helper._get_tensor_rank(values), symbolic_helper._get_tensor_dim_size(values, -3)
    if rank is None or own is None or heads is None:
        raise UnsupportedOperatorError("aten::scaled_dot_product_attention", graph.opset, None)
    places = torch.arange(own).repeat_interleave(heads // own)
    return graph.op("Gather", values, graph.op("Constant", value_t=places), axis_i=rank - 3)


@symbolic_helper.parse_args("v", "i", "f", "f")
def _histc(graph: Any, values: Any, bins: int, lowest: float, highest: float) -> Any:
    """How many values lie in each of ``bins`` equal parts of a range that must be known; by the steps torch takes."""
    if lowest >= highest:
        # Taken from the values.
        raise UnsupportedOperatorError("aten::histc", graph.opset, None)
    column = symbolic_helper._reshape_helper(graph, values, [-1, 1])
    bottom, top = (_number(graph, end, values) for end in (lowest, highest))
    parts = graph.op("Mul", graph.op("Sub", column, bottom), _number(graph, float(bins), values))
    scaled = graph.op("Div", parts, _number(graph, highest - lowest, values))
    # The end of the range belongs to the last part.
    last, none = (_number(graph, place, values) for place in (bins - 1.0, -1.0))
    part = graph.op("Where", graph.op("Equal", column, top), last, graph.op("Floor", scaled))
    part = graph.op("Where", graph.op("Greater", column, top), none, part)
    numbers = graph.op("Constant", value_t=torch.arange(bins).to(JitScalarType.from_value(values).dtype()))
    counted = graph.op("Cast", graph.op("Equal", part, numbers), to_i=JitScalarType.from_value(values).onnx_type())
    return symbolic_helper._reducesum_helper(graph, counted, axes_i=[0], keepdims_i=0)


def _grouped_product(graph: Any, rows: Any, matrices: Any, ends: Any, *options: Any) -> Any:
    """Multiply rows in order of their groups each by the matrix of its group; ``ends`` says where a group ends."""
    groups = symbolic_helper._get_tensor_dim_size(matrices, 0)
    ranks = [symbolic_helper._get_tensor_rank(part) for part in (rows, matrices)]
    if ranks != [2, 3] or groups is None or not all(map(symbolic_helper._is_none, options)):
        # Groups of columns, as many rows in each group, or a dtype of its own.
        raise UnsupportedOperatorError("aten::_grouped_mm", graph.opset, None)
    first = graph.op("Constant", value_t=torch.tensor([0]))
    bounds = graph.op("Concat", first, graph.op("Cast", ends, to_i=JitScalarType.INT64.onnx_type()), axis_i=0)
    places = [graph.op("Constant", value_t=torch.tensor([place])) for place in range(groups + 1)]
    bounds = [graph.op("Gather", bounds, place, axis_i=0) for place in places]
    products = []
    for group in range(groups):
        members = graph.op("Slice", rows, bounds[group], bounds[group + 1], first)
        matrix = graph.op("Gather", matrices, graph.op("Constant", value_t=torch.tensor(group)), axis_i=0)
        products.append(graph.op("MatMul", members, matrix))
    return graph.op("Concat", *products, axis_i=0)


def _smoothly_resized(kind: str) -> Callable[..., Any]:
    """Return the form of torch's resizing without jagged edges, from and to sizes that are known.

    Each row, and then each column, is a product with a matrix; torch itself makes that, of the identity.
    """
    name = f"_upsample_{kind}2d_aa"

    @symbolic_helper.parse_args("v", "is", "b", "fs")
    def resized(
        graph: Any, images: Any, sizes: Sequence[int] | None, aligned: bool, factors: Sequence[float] | None
    ) -> Any:
        operator, dtype = getattr(torch.ops.aten, name), JitScalarType.from_value(images).dtype()
        matrices = []
        for axis in (-2, -1):
            size = symbolic_helper._get_tensor_dim_size(images, axis)
            if size is None:
                raise UnsupportedOperatorError(f"aten::{name}", graph.opset, None)
            wanted, factor = ([sizes[axis], size] if sizes else None), ([factors[axis], 1.0] if factors else None)
            matrix = operator(torch.eye(size)[None, None], wanted, aligned, factor)[0, 0]
            matrices.append(matrix.to(dtype))
        rows, columns = (graph.op("Constant", value_t=matrix) for matrix in (matrices[0], matrices[1].T.contiguous()))
        return graph.op("MatMul", rows, graph.op("MatMul", images, columns))

    return resized


def _number(graph: Any, value: float, like: Any) -> Any:
    return graph.op("Constant", value_t=torch.tensor(value, dtype=JitScalarType.from_value(like).dtype()))


_FORMS: Mapping[str, Callable[..., Any]] = {
    "aten::_grouped_mm": _grouped_product,
    "aten::_upsample_bicubic2d_aa": _smoothly_resized("bicubic"),
    "aten::_upsample_bilinear2d_aa": _smoothly_resized("bilinear"),
    "aten::as_strided": _as_strided,
    "aten::cumsum": _cumsum,
    "aten::diff": _diff,
    "aten::expm1": _expm1,
    "aten::histc": _histc,
    "aten::index_put": _index_put,
    "aten::permute": _permute,
    "aten::repeat_interleave": _repeat_interleave,
    "aten::reshape": _reshape,
    "aten::scaled_dot_product_attention": _attention,
    "aten::view": _reshape,
    "transformers::grouped_mm_fallback": _grouped_product,
}
