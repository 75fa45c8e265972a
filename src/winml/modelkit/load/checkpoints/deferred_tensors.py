"""Tensors with a shape and an element type whose values are read from weight files when they are asked for.

Operations on such a tensor are recorded instead of computed. So a checkpoint can be loaded with them – its tensors
renamed, merged, cast and tied – and the results are read later, one tensor at a time. Where a value decides which
operation comes next (are these two equal?), it is read at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters
from torch.utils._pytree import tree_flatten, tree_map

from winml.modelkit.graph.files.stored_tensors import StoredTensor, StoredValues
from winml.modelkit.load.checkpoints.weight_files import StoredEntry

__all__ = ["DeferredTensor", "NotDeferrableError", "deferred_entries"]

aten = torch.ops.aten

_DECIDING = frozenset({aten.equal.default, aten._local_scalar_dense.default, aten.is_nonzero.default})
"""Operations whose answer is a Python value: they are done at once."""

_SAME_VALUES = frozenset({aten.alias.default, aten.detach.default, aten.slice.Tensor, aten.view.default,
                          aten._unsafe_view.default, aten.lift_fresh.default, aten.clone.default})  # fmt: skip
"""Operations that change no value and no order; where the shape is the same too, nothing has happened."""


class NotDeferrableError(Exception):
    """Something writes into a tensor that has no values."""


@dataclass(frozen=True)
class _RecordedOperation:
    """A recorded operation that values come out of."""

    operation: Any
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    position: int
    """Which of the tensors it returns."""

    @property
    def is_view(self) -> bool:
        """Whether what comes out shares its memory with what went in."""
        return any(returned.alias_info is not None for returned in self.operation._schema.returns)


class DeferredTensor(torch.Tensor):
    """A tensor on the CPU whose values are not there yet."""

    _origin: StoredTensor | _RecordedOperation
    _meta: torch.Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's own way to say: none

    @staticmethod
    def __new__(cls, origin: StoredTensor | _RecordedOperation, meta: torch.Tensor) -> DeferredTensor:  # noqa: PYI034 - typing has Self from Python 3.11 on
        """Make one that is like ``meta``."""
        tensor: DeferredTensor = torch.Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), storage_offset=0, dtype=meta.dtype, device=torch.device("cpu")
        )
        tensor._origin, tensor._meta = origin, meta
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch says Any
        """Return what is known without reading."""
        return f"DeferredTensor({list(self.shape)}, {self.dtype}, {self._origin})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch documents and calls it
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Record the operation."""
        kwargs = kwargs or {}
        if func in _DECIDING:
            return func(*tree_map(_realize_deferred, args), **tree_map(_realize_deferred, kwargs))
        if func._schema.is_mutable:
            return cls._record_write(func, args, kwargs)
        like = func(*tree_map(_without_values, args), **tree_map(_without_values, kwargs))
        outputs, spec = tree_flatten(like)
        deferred = [
            cls(_values_of_output(func, args, kwargs, position, output), output)
            if isinstance(output, torch.Tensor)
            else output
            for position, output in enumerate(outputs)
        ]
        return spec.unflatten(deferred)

    @classmethod
    def _record_write(cls, func: Any, args: Any, kwargs: Any) -> Any:
        """Record an operation that writes into a tensor which shares its memory with no other.

        Raises:
            NotDeferrableError: something does, or may.
        """
        target = args[0] if args else None
        if (
            not isinstance(target, DeferredTensor)
            or not isinstance(before := target._origin, _RecordedOperation)
            or before.is_view
            or kwargs.get("out") is not None
        ):
            raise NotDeferrableError(f"{func} on a tensor of the checkpoint")
        earlier = cls(before, target._meta)
        target._origin = _RecordedOperation(func, (earlier, *args[1:]), kwargs, 0)
        return target

    def realized(self) -> torch.Tensor:
        """Return an ordinary tensor with the values, in memory of its own.

        Raises:
            CheckpointError: the file became shorter.
        """
        if isinstance(self._origin, StoredTensor):
            return _from_numpy(self._origin)
        recorded = self._origin
        arguments = tree_map(_realize_deferred, recorded.arguments)
        keywords = tree_map(_realize_deferred, recorded.keywords)
        values: torch.Tensor = tree_flatten(recorded.operation(*arguments, **keywords))[0][recorded.position]
        return values

    def by_reference(self, name: str) -> ir.TensorProtocol:
        """Return the tensor for a graph; its values are read when it is written."""
        if isinstance(self._origin, StoredTensor):
            return self._origin.named(name)

        def evaluate() -> ir.TensorProtocol:
            return tensor_adapters.TorchTensor(self.realized().contiguous(), name=name)

        dtype = tensor_adapters.from_torch_dtype(self.dtype)
        return ir.LazyTensor(evaluate, dtype=dtype, shape=ir.Shape(self.shape), name=name)


def deferred_entries(entries: Mapping[str, StoredEntry]) -> dict[str, DeferredTensor]:
    """Return the tensors of weight files by name, none of them read.

    Raises:
        NotDeferrableError: torch has no such element type.
    """
    return {name: _defer_entry(name, entry) for name, entry in entries.items()}


def _defer_entry(name: str, entry: StoredEntry) -> DeferredTensor:
    dtype = getattr(torch, entry.dtype, None)
    if dtype is None:
        raise NotDeferrableError(f"{name} is {entry.dtype}")
    stored = StoredValues(entry.path, entry.offset, tensor_adapters.from_torch_dtype(dtype), entry.shape, name)
    return DeferredTensor(StoredTensor(stored), torch.empty(entry.shape, dtype=dtype, device="meta"))


def _values_of_output(
    func: Any, args: Any, kwargs: Any, position: int, output: torch.Tensor
) -> StoredTensor | _RecordedOperation:
    """Return where the values of an output come from: a file, where the operation changes nothing or only casts."""
    first = args[0] if args else None
    if isinstance(first, DeferredTensor) and first.shape == output.shape and output.is_contiguous():
        before = first._origin
        if func in _SAME_VALUES and first.dtype == output.dtype:
            return before
        if func is aten._to_copy.default and isinstance(before, StoredTensor):
            if first.dtype == output.dtype:
                return before
            if before.dtype == before.stored.dtype and first.is_floating_point() and output.is_floating_point():
                return before.cast(tensor_adapters.from_torch_dtype(output.dtype))
    return _RecordedOperation(func, args, kwargs, position)


def _without_values(value: Any) -> Any:
    if isinstance(value, DeferredTensor):
        return value._meta
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _realize_deferred(value: Any) -> Any:
    return value.realized() if isinstance(value, DeferredTensor) else value


def _from_numpy(tensor: StoredTensor) -> torch.Tensor:
    """Return the values; numpy and torch share no names for the small float types, only their bytes."""
    dtype = tensor_adapters.to_torch_dtype(tensor.dtype)
    values = tensor.numpy()
    if values.size == 0:
        return torch.empty(values.shape, dtype=dtype)
    return torch.frombuffer(values, dtype=dtype).reshape(values.shape)
