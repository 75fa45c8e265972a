"""Access to the tensors of caches of a custom class: reading and replacement.

Such a cache is a list of states, or an object with lists and dicts of states. Its contents are found by inspection: no
class is known by name. ``finding.py`` reads the layers of transformers inside such an object.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from winml.modelkit.models.caches.layout import AccessPath

_LAYERS = "layers"
"""Attribute of a transformers cache that holds its layers."""
_SCALARS = (bool, int, float, complex, str)


def held_tensors(cache: object) -> dict[AccessPath, torch.Tensor]:
    """Return the tensors that a cache holds outside of its layers: access path → tensor."""
    return {path: value for path, value in _iterate_leaves(cache, ()) if isinstance(value, torch.Tensor)}


def held_values(cache: object) -> dict[AccessPath, object]:
    """Return the other values of a cache outside of layers (numbers, booleans, text, `None`): access path → value."""
    return {path: value for path, value in _iterate_leaves(cache, ()) if value is None or isinstance(value, _SCALARS)}


def with_tensors(cache: object, tensors: Mapping[AccessPath, object], layers: Sequence[object] = ()) -> Any:
    """Return a copy of a cache with some tensors replaced; other values are copied unchanged.

    Args:
        cache: A cache of the same model.
        tensors: Access path → new tensor.
        layers: New layers, if the cache has layers.
    """

    def replace_tensors(value: object, path: AccessPath) -> Any:
        if path in tensors:
            return tensors[path]
        if isinstance(value, torch.Tensor):
            return value.clone()
        return _map_children(value, path, replace_tensors)

    created = replace_tensors(cache, ())
    if layers:
        created.layers = list(layers)
    return created


def unread(value: object) -> Any:
    """Return a stand-in for a number or a tensor of numbers that supports counting and raises if read."""
    return value.as_subclass(_UnreadTensor) if isinstance(value, torch.Tensor) else _UnreadNumber()


class _ReadError(RuntimeError):
    """Error of a read count. Not a ``TypeError``: Python and torch retry comparisons after a ``TypeError``."""


class _UnreadNumber:
    """Counter that supports addition of numbers only."""

    def __add__(self, other: object) -> _UnreadNumber:
        _refuse_unless_number(other)
        return self

    __radd__ = __add__

    def _refuse_read(self, *_others: object) -> Any:
        raise _ReadError("a count is read")

    # Methods that every Python object has; other methods of numbers raise because the class does not define them.
    __bool__ = __eq__ = __ne__ = __hash__ = __repr__ = __format__ = _refuse_read
    __int__ = __index__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse_read


class _UnreadTensor(torch.Tensor):
    """Tensor of counters that supports addition of numbers only."""

    @classmethod
    def __torch_function__(cls, func: object, types: Any, args: Any = (), kwargs: object = None) -> Any:
        if func not in _ADDITIONS:
            raise _ReadError(f"{func} reads a count")
        _refuse_unless_number(args[1])
        return args[0]


_ADDITIONS = (torch.Tensor.__add__, torch.Tensor.__radd__, torch.Tensor.__iadd__, torch.Tensor.add_, torch.Tensor.add)


def _refuse_unless_number(value: object) -> None:
    if not isinstance(value, int):
        raise _ReadError(f"{type(value).__name__} is added to a count")


def _iterate_leaves(value: object, path: AccessPath) -> Iterator[tuple[AccessPath, Any]]:
    children = _list_children(value, path)
    if not children:
        yield path, value
    for key, child in children:
        yield from _iterate_leaves(child, (*path, key))


def _list_children(value: object, path: AccessPath) -> Sequence[tuple[str | int, Any]]:
    """Return the items of a container, or the attributes of the cache itself; `()` for tensors and nested objects."""
    if isinstance(value, torch.Tensor):
        return ()
    if isinstance(value, Mapping):
        return tuple(value.items())
    if isinstance(value, (list, tuple)):
        return tuple(enumerate(value))
    if path or not hasattr(value, "__dict__"):
        # A nested object, such as a config, is no state.
        return ()
    return tuple((name, child) for name, child in vars(value).items() if name != _LAYERS)


def _map_children(value: Any, path: AccessPath, change: Callable[[object, AccessPath], Any]) -> Any:
    children = {key: change(child, (*path, key)) for key, child in _list_children(value, path)}
    if isinstance(value, Mapping):
        return children
    if isinstance(value, (list, tuple)):
        return type(value)(children.values())
    if not children:
        return value
    created = copy.copy(value)
    vars(created).update(children)
    return created
