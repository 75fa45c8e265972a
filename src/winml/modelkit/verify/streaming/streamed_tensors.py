"""Parameters whose values are read from the checkpoint whenever a forward computes with them, and dropped afterwards.

A product with a large weight reads the weight in pieces, an embedding reads the rows it returns, and any other
operation reads the whole tensor. Several runs may share what is read: ``streamed_reference.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from onnx_ir import tensor_adapters
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from winml.modelkit.graph.files.stored_tensors import StoredTensor, StoredValues
from winml.modelkit.load.checkpoints.deferred_tensors import DeferredTensor, NotDeferrableError

__all__ = ["KEPT_BYTES", "WeightRequest", "answer_requests", "asking", "stream_parameters"]

aten = torch.ops.aten

PIECE_BYTES = 1 << 25
"""Values of a weight held at a time. Chosen: a fraction of what the libraries take, large enough to compute well."""
KEPT_BYTES = 1 << 18
"""Parameters up to this size are read once and kept. Chosen: norms and biases, which together are small."""

_CAST = aten._to_copy.default


class _Scratch:
    """Memory for a piece of a weight, the same for all: memory that is given back in between is not all of it free."""

    def __init__(self, piece_bytes: int) -> None:
        """Take no memory yet."""
        self.piece_bytes = piece_bytes
        self._memories: dict[str, torch.Tensor] = {}

    def read(self, stored: StoredValues, dtype: torch.dtype) -> torch.Tensor:
        """Return values in a dtype; the next call writes over them.

        Raises:
            CheckpointError: the file became shorter.
        """
        values = self._memory("stored", stored, tensor_adapters.to_torch_dtype(stored.dtype))
        stored.read_into(values.view(-1).view(torch.uint8).numpy())
        return values if values.dtype == dtype else self._memory("cast", stored, dtype).copy_(values)

    def _memory(self, use: str, stored: StoredValues, dtype: torch.dtype) -> torch.Tensor:
        needed = stored.size * dtype.itemsize
        held = self._memories.get(use)
        if held is None or len(held) < needed:
            self._memories[use] = held = torch.empty(max(needed, self.piece_bytes), dtype=torch.uint8)
        return held[:needed].view(dtype).view(stored.shape)


@dataclass(eq=False)
class _Source:
    """Where the values of one parameter come from."""

    deferred: DeferredTensor
    position: int
    """Which parameter of the model it is."""
    scratch: _Scratch
    kept: torch.Tensor | None = None

    @property
    def stored(self) -> StoredValues | None:
        """Where its rows lie in a file one after the other; None where they do not."""
        origin = self.deferred._origin
        is_plain = isinstance(origin, StoredTensor) and origin.permutation is None and self.deferred.dim() > 0
        return origin.stored if isinstance(origin, StoredTensor) and is_plain else None

    def read(self) -> torch.Tensor:
        """Return the values.

        Raises:
            CheckpointError: the file became shorter.
        """
        if self.kept is not None:
            return self.kept
        deferred, stored = self.deferred, self.stored
        values = deferred.realized() if stored is None else _read(stored, deferred.dtype)
        if values.numel() * values.element_size() <= KEPT_BYTES:
            self.kept = values
        return values

    def row_pieces(self) -> Iterator[torch.Tensor]:
        """Yield the rows of a matrix in order, a piece at a time; the next one takes the memory of the one before.

        Raises:
            CheckpointError: the file became shorter.
        """
        count, width = self.deferred.shape
        stored = self.stored
        if stored is None or self.kept is not None or not stored.size:
            yield self.read()
            return
        rows = max(1, self.scratch.piece_bytes // (width * self.deferred.element_size()))
        for start in range(0, count, rows):
            yield self.scratch.read(_row_slice(stored, start, min(rows, count - start)), self.deferred.dtype)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the rows of a table at these places; each is read once.

        Raises:
            CheckpointError: the file became shorter.
        """
        stored = self.stored
        if stored is None or self.kept is not None or not indices.numel():
            return self.read()[indices]
        wanted, places = torch.unique(indices, return_inverse=True)
        return torch.cat([_read(_row_slice(stored, int(row), 1), self.deferred.dtype) for row in wanted])[places]


@dataclass(frozen=True)
class _View:
    """An operation that only looks at parameters otherwise, or casts them; done when something is computed."""

    operation: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    position: int
    """Which of the tensors it returns."""


@dataclass(frozen=True, eq=False)
class WeightRequest:
    """What a forward wants of a parameter."""

    source: _Source
    rows: torch.Tensor | None = None
    """A matrix that is to be multiplied with the transposed parameter; None where its values themselves are wanted."""

    @property
    def key(self) -> object:
        """Equal for requests that one reading answers."""
        return self.position, self.rows is None

    @property
    def position(self) -> int:
        """Which parameter of the model it is about."""
        return self.source.position


class _Asking(threading.local):
    """Who answers the requests of a thread; None: they are answered at once."""

    ask: Callable[[WeightRequest], torch.Tensor] | None = None


_ASKING = _Asking()


@contextmanager
def asking(ask: Callable[[WeightRequest], torch.Tensor]) -> Iterator[None]:
    """Let ``ask`` answer what forwards in this thread want of parameters, for the time of the block."""
    before, _ASKING.ask = _ASKING.ask, ask
    try:
        yield
    finally:
        _ASKING.ask = before


class _StreamedTensor(torch.Tensor):
    """A parameter that has values only while something is computed with it; or a view of one."""

    _origin: _Source | _View
    _meta: torch.Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's own way to say: none

    @staticmethod
    def __new__(cls, origin: _Source | _View, meta: torch.Tensor) -> _StreamedTensor:  # noqa: PYI034 - typing has Self from Python 3.11 on
        """Make one that is like ``meta``."""
        tensor: _StreamedTensor = torch.Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), storage_offset=0, dtype=meta.dtype, device=torch.device("cpu")
        )
        tensor._origin, tensor._meta = origin, meta
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch says Any
        """Return what is known without reading."""
        return f"_StreamedTensor({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch documents and calls it
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Record what only looks at parameters otherwise; compute all else.

        Raises:
            NotDeferrableError: the operation writes into a parameter.
            CheckpointError: the file became shorter.
        """
        kwargs = kwargs or {}
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        if func._schema.is_mutable and isinstance(tensors[0], cls):
            raise NotDeferrableError(f"{func} on a parameter")
        if (func.is_view or func is _CAST) and all(isinstance(tensor, cls) for tensor in tensors):
            return _viewed(func, args, kwargs)
        if func is aten.embedding.default and (source := _source_of(args[0])) is not None:
            return source.rows(args[1])
        if func in (aten.linear.default, aten.matmul.default):
            # Under inference_mode these come whole; their parts are handled here.
            return func.decompose(*args, **kwargs)
        if func is aten.mm.default and (source := _transposed_source(args[1])) is not None:
            return _asked(WeightRequest(source, _values(args[0])))
        if func is aten.addmm.default and (source := _transposed_source(args[2])) is not None and not kwargs:
            return _values(args[0]) + _asked(WeightRequest(source, _values(args[1])))
        return func(*tree_map(_values, args), **tree_map(_values, kwargs))


def stream_parameters(model: nn.Module, piece_bytes: int = PIECE_BYTES) -> None:
    """Let a model whose parameters are deferred compute with them, each read when its turn comes; in place.

    Args:
        model: Its parameters are ``DeferredTensor``.
        piece_bytes: Values of a large weight held at a time.
    """
    streamed: dict[int, nn.Parameter] = {}
    scratch = _Scratch(piece_bytes)
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            values: Any = parameter  # a parameter is of the class of its tensor
            if not isinstance(values, DeferredTensor):
                continue
            if id(parameter) not in streamed:
                tensor = _StreamedTensor(_Source(values, len(streamed), scratch), values._meta)
                streamed[id(parameter)] = nn.Parameter(tensor, requires_grad=False)
            module._parameters[name] = streamed[id(parameter)]


def answer_requests(requests: Sequence[WeightRequest]) -> list[torch.Tensor]:
    """Return what was asked for; all requests are about one parameter, which is read once.

    Raises:
        CheckpointError: the file became shorter.
    """
    source = requests[0].source
    matrices = [request.rows for request in requests if request.rows is not None]
    if not matrices:
        return [source.read()] * len(requests)
    together = torch.cat(matrices) if len(matrices) > 1 else matrices[0]
    products = [together @ piece.t() for piece in source.row_pieces()]
    product = torch.cat(products, dim=1) if len(products) > 1 else products[0]
    return list(torch.split(product, [len(matrix) for matrix in matrices]))


def _asked(request: WeightRequest) -> torch.Tensor:
    if _ASKING.ask is None or request.source.kept is not None:
        return answer_requests([request])[0]
    return _ASKING.ask(request)


def _viewed(func: Any, args: Any, kwargs: Any) -> Any:
    outputs, spec = tree_flatten(func(*tree_map(_without_values, args), **tree_map(_without_values, kwargs)))
    return spec.unflatten(
        [
            _StreamedTensor(_View(func, args, kwargs, position), output) if isinstance(output, torch.Tensor) else output
            for position, output in enumerate(outputs)
        ]
    )


def _without_values(value: Any) -> Any:
    if isinstance(value, _StreamedTensor):
        return value._meta
    return torch.device("meta") if isinstance(value, torch.device) else value


def _values(value: Any) -> Any:
    """Return an ordinary tensor for a streamed one, and everything else as it is."""
    if not isinstance(value, _StreamedTensor):
        return value
    origin = value._origin
    if isinstance(origin, _Source):
        return _asked(WeightRequest(origin))
    outputs = origin.operation(*tree_map(_values, origin.arguments), **tree_map(_values, origin.keywords))
    return tree_leaves(outputs)[origin.position]


def _source_of(value: Any) -> _Source | None:
    """Return the parameter that a tensor is; None where it is anything else."""
    if not isinstance(value, _StreamedTensor):
        return None
    origin = value._origin
    if isinstance(origin, _Source):
        return origin
    return _source_of(origin.arguments[0]) if origin.operation in (aten.detach.default, aten.alias.default) else None


def _transposed_source(value: Any) -> _Source | None:
    """Return the parameter that a tensor is the transposed matrix of; None where it is anything else."""
    if not isinstance(value, _StreamedTensor) or not isinstance(value._origin, _View) or value.dim() != 2:
        return None
    source = _source_of(value._origin.arguments[0]) if _is_transposing(value._origin) else None
    return source if source is not None and source.deferred.dim() == 2 else None


def _is_transposing(view: _View) -> bool:
    """Say whether a view of a matrix swaps its axes."""
    if view.operation is aten.transpose.int:
        first, second = view.arguments[1:3]
        return bool((first - second) % 2)
    return view.operation is aten.t.default


def _row_slice(stored: StoredValues, start: int, count: int) -> StoredValues:
    row_bytes = stored.size // stored.shape[0] * stored.dtype.numpy().itemsize
    return replace(stored, offset=stored.offset + start * row_bytes, shape=(count, *stored.shape[1:]))


def _read(stored: StoredValues, dtype: torch.dtype) -> torch.Tensor:
    values = stored.read()
    if not values.size:
        return torch.empty(stored.shape, dtype=dtype)
    held = torch.frombuffer(values.reshape(-1).view(np.uint8), dtype=tensor_adapters.to_torch_dtype(stored.dtype))
    return held.reshape(stored.shape).to(dtype)
