"""Reuse of the layouts of results while torch traces a program: an operator is inferred once for equal operands.

torch infers the result of an operator on fake tensors by running its decomposition, symbol by symbol. The layers of a
model repeat the same operators on tensors of the same layouts.

A result is inferred each time if it has a symbolic size that is no size of an operand, such as the sum of two, or if
it depends on values. The graph is the same, node by node.

NOTE: these functions are private in torch (docs/decisions/0004-private-seams.md).
``tests/unit/export/dynamo/test_repeated_operators.py`` fails when they change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.fx.experimental import proxy_tensor
from torch.utils import _pytree as pytree

_PLAIN = (int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))
"""Classes of operands without a layout."""


class _Result(NamedTuple):
    """A result relative to the operands of its call."""

    base: int | None
    """Position of the first operand that shares its storage; None: a new tensor."""
    is_base: bool
    dtype: torch.dtype
    device: torch.device
    sizes: list[tuple[int | None, Any]]
    """Sizes, strides and offset, each with its position among the symbolic sizes of the operands."""


class _Operands:
    """The tensors and symbolic sizes of one call, and a key that is equal for operands of equal layouts."""

    def __init__(self, flat: list[Any]) -> None:
        self.tensors: list[FakeTensor] = []
        self.storages: dict[int, int] = {}
        """Storage → position of the first tensor with it."""
        self.sizes: dict[Any, tuple[int, torch.SymInt]] = {}
        """Node of a symbolic size → position and size."""
        self.is_reusable = True
        self.key = (torch.get_default_dtype(), *map(self._describe, flat))

    def _describe(self, operand: Any) -> Any:
        if isinstance(operand, torch.SymInt):
            node = operand.node
            self.is_reusable &= hasattr(node, "_expr") and node.has_hint()
            # Equal sizes may be different nodes of the graph.
            position, _ = self.sizes.setdefault(node, (len(self.sizes), operand))
            return self.is_reusable and (node.expr, position)
        if not _has_layout_only(operand):
            self.is_reusable &= isinstance(operand, _PLAIN)
            return type(operand), operand
        self.tensors.append(operand)
        storage = self.storages.setdefault(operand.untyped_storage()._cdata, len(self.tensors) - 1)
        layout = map(self._describe, _layout(operand))
        return (operand.dtype, operand.fake_device, operand.requires_grad, storage, *layout)

    def relate(self, result: Any) -> _Result | None:
        """Return a result relative to the operands; None if another call must infer it."""
        if not _has_layout_only(result) or result.requires_grad:
            return None
        if any(isinstance(size, torch.SymInt) and size.node not in self.sizes for size in result.shape):
            return None
        base = self.storages.get(result.untyped_storage()._cdata)
        layout = [(self.sizes.get(getattr(size, "node", None), (None,))[0], size) for size in _layout(result)]
        is_base = base is not None and self.tensors[base] is result
        return _Result(base, is_base, result.dtype, result.fake_device, layout)

    def make(self, result: _Result) -> FakeTensor:
        """Return the result of this call."""
        base = self.tensors[result.base or 0]
        if result.is_base:
            return base
        nodes = [size for _, size in self.sizes.values()]
        *layout, offset = (size if place is None else nodes[place] for place, size in result.sizes)
        sizes, strides = layout[: len(layout) // 2], layout[len(layout) // 2 :]
        with in_kernel_invocation_manager(base.fake_mode):
            tensor = torch.empty_strided(sizes, strides, dtype=result.dtype, device="meta")
            if result.base is not None:
                tensor.set_(base.untyped_storage(), offset, sizes, strides)
        return FakeTensor(base.fake_mode, tensor, result.device)


def _has_layout_only(value: Any) -> bool:
    """Return True for a dense fake tensor whose values are unknown."""
    is_plain = type(value) is FakeTensor and value.layout is torch.strided and not value.is_complex()
    return is_plain and value.constant is None and value.real_tensor is None


def _layout(tensor: FakeTensor) -> tuple[Any, ...]:
    return (*tensor.shape, *tensor.stride(), tensor.storage_offset())


def reused_results() -> Callable[..., Any]:
    """Return torch's recording of one operator in a graph, which infers the result once for equal operands."""
    record, known = proxy_tensor.proxy_call, dict[Any, _Result | None]()

    def call(mode: Any, operator: Any, in_trace: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        flat, structure = pytree.tree_flatten((args, kwargs))
        operands = _Operands(flat)
        is_pure = operator.namespace == "aten" and not operator._schema.is_mutable
        # Autocast changes the type of a result, and a second trace decomposes operators.
        if (
            not (in_trace and is_pure and operands.is_reusable and operands.tensors)
            or torch._C._is_any_autocast_enabled()
        ):
            return record(mode, operator, in_trace, args, kwargs)
        key = (operator, str(structure), operands.key)
        if (result := known.get(key)) is None:
            inferred = record(mode, operator, in_trace, args, kwargs)
            known[key] = operands.relate(inferred)
            return inferred
        _, proxies, _ = proxy_tensor._fetch_proxies_and_all_constant_flag(flat, mode.tracer)
        proxy = mode.tracer.create_proxy(
            "call_function",
            operator,
            *pytree.tree_unflatten(list(proxies), structure),
            name=mode.tracer.graph._target_to_str(operator.overloadpacket.__name__),
        )
        return proxy_tensor.track_tensor_tree(operands.make(result), proxy, constant=None, tracer=mode.tracer)

    return call
