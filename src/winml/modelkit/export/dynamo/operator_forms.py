"""ONNX forms of operators that torch's dynamo exporter lacks or converts wrongly.

* Operators of ``exact_forms.py`` are accurate over the whole range of a float; torch's forms overflow or cancel.
* ``conv3d`` without a bias: onnxscript adds a zero bias of wrong shape, which ONNX Runtime refuses.
* ``erf_inv`` and ``sym_numel``, the number of elements if it depends on values, have no form in torch.
* ``logcumsumexp``: torch subtracts one maximum of the whole axis, next to which smaller values vanish.
* ``squeeze`` leaves an axis that is longer than 1; onnxscript removes it, which ONNX Runtime refuses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir import tape

from winml.modelkit.export import exact_forms


class _OnnxscriptBuilder:
    """Adds nodes to the graph that onnxscript records."""

    def __init__(self) -> None:
        from onnxscript import opset18

        self._opset: Any = opset18

    def op(self, operator: str, *inputs: Any, **attributes: int) -> Any:
        """Add a node."""
        return getattr(self._opset, operator)(*inputs, **attributes)

    def number(self, value: float, like: Any, /) -> Any:
        """Return a constant of the dtype of a value."""
        return self._opset.CastLike(self._opset.Constant(value_float=float(value)), like)

    def index(self, value: int) -> Any:
        """Return a constant of 64 bits."""
        return self._opset.Constant(value_int=value)


class _BodyBuilder:
    """Adds nodes to the body of a loop over floats of one dtype."""

    def __init__(self, dtype: ir.DataType) -> None:
        self._tape, self._dtype = tape.Tape(), dtype

    def op(self, operator: str, *inputs: Any, **attributes: int) -> Any:
        """Add a node."""
        return self._tape.op(operator, inputs, attributes)

    def number(self, value: float, _like: Any, /) -> Any:
        """Return a constant of the dtype of the loop."""
        return self._tape.op("Constant", [], {"value": ir.tensor(value, dtype=self._dtype)})

    def index(self, value: int) -> Any:
        """Return a constant of 64 bits."""
        return self._tape.op("Constant", [], {"value_int": value})

    def as_graph(self, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value], name: str) -> ir.Graph:
        """Return the body."""
        return ir.Graph(inputs, outputs, nodes=self._tape.nodes, name=name)


def operator_forms() -> dict[Any, Callable[..., Any]]:
    """Return operator → ONNX form that replaces torch's."""
    from onnxscript import opset18 as op
    from onnxscript.function_libs.torch_lib.ops import core as torchlib
    from torch.onnx._internal.exporter._torchlib.ops.hop import call_op

    builder = _OnnxscriptBuilder()

    def binary(form: Callable[..., Any], of_integers: Callable[..., Any]) -> Callable[..., Any]:
        """Return a form of two operands, either of which may be a Python number."""

        def combined(a: Any, b: Any) -> Any:
            tensor = b if isinstance(a, (int, float)) else a
            operands = [builder.number(value, tensor) if isinstance(value, (int, float)) else value for value in (a, b)]
            return (of_integers if tensor.dtype.is_integer() else partial(form, builder))(*operands)

        return combined

    floor_divide = binary(exact_forms.floor_divide, torchlib.aten_floor_divide)
    remainder = binary(exact_forms.remainder, torchlib.aten_remainder)
    # Div of integers rounds towards 0.
    trunc_divide = binary(exact_forms.trunc_divide, op.Div)

    def divide(a: Any, b: Any, rounding_mode: str | None = None) -> Any:
        rounded = {"floor": floor_divide, "trunc": trunc_divide, None: torchlib.aten_div}
        return rounded[rounding_mode](a, b)

    def log(x: Any) -> Any:
        maker = x.producer()
        if maker is not None and maker.op_type == "Sigmoid":
            return exact_forms.log_sigmoid(builder, maker.inputs[0])
        return torchlib.aten_log(x)

    def erfinv(y: Any) -> Any:
        return exact_forms.erfinv(builder, y, newton_steps=2 if y.dtype == ir.DataType.DOUBLE else 0)

    def logcumsumexp(x: Any, dim: int) -> Any:
        rank = len(x.shape)
        if rank == 0:
            return op.Identity(x)
        axis = dim % rank
        body = _BodyBuilder(x.dtype)
        total, element = (ir.Value(name=f"{x.name}_{role}", type=ir.TensorType(x.dtype)) for role in ("total", "item"))
        raised = exact_forms.logaddexp(body, total, element)
        graph = body.as_graph([total, element], [raised, body.op("Identity", raised)], "logcumsumexp")
        nothing = op.Expand(builder.number(-math.inf, x), op.Shape(op.Gather(x, builder.index(0), axis=axis)))
        options: dict[str, Any] = {"num_scan_inputs": 1, "scan_input_axes": [axis], "scan_output_axes": [axis]}
        _last, totals = call_op("Scan", nothing, x, _num_outputs=2, body=graph, **options)
        totals.dtype, totals.shape = x.dtype, x.shape
        return totals

    def prod(x: Any, dim: int, keepdim: bool = False, dtype: int = -1) -> Any:
        axis = dim % len(x.shape) if len(x.shape) else 0
        size = x.shape[axis] if len(x.shape) else None
        is_integer = x.dtype == ir.DataType.INT64 and dtype in (-1, None, ir.DataType.INT64)
        if not is_integer or not isinstance(size, int) or not 1 <= size <= exact_forms.MOST_FACTORS:
            return torchlib.aten_prod_dim_int(x, dim, keepdim, dtype)
        result = exact_forms.product(builder, x, axis, size)
        axes: Any = op.Constant(value_ints=[axis])
        return op.Unsqueeze(result, axes) if keepdim else result

    def conv3d(
        x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
    ) -> Any:
        strides, pads, dilations = (
            list(sizes) * (3 // len(sizes)) if isinstance(sizes, Sequence) else [sizes] * 3
            for sizes in (stride, padding, dilation)
        )
        return op.Conv(x, weight, bias, strides=strides, pads=[*pads, *pads], dilations=dilations, group=groups)

    def squeeze(x: Any, dim: int) -> Any:
        # Of a dynamic size torch traces one above 1.
        axes: Any = op.Constant(value_ints=[dim])
        return op.Squeeze(x, axes) if len(x.shape) and x.shape[dim] == 1 else op.Identity(x)

    aten, prims = torch.ops.aten, torch.ops.prims
    exact: dict[Any, Callable[..., Any]] = {
        aten.atan2.default: exact_forms.atan2,
        aten.erfc.default: exact_forms.erfc,
        aten.expm1.default: exact_forms.expm1,
        aten.log1p.default: exact_forms.log1p,
        aten.log_sigmoid.default: exact_forms.log_sigmoid,
        aten.logaddexp.default: exact_forms.logaddexp,
        aten.logaddexp2.default: exact_forms.logaddexp2,
        aten.special_erfcx.default: exact_forms.erfcx,
        prims.erfcx.default: exact_forms.erfcx,
    }
    return {
        **{operator: partial(form, builder) for operator, form in exact.items()},
        aten.conv3d.default: conv3d,
        aten.div.Scalar_mode: divide,
        aten.div.Tensor_mode: divide,
        aten.floor_divide.default: floor_divide,
        aten.log.default: log,
        aten.logcumsumexp.default: logcumsumexp,
        aten.prod.dim_int: prod,
        aten.remainder.Scalar: remainder,
        aten.remainder.Scalar_Tensor: remainder,
        aten.remainder.Tensor: remainder,
        aten.squeeze.dim: squeeze,
        aten.sym_numel.default: op.Size,
        prims.erf_inv.default: erfinv,
    }
