"""Leaves a module, and the settings of the process, as they were found.

A forward may write on its modules: count calls in a buffer, keep a table, replace a layer, draw random numbers. An
export calls it several times, and afterwards nothing of that must show.
"""

from __future__ import annotations

import random
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

__all__ = ["kept_values", "module_left_as_found", "process_left_as_found"]

LARGEST_COPY_BYTES = 2**26
"""Chosen: parameters of this size in all are copied in some ten milliseconds. No forward known writes into larger ones,
and a copy of those would cost as much memory as the model."""
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


@contextmanager
def process_left_as_found() -> Iterator[None]:
    """Put back random generators (of torch, numpy and Python) and the settings of torch at the end of the block."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    device_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    flags = [read() for read, _ in _FLAGS]
    try:
        yield
    finally:
        for (read, write), value in zip(_FLAGS, flags, strict=True):
            if read() != value:
                write(value)
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        if device_states is not None:
            torch.cuda.set_rng_state_all(device_states)


@contextmanager
def module_left_as_found(model: nn.Module) -> Iterator[None]:
    """Put back, in place and at the end, all state of a module and of those below it.

    Attributes, hooks, parameters, buffers and modules are the same objects again, tensors have their values, gradients
    and flags, and lists, mappings and sets hold what they held. Values of parameters are put back up to
    ``LARGEST_COPY_BYTES`` of them in all.
    """
    state = _State()
    for module in list(model.modules()):
        state.remember(vars(module), _DEPTH)
        for value in vars(module).values():
            # A record on a module, such as a cache, is part of its state; what hangs on that record is not.
            if not isinstance(value, _OPAQUE) and hasattr(value, "__dict__"):
                state.remember(vars(value), 1)
    parameters = list(model.parameters())
    held = (parameter for parameter in parameters if not isinstance(parameter, UninitializedParameter))
    if sum(parameter.numel() * parameter.element_size() for parameter in held) <= LARGEST_COPY_BYTES:
        state.tensors += _copies(parameters)
    flags = [(parameter, parameter.requires_grad, parameter.grad) for parameter in parameters]
    try:
        yield
    finally:
        state.put_back()
        for parameter, requires_grad, gradient in flags:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
            if parameter.grad is not gradient:
                parameter.grad = gradient


@contextmanager
def kept_values(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Put back, in place and at the end, the values of tensors; of those without values, nothing."""
    copies = _copies(tensors)
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

    def put_back(self) -> None:
        tensor, values = self.tensor, self.values
        with torch.no_grad():
            if tensor.shape != values.shape or tensor.dtype != values.dtype or tensor.device != values.device:
                tensor.data = values
            elif not torch.equal(tensor, values):
                tensor.copy_(values)


def _copies(tensors: Iterable[torch.Tensor]) -> list[_TensorCopy]:
    """Return copies of the values of tensors, of those that hold any."""
    # Of other classes are fake tensors, and those that get their shape with the first call.
    classes = (torch.Tensor, nn.Parameter, nn.Buffer)
    held = (tensor for tensor in tensors if type(tensor) in classes and not tensor.is_meta)
    return [_TensorCopy(tensor, tensor.detach().clone()) for tensor in held]


class _State:
    """What containers hold, and the values of tensors in them."""

    def __init__(self) -> None:
        self.containers: dict[int, tuple[Any, Any]] = {}
        self.tensors: list[_TensorCopy] = []
        self._seen_tensors: set[int] = set()

    def remember(self, value: Any, depth: int) -> None:
        """Remember a container with all that it holds, to a depth; or a tensor that is no parameter."""
        if type(value) in weakref.ProxyTypes:  # any other question to one whose object is gone raises
            return
        if isinstance(value, torch.Tensor):
            if not isinstance(value, nn.Parameter) and id(value) not in self._seen_tensors:
                self._seen_tensors.add(id(value))
                self.tensors += _copies([value])
        elif isinstance(value, (dict, list, set, deque)):
            if id(value) in self.containers:
                return
            items = dict(value) if isinstance(value, dict) else list(value)
            self.containers[id(value)] = (value, items)
            if depth:
                for item in items.values() if isinstance(items, dict) else items:
                    self.remember(item, depth - 1)
        elif isinstance(value, tuple) and depth:
            for item in value:
                self.remember(item, depth - 1)

    def put_back(self) -> None:
        """Make everything hold what it held."""
        for container, items in self.containers.values():
            if isinstance(container, dict):
                if not _are_same([*container.items()], [*items.items()]):
                    container.clear()
                    container.update(items)
            elif not _are_same([*container], items):
                container.clear()
                container.update(items) if isinstance(container, set) else container.extend(items)
        for copy in self.tensors:
            copy.put_back()


def _are_same(now: list[Any], before: list[Any]) -> bool:
    """Say whether two lists hold the same objects in the same order; of pairs, the same two."""

    def identity(item: Any) -> Any:
        return tuple(map(id, item)) if type(item) is tuple else id(item)

    return list(map(identity, now)) == list(map(identity, before))
