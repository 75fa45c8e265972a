"""Which containers do the names of inputs stand for, where no example shows them?

``features.input_ids`` is a value of the dict ``features``, ``images.0`` the first of the list ``images``. What the
annotations of the forward call otherwise (a tuple, a NamedTuple, a dataclass) is made of that class.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Union, get_args, get_origin

import torch

from winml.modelkit.errors import UsageError
from winml.modelkit.load.inputs.nested_arguments import NestedArguments, flatten_arguments

__all__ = ["arguments_of_names"]


def arguments_of_names(
    model: torch.nn.Module | type[torch.nn.Module],
    names: Sequence[str],
    given_by: str,
    constants: Mapping[str, Any] | None = None,
) -> NestedArguments | None:
    """Return how inputs of these names become the arguments of a forward; None where each is one.

    Args:
        model: Whose forward takes the arguments.
        names: Names of the inputs, containers and keys joined by dots.
        given_by: What gave the names, for messages.
        constants: Further arguments, by name.

    Raises:
        UsageError: a name stands for a tensor and for a container, or a container cannot be made of its names.
    """
    constants = constants or {}
    if not constants and not any("." in name for name in names):
        return None
    hints = _annotations(model)
    members = _members_of(names, given_by)
    template = {name: _value(paths, name, hints.get(name), given_by) for name, paths in members.items()}
    tensors, arguments = flatten_arguments({**template, **constants}, given_by)
    if set(tensors) != set(names):
        unmatched = sorted({*names} ^ {*tensors})
        raise UsageError(
            f"{given_by}: {unmatched[0]!r} does not fit the class of its container", hint="Name its fields."
        )
    return arguments


def _members_of(paths: Sequence[str], given_by: str) -> dict[str, list[str]]:
    """Return what follows the first name of each path, by that name; ``""`` where nothing does.

    Raises:
        UsageError: a name is a tensor and a container.
    """
    members: dict[str, list[str]] = {}
    for path in paths:
        first, _, rest = path.partition(".")
        members.setdefault(first, []).append(rest)
    for first, rests in members.items():
        if "" in rests and len(rests) > 1:
            raise UsageError(
                f"{given_by}: {first!r} is described as a tensor and as a container",
                hint="Describe the tensor, or those inside.",
            )
    return members


def _value(paths: Sequence[str], name: str, hint: Any, given_by: str) -> Any:
    """Return a value of the kind the annotation asks for, else a list where the keys count from 0, else a dict."""
    if list(paths) == [""]:
        return torch.empty(0, device="meta")
    hint = _without_none(hint)
    members = _members_of(paths, given_by)
    is_counted = sorted(members) == sorted(map(str, range(len(members))))
    origin = get_origin(hint) or hint
    values = {key: _value(rest, f"{name}.{key}", _hint_of(hint, key), given_by) for key, rest in members.items()}
    if isinstance(origin, type) and (dataclasses.is_dataclass(origin) or hasattr(origin, "_fields")):
        return _record(origin, values, name, given_by)
    if is_counted and not (isinstance(origin, type) and issubclass(origin, Mapping)):
        in_order = [values[str(position)] for position in range(len(values))]
        return tuple(in_order) if origin is tuple else in_order
    return values


def _record(record: Any, values: Mapping[str, Any], name: str, given_by: str) -> Any:
    """Return a dataclass or NamedTuple with these members; others that it needs are None.

    Raises:
        UsageError: it has no such member, or cannot be made.
    """
    needed = [key for key, item in inspect.signature(record).parameters.items() if item.default is item.empty]
    try:
        return record(**{**dict.fromkeys(needed), **values})
    except Exception as error:  # the constructor is the user's code
        raise UsageError(
            f"{given_by}: {name}: {record.__name__} cannot be made of {', '.join(values)}: "
            f"{type(error).__name__}: {error}",
            hint=f"Its members: {', '.join(inspect.signature(record).parameters)}.",
        ) from error


def _annotations(model: Any) -> Mapping[str, Any]:
    try:
        return typing.get_type_hints(model.forward)
    except (NameError, TypeError, AttributeError):
        return {}


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
        return kinds[0] if len(kinds) == 1 else None
    return hint


def _hint_of(hint: Any, key: str) -> Any:
    """Return the annotation of a member."""
    arguments = [kind for kind in get_args(hint) if kind is not ...]
    origin = get_origin(hint) or hint
    if isinstance(origin, type) and (dataclasses.is_dataclass(origin) or hasattr(origin, "_fields")):
        try:
            return typing.get_type_hints(origin).get(key)
        except (NameError, TypeError):
            return None
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return arguments[-1] if arguments else None
    if origin is tuple and key.isdigit() and int(key) < len(arguments):
        return arguments[int(key)]
    return arguments[0] if arguments else None
