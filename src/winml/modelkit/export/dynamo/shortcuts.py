"""Omission of work of torch's dynamo exporter that does not change the graph, during one export.

* torch traces the exported program a second time, to decompose operators. Most graphs of transformers write into no
  tensor that is read by another name, and their few operators without an ONNX form are replaced one by one.
* torch runs the program once more to insert casts; each node has its result already.
* torch caches the result of each operator on fake tensors. With dynamic sizes no entry is ever found again, and making
  entries takes a third of the trace (measured on a Llama with KV cache: 4.8 s of 8 layers, without it 3.0).
* torch compares the strides of a tensor with its sizes at each operator, symbol by symbol; a program has few layouts
  (measured on gpt2 with KV cache: 11,000 comparisons, a fifth of the trace).
* torch infers the result of each operator; the layers of a model repeat operators on tensors of equal layouts.
* torch parses the sources of a thousand ONNX forms; a graph uses about thirty. It converts the schema of an ONNX
  operator for each node.
* torch reads the Python source lines of each node, which are dropped afterwards.

NOTE: these functions are private in torch (docs/decisions/0004-private-seams.md).
``tests/unit/export/dynamo/test_shortcuts.py`` fails when they change.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import onnx_ir as ir
import torch
import torch._prims_common
from onnxscript import TracedOnnxFunction
from torch._export.utils import _is_cia_op, _is_preservable_cia_op
from torch._prims_common import is_contiguous_or_false
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import proxy_tensor
from torch.onnx._internal.exporter import _fx_passes, _registration
from torch.onnx._internal.fx.passes import type_promotion
from torch.utils import _pytree as pytree

from winml.modelkit.models.inputs.repeated_operators import infer_once
from winml.modelkit.ort.shared_settings import attributes_replaced

_Form = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""An operator with its arguments and keyword arguments."""


def shortcuts(*, keep_stack_traces: bool) -> AbstractContextManager[None]:
    """Skip this work inside the block; patches torch.

    Args:
        keep_stack_traces: Still read the Python source lines of each node.
    """
    decompose = _fx_passes.decompose_with_registry
    identify_schema = operator.attrgetter("domain", "name", "since_version")
    compare, convert = torch._prims_common.check_contiguous_sizes_strides, ir.schemas.OpSignature.from_op_schema

    def decompose_where_needed(program: Any, registry: Any) -> Any:
        writes = _find_lone_writes(program.graph)
        if not _is_replaced_alone(program, registry, writes):
            return decompose(program, registry)
        _replace_operators(program.graph, writes)
        return program

    return attributes_replaced(
        # torch takes its domain, which is the opset's.
        (TracedOnnxFunction, "function_ir", property(lambda form: form.opset)),
        (_fx_passes, "decompose_with_registry", decompose_where_needed),
        (type_promotion._TypePromotionInterpreter, "run_node", _promote_node),
        (FakeTensorMode, "_cached_dispatch_impl", FakeTensorMode._dispatch_impl),
        (torch._prims_common, "check_contiguous_sizes_strides", _remembered(compare, _identify_layout)),
        (proxy_tensor, "proxy_call", _reused_results()),
        (proxy_tensor, "_extract_tensor_metadata", lambda _tensor: None),
        (ir.schemas.OpSignature, "from_op_schema", _remembered(convert, identify_schema)),
        (torch.fx.config, "do_not_emit_stack_traces", not keep_stack_traces),
    )


def _reused_results() -> Callable[..., Any]:
    """Return torch's recording of one operator in a graph, which infers the result once for equal operands."""
    record, known = proxy_tensor.proxy_call, dict[Any, Any]()

    def call(mode: Any, operator: Any, in_trace: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def infer() -> Any:
            return record(mode, operator, in_trace, args, kwargs)

        # Autocast changes the type of a result, and a second trace decomposes operators.
        if not in_trace or torch._C._is_any_autocast_enabled():
            return infer()
        result, is_inferred = infer_once(known, operator, args, kwargs, infer)
        if is_inferred:
            return result
        flat, structure = pytree.tree_flatten((args, kwargs))
        _, proxies, _ = proxy_tensor._fetch_proxies_and_all_constant_flag(flat, mode.tracer)
        proxy = mode.tracer.create_proxy(
            "call_function",
            operator,
            *pytree.tree_unflatten(list(proxies), structure),
            name=mode.tracer.graph._target_to_str(operator.overloadpacket.__name__),
        )
        return proxy_tensor.track_tensor_tree(result, proxy, constant=None, tracer=mode.tracer)

    return call


def _remembered(compute: Callable[..., Any], identify: Callable[..., object]) -> Callable[..., Any]:
    """Return a function that computes once for arguments of an equal identity; each time if it is `None`."""
    known = dict[object, Any]()

    def call(*arguments: Any, **options: Any) -> Any:
        key = identify(*arguments, **options)
        if key is None or key not in known:
            known[key] = compute(*arguments, **options)
        return known[key]

    return call


def _identify_layout(sizes: Any, strides: Any, false_if_dde: bool = False) -> tuple[Any, ...] | None:
    key = (false_if_dde, *map(_identify_size, sizes), *map(_identify_size, strides))
    return None if None in key else key


def _identify_size(size: Any) -> Any:
    """Return an object that is equal for equal sizes; `None` for a size that depends on values."""
    if isinstance(size, int):
        return size
    node = size.node
    return (node.shape_env, node.expr) if node.has_hint() and hasattr(node, "_expr") else None


def _promote_node(interpreter: Any, node: torch.fx.Node) -> Any:
    """Insert the casts that a node needs; return its result of the trace, whose type the casts restore."""
    with interpreter._set_current_node(node):
        if rule := type_promotion.get_type_promotion_rule(node, interpreter.type_promotion_table):
            interpreter._maybe_promote_node(node, rule)
    is_known = node.op == "call_function" and "val" in node.meta
    return node.meta["val"] if is_known else torch.fx.Interpreter.run_node(interpreter, node)


def _find_lone_writes(graph: torch.fx.Graph) -> dict[torch.fx.Node, Any]:
    """Return the nodes that write into a tensor which nothing else reads afterwards → the operator that writes nothing.

    The tensor is the result of a node, of the same dtype as all operands, and no other node has its storage.
    """
    owners: dict[int, list[torch.fx.Node]] = {}
    for node in graph.nodes:
        if isinstance(value := node.meta.get("val"), torch.Tensor):
            owners.setdefault(value.untyped_storage()._cdata, []).append(node)
    writes = {}
    for nodes in owners.values():
        # Each writes into the result of the one before; views of the last result may follow.
        chain = dict[torch.fx.Node, Any]()
        for before, node in pairwise(nodes):
            if node.args[:1] != (before,) or len(before.users) > 1 or (pure := _get_pure(node)) is None:
                break
            chain[node] = pure
        later = nodes[len(chain) + 1 :]
        if nodes[0].op == "call_function" and not any(_writes(node.target) for node in later):
            writes.update(chain)
    return writes


def _get_pure(node: torch.fx.Node) -> Any:
    """Return ``add.Tensor`` for ``add_.Tensor``; None for operands of several dtypes, which it would combine."""
    name, _, overload = str(node.target).removeprefix("aten.").rpartition(".")
    operands = [operand.meta["val"] for operand in node.args if isinstance(operand, torch.fx.Node)]
    dtypes = {value.dtype for value in operands if isinstance(value, torch.Tensor)}
    is_write = name in _WRITES and all(isinstance(value, torch.Tensor) for value in operands) and len(dtypes) == 1
    return getattr(getattr(_aten, name.removesuffix("_")), overload) if is_write else None


def _is_replaced_alone(
    program: torch.export.ExportedProgram,
    registry: _registration.ONNXRegistry,
    writes: Mapping[torch.fx.Node, object],
) -> bool:
    """Return True if all operators have ONNX forms after replacing some one by one.

    False if the program writes into other tensors, calls inner graphs, has an operator without a form or replacement,
    or a node whose shape only a second trace finds.
    """
    if len(list(program.graph_module.modules())) > 1:
        return False
    if any("val" not in node.meta for node in program.graph.nodes if node.op == "call_function"):
        return False
    return all(
        _find_form(node) is not None
        if node.target in _REPLACED
        else registry.is_registered(node.target) and not _is_decomposed_always(node.target)
        for node in program.graph.nodes
        if node.op == "call_function" and node.target not in _LEFT_TO_TORCH and node not in writes
    )


def _find_form(node: torch.fx.Node) -> _Form | torch.fx.Node | None:
    """Return the replacement of a node's operator, or its operand; `None` if torch must decompose the operator."""
    form: _Form | torch.fx.Node | None = _REPLACED[node.target](*node.args, **node.kwargs, out=node.meta["val"])
    return form


def _is_decomposed_always(target: Any) -> bool:
    """Return True if an operator with an ONNX form is replaced by torch all the same."""
    is_cia = isinstance(target, torch._ops.OpOverload) and _is_cia_op(target)
    return _writes(target) or (is_cia and not _is_preservable_cia_op(target))


def _writes(target: Any) -> bool:
    """Return True if an operator writes into an operand."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _replace_operators(graph: torch.fx.Graph, writes: Mapping[torch.fx.Node, Any]) -> None:
    """Replace operators without an ONNX form by operators with a form, or by their operands, in place."""
    for node in graph.nodes:
        node.target = writes.get(node, node.target)
        if node.op != "call_function" or node.target not in _REPLACED:
            continue
        form = _find_form(node)
        assert form is not None  # as was found before
        if isinstance(form, torch.fx.Node) and any(user.op == "output" for user in node.users):
            form = _replace_by_clone(form)
        if isinstance(form, torch.fx.Node):
            node.replace_all_uses_with(form)
        elif len(form[0]._schema.returns) == 1:
            node.target, node.args, node.kwargs = form
        else:
            with graph.inserting_before(node):
                whole = graph.call_function(*form)
            whole.meta = {**node.meta, "val": (node.meta["val"],)}
            node.target, node.args, node.kwargs = operator.getitem, (whole, 0), {}
    graph.eliminate_dead_code()


_aten = torch.ops.aten
_LEFT_TO_TORCH = (operator.getitem, torch.ops.aten._assert_tensor_metadata.default)
"""Operators that torch translates without a form, or removes."""


def _replace_cast(x: torch.fx.Node, *_args: Any, out: torch.Tensor, copy: bool = False, **_options: Any) -> Any:
    if x.meta["val"].dtype == out.dtype:
        return _replace_by_clone(x) if copy else x
    return torch.ops.aten._to_copy.default, (x,), {"dtype": out.dtype}


def _replace_by_clone(x: torch.fx.Node, *_args: Any, **_options: Any) -> _Form:
    return _aten.clone.default, (x,), {}


def _replace_contiguous(x: torch.fx.Node, **_options: Any) -> _Form | torch.fx.Node:
    if is_contiguous_or_false(x.meta["val"]):
        return x
    # The next node may view the result, which torch checks again.
    return _aten.clone.default, (x,), {"memory_format": torch.contiguous_format}


def _replace_dropout(x: torch.fx.Node, _rate: float, train: bool, **_options: Any) -> _Form | None:
    return None if train else _replace_by_clone(x)


def _replace_view(x: torch.fx.Node, shape: Any, **_options: Any) -> _Form | None:
    return (_aten.view.default, (x, shape), {}) if is_contiguous_or_false(x.meta["val"]) else None


def _replace_flatten(x: torch.fx.Node, *_axes: int, out: torch.Tensor, **_options: Any) -> _Form | None:
    sizes = list(out.shape)
    return _replace_view(x, sizes) if all(isinstance(size, int) for size in sizes) else None


def _replace_batch_norm(*args: Any, **_options: Any) -> _Form | None:
    *operands, is_training, momentum, epsilon, _is_fast = args
    form: _Form = torch.ops.aten._native_batch_norm_legit_no_training.default, (*operands, momentum, epsilon), {}
    return None if is_training or operands[-1] is None else form


def _replace_mean_pool(x: torch.fx.Node, sizes: list[int], **_options: Any) -> _Form | None:
    return (_aten.mean.dim, (x, [-1, -2], True), {}) if sizes == [1, 1] else None


def _use_operator(target: Any) -> Callable[..., _Form]:
    return lambda *args, **_options: (target, args, {})


_WRITES = frozenset({"add_", "mul_", "relu_", "sub_"})
"""Operators of ATen that write their result into the first operand."""
_REPLACED: dict[Any, Callable[..., _Form | torch.fx.Node | None]] = {
    _aten.to.device: _replace_cast,
    _aten.to.dtype: _replace_cast,
    _aten.to.dtype_layout: _replace_cast,
    _aten.contiguous.default: _replace_contiguous,
    _aten.dropout.default: _replace_dropout,
    _aten.reshape.default: _replace_view,
    _aten.flatten.using_ints: _replace_flatten,
    _aten.adaptive_avg_pool2d.default: _replace_mean_pool,
    _aten.batch_norm.default: _replace_batch_norm,
    _aten.__and__.Tensor: _use_operator(_aten.bitwise_and.Tensor),
    _aten.__or__.Tensor: _use_operator(_aten.bitwise_or.Tensor),
    _aten.min.other: _use_operator(_aten.minimum.default),
    _aten.max.other: _use_operator(_aten.maximum.default),
}
"""Operator → its decomposition by torch, or its operand; None if the result depends on further conditions."""
