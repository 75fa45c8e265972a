"""ONNX forms of operators that torch's TorchScript exporter lacks or converts wrongly.

Registered with torch for the time of one export only. Operators without an ONNX form are still refused; those models go
to the dynamo exporter.
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

_SHORT_INTEGERS = (JitScalarType.BOOL, JitScalarType.UINT8, JitScalarType.INT8, JitScalarType.INT16, JitScalarType.INT)
"""Specified: integer types whose sums torch computes in 64 bits."""

_AXIS_END = torch.iinfo(torch.int64).max
"""Specified: the value Slice accepts as the end of any axis."""


@contextmanager
def further_operators(opset_version: int) -> Iterator[None]:
    """Register the forms below for the time of the block, except where the user registered one.

    Args:
        opset_version: The opset of the export.
    """
    registered_names = registry.all_functions()
    names = [name for name in _FORMS if not _is_user_operator(name, opset_version)]
    for name in names:
        registry.register(name, opset_version, _FORMS[name], custom=True)
    try:
        yield
    finally:
        for name in names:
            registry.unregister(name, opset_version)
            if name not in registered_names:
                # torch would leave an entry without forms, on which its own error message fails.
                del registry._registry[name]


def _is_user_operator(name: str, opset_version: int) -> bool:
    group = registry.get_function_group(name)
    form = group.get(opset_version) if group is not None else None
    return form is not None and not form.__module__.startswith("torch.onnx.")


@symbolic_helper.parse_args("v", "i", "i", "v", "v")
def _diff_form(graph: Any, values: object, times: int, axis: int, before: Any, after: object) -> Any:
    """``torch.diff``: each value minus the one before it, ``times`` times; for booleans, whether they differ."""
    operands = [operand for operand in (before, values, after) if not symbolic_helper._is_none(operand)]
    differences = graph.op("Concat", *operands, axis_i=axis) if len(operands) > 1 else values
    operator = "Xor" if symbolic_helper._is_bool(values) else "Sub"
    for _ in range(times):
        later_values = symbolic_helper._slice_helper(graph, differences, axes=[axis], starts=[1], ends=[_AXIS_END])
        earlier_values = symbolic_helper._slice_helper(graph, differences, axes=[axis], starts=[0], ends=[-1])
        differences = graph.op(operator, later_values, earlier_values)
    return differences


def _cumsum_form(graph: Any, values: Any, axis: object, dtype: object = None) -> Any:
    """Like torch's own form, but with sums of booleans and short integers in 64 bits, as torch computes them."""
    kind = JitScalarType.from_value(values, JitScalarType.UNDEFINED)
    if (dtype is None or symbolic_helper._is_none(dtype)) and kind in _SHORT_INTEGERS:
        values = graph.op("Cast", values, to_i=JitScalarType.INT64.onnx_type())
    return symbolic_opset11.cumsum(graph, values, axis, dtype)


@symbolic_helper.parse_args("v")
def _expm1_form(graph: Any, values: object) -> Any:
    """``tanh(x / 2) * (exp(x) + 1)``: equal to ``exp(x) - 1``, and exact near 0, where the difference cancels."""
    half = graph.op("Div", values, _float_constant(graph, 2.0, values))
    raised = graph.op("Add", graph.op("Exp", values), _float_constant(graph, 1.0, values))
    return graph.op("Mul", graph.op("Tanh", half), raised)


def _as_strided_form(graph: Any, values: Any, *places: object) -> Any:
    """Like torch's own form, which assumes contiguous memory, applied to the values in memory order."""
    strides, sizes = values.type().strides(), values.type().sizes()
    if strides is None:
        return symbolic_opset9.as_strided(graph, values, *places)
    # An axis of size 1 may have any place; sizes are unknown where the forward computes them.
    order = sorted(range(len(strides)), key=lambda axis: -strides[axis])
    if sizes is not None and not _fills_memory([(sizes[axis], strides[axis]) for axis in order]):
        raise UnsupportedOperatorError("aten::as_strided", graph.opset, None)
    ordered = values if order == sorted(order) else graph.op("Transpose", values, perm_i=order)
    return symbolic_opset9.as_strided(graph, ordered, *places)


def _fills_memory(axes: Sequence[tuple[int, int]]) -> bool:
    """Say whether axes of ``(size, stride)``, outermost first, cover memory without gaps and overlaps."""
    expected = 1
    for size, stride in reversed(axes):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


@symbolic_helper.parse_args("v", "is")
def _permute_form(graph: object, values: object, axes: Sequence[int]) -> Any:
    """Like torch's own form, which writes negative axes unchanged; ONNX does not allow them here."""
    return symbolic_opset9.permute(graph, values, [axis % len(axes) for axis in axes])


@symbolic_helper.quantized_args(True)
def _reshape_form(graph: Any, values: object, shape: Any) -> Any:
    """Like torch's own form, in which a size of 0 always copies the input's size; here 0 means 0 (``allowzero``)."""
    sizes = symbolic_helper._maybe_get_const(shape, "is")
    if symbolic_helper._is_value(sizes):
        size_values = symbolic_helper._unpack_list(sizes) if symbolic_helper._is_packed_list(sizes) else ()
        sizes = [symbolic_helper._maybe_get_const(size_value, "i") for size_value in size_values]
    return symbolic_helper._reshape_helper(graph, values, shape, allowzero=int(graph.opset >= 14 and 0 in sizes))


def _repeat_interleave_form(graph: Any, values: object, repeats: Any, axis: object = None, *size: Any) -> Any:
    """Like torch's own form, which is wrong for negative axes: it changes every constant with that value."""
    torch_symbolics = symbolic_opset13 if graph.opset >= 13 else symbolic_opset9
    number = None if axis is None or symbolic_helper._is_none(axis) else symbolic_helper._get_const(axis, "i", "dim")
    if (symbolic_helper._get_tensor_sizes(repeats) or [None])[0] not in (None, 1):
        return _repeated_by_counts(graph, values, repeats, number)
    axis = axis if number is None else graph.op("Constant", value_t=torch.tensor(number))
    return torch_symbolics.repeat_interleave(graph, values, repeats, axis, *size)


def _repeated_by_counts(graph: Any, values: object, counts: Any, axis: int | None) -> Any:
    """Repeat each position by its count; torch's own form repeats a position of count 0 once."""
    integer = JitScalarType.INT64.onnx_type()
    zero, one = (graph.op("Constant", value_t=torch.tensor(number)) for number in (0, 1))
    counts = graph.op("Cast", counts, to_i=integer)
    total = symbolic_helper._reducesum_helper(graph, counts, axes_i=[0], keepdims_i=0)
    column = symbolic_helper._unsqueeze_helper(graph, graph.op("Range", zero, total, one), [1])
    is_over = graph.op("Not", graph.op("Greater", graph.op("CumSum", counts, zero), column))
    places = symbolic_helper._reducesum_helper(graph, graph.op("Cast", is_over, to_i=integer), axes_i=[1], keepdims_i=0)
    flat = symbolic_helper._reshape_helper(graph, values, [-1]) if axis is None else values
    return graph.op("Gather", flat, places, axis_i=axis or 0)


def _index_put_form(graph: Any, values: object, places: Any, new_values: Any, adds: Any = None) -> Any:
    """Like torch's own form, which crashes the process for empty values (it divides by the number of elements)."""
    indices = symbolic_helper._unpack_list(places)
    if 0 not in (new_values.type().sizes() or ()):
        return symbolic_opset11.index_put(graph, values, places, new_values, *(() if adds is None else (adds,)))
    kind = JitScalarType.from_value(indices[0], JitScalarType.UNDEFINED)
    is_plain = len(indices) == 1 and symbolic_helper._get_tensor_rank(indices[0]) == 1 and kind == JitScalarType.INT64
    if not is_plain or symbolic_helper._maybe_get_const(adds, "b"):
        raise UnsupportedOperatorError("aten::index_put", graph.opset, None)
    return graph.op("ScatterND", values, symbolic_helper._unsqueeze_helper(graph, indices[0], [-1]), new_values)


def _attention_form(graph: object, query: Any, key: object, value: Any, *options: object) -> Any:
    """Like torch's own form, which does not support grouped-query attention (``enable_gqa``)."""
    if symbolic_helper._get_const(options[-1], "b", "enable_gqa"):
        heads = symbolic_helper._get_tensor_dim_size(query, -3)
        key, value = (_with_heads(graph, operand, heads) for operand in (key, value))
    return symbolic_opset14.scaled_dot_product_attention(graph, query, key, value, *options[:-1])


def _with_heads(graph: Any, values: Any, heads: int | None) -> Any:
    """Repeat each head equally often, up to ``heads`` heads."""
    rank, own_heads = symbolic_helper._get_tensor_rank(values), symbolic_helper._get_tensor_dim_size(values, -3)
    if rank is None or own_heads is None or heads is None:
        raise UnsupportedOperatorError("aten::scaled_dot_product_attention", graph.opset, None)
    places = torch.arange(own_heads).repeat_interleave(heads // own_heads)
    return graph.op("Gather", values, graph.op("Constant", value_t=places), axis_i=rank - 3)


@symbolic_helper.parse_args("v", "i", "f", "f")
def _histc_form(graph: Any, values: Any, bins: int, lowest: float, highest: float) -> Any:
    """``torch.histc`` over a constant range: count the values in each of ``bins`` equal bins, rounded as in torch."""
    if lowest >= highest:
        # torch then takes the range from the values.
        raise UnsupportedOperatorError("aten::histc", graph.opset, None)
    column = symbolic_helper._reshape_helper(graph, values, [-1, 1])
    bottom, top = (_float_constant(graph, end, values) for end in (lowest, highest))
    scaled_offsets = graph.op("Mul", graph.op("Sub", column, bottom), _float_constant(graph, float(bins), values))
    scaled = graph.op("Div", scaled_offsets, _float_constant(graph, highest - lowest, values))
    # The end of the range belongs to the last bin.
    last_bin, no_bin = (_float_constant(graph, place, values) for place in (bins - 1.0, -1.0))
    bin_index = graph.op("Where", graph.op("Equal", column, top), last_bin, graph.op("Floor", scaled))
    bin_index = graph.op("Where", graph.op("Greater", column, top), no_bin, bin_index)
    numbers = graph.op("Constant", value_t=torch.arange(bins).to(JitScalarType.from_value(values).dtype()))
    matches = graph.op("Cast", graph.op("Equal", bin_index, numbers), to_i=JitScalarType.from_value(values).onnx_type())
    return symbolic_helper._reducesum_helper(graph, matches, axes_i=[0], keepdims_i=0)


def _grouped_product_form(graph: Any, rows: Any, matrices: Any, ends: Any, *options: Any) -> Any:
    """Multiply each row by the matrix of its group; rows are sorted by group, ``ends`` has the end of each group."""
    groups = symbolic_helper._get_tensor_dim_size(matrices, 0)
    ranks = [symbolic_helper._get_tensor_rank(operand) for operand in (rows, matrices)]
    if ranks != [2, 3] or groups is None or not all(map(symbolic_helper._is_none, options)):
        # Groups of columns, batched groups, or an explicit dtype.
        raise UnsupportedOperatorError("aten::_grouped_mm", graph.opset, None)
    zero = graph.op("Constant", value_t=torch.tensor([0]))
    bounds = graph.op("Concat", zero, graph.op("Cast", ends, to_i=JitScalarType.INT64.onnx_type()), axis_i=0)
    places = [graph.op("Constant", value_t=torch.tensor([place])) for place in range(groups + 1)]
    bounds = [graph.op("Gather", bounds, place, axis_i=0) for place in places]
    products = []
    for group in range(groups):
        members = graph.op("Slice", rows, bounds[group], bounds[group + 1], zero)
        matrix = graph.op("Gather", matrices, graph.op("Constant", value_t=torch.tensor(group)), axis_i=0)
        products.append(graph.op("MatMul", members, matrix))
    return graph.op("Concat", *products, axis_i=0)


def _antialiased_resize_form(kind: str) -> Callable[..., Any]:
    """Return the form of torch's antialiased resizing between constant sizes.

    Resizing is linear: a product with one matrix for the rows and one for the columns. torch computes each matrix by
    resizing the identity.
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
            output_size, factor = ([sizes[axis], size] if sizes else None), ([factors[axis], 1.0] if factors else None)
            matrix = operator(torch.eye(size)[None, None], output_size, aligned, factor)[0, 0]
            matrices.append(matrix.to(dtype))
        rows, columns = (graph.op("Constant", value_t=matrix) for matrix in (matrices[0], matrices[1].T.contiguous()))
        return graph.op("MatMul", rows, graph.op("MatMul", images, columns))

    return resized


def _float_constant(graph: Any, value: float, reference: Any) -> Any:
    return graph.op("Constant", value_t=torch.tensor(value, dtype=JitScalarType.from_value(reference).dtype()))


_FORMS: Mapping[str, Callable[..., Any]] = {
    "aten::_grouped_mm": _grouped_product_form,
    "aten::_upsample_bicubic2d_aa": _antialiased_resize_form("bicubic"),
    "aten::_upsample_bilinear2d_aa": _antialiased_resize_form("bilinear"),
    "aten::as_strided": _as_strided_form,
    "aten::cumsum": _cumsum_form,
    "aten::diff": _diff_form,
    "aten::expm1": _expm1_form,
    "aten::histc": _histc_form,
    "aten::index_put": _index_put_form,
    "aten::permute": _permute_form,
    "aten::repeat_interleave": _repeat_interleave_form,
    "aten::reshape": _reshape_form,
    "aten::scaled_dot_product_attention": _attention_form,
    "aten::view": _reshape_form,
    "transformers::grouped_mm_fallback": _grouped_product_form,
}
