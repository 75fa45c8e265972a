"""Reuse of the layouts of results: an operator on tensors without values is inferred once for equal operands.

torch infers the result of an operator on fake tensors by running its decomposition, symbol by symbol. The layers of a
model repeat the same operators on tensors of the same layouts.

A result is inferred each time if it has a symbolic size that is no size of an operand, such as the sum of two, or if
it depends on values.

NOTE: fake tensors are private in torch (docs/decisions/0004-private-seams.md).
``tests/unit/export/dynamo/test_repeated_operators.py`` fails when they change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

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

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.storages: dict[int, int] = {}
        """Storage → position of the first tensor with it."""
        self.sizes: dict[Any, tuple[int, torch.SymInt]] = {}
        """Node of a symbolic size → position and size."""
        self.is_reusable = True
        self.key = (torch.get_default_dtype(), *map(self._describe, (*args, *kwargs.items())))

    def _describe(self, operand: Any) -> Any:
        if isinstance(operand, (list, tuple)):
            return tuple(map(self._describe, operand))
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
        layout = (self._describe(size) if isinstance(size, torch.SymInt) else size for size in _layout(operand))
        return (operand.dtype, operand.device, operand.requires_grad, storage, *layout)

    def relate(self, result: Any) -> _Result | None:
        """Return a result relative to the operands; None if another call must infer it."""
        if not _has_layout_only(result) or result.requires_grad:
            return None
        if any(isinstance(size, torch.SymInt) and size.node not in self.sizes for size in result.shape):
            return None
        base = self.storages.get(result.untyped_storage()._cdata)
        layout = [(self.sizes.get(getattr(size, "node", None), (None,))[0], size) for size in _layout(result)]
        is_base = base is not None and self.tensors[base] is result
        return _Result(base, is_base, result.dtype, result.device, layout)

    def make(self, result: _Result) -> torch.Tensor:
        """Return the result of this call."""
        base = self.tensors[result.base or 0]
        if result.is_base:
            return base
        nodes = [size for _, size in self.sizes.values()]
        *layout, offset = (size if place is None else nodes[place] for place, size in result.sizes)
        sizes, strides = layout[: len(layout) // 2], layout[len(layout) // 2 :]
        mode = base.fake_mode if isinstance(base, FakeTensor) else None
        with nullcontext() if mode is None else in_kernel_invocation_manager(mode):
            tensor = torch.empty_strided(sizes, strides, dtype=result.dtype, device="meta")
            if result.base is not None:
                tensor.set_(base.untyped_storage(), offset, sizes, strides)
        return tensor if mode is None else FakeTensor(mode, tensor, result.device)


def _has_layout_only(value: Any) -> bool:
    """Return True for a dense tensor without values: a fake tensor, or a tensor on the meta device."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_complex():
        return False
    return value.constant is None and value.real_tensor is None if isinstance(value, FakeTensor) else value.is_meta


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (*tensor.shape, *tensor.stride(), tensor.storage_offset())


def infer_once(
    known: dict[Any, Any], operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], infer: Callable[[], Any]
) -> tuple[Any, bool]:
    """Return the result of an operator, and True if it was inferred.

    Args:
        known: The results of earlier calls relative to their operands; a result is added in place.
        operator: An operator of torch.
        args: Its operands.
        kwargs: Its named operands.
        infer: Infers the result.
    """
    operands = _Operands(args, kwargs)
    is_pure = operator.namespace == "aten" and not operator._schema.is_mutable
    if not (is_pure and operands.is_reusable and operands.tensors):
        return infer(), True
    key = (operator, operands.key)
    if (result := known.get(key)) is not None:
        return operands.make(result), False
    inferred = infer()
    known[key] = operands.relate(inferred)
    return inferred, True
