"""Leaves a module, and the settings of the process, as they were found.

A forward may write on its modules: count calls in a buffer, keep a table, replace a layer, draw random numbers. An
export calls it several times, and afterwards nothing of that must show.
"""

from __future__ import annotations

import logging
import random
import types
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from winml.modelkit.errors import first_line

__all__ = [
    "LeftAsFound",
    "module_left_as_found",
    "process_left_as_found",
    "quiet_torch",
    "restored_tensor_values",
    "unprinted_failures",
]


LARGEST_COPY_BYTES = 2**26
"""Chosen: tensors of this size in all are copied in some ten milliseconds. No forward known writes into more, and a
copy would cost as much memory as the model."""
_DEPTH = 4
"""Chosen: a list in a record in a mapping of a module is reached; a whole program that hangs on a module is not."""
_OPAQUE = (
    *weakref.ProxyTypes,  # first, as in remember()
    *(type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType),
    *(nn.Module, torch.Tensor),
)

_FLAGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, torch.set_default_device),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    (lambda: torch.is_autocast_enabled("cpu"), lambda is_on: torch.set_autocast_enabled("cpu", is_on)),
    (np.geterr, lambda settings: np.seterr(**settings)),
)
"""What returns a setting of the process, and what sets it."""
_UNREADABLE = object()


@contextmanager
def process_left_as_found() -> Iterator[None]:
    """Put back random generators (of torch, numpy and Python) and the settings of torch at the end of the block."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    device_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    flags = [_read_or_unreadable(read) for read, _ in _FLAGS]
    try:
        yield
    finally:
        for (read, write), value in zip(_FLAGS, flags, strict=True):
            if value is not _UNREADABLE and _read_or_unreadable(read) != value:
                write(value)
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        if device_states is not None:
            torch.cuda.set_rng_state_all(device_states)


def _read_or_unreadable(read: Callable[[], object]) -> Any:
    try:
        return read()
    except RuntimeError:  # such as where the same was set by another of torch's names for it
        return _UNREADABLE


@dataclass
class LeftAsFound:
    """What is told of a block at whose end state is put back."""

    notes: tuple[str, ...] = ()
    """At the end: one sentence for each thing that is not as it was found."""


@contextmanager
def module_left_as_found(model: nn.Module) -> Iterator[LeftAsFound]:
    """Put back, in place and at the end, all state of a module and of those below it.

    Attributes, hooks, parameters, buffers and modules are the same objects again, tensors have their values, gradients
    and flags, and lists, mappings and sets hold what they held. Values are put back up to ``LARGEST_COPY_BYTES`` of
    them in all; of others it is noted that they were written into.
    """
    found = LeftAsFound()
    state = _State()
    for module in list(model.modules()):
        state.remember(vars(module), _DEPTH)
        for value in vars(module).values():
            # A record on a module, such as a cache, is part of its state; what hangs on that record is not.
            if not isinstance(value, _OPAQUE) and hasattr(value, "__dict__"):
                state.remember(vars(value), 1)
    parameters = list(model.parameters())
    names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    copies, others = _copies([*state.tensors, *parameters])
    versions = [(tensor, _version(tensor)) for tensor in others]
    flags = [(parameter, parameter.requires_grad, parameter.grad) for parameter in parameters]
    try:
        yield found
    finally:
        state.put_back()
        refused = [(copy, reason) for copy in copies if (reason := copy.put_back())]
        written = [tensor for tensor, version in versions if _version(tensor) != version]
        found.notes = (
            *(
                f"the forward wrote into {names.get(id(tensor), 'a tensor')} ({_size_bytes(tensor) >> 20} MiB), which "
                "is too large to be copied and keeps what was written"
                for tensor in written
            ),
            *(
                f"{names.get(id(copy.tensor), 'a tensor')} could not be given back its values: {reason}"
                for copy, reason in refused
            ),
        )
        for parameter, requires_grad, gradient in flags:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
            if parameter.grad is not gradient:
                parameter.grad = gradient


@contextmanager
def restored_tensor_values(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Put back, in place and at the end, the values of tensors, up to ``LARGEST_COPY_BYTES`` of them in all."""
    copies, _ = _copies(tensors)
    try:
        yield
    finally:
        for copy in copies:
            copy.put_back()


@dataclass(frozen=True)
class _TensorCopy:
    """A tensor, and its values."""

    tensor: torch.Tensor
    values: torch.Tensor

    def put_back(self) -> str:
        """Give the tensor its values again; return what kept it from that, if anything."""
        tensor, values = self.tensor, self.values
        try:
            with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
                if tensor.shape != values.shape or tensor.dtype != values.dtype or tensor.device != values.device:
                    tensor.data = values
                elif not _are_equal(tensor, values):
                    tensor.copy_(values)
        except RuntimeError as error:
            return first_line(error)
        return ""


def _are_equal(tensor: torch.Tensor, values: torch.Tensor) -> bool:
    try:
        return torch.equal(tensor, values)
    except RuntimeError:  # torch compares no tensors of this dtype
        return False


def _copies(tensors: Iterable[torch.Tensor]) -> tuple[list[_TensorCopy], list[torch.Tensor]]:
    """Return copies of the values of tensors, the smallest first, and the tensors for which the limit was too small."""
    # Of other classes are fake tensors, and those that get their shape with the first call.
    classes = (torch.Tensor, nn.Parameter, nn.Buffer)
    held = [
        tensor
        for tensor in tensors
        if type(tensor) in classes and not tensor.is_meta and tensor.layout == torch.strided
    ]
    held.sort(key=_size_bytes)
    copies: list[_TensorCopy] = []
    left = LARGEST_COPY_BYTES
    for tensor in held:
        left -= _size_bytes(tensor)
        if left < 0:
            break
        copies.append(_TensorCopy(tensor, tensor.detach().clone()))
    return copies, held[len(copies) :]


def _size_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _version(tensor: torch.Tensor) -> int | None:
    """Return a number that grows with every write in place; None of a tensor that has none."""
    return None if tensor.is_inference() else tensor._version


class _State:
    """What containers hold, and the values of tensors in them."""

    def __init__(self) -> None:
        self.containers: dict[int, tuple[Any, Any]] = {}
        self.tensors: list[torch.Tensor] = []
        self._seen_tensors: set[int] = set()

    def remember(self, value: object, depth: int) -> None:
        """Remember a container with all that it holds, to a depth; or a tensor that is no parameter."""
        if type(value) in weakref.ProxyTypes:  # any other question to one whose object is gone raises
            return
        if isinstance(value, torch.Tensor):
            if not isinstance(value, nn.Parameter) and id(value) not in self._seen_tensors:
                self._seen_tensors.add(id(value))
                self.tensors.append(value)
        elif isinstance(value, (dict, list, set, deque)):
            if id(value) in self.containers:
                return
            kind = _kind(value)
            items = dict(kind.items(value)) if isinstance(value, dict) else list(kind.__iter__(value))
            self.containers[id(value)] = (value, items)
            if depth:
                for item in items.values() if isinstance(items, dict) else items:
                    self.remember(item, depth - 1)
        elif isinstance(value, tuple) and depth:
            for item in value:
                self.remember(item, depth - 1)

    def put_back(self) -> None:
        """Make every container hold what it held."""
        for container, items in self.containers.values():
            kind = _kind(container)  # a subclass may refuse what puts back
            if isinstance(container, dict):
                if not _are_same([*kind.items(container)], [*items.items()]):
                    kind.clear(container)
                    for key, value in items.items():
                        kind.__setitem__(container, key, value)
            elif not _are_same([*kind.__iter__(container)], items):
                kind.clear(container)
                (kind.update if isinstance(container, set) else kind.extend)(container, items)


def _kind(container: object) -> Any:
    """Return the class of Python's own that a container is of."""
    return next(kind for kind in (OrderedDict, dict, list, set, deque) if isinstance(container, kind))


def _are_same(now: list[object], before: list[object]) -> bool:
    """Say whether two lists hold the same objects in the same order; of pairs, the same two."""

    def identity(item: object) -> Any:
        return tuple(map(id, item)) if type(item) is tuple else id(item)

    return list(map(identity, now)) == list(map(identity, before))


# --- Suppresses the messages of torch and transformers during an export.
#
# They concern internals of the libraries and missing optional packages, so the user cannot act on them. Failures are
# raised as our errors.


_LIBRARIES = ("torch", "transformers", "onnxscript", "onnx_ir")


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Suppress warnings and log messages of the exporting libraries for the time of the block."""
    handlers = _log_handlers()
    for handler in handlers:
        handler.addFilter(_is_for_the_user)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(_is_for_the_user)


@contextmanager
def unprinted_failures() -> Iterator[None]:
    """Keep ``torch.export`` from printing its graph when it fails, past its loggers, for the time of the block."""
    # Half a second to import: by those who export with it only.
    from torch.export import _trace as export_trace

    vars(export_trace)["print"] = _print_nothing
    try:
        yield
    finally:
        del vars(export_trace)["print"]


def _print_nothing(*_values: object, **_options: object) -> None:
    return


def _is_for_the_user(log_record: logging.LogRecord) -> bool:
    return log_record.name.partition(".")[0] not in _LIBRARIES


def _log_handlers() -> list[logging.Handler]:
    """Return every handler that log records of these libraries may reach, also from loggers created later."""
    loggers = [
        logger
        for name, logger in logging.root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger) and name.partition(".")[0] in _LIBRARIES
    ]
    handlers = [handler for logger in (logging.root, *loggers) for handler in logger.handlers]
    return [*handlers, logging.lastResort] if logging.lastResort else handlers
