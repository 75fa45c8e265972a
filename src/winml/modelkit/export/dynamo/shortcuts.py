"""Skips work of torch's dynamo exporter that does not change the graph, for the time of one export.

* torch traces the exported program a second time, to decompose operators. Most graphs of transformers write into no
  tensor, and the few operators in them that ONNX has no form of are replaced one for one.
* It parses the sources of all its ONNX forms, a thousand, of which a graph uses some thirty.
* It reads the lines of Python of each node, which are dropped afterwards.

NOTE: these places are private in torch (docs/decisions/0004-private-seams.md).
``tests/unit/export/dynamo/test_shortcuts.py`` fails when they move.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from onnxscript import TracedOnnxFunction
from torch._export.utils import _is_cia_op, _is_preservable_cia_op
from torch._prims_common import is_contiguous_or_false
from torch.onnx._internal.exporter import _fx_passes, _registration

from winml.modelkit.ort.shared_settings import attributes_replaced

_Form = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""An operator with its arguments and keyword arguments."""


def shortcuts(*, keep_stack_traces: bool) -> AbstractContextManager[None]:
    """Skip it inside the block; patches torch.

    Args:
        keep_stack_traces: Read the lines of Python of each node all the same.
    """
    record, decompose = _registration.OnnxDecompMeta, _fx_passes.decompose_with_registry

    def without_signature(**fields: Any) -> _registration.OnnxDecompMeta:
        # Where a signature is missing, torch reads it when the form is called.
        return record(**{**fields, "skip_signature_inference": True})

    def decompose_where_needed(program: Any, registry: Any) -> Any:
        if not _is_replaced_alone(program, registry):
            return decompose(program, registry)
        _replace_operators(program.graph)
        return program

    return attributes_replaced(
        (_registration, "OnnxDecompMeta", without_signature),
        # torch takes its domain, which is the opset's.
        (TracedOnnxFunction, "function_ir", property(lambda form: form.opset)),
        (_fx_passes, "decompose_with_registry", decompose_where_needed),
        (torch.fx.config, "do_not_emit_stack_traces", not keep_stack_traces),
    )


def _is_replaced_alone(program: torch.export.ExportedProgram, registry: _registration.ONNXRegistry) -> bool:
    """Return whether all operators have ONNX forms once some are replaced one for one.

    Not where the program writes into tensors, calls graphs inside, has an operator that is not replaced here, or a node
    whose shape only a second trace finds.
    """
    if len(list(program.graph_module.modules())) > 1:
        return False
    if any("val" not in node.meta for node in program.graph.nodes if node.op == "call_function"):
        return False
    return all(
        _form_of(node) is not None
        if node.target in _REPLACED
        else registry.is_registered(node.target) and not _is_decomposed_always(node.target)
        for node in program.graph.nodes
        if node.op == "call_function" and node.target not in _LEFT_TO_TORCH
    )


def _form_of(node: torch.fx.Node) -> _Form | torch.fx.Node | None:
    form: _Form | torch.fx.Node | None = _REPLACED[node.target](*node.args, **node.kwargs, out=node.meta["val"])
    return form


def _is_decomposed_always(target: Any) -> bool:
    """Return whether an operator with an ONNX form is replaced by torch all the same."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target._schema.is_mutable or (_is_cia_op(target) and not _is_preservable_cia_op(target))


def _replace_operators(graph: torch.fx.Graph) -> None:
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in _REPLACED:
            continue
        form = _form_of(node)
        assert form is not None  # as was found before
        if isinstance(form, torch.fx.Node) and any(user.op == "output" for user in node.users):
            form = _copy(form)
        if isinstance(form, torch.fx.Node):
            node.replace_all_uses_with(form)
        else:
            node.target, node.args, node.kwargs = form
    graph.eliminate_dead_code()


_aten = torch.ops.aten
_LEFT_TO_TORCH = (operator.getitem, torch.ops.aten._assert_tensor_metadata.default)
"""Operators that torch translates without a form, or removes."""


def _cast(x: torch.fx.Node, *_args: Any, out: torch.Tensor, copy: bool = False, **_options: Any) -> Any:
    if x.meta["val"].dtype == out.dtype:
        return _copy(x) if copy else x
    return torch.ops.aten._to_copy.default, (x,), {"dtype": out.dtype}


def _copy(x: torch.fx.Node, *_args: Any, **_options: Any) -> _Form:
    return _aten.clone.default, (x,), {}


def _contiguous(x: torch.fx.Node, **_options: Any) -> _Form | torch.fx.Node:
    if is_contiguous_or_false(x.meta["val"]):
        return x
    # What follows may view it, which torch checks once more.
    return _aten.clone.default, (x,), {"memory_format": torch.contiguous_format}


def _dropout(x: torch.fx.Node, _rate: float, train: bool, **_options: Any) -> _Form | None:
    return None if train else _copy(x)


def _view(x: torch.fx.Node, shape: Any, **_options: Any) -> _Form | None:
    return (_aten.view.default, (x, shape), {}) if is_contiguous_or_false(x.meta["val"]) else None


def _flat(x: torch.fx.Node, *_axes: int, out: torch.Tensor, **_options: Any) -> _Form | None:
    sizes = list(out.shape)
    return _view(x, sizes) if all(isinstance(size, int) for size in sizes) else None


def _other_name(target: Any) -> Callable[..., _Form]:
    return lambda *args, **_options: (target, args, {})


_REPLACED: dict[Any, Callable[..., _Form | torch.fx.Node | None]] = {
    _aten.to.device: _cast,
    _aten.to.dtype: _cast,
    _aten.to.dtype_layout: _cast,
    _aten.contiguous.default: _contiguous,
    _aten.dropout.default: _dropout,
    _aten.reshape.default: _view,
    _aten.flatten.using_ints: _flat,
    _aten.__and__.Tensor: _other_name(_aten.bitwise_and.Tensor),
    _aten.__or__.Tensor: _other_name(_aten.bitwise_or.Tensor),
    _aten.min.other: _other_name(_aten.minimum.default),
    _aten.max.other: _other_name(_aten.maximum.default),
}
"""Operator → what torch makes of it when it decomposes, or its operand; None where that depends on more."""
