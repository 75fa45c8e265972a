"""Tensors with a shape and an element type; their values are read from weight files on demand.

Operations on such a tensor are recorded instead of computed. A checkpoint is loaded with such tensors – renamed,
merged, cast and tied – and the results are read later, one tensor at a time. If a value decides the next operation (are
two tensors equal?), the value is read at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from winml.modelkit.models.checkpoints.weight_files import StoredEntry
from winml.modelkit.onnx.coded_weights import CodedTensor, join_weights, stack_weights
from winml.modelkit.onnx.files.stored_tensors import StoredTensor, StoredValues

_aten = torch.ops.aten

_VALUE_READERS = frozenset({_aten.equal.default, _aten._local_scalar_dense.default, _aten.is_nonzero.default})
"""Operations that return a Python value: computed at once."""

_SAME_VALUES = frozenset({_aten.alias.default, _aten.detach.default, _aten.slice.Tensor, _aten.view.default,
                          _aten._unsafe_view.default, _aten.lift_fresh.default, _aten.clone.default})  # fmt: skip
"""Operations that change neither values nor their order; if the shape is equal too, the result is the same tensor."""


class NotDeferrableError(Exception):
    """An operation writes into a tensor without values."""


@dataclass(frozen=True)
class RecordedOperation:
    """A deferred operation on stored weights."""

    operation: Any
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    position: int
    """Position of the tensor among the outputs of the operation."""

    @property
    def is_view(self) -> bool:
        """True if the output shares its memory with an input."""
        return any(output.alias_info is not None for output in self.operation._schema.returns)

    def compute(self, evaluate: Callable[[object], object]) -> torch.Tensor:
        """Compute the operation.

        Args:
            evaluate: Takes a leaf of the arguments, and returns an ordinary tensor for a tensor without values.
        """
        outputs = self.operation(*tree_map(evaluate, self.arguments), **tree_map(evaluate, self.keywords))
        values: torch.Tensor = tree_leaves(outputs)[self.position]
        return values


_UnreadTensorT = TypeVar("_UnreadTensorT", bound="UnreadTensor")


class UnreadTensor(torch.Tensor):
    """A tensor on the CPU that has shape and element type, and no values in memory.

    Attributes:
        origin: Source of the values.
        like: A tensor on ``meta`` of the same shape, strides and element type.
    """

    origin: Any
    like: torch.Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's idiom to disable it

    @staticmethod
    def __new__(cls: type[_UnreadTensorT], origin: object, like: torch.Tensor) -> _UnreadTensorT:
        """Create a tensor with the properties of another tensor."""
        tensor: _UnreadTensorT = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), storage_offset=0, dtype=like.dtype, device=torch.device("cpu")
        )
        tensor.origin, tensor.like = origin, like
        return tensor

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]  # torch says Any
        """Return shape, element type and origin, without reading values."""
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype}, {self.origin})"

    @classmethod
    def recorded(
        cls,
        operation: Any,
        arguments: tuple[Any, ...],
        keywords: Mapping[str, Any],
        origin_of: Callable[[RecordedOperation, torch.Tensor], object] = lambda recorded, _like: recorded,
    ) -> Any:
        """Return the outputs of an operation, with their tensors unread.

        Args:
            operation: An operation of torch.
            arguments: Its arguments.
            keywords: Its keyword arguments.
            origin_of: (recorded operation, tensor on ``meta`` like the output) → origin of the output.
        """
        outputs, spec = tree_flatten(
            operation(*tree_map(_strip_values, arguments), **tree_map(_strip_values, keywords))
        )
        unread = [
            cls(origin_of(RecordedOperation(operation, arguments, keywords, position), output), output)
            if isinstance(output, torch.Tensor)
            else output
            for position, output in enumerate(outputs)
        ]
        return spec.unflatten(unread)


class DeferredTensor(UnreadTensor):
    """A tensor of a checkpoint, or computed from tensors of a checkpoint, with values read on demand."""

    origin: StoredTensor | CodedTensor | RecordedOperation

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch documents and calls it
        cls, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Record the operation."""
        kwargs = kwargs or {}
        if func in _VALUE_READERS:
            return func(*tree_map(_realize_deferred, args), **tree_map(_realize_deferred, kwargs))
        if func._schema.is_mutable:
            return cls._record_write(func, args, kwargs)
        return cls.recorded(func, args, kwargs, _origin_of_output)

    @classmethod
    def _record_write(cls, func: object, args: Any, kwargs: Any) -> Any:
        """Record an operation that writes into a tensor with memory of its own; changes and returns the tensor.

        Raises:
            NotDeferrableError: the memory is shared with another tensor, or may be.
        """
        target = args[0] if args else None
        if (
            not isinstance(target, DeferredTensor)
            or not isinstance(origin := target.origin, RecordedOperation)
            or origin.is_view
            or kwargs.get("out") is not None
        ):
            raise NotDeferrableError(f"{func} on a tensor of the checkpoint")
        old_target = cls(origin, target.like)
        target.origin = RecordedOperation(func, (old_target, *args[1:]), kwargs, 0)
        return target

    def realized(self) -> torch.Tensor:
        """Return an ordinary tensor with the values, in separate memory.

        Raises:
            CheckpointError: the file became shorter.
        """
        if isinstance(self.origin, (StoredTensor, CodedTensor)):
            return _from_numpy(self.origin)
        return self.origin.compute(_realize_deferred)

    def by_reference(self, name: str) -> ir.TensorProtocol:
        """Return the tensor for a graph; its values are read when the graph is written.

        Raises:
            CheckpointError: the file became shorter.
        """
        if isinstance(self.origin, (StoredTensor, CodedTensor)):
            return self.origin.named(name)

        def evaluate() -> ir.TensorProtocol:
            return tensor_adapters.TorchTensor(self.realized().contiguous(), name=name)

        dtype = tensor_adapters.from_torch_dtype(self.dtype)
        return ir.LazyTensor(evaluate, dtype=dtype, shape=ir.Shape(self.shape), name=name)


def deferred_entries(entries: Mapping[str, StoredEntry]) -> dict[str, DeferredTensor]:
    """Return the tensors of weight files by name, without reading values.

    Raises:
        NotDeferrableError: torch has no such element type.
    """
    return {name: _defer_entry(name, entry) for name, entry in entries.items()}


def _defer_entry(name: str, entry: StoredEntry) -> DeferredTensor:
    dtype = getattr(torch, entry.dtype, None)
    if dtype is None:
        raise NotDeferrableError(f"{name} is {entry.dtype}")
    values = StoredValues(entry.path, entry.offset, tensor_adapters.from_torch_dtype(dtype), entry.shape, name)
    return DeferredTensor(StoredTensor(values), torch.empty(entry.shape, dtype=dtype, device="meta"))


def defer_coded(tensor: CodedTensor) -> DeferredTensor:
    """Return a quantized weight as a tensor of its dequantized values, which are computed on demand."""
    dtype = tensor_adapters.to_torch_dtype(tensor.dtype)
    return DeferredTensor(tensor, torch.empty(tuple(tensor.shape.numpy()), dtype=dtype, device="meta"))


def _origin_of_output(
    recorded: RecordedOperation, output: torch.Tensor
) -> StoredTensor | CodedTensor | RecordedOperation:
    """Return the origin of an output.

    The origin of the argument if its values are kept, a cast of the argument if exact, one coded tensor for merged
    codes, else the operation.
    """
    source = recorded.arguments[0] if recorded.arguments else None
    if isinstance(source, (list, tuple)) and (coded := _merge_codes(recorded)) is not None:
        return coded
    if isinstance(source, DeferredTensor) and source.shape == output.shape and output.is_contiguous():
        origin = source.origin
        if recorded.operation in _SAME_VALUES and source.dtype == output.dtype:
            return origin
        if recorded.operation is _aten._to_copy.default and isinstance(origin, (StoredTensor, CodedTensor)):
            if source.dtype == output.dtype:
                return origin
            if isinstance(origin, CodedTensor):
                exact = origin.dtype == ir.DataType.FLOAT
                return origin.cast(tensor_adapters.from_torch_dtype(output.dtype)) if exact else recorded
            if origin.dtype == origin.stored.dtype and source.is_floating_point() and output.is_floating_point():
                return origin.cast(tensor_adapters.from_torch_dtype(output.dtype))
    return recorded


def _merge_codes(recorded: RecordedOperation) -> CodedTensor | None:
    """Return the codes of stacked experts or concatenated rows as one weight; `None` for other tensors or layouts."""
    tensors, *axes = recorded.arguments
    axis = axes[0] if axes else recorded.keywords.get("dim", 0)
    origins = [tensor.origin if isinstance(tensor, DeferredTensor) else None for tensor in tensors]
    coded = [origin for origin in origins if isinstance(origin, CodedTensor) and origin.permutation is None]
    if len(coded) != len(origins) or len({origin.dtype for origin in coded}) != 1:
        return None
    weights = [origin.weight for origin in coded]
    if recorded.operation is _aten.stack.default and axis == 0:
        merged = stack_weights(weights)
    elif recorded.operation is _aten.cat.default and axis in (len(weights[0].shape) - 2, -2):
        merged = join_weights(weights)
    else:
        return None
    return None if merged is None else CodedTensor(merged, dtype=coded[0].dtype)


def _strip_values(value: object) -> Any:
    if isinstance(value, UnreadTensor):
        return value.like
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _realize_deferred(value: object) -> Any:
    return value.realized() if isinstance(value, DeferredTensor) else value


def _from_numpy(tensor: StoredTensor | CodedTensor) -> torch.Tensor:
    """Return the values. numpy and torch have different names for the small float types, but the same bytes."""
    dtype = tensor_adapters.to_torch_dtype(tensor.dtype)
    values = tensor.numpy()
    if values.size == 0:
        return torch.empty(values.shape, dtype=dtype)
    return torch.frombuffer(values, dtype=dtype).reshape(values.shape)
