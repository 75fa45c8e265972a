"""Reuse of the layouts of results while torch traces a program: an operator is inferred once for equal operands.

torch infers the result of an operator on fake tensors by running its decomposition, symbol by symbol. The layers of a
model repeat the same operators on tensors of the same layouts.

A result is inferred each time if it has a symbolic size that is no size of an operand, such as the sum of two, or if
it depends on values. The graph is the same, node by node.

NOTE: these functions are private in torch (docs/decisions/0004-private-seams.md).
``tests/unit/export/dynamo/test_repeated_operators.py`` fails when they change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.fx.experimental import proxy_tensor
from torch.utils import _pytree as pytree

_PLAIN = (int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))
"""Classes of operands without a layout."""


@dataclass
class _Operands:
    """The operands of one call."""

    flat: list[Any]
    tensors: list[FakeTensor] = field(default_factory=list)
    positions: dict[Any, int] = field(default_factory=dict)
    """Node of a symbolic size → position of the size."""
    sizes: list[torch.SymInt] = field(default_factory=list)
    is_reusable: bool = True

    def describe(self, operand: Any) -> Any:
        """Return a key that is equal for operands of equal layouts; collect their tensors and symbolic sizes."""
        if isinstance(operand, torch.SymInt):
            node = operand.node
            self.is_reusable &= hasattr(node, "_expr") and node.has_hint()
            if node not in self.positions:
                self.positions[node] = len(self.sizes)
                self.sizes.append(operand)
            # Equal sizes may be different nodes of the graph.
            return self.is_reusable and (node.expr, self.positions[node])
        if type(operand) is FakeTensor and _has_layout_only(operand):
            self.tensors.append(operand)
            return (operand.dtype, operand.fake_device, operand.requires_grad, *map(self.describe, _layout(operand)))
        self.is_reusable &= isinstance(operand, _PLAIN)
        return type(operand), operand

    def relate(self, result: Any) -> _Result | None:
        """Return a result relative to the operands; None if another call must infer it."""
        if type(result) is not FakeTensor or not _has_layout_only(result) or result.requires_grad:
            return None
        is_new = [size for size in result.shape if isinstance(size, torch.SymInt) and size.node not in self.positions]
        if is_new:
            return None
        layout = tuple(
            (self.positions.get(size.node), size) if isinstance(size, torch.SymInt) else (None, size)
            for size in _layout(result)
        )
        storage = result.untyped_storage()._cdata
        shared = [place for place, tensor in enumerate(self.tensors) if tensor.untyped_storage()._cdata == storage]
        is_operand = [place for place in shared if self.tensors[place] is result]
        return _Result(next(iter([*is_operand, *shared]), None), bool(is_operand), result.dtype, layout)


@dataclass(frozen=True)
class _Result:
    """A result relative to the operands of its call."""

    operand: int | None
    """Position of the tensor that is the result or whose storage the result shares; None: neither."""
    is_operand: bool
    dtype: torch.dtype
    layout: tuple[tuple[int | None, Any], ...]
    """Sizes, strides and offset, each with its position among the symbolic sizes of the operands."""

    def of(self, operands: _Operands) -> FakeTensor:
        """Return the result of another call with equal operands."""
        if self.operand is not None and self.is_operand:
            return operands.tensors[self.operand]
        like = operands.tensors[self.operand or 0]
        *layout, offset = (size if place is None else operands.sizes[place] for place, size in self.layout)
        sizes, strides = layout[: len(layout) // 2], layout[len(layout) // 2 :]
        mode = like.fake_mode
        with in_kernel_invocation_manager(mode):
            made = torch.empty_strided(sizes, strides, dtype=self.dtype, device="meta")
            if self.operand is not None:
                made.set_(like.untyped_storage(), offset, sizes, strides)
        return FakeTensor(mode, made, like.fake_device)


def _has_layout_only(tensor: FakeTensor) -> bool:
    is_plain = tensor.layout is torch.strided and not tensor.is_complex()
    return is_plain and tensor.constant is None and tensor.real_tensor is None


def _layout(tensor: FakeTensor) -> tuple[Any, ...]:
    return (*tensor.shape, *tensor.stride(), tensor.storage_offset())


def reused_results() -> Callable[..., Any]:
    """Return torch's recording of one operator in a graph, which infers the result once for equal operands."""
    record, known = proxy_tensor.proxy_call, dict[Any, _Result | None]()

    def call(mode: Any, operator: Any, before_dispatch: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        flat, structure = pytree.tree_flatten((args, kwargs))
        operands = _Operands(flat)
        key = (operator, str(structure), *map(operands.describe, flat))
        if (
            not operands.is_reusable
            or not operands.tensors
            or not before_dispatch
            or operator._schema.is_mutable
            or torch._C._is_any_autocast_enabled()
        ):
            return record(mode, operator, before_dispatch, args, kwargs)
        if known.get(key) is None:
            result = record(mode, operator, before_dispatch, args, kwargs)
            known[key] = operands.relate(result)
            return result
        result = known[key].of(operands)
        _, proxies, _ = proxy_tensor._fetch_proxies_and_all_constant_flag(flat, mode.tracer)
        recorded = mode.tracer.create_proxy(
            "call_function",
            operator,
            *pytree.tree_unflatten(list(proxies), structure),
            name=mode.tracer.graph._target_to_str(operator.overloadpacket.__name__),
        )
        return proxy_tensor.track_tensor_tree(result, recorded, constant=None, tracer=mode.tracer)

    return call
