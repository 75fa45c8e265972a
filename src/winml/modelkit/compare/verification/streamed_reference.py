"""Outputs of a model in PyTorch whose weights remain in the checkpoint.

The values of a parameter are read whenever a forward computes with them, and dropped afterwards. A product with a large
weight reads the weight in pieces, an embedding reads the rows it returns, and any other operation reads the whole
tensor. All inputs are answered side by side: each weight is read once for all of them.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
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
"""Values of a weight held at a time. Chosen: a fraction of what the libraries take, large enough to compute well."""
RETAINED_BYTES = 1 << 18
"""Parameters up to this size are read once and kept. Chosen: norms and biases, which together are small."""

_CAST = aten._to_copy.default

_Result = TypeVar("_Result")


class _Scratch:
    """Memory for a piece of a weight, the same for all: memory that is given back in between is not all of it free."""

    def __init__(self) -> None:
        """Take no memory yet."""
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
            self._memories[use] = held = torch.empty(max(needed, _PIECE_BYTES), dtype=torch.uint8)
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
        origin = self.deferred.origin
        if isinstance(origin, StoredTensor) and origin.permutation is None and self.deferred.dim() > 0:
            return origin.stored
        return None

    @property
    def coded(self) -> CodedWeight | None:
        """The codes whose rows are its own; None where it has none."""
        origin = self.deferred.origin
        if isinstance(origin, CodedTensor) and origin.permutation is None and self.deferred.dim() == 2:
            return origin.weight
        return None

    def read(self) -> torch.Tensor:
        """Return the values.

        Raises:
            CheckpointError: the file became shorter.
        """
        if self.kept is not None:
            return self.kept
        deferred, stored = self.deferred, self.stored
        values = deferred.realized() if stored is None else _read(stored, deferred.dtype)
        if values.numel() * values.element_size() <= RETAINED_BYTES:
            self.kept = values
        return values

    def row_pieces(self) -> Iterator[torch.Tensor]:
        """Yield the rows of a matrix in order, a piece at a time; the next one takes the memory of the one before.

        Raises:
            CheckpointError: the file became shorter.
        """
        count, width = self.deferred.shape
        stored, coded = self.stored, self.coded
        if coded is not None and self.kept is None:
            parts = coded.read()
            step = max(1, _PIECE_BYTES // (width * 4))
            for start in range(0, count, step):
                yield self._numbers(coded.values_of_rows(parts, slice(start, start + step)))
            return
        if stored is None or self.kept is not None or not stored.size:
            yield self.read()
            return
        rows = max(1, _PIECE_BYTES // (width * self.deferred.element_size()))
        for start in range(0, count, rows):
            yield self.scratch.read(_row_slice(stored, start, min(rows, count - start)), self.deferred.dtype)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the rows of a table at these places; each is read once.

        Raises:
            CheckpointError: the file became shorter.
        """
        stored, coded = self.stored, self.coded
        if (stored is None and coded is None) or self.kept is not None or not indices.numel():
            return self.read()[indices]
        requested, places = torch.unique(indices, return_inverse=True)
        if coded is not None:
            return self._numbers(coded.values_of_rows(coded.read(), requested.numpy()))[places]
        assert stored is not None  # one of the two is there
        return torch.cat([_read(_row_slice(stored, int(row), 1), self.deferred.dtype) for row in requested])[places]

    def _numbers(self, values: Array) -> torch.Tensor:
        return torch.from_numpy(values).to(self.deferred.dtype)


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


_Ask = Callable[[WeightRequest], torch.Tensor]


class _Asking(threading.local):
    """Who answers the requests of a thread; None: they are answered at once."""

    ask: _Ask | None = None


_ASKING = _Asking()


@contextmanager
def asking(ask: _Ask) -> Iterator[None]:
    """Let ``ask`` answer what forwards in this thread want of parameters, for the time of the block."""
    before, _ASKING.ask = _ASKING.ask, ask
    try:
        yield
    finally:
        _ASKING.ask = before


class _StreamedTensor(UnreadTensor):
    """A parameter that has values only while something is computed with it; or a view of one, or one cast."""

    origin: _Source | RecordedOperation

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch documents and calls it
        cls, func: Any, types: object, args: Any = (), kwargs: Any = None
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
            return cls.recorded(func, args, kwargs)
        if func is aten.embedding.default and (source := _source_of(args[0])) is not None:
            return source.rows(args[1])
        if func in (aten.linear.default, aten.matmul.default):
            # Under inference_mode these come whole; their parts are handled here.
            return func.decompose(*args, **kwargs)
        if func is aten.mm.default and (source := _transposed_source(args[1])) is not None:
            return _request(WeightRequest(source, _values(args[0])))
        if func is aten.addmm.default and (source := _transposed_source(args[2])) is not None and not kwargs:
            return _values(args[0]) + _request(WeightRequest(source, _values(args[1])))
        return func(*tree_map(_values, args), **tree_map(_values, kwargs))


def stream_parameters(model: nn.Module) -> None:
    """Let a model whose parameters are deferred compute with them, each read when its turn comes; in place.

    Args:
        model: Its parameters are ``DeferredTensor``.
    """
    streamed: dict[int, nn.Parameter] = {}
    scratch = _Scratch()
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            values: Any = parameter  # a parameter is of the class of its tensor
            if not isinstance(values, DeferredTensor):
                continue
            if id(parameter) not in streamed:
                tensor = _StreamedTensor(_Source(values, len(streamed), scratch), values.like)
                streamed[id(parameter)] = nn.Parameter(tensor, requires_grad=False)
            module._parameters[name] = streamed[id(parameter)]


def streamed_slices(requests: Sequence[WeightRequest]) -> list[torch.Tensor]:
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


def _request(request: WeightRequest) -> torch.Tensor:
    if _ASKING.ask is None or request.source.kept is not None:
        return streamed_slices([request])[0]
    return _ASKING.ask(request)


def _values(value: Any) -> Any:
    """Return an ordinary tensor for a streamed one, and everything else as it is."""
    if not isinstance(value, _StreamedTensor):
        return value
    origin = value.origin
    if isinstance(origin, _Source):
        return _request(WeightRequest(origin))
    return origin.compute(_values)


def _source_of(value: object) -> _Source | None:
    """Return the parameter that a tensor is; None where it is anything else."""
    if not isinstance(value, _StreamedTensor):
        return None
    origin = value.origin
    if isinstance(origin, _Source):
        return origin
    return _source_of(origin.arguments[0]) if origin.operation in (aten.detach.default, aten.alias.default) else None


def _transposed_source(value: object) -> _Source | None:
    """Return the parameter that a tensor is the transposed matrix of; None where it is anything else."""
    if not isinstance(value, _StreamedTensor) or not isinstance(value.origin, RecordedOperation) or value.dim() != 2:
        return None
    source = _source_of(value.origin.arguments[0]) if _is_transposing(value.origin) else None
    return source if source is not None and source.deferred.dim() == 2 else None


def _is_transposing(view: RecordedOperation) -> bool:
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


def run_in_lock_step(
    works: Sequence[Callable[[_Ask], _Result]],
    serve: Callable[[Sequence[WeightRequest]], Sequence[torch.Tensor]],
) -> list[_Result]:
    """Run functions side by side, such that all of them wait for the same weight at the same time.

    Each function has a thread of its own, but only one is ever at work: a run goes on until it asks for a weight, and
    the weight is given to every run that waits for the same.

    Args:
        works: Functions that call what they are given to ask for something.
        serve: Answers requests of one key; called in this thread.

    Raises:
        Exception: what the first of the works raised, or ``serve``; the others are ended.
    """
    with ThreadPoolExecutor(len(works)) as threads:
        runs = [_Run(work, threads) for work in works]
        try:
            for run in runs:
                run.go_on()
            while waiting := [(run, run.request) for run in runs if run.request is not None]:
                first = min((request for _, request in waiting), key=lambda request: request.position)
                group = [(run, request) for run, request in waiting if request.key == first.key]
                outputs = serve([request for _, request in group])
                for (run, _), output in zip(group, outputs, strict=True):
                    run.go_on(output)
        finally:
            for run in runs:
                run.end()
    return [run.future.result() for run in runs]


class _EndedError(Exception):
    """Ends a run whose result nobody waits for."""


class _Run(Generic[_Result]):
    """One function that stops whenever it asks for something."""

    def __init__(self, work: Callable[[_Ask], _Result], threads: Executor) -> None:
        """Take a function; it begins with the first :meth:`go_on`."""
        self.request: WeightRequest | None = None
        """What it waits for; None before it began and after it ended."""
        self._answers: list[torch.Tensor] = []
        self._is_ending = False
        self._error: BaseException | None = None
        self._turn, self._stop = threading.Semaphore(0), threading.Semaphore(0)
        self.future: Future[_Result] = threads.submit(self._main, work)

    def go_on(self, *outputs: torch.Tensor) -> None:
        """Let it work until it asks for something or ends; with an answer, where it asked.

        Raises:
            BaseException: what its function raised.
        """
        self._answers, self.request = list(outputs), None
        self._turn.release()
        self._stop.acquire()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """End it, if it is still at work."""
        self._is_ending = True
        self._turn.release()

    def _main(self, work: Callable[[_Ask], _Result]) -> _Result:
        try:
            self._turn.acquire()
            if self._is_ending:
                raise _EndedError
            return work(self._ask)
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._stop.release()

    def _ask(self, request: WeightRequest) -> torch.Tensor:
        if not self._is_ending:
            self.request = request
            self._stop.release()
            self._turn.acquire()
        if self._is_ending:
            raise _EndedError
        return self._answers.pop()


def with_streaming_loader(prepared: PreparedPart) -> PreparedPart:
    """Return a part whose weights, where they are loaded, are read whenever something is computed with them."""
    load_references = prepared.part.with_references
    assert load_references is not None  # the parameters have no values

    def load(dtype: torch.dtype | None = None) -> nn.Module:
        model = load_references(dtype)
        stream_parameters(model)
        return model

    return replace(prepared, part=replace(prepared.part, with_weights=load))


@contextmanager
def with_streamed_values(prepared: PreparedPart) -> Iterator[PreparedPart]:
    """Yield the prepared part as it is where its parameters hold values, else one that reads them as it goes.

    Raises:
        CheckpointError: the weights cannot be read or are not those of the model.
    """
    if prepared.part.with_references is None:
        yield prepared
        return
    with _streamed(prepared, 1) as parts:
        yield parts[0]


@contextmanager
def _streamed(prepared: PreparedPart, count: int) -> Iterator[list[PreparedPart]]:
    """Yield the prepared part as often as asked for, with parameters that are read when something is computed.

    Each has modules of its own, since a forward may write on them; parameters are shared.

    Args:
        prepared: A part whose parameters have no values.
        count: How many of them.

    Raises:
        CheckpointError: the weights cannot be read or are not those of the model.
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
        for item in parts:
            item.forward.rename_outputs(prepared.forward.output_names)
        yield parts


def streamed_outputs(prepared: PreparedPart, draws: Sequence[Draw]) -> list[Draw]:
    """Return the draws with what the model answers in PyTorch.

    Args:
        prepared: A part whose parameters have no values.
        draws: Inputs that it takes.

    Raises:
        ExportError: the model refuses one of them; names the module.
        CheckpointError: the weights cannot be read or are not those of the model.
    """

    def answer(weighted: PreparedPart, draw: Draw, ask: _Ask) -> Draw:
        # Gradients are a matter of the thread.
        with torch.no_grad(), asking(ask):
            return run_draw(weighted, draw)

    with _streamed(prepared, len(draws)) as parts, conditions_as_python():
        works = [partial(answer, weighted, draw) for weighted, draw in zip(parts, draws, strict=True)]
        return run_in_lock_step(works, streamed_slices)
