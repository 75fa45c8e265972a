"""Restoration of the state of a module, and of the settings of the process.

A forward may modify its modules: count calls in a buffer, keep a table, replace a layer, draw random numbers. An export
calls the forward several times and must leave no such change behind.
"""

from __future__ import annotations

import functools
import logging
import os
import random
import sys
import types
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from winml.modelkit.errors import first_line

LARGEST_COPY_BYTES = 2**26
"""Chosen: copying tensors of this total size takes some ten milliseconds.

No forward known writes into more, and a copy would take as much memory as the model.
"""
_SMALL_BYTES = 2**16
"""Chosen: a forward that sets a parameter by its first input sets one number per channel."""
_TENSOR_CLASSES = (torch.Tensor, nn.Parameter, nn.Buffer)
"""Excluded classes are fake tensors, and tensors that get their shape with the first call."""
_HOOKS_MARK = "_output_capturing_hooks_installed"
"""Not public: transformers' mark on a module for hooks registered in the first forward; these hooks stay unchanged."""
_TORCH_CONTAINERS = ("_parameters", "_buffers", "_modules")
_TORCH_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes of every module, most of them mappings of hooks."""
_MAX_DEPTH = 4
"""Chosen: reaches a list in a record in a mapping of a module, but not a whole program referenced by a module."""
_OPAQUE = (
    *weakref.ProxyTypes,  # first, as in remember()
    *(type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType),
    *(nn.Module, torch.Tensor),
)

_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
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
"""Getter and setter of each setting of the process."""
_UNREADABLE = object()


@contextmanager
def restored_process_state() -> Iterator[None]:
    """Restore random generators (of torch, numpy and Python) and the settings of torch at the end of the block."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    device_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    flags = [_try_read(getter) for getter, _ in _SETTINGS]
    try:
        yield
    finally:
        for (getter, setter), value in zip(_SETTINGS, flags, strict=True):
            if value is not _UNREADABLE and _try_read(getter) != value:
                setter(value)
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        if device_states is not None:
            torch.cuda.set_rng_state_all(device_states)


def _try_read(getter: Callable[[], object]) -> Any:
    try:
        return getter()
    except RuntimeError:  # for example, if set through another API of torch
        return _UNREADABLE


@dataclass
class Restoration:
    """Notes of a state restoration."""

    notes: tuple[str, ...] = ()
    """Set at the end: one sentence for each state that could not be restored."""


@contextmanager
def restored_module_state(model: nn.Module) -> Iterator[Restoration]:
    """Restore, in place and at the end, all state of a module and of its submodules.

    Attributes, hooks, parameters, buffers and modules are the same objects again; tensors have their values, gradients
    and flags; lists, mappings and sets have their items. Values are restored up to a total of ``LARGEST_COPY_BYTES``; a
    write into a further tensor becomes a note.
    """
    restoration = Restoration()
    state = _StateRecord()
    for path, module in list(model.named_modules()):
        state.remember_module(path, module)
    parameters = list(model.parameters())
    names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    copies, large_tensors = _copy_values([*state.tensors, *parameters])
    versions = [(tensor, _read_version(tensor)) for tensor in large_tensors]
    flags = [(parameter, parameter.requires_grad, parameter.grad) for parameter in parameters]
    try:
        yield restoration
    finally:
        state.put_back()
        failures = [(copy, reason) for copy in copies if (reason := copy.put_back())]
        written_tensors = [tensor for tensor, version in versions if _read_version(tensor) != version]
        restoration.notes = (
            *(
                f"the forward wrote into {names.get(id(tensor), 'a tensor')} ({_size_bytes(tensor) >> 20} MiB), which "
                "is too large to be copied and keeps what was written"
                for tensor in written_tensors
            ),
            *(
                f"{names.get(id(copy.tensor), 'a tensor')} could not be given back its values: {reason}"
                for copy, reason in failures
            ),
        )
        for parameter, requires_grad, gradient in flags:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
            if parameter.grad is not gradient:
                parameter.grad = gradient


@contextmanager
def unchanged_attributes(model: nn.Module) -> Iterator[AttributeState]:
    """Restore, in place and at the end, the state kept by a forward on its modules: every run starts alike.

    Some forwards store the size or values of an input, count in a buffer, or replace a module by one for short texts
    (for: BigBird, BigBird-Pegasus), and use this state in later calls.
    """
    state = AttributeState(model)
    try:
        yield state
    finally:
        state.put_back()


def shared_state(model: nn.Module) -> dict[str, object]:
    """Return state that a forward may keep outside of its modules, in the user's code; this state is not restored.

    Covered are globals, class attributes, default arguments and variables of an enclosing function: of methods, of
    functions in their modules, of hooks, and of functions on modules. Numbers, flags and texts are recorded by value,
    small tensors by their values, containers by their items, objects by their attributes.
    """
    return _SharedState(model).fingerprints


class _SharedState:
    """Collector of shared state; visits each function and each container once."""

    def __init__(self, model: nn.Module) -> None:
        self.fingerprints: dict[str, object] = {}
        self._seen: set[int] = set()
        for kind in {kind: None for module in model.modules() for kind in type(module).__mro__}:
            source = sys.modules.get(kind.__module__)
            if source is None or _is_library_file(getattr(source, "__file__", None)):
                continue
            for owner, namespace in ((kind.__name__, vars(kind)), (kind.__module__, vars(source))):
                for name, value in list(namespace.items()):
                    self._record_value(f"{owner}.{name}", value)
        for module in model.modules():
            hooks = (hook for name in _OWN_HOOKS for hook in vars(module).get(name, {}).values())
            for value in (*vars(module).values(), *hooks):
                self._add_function(value)

    def _record_value(self, name: str, value: object) -> None:
        if isinstance(value, (*_CONTAINERS, int, float, str, type(None), torch.Tensor)):
            self.fingerprints[name] = _compute_fingerprint(value, _MAX_DEPTH)
        elif not self._add_function(value) and _is_record(value):
            self.fingerprints[name] = _compute_fingerprint(vars(value), _MAX_DEPTH)

    def _add_function(self, value: object) -> bool:
        """Add the state of a function of the user; return True if the value is a function."""
        if isinstance(value, (staticmethod, classmethod, functools.partial, types.MethodType)):
            value = value.func if isinstance(value, functools.partial) else value.__func__
        if isinstance(value, property):
            value = value.fget
        if not isinstance(value, types.FunctionType):
            return False
        if id(value) in self._seen or _is_library_file(value.__code__.co_filename):
            return True
        self._seen.add(id(value))
        code = value.__code__
        names = code.co_varnames[: code.co_argcount]
        defaults = value.__defaults__ or ()
        bound = dict(zip(names[len(names) - len(defaults) :], defaults, strict=False)) | (value.__kwdefaults__ or {})
        bound |= {
            name: _cell_value(cell) for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=False)
        }
        for variable, content in bound.items():
            self._record_value(f"{variable} of {value.__qualname__.replace('<locals>.', '')}()", content)
        return True


def _cell_value(cell: types.CellType) -> object:
    """Return the value of an enclosing function's variable; `None` if it is not bound yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


_CONTAINERS = (dict, list, set, frozenset, tuple, deque)
_OWN_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_MAX_ITEMS = 64
"""Chosen: maximum items of a container that are recorded; for larger ones, only their number."""


_LIBRARY_FOLDERS = (Path(__file__).parents[1], Path(os.__file__).parent)
"""Folders of this package and of Python's own modules."""


def _is_library_file(file: str | None) -> bool:
    path = Path(file or "site-packages")
    return "site-packages" in path.parts or any(path.is_relative_to(folder) for folder in _LIBRARY_FOLDERS)


def _is_record(value: object) -> bool:
    """Return True if a value is an object of the user's code that is neither a class nor a module."""
    if isinstance(value, (type, types.ModuleType, nn.Module)) or not hasattr(value, "__dict__"):
        return False
    source = sys.modules.get(type(value).__module__)
    return not _is_library_file(getattr(source, "__file__", None))


def _compute_fingerprint(value: object, depth: int) -> object:
    """Return an object that compares equal as long as a value is unchanged."""
    if isinstance(value, (bool, int, float, str, type(None))):
        return repr(value)
    if isinstance(value, torch.Tensor):
        is_readable = type(value) in _TENSOR_CLASSES and not value.is_meta and value.layout == torch.strided
        if not is_readable or _size_bytes(value) > _SMALL_BYTES:
            return (tuple(value.shape), id(value), _read_version(value))
        values = value.detach().cpu().contiguous().flatten().view(torch.uint8)
        return (tuple(value.shape), str(value.dtype), bytes(values.numpy()))
    if isinstance(value, _CONTAINERS):
        elements = list(value.items() if isinstance(value, dict) else value)
        if not depth or len(elements) > _MAX_ITEMS or isinstance(value, (set, frozenset)):
            return len(elements)
        return [_compute_fingerprint(element, depth - (not isinstance(element, tuple))) for element in elements]
    return type(value).__name__


class AttributeState:
    """The state of a module and of its submodules; values of parameters only if they are small."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._state = _StateRecord(torch_attributes=_TORCH_ATTRIBUTES, lasting=(_HOOKS_MARK,))
        for path, module in list(model.named_modules()):
            self._state.remember_module(path, module)
        self._names = {
            **{id(tensor): name for tensor, name in zip(self._state.tensors, self._state.tensor_names, strict=True)},
            **{id(tensor): name for name, tensor in model.named_parameters()},
        }
        parameters = list(model.parameters())
        small = [parameter for parameter in parameters if _size_bytes(parameter) <= _SMALL_BYTES]
        self._copies, uncopied = _copy_values([*self._state.tensors, *small])
        uncopied += [parameter for parameter in parameters if _size_bytes(parameter) > _SMALL_BYTES]
        self._versions = [(tensor, _read_version(tensor)) for tensor in uncopied]
        self._keeps_changes = False

    def keep(self) -> None:
        """Keep the current state at the end of the block."""
        self._keeps_changes = True

    def changes(self) -> tuple[str, ...]:
        """Return the paths of changed attributes: ``encoder.cached``."""
        tensors = [copy.tensor for copy in self._copies if not copy.is_equal()]
        tensors += [tensor for tensor, version in self._versions if _read_version(tensor) != version]
        names = [*self._state.changes(), *(self._names[id(tensor)] for tensor in tensors)]
        return tuple(dict.fromkeys(names))

    def separated(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Copy the tensors that share memory with restored state; return the others as they are."""
        held = {copy.tensor.untyped_storage().data_ptr() for copy in self._copies}
        return [
            tensor.clone()
            if type(tensor) in _TENSOR_CLASSES and tensor.untyped_storage().data_ptr() in held
            else tensor
            for tensor in tensors
        ]

    def put_back(self) -> None:
        """Restore the state, unless the current state is to be kept."""
        if not self._keeps_changes:
            self._restore_state()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the original state during the block, even if a later state is kept."""
        with unchanged_attributes(self._model):
            self._restore_state()
            yield

    def _restore_state(self) -> None:
        self._state.put_back()
        for copy in self._copies:
            copy.put_back()


@dataclass(frozen=True)
class _TensorCopy:
    """A tensor, and a copy of its values."""

    tensor: torch.Tensor
    values: torch.Tensor

    def is_equal(self) -> bool:
        """Return True if the tensor has its original values."""
        tensor, values = self.tensor, self.values
        is_alike = tensor.shape == values.shape and tensor.dtype == values.dtype and tensor.device == values.device
        return is_alike and _are_equal(tensor, values)

    def put_back(self) -> str:
        """Restore the values of the tensor; return the reason of a failure, or ``""``."""
        tensor, values = self.tensor, self.values
        try:
            with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
                if tensor.shape != values.shape or tensor.dtype != values.dtype or tensor.device != values.device:
                    tensor.data = values
                elif not self.is_equal():
                    tensor.copy_(values)
        except RuntimeError as error:
            return first_line(error)
        return ""


def _are_equal(tensor: torch.Tensor, values: torch.Tensor) -> bool:
    try:
        return torch.equal(tensor, values)
    except RuntimeError:  # torch cannot compare tensors of this dtype
        return False


def _copy_values(tensors: Iterable[torch.Tensor]) -> tuple[list[_TensorCopy], list[torch.Tensor]]:
    """Return copies of the values of tensors, the smallest first, and the tensors beyond the size limit."""
    copyable = [
        tensor
        for tensor in tensors
        if type(tensor) in _TENSOR_CLASSES and not tensor.is_meta and tensor.layout == torch.strided
    ]
    copyable.sort(key=_size_bytes)
    copies: list[_TensorCopy] = []
    bytes_left = LARGEST_COPY_BYTES
    for tensor in copyable:
        bytes_left -= _size_bytes(tensor)
        if bytes_left < 0:
            break
        copies.append(_TensorCopy(tensor, tensor.detach().clone()))
    return copies, copyable[len(copies) :]


def _size_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _read_version(tensor: torch.Tensor) -> int | None:
    """Return a number that grows with every write in place; `None` for a tensor without such a number."""
    return None if tensor.is_inference() else tensor._version


class _StateRecord:
    """Items of containers, and the tensors inside."""

    def __init__(self, torch_attributes: Collection[str] = (), lasting: Collection[str] = ()) -> None:
        """Start without remembered state.

        Args:
            torch_attributes: Attributes of every module; their contents are not remembered.
            lasting: Attributes that stay once they are set.
        """
        self.containers: dict[int, tuple[Any, Any, str]] = {}
        """Identity of a container → the container, its items, and its name; names of module attributes have a dot."""
        self.tensors: list[torch.Tensor] = []
        self.tensor_names: list[str] = []
        self._torch_attributes, self._lasting = torch_attributes, lasting
        self._seen_tensors: set[int] = set()

    def remember_module(self, path: str, module: nn.Module) -> None:
        """Remember the attributes of one module, except attributes that no forward changes."""
        prefix = f"{path}." if path else ""
        attributes = vars(module)
        self.containers[id(attributes)] = (attributes, dict(attributes), prefix)
        for name, value in attributes.items():
            if name in _TORCH_CONTAINERS:
                self.containers[id(value)] = (value, dict(value), prefix)
                for key, child in value.items():
                    self.remember(child, 0, f"{prefix}{key}")
            elif name not in self._torch_attributes:
                self.remember(value, _MAX_DEPTH, f"{prefix}{name}")
                # A record on a module, such as a cache, is part of its state; objects inside this record are not.
                if name != "forward" and not isinstance(value, _OPAQUE) and hasattr(value, "__dict__"):
                    self.remember(vars(value), 1, f"{prefix}{name}")

    def remember(self, value: object, depth: int, name: str) -> None:
        """Remember a container with all its contents, to a depth; or a tensor that is no parameter.

        Args:
            value: The container or tensor; other values are ignored.
            depth: Number of levels of containers inside.
            name: Name of the attribute, for notes.
        """
        if type(value) in weakref.ProxyTypes:  # any other access to a dead proxy raises
            return
        if isinstance(value, torch.Tensor):
            if not isinstance(value, nn.Parameter) and id(value) not in self._seen_tensors:
                self._seen_tensors.add(id(value))
                self.tensors.append(value)
                self.tensor_names.append(name)
        elif isinstance(value, (dict, list, set, deque)):
            if id(value) in self.containers:
                return
            kind = _builtin_class(value)
            items = dict(kind.items(value)) if isinstance(value, dict) else list(kind.__iter__(value))
            self.containers[id(value)] = (value, items, name)
            if depth:
                for child in items.values() if isinstance(items, dict) else items:
                    self.remember(child, depth - 1, name)
        elif isinstance(value, tuple) and depth:
            for child in value:
                self.remember(child, depth - 1, name)

    def changes(self) -> Iterator[str]:
        """Yield the names of attributes with another value or a changed container."""
        for container, items, name in self.containers.values():
            if name and not name.endswith("."):
                if not _has_same_items(container, items):
                    yield name
            else:
                for key in {**items, **container}:
                    is_same = key in items and key in container and items[key] is container[key]
                    if not is_same and key not in self._lasting:
                        yield f"{name}{key}"

    def put_back(self) -> None:
        """Restore the items of every container."""
        for container, items, _name in self.containers.values():
            if _has_same_items(container, items):
                continue
            kind = _builtin_class(container)  # a subclass may refuse these methods
            if isinstance(container, dict):
                items = {**items, **{key: container[key] for key in self._lasting if key in container}}
            kind.clear(container)
            if isinstance(container, dict):
                for key, value in items.items():
                    kind.__setitem__(container, key, value)
            else:
                (kind.update if isinstance(container, set) else kind.extend)(container, items)


def _has_same_items(container: Any, items: Any) -> bool:
    """Return True if a container holds the same objects, in the same order."""
    kind = _builtin_class(container)
    if isinstance(container, dict):
        sides = (kind.keys(container), items.keys()), (kind.values(container), items.values())
        return all(list(map(id, now)) == list(map(id, before)) for now, before in sides)
    return list(map(_get_identity, kind.__iter__(container))) == list(map(_get_identity, items))


def _builtin_class(container: object) -> Any:
    """Return the built-in class of a container."""
    return next(kind for kind in (OrderedDict, dict, list, set, deque) if isinstance(container, kind))


def _get_identity(element: object) -> Any:
    """Return the identity of an object; for a tuple, the identities of its items."""
    return tuple(map(id, element)) if type(element) is tuple else id(element)


_LIBRARIES = ("torch", "transformers", "onnxscript", "onnx_ir")


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Suppress warnings and log messages of the exporting libraries during the block.

    The messages concern internals of the libraries and missing optional packages, so the user cannot act on them.
    Failures are raised as our errors.
    """
    with warnings.catch_warnings(), ExitStack() as filters:
        warnings.simplefilter("ignore")
        for handler in _log_handlers():
            handler.addFilter(_is_foreign_record)
            filters.callback(handler.removeFilter, _is_foreign_record)
        yield


@contextmanager
def unprinted_failures() -> Iterator[None]:
    """Suppress the graph that ``torch.export`` prints on failure, bypassing its loggers, during the block."""
    # The import takes half a second: only for users of torch.export.
    from torch.export import _trace as export_trace

    vars(export_trace)["print"] = lambda *_values, **_options: None
    try:
        yield
    finally:
        del vars(export_trace)["print"]


def _is_foreign_record(log_record: logging.LogRecord) -> bool:
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
