"""Outputs of a PyTorch model whose weights stay in the checkpoint.

The values of a parameter are read when a forward computes with it, and dropped afterwards. A product with a large
weight reads the weight in pieces, an embedding reads the rows it returns, and any other operation reads the whole
tensor. All samples run side by side: each weight is read once for all samples.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from onnx_ir import tensor_adapters
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from winml.modelkit.arrays import Array
from winml.modelkit.compare.verification.reference_run import PreparedPart, conditions_as_python, prepared_part
from winml.modelkit.compare.verification.sizes import Draw, run_draw
from winml.modelkit.models.checkpoints.deferred_tensors import (
    DeferredTensor,
    NotDeferrableError,
    RecordedOperation,
    UnreadTensor,
)
from winml.modelkit.onnx.coded_weights import CodedTensor, CodedWeight
from winml.modelkit.onnx.files.stored_tensors import StoredTensor, StoredValues

aten = torch.ops.aten

_PIECE_BYTES = 1 << 25
"""Maximum bytes of weight values in memory. Chosen: a fraction of the memory of the libraries, large enough for fast
products."""
MAX_RESIDENT_BYTES = 1 << 18
"""Maximum size of parameters that are read once and kept. Chosen: norms and biases, small in total."""

_CAST = aten._to_copy.default

_Result = TypeVar("_Result")


class _Scratch:
    """Reused memory for pieces of weights: freed memory in between would not be entirely available again."""

    def __init__(self) -> None:
        """Allocate nothing yet."""
        self._memories: dict[str, torch.Tensor] = {}

    def read(self, stored: StoredValues, dtype: torch.dtype) -> torch.Tensor:
        """Read values in a dtype; the next call overwrites them.

        Raises:
            CheckpointError: the file is shorter than before.
        """
        values = self._reserve_memory("stored", stored, tensor_adapters.to_torch_dtype(stored.dtype))
        stored.read_into(values.view(-1).view(torch.uint8).numpy())
        return values if values.dtype == dtype else self._reserve_memory("cast", stored, dtype).copy_(values)

    def _reserve_memory(self, use: str, stored: StoredValues, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialized memory for the values of a weight in a dtype; the next call for the same use reuses it.

        Args:
            use: Purpose of the memory, such as ``stored`` or ``cast``.
            stored: The weight.
            dtype: Type of the values.
        """
        needed = stored.size * dtype.itemsize
        memory = self._memories.get(use)
        if memory is None or len(memory) < needed:
            self._memories[use] = memory = torch.empty(max(needed, _PIECE_BYTES), dtype=torch.uint8)
        return memory[:needed].view(dtype).view(stored.shape)


@dataclass(eq=False)
class _Source:
    """Source of the values of one parameter."""

    deferred: DeferredTensor
    position: int
    """Index of the parameter in the model."""
    scratch: _Scratch
    kept: torch.Tensor | None = None

    @property
    def stored(self) -> StoredValues | None:
        """Storage of its rows in a file, if contiguous; ``None`` otherwise."""
        origin = self.deferred.origin
        if isinstance(origin, StoredTensor) and origin.permutation is None and self.deferred.dim() > 0:
            return origin.stored
        return None

    @property
    def coded(self) -> CodedWeight | None:
        """Codes of the matrix, row by row; ``None`` without codes."""
        origin = self.deferred.origin
        if isinstance(origin, CodedTensor) and origin.permutation is None and self.deferred.dim() == 2:
            return origin.weight
        return None

    def read(self) -> torch.Tensor:
        """Return the values.

        Raises:
            CheckpointError: the file is shorter than before.
        """
        if self.kept is not None:
            return self.kept
        deferred, stored = self.deferred, self.stored
        values = deferred.realized() if stored is None else _read_tensor(stored, deferred.dtype)
        if values.numel() * values.element_size() <= MAX_RESIDENT_BYTES:
            self.kept = values
        return values

    def row_pieces(self) -> Iterator[torch.Tensor]:
        """Yield the rows of a matrix in pieces, in order; each piece overwrites the previous one.

        Raises:
            CheckpointError: the file is shorter than before.
        """
        count, width = self.deferred.shape
        stored, coded = self.stored, self.coded
        if coded is not None and self.kept is None:
            parts = coded.read()
            step = max(1, _PIECE_BYTES // (width * 4))
            for start in range(0, count, step):
                yield self._to_tensor(coded.values_of_rows(parts, slice(start, start + step)))
            return
        if stored is None or self.kept is not None or not stored.size:
            yield self.read()
            return
        rows = max(1, _PIECE_BYTES // (width * self.deferred.element_size()))
        for start in range(0, count, rows):
            yield self.scratch.read(_row_slice(stored, start, min(rows, count - start)), self.deferred.dtype)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the rows of a table at these indices; each is read once.

        Raises:
            CheckpointError: the file is shorter than before.
        """
        stored, coded = self.stored, self.coded
        if (stored is None and coded is None) or self.kept is not None or not indices.numel():
            return self.read()[indices]
        requested, places = torch.unique(indices, return_inverse=True)
        if coded is not None:
            return self._to_tensor(coded.values_of_rows(coded.read(), requested.numpy()))[places]
        assert stored is not None  # one of both exists
        return torch.cat([_read_tensor(_row_slice(stored, int(row), 1), self.deferred.dtype) for row in requested])[
            places
        ]

    def _to_tensor(self, values: Array) -> torch.Tensor:
        """Convert decoded values to a tensor in the dtype of the parameter."""
        return torch.from_numpy(values).to(self.deferred.dtype)


@dataclass(frozen=True, eq=False)
class WeightRequest:
    """Request of a forward for a parameter or a product with it."""

    source: _Source
    rows: torch.Tensor | None = None
    """Matrix to multiply with the transposed parameter; ``None`` for a request of the values."""

    @property
    def key(self) -> object:
        """Key shared by requests that one read can serve."""
        return self.position, self.rows is None

    @property
    def position(self) -> int:
        """Index of the parameter in the model."""
        return self.source.position


_Ask = Callable[[WeightRequest], torch.Tensor]


class _Asking(threading.local):
    """Handler of the requests of a thread; ``None``: requests are served immediately."""

    ask: _Ask | None = None


_ASKING = _Asking()


@contextmanager
def asking(ask: _Ask) -> Iterator[None]:
    """Serve the parameter requests of forwards in this thread by ``ask`` until the block ends."""
    before, _ASKING.ask = _ASKING.ask, ask
    try:
        yield
    finally:
        _ASKING.ask = before


class _StreamedTensor(UnreadTensor):
    """A parameter that has values only during a computation; or a view or cast of such a parameter."""

    origin: _Source | RecordedOperation

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch documents and calls it
        cls, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Record views and casts of parameters; compute all other operations.

        Raises:
            NotDeferrableError: the operation writes into a parameter.
            CheckpointError: the file is shorter than before.
        """
        kwargs = kwargs or {}
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        if func._schema.is_mutable and isinstance(tensors[0], cls):
            raise NotDeferrableError(f"{func} on a parameter")
        if (func.is_view or func is _CAST) and all(isinstance(tensor, cls) for tensor in tensors):
            return cls.recorded(func, args, kwargs)
        if func is aten.embedding.default and (source := _source_of(args[0])) is not None:
            return source.rows(args[1])
        if func in (aten.linear.default, aten.matmul.default):
            # inference_mode dispatches these as a whole; their parts are handled here.
            return func.decompose(*args, **kwargs)
        if func is aten.mm.default and (source := _transposed_source(args[1])) is not None:
            return _serve_request(WeightRequest(source, _materialize(args[0])))
        if func is aten.addmm.default and (source := _transposed_source(args[2])) is not None and not kwargs:
            return _materialize(args[0]) + _serve_request(WeightRequest(source, _materialize(args[1])))
        return func(*tree_map(_materialize, args), **tree_map(_materialize, kwargs))


def stream_parameters(model: nn.Module) -> None:
    """Replace deferred parameters by streamed ones that are read on demand; in place.

    Args:
        model: The model; its parameters are ``DeferredTensor``.
    """
    streamed: dict[int, nn.Parameter] = {}
    scratch = _Scratch()
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            values: Any = parameter  # a parameter has the class of its tensor
            if not isinstance(values, DeferredTensor):
                continue
            if id(parameter) not in streamed:
                tensor = _StreamedTensor(_Source(values, len(streamed), scratch), values.like)
                streamed[id(parameter)] = nn.Parameter(tensor, requires_grad=False)
            module._parameters[name] = streamed[id(parameter)]


def streamed_slices(requests: Sequence[WeightRequest]) -> list[torch.Tensor]:
    """Serve requests for one parameter, which is read once.

    Raises:
        CheckpointError: the file is shorter than before.
    """
    source = requests[0].source
    matrices = [request.rows for request in requests if request.rows is not None]
    if not matrices:
        return [source.read()] * len(requests)
    together = torch.cat(matrices) if len(matrices) > 1 else matrices[0]
    products = [together @ piece.t() for piece in source.row_pieces()]
    product = torch.cat(products, dim=1) if len(products) > 1 else products[0]
    return list(torch.split(product, [len(matrix) for matrix in matrices]))


def _serve_request(request: WeightRequest) -> torch.Tensor:
    """Send a request to the handler of this thread, or serve it immediately."""
    if _ASKING.ask is None or request.source.kept is not None:
        return streamed_slices([request])[0]
    return _ASKING.ask(request)


def _materialize(value: Any) -> Any:
    """Convert a streamed tensor to an ordinary tensor; other values are unchanged."""
    if not isinstance(value, _StreamedTensor):
        return value
    origin = value.origin
    if isinstance(origin, _Source):
        return _serve_request(WeightRequest(origin))
    return origin.compute(_materialize)


def _source_of(value: object) -> _Source | None:
    """Parameter of a streamed tensor; ``None`` for other values."""
    if not isinstance(value, _StreamedTensor):
        return None
    origin = value.origin
    if isinstance(origin, _Source):
        return origin
    return _source_of(origin.arguments[0]) if origin.operation in (aten.detach.default, aten.alias.default) else None


def _transposed_source(value: object) -> _Source | None:
    """Parameter whose transposed matrix a tensor is; ``None`` for other values."""
    if not isinstance(value, _StreamedTensor) or not isinstance(value.origin, RecordedOperation) or value.dim() != 2:
        return None
    source = _source_of(value.origin.arguments[0]) if _is_transposing(value.origin) else None
    return source if source is not None and source.deferred.dim() == 2 else None


def _is_transposing(view: RecordedOperation) -> bool:
    """Return True if a view of a matrix swaps its axes."""
    if view.operation is aten.transpose.int:
        a, b = view.arguments[1:3]
        return bool((a - b) % 2)
    return view.operation is aten.t.default


def _row_slice(stored: StoredValues, start: int, count: int) -> StoredValues:
    """Return the storage of consecutive rows."""
    row_bytes = stored.size // stored.shape[0] * stored.dtype.numpy().itemsize
    return replace(stored, offset=stored.offset + start * row_bytes, shape=(count, *stored.shape[1:]))


def _read_tensor(stored: StoredValues, dtype: torch.dtype) -> torch.Tensor:
    values = stored.read()
    if not values.size:
        return torch.empty(stored.shape, dtype=dtype)
    flat = torch.frombuffer(values.reshape(-1).view(np.uint8), dtype=tensor_adapters.to_torch_dtype(stored.dtype))
    return flat.reshape(stored.shape).to(dtype)


def run_in_lock_step(
    works: Sequence[Callable[[_Ask], _Result]],
    serve: Callable[[Sequence[WeightRequest]], Sequence[torch.Tensor]],
) -> list[_Result]:
    """Run functions in lock step, so that all functions wait for the same weight at the same time.

    Each function has a separate thread, but only one thread runs at a time: a run continues until it requests a weight,
    and the weight is passed to every run that waits for it.

    Args:
        works: Functions that call their argument to request a weight.
        serve: Serves requests with one key; called in this thread.

    Raises:
        Exception: the first exception of a function or of ``serve``; the other runs are ended.
    """
    with ThreadPoolExecutor(len(works)) as threads:
        runs = [_Run(work, threads) for work in works]
        try:
            for run in runs:
                run.go_on()
            while waiting := [(run, run.request) for run in runs if run.request is not None]:
                earliest = min((request for _, request in waiting), key=lambda request: request.position)
                group = [(run, request) for run, request in waiting if request.key == earliest.key]
                outputs = serve([request for _, request in group])
                for (run, _), output in zip(group, outputs, strict=True):
                    run.go_on(output)
        finally:
            for run in runs:
                run.end()
    return [run.future.result() for run in runs]


class _EndedError(Exception):
    """Ends a run whose result is not needed."""


class _Run(Generic[_Result]):
    """A function that pauses at each request."""

    def __init__(self, work: Callable[[_Ask], _Result], threads: Executor) -> None:
        """Prepare a function; it starts with the first :meth:`go_on`."""
        self.request: WeightRequest | None = None
        """Pending request; ``None`` before the start and after the end."""
        self._answers: list[torch.Tensor] = []
        self._is_ending = False
        self._error: BaseException | None = None
        self._turn, self._stop = threading.Semaphore(0), threading.Semaphore(0)
        self.future: Future[_Result] = threads.submit(copy_context().run, self._run_work, work)

    def go_on(self, *outputs: torch.Tensor) -> None:
        """Resume until the next request or the end, with the output of the pending request.

        Raises:
            BaseException: exception of the function.
        """
        self._answers, self.request = list(outputs), None
        self._turn.release()
        self._stop.acquire()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """End the run if it has not finished."""
        self._is_ending = True
        self._turn.release()

    def _run_work(self, work: Callable[[_Ask], _Result]) -> _Result:
        """Run the function after the first turn, and keep its error."""
        try:
            self._turn.acquire()
            if self._is_ending:
                raise _EndedError
            return work(self._request_weight)
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._stop.release()

    def _request_weight(self, request: WeightRequest) -> torch.Tensor:
        """Pause at a request until it is served, and return the weight.

        Raises:
            _EndedError: the run ends, its result is not needed.
        """
        if not self._is_ending:
            self.request = request
            self._stop.release()
            self._turn.acquire()
        if self._is_ending:
            raise _EndedError
        return self._answers.pop()


def with_streaming_loader(prepared: PreparedPart) -> PreparedPart:
    """Return a part whose loader streams the weights on demand."""
    load_references = prepared.part.with_references
    assert load_references is not None  # the parameters have no values

    def load(dtype: torch.dtype | None = None) -> nn.Module:
        model = load_references(dtype)
        stream_parameters(model)
        return model

    return replace(prepared, part=replace(prepared.part, with_weights=load))


@contextmanager
def with_streamed_values(prepared: PreparedPart) -> Iterator[PreparedPart]:
    """Yield the prepared part unchanged if its parameters hold values, or else a part with streamed parameters.

    Raises:
        CheckpointError: the weights cannot be read or do not belong to the model.
    """
    if prepared.part.with_references is None:
        yield prepared
        return
    with _stream_parts(prepared, 1) as parts:
        yield parts[0]


@contextmanager
def _stream_parts(prepared: PreparedPart, count: int) -> Iterator[list[PreparedPart]]:
    """Yield copies of the prepared part with streamed parameters.

    Each copy has separate modules, since a forward may set attributes; parameters are shared.

    Args:
        prepared: A part whose parameters have no values.
        count: Number of copies.

    Raises:
        CheckpointError: the weights cannot be read or do not belong to the model.
    """
    part = prepared.part
    assert part.with_references is not None  # the parameters have no values
    model = part.with_references()
    stream_parameters(model)
    shared = {id(parameter): parameter for parameter in model.parameters()}
    models = [model, *(copy.deepcopy(model, dict(shared)) for _ in range(count - 1))]
    with ExitStack() as entered:
        parts = [
            entered.enter_context(
                prepared_part(replace(part, model=model, stored=None, with_weights=None, with_references=None))
            )
            for model in models
        ]
        for part_copy in parts:
            part_copy.forward.rename_outputs(prepared.forward.output_names)
        yield parts


def streamed_outputs(prepared: PreparedPart, draws: Sequence[Draw]) -> list[Draw]:
    """Add the outputs of PyTorch to the samples.

    Args:
        prepared: A part whose parameters have no values.
        draws: Samples that the part accepts.

    Raises:
        ExportError: the model refuses a sample; names the module.
        CheckpointError: the weights cannot be read or do not belong to the model.
    """

    def answer(weighted: PreparedPart, draw: Draw, ask: _Ask) -> Draw:
        # Gradient mode is local to the thread.
        with torch.no_grad(), asking(ask):
            return run_draw(weighted, draw)

    with _stream_parts(prepared, len(draws)) as parts, conditions_as_python():
        works = [partial(answer, weighted, draw) for weighted, draw in zip(parts, draws, strict=True)]
        return run_in_lock_step(works, streamed_slices)
