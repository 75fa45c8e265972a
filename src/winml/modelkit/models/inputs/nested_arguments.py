"""Conversion of the flat inputs of a graph into the arguments of a forward.

An argument may hold its tensors in lists, tuples, dicts, dataclasses and other containers registered with torch's
pytree. Every tensor becomes one input, named by its path: ``features.input_ids``, ``images.0``.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union, get_args, get_origin

import torch
from torch.utils import _pytree as pytree  # not public; torch.export flattens arguments with it

from winml.modelkit.errors import InputError, UsageError
from winml.modelkit.models.inputs.sizes import SEPARATOR

_CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.layout,
)  # fmt: skip
"""Types of arguments besides tensors; their values are the same in every call."""
_MAX_VALUE_LENGTH = 60


@dataclass(frozen=True)
class NestedArguments:
    """Arguments of a forward with replaceable tensors."""

    names: tuple[str, ...]
    """Names of the arguments, in order."""
    constants: Mapping[str, Any]
    """Path → value that is no tensor."""
    _build: Callable[[Mapping[str, torch.Tensor]], dict[str, object]]
    _results: Callable[[Any], Any] | None = None

    def build(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return the arguments by name, with the given tensors; containers are new in each call."""
        return self._build(tensors)

    def results(self, outputs: object) -> Any:
        """Return the outputs of the forward in the structure of the graph outputs; usually unchanged."""
        return outputs if self._results is None else self._results(outputs)

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence on every constant except `None`, which stands for an omitted argument."""
        texts = {name: repr(value) for name, value in self.constants.items() if value is not None}
        return tuple(
            f"{name} is the constant {text if len(text) <= _MAX_VALUE_LENGTH else text[:_MAX_VALUE_LENGTH] + '…'}: "
            "only tensors become inputs of the graph"
            for name, text in texts.items()
        )


def flatten_arguments(
    arguments: Mapping[str, object], requested_by: str
) -> tuple[dict[str, torch.Tensor], NestedArguments | None]:
    """Return the tensors in arguments by path, and a builder of the arguments.

    Args:
        arguments: Values by the name of the argument.
        requested_by: Origin of the arguments, for messages.

    Returns:
        The tensors in order, and the builder; `None` instead of the builder if every argument is a tensor.

    Raises:
        InputError: there is no tensor, a value is neither tensor nor constant nor a known container, or two tensors
            have one path.
    """
    flattening = _Flattening(requested_by, {}, {})
    try:
        build = flattening.flatten(dict(arguments), "")
    except RecursionError:
        raise InputError(
            f"{requested_by}: the arguments contain themselves", hint="Pass containers without cycles."
        ) from None
    tensors = flattening.tensors
    if not tensors:
        description = next(
            (f"{type(value).__name__} for {name!r}, without tensors" for name, value in arguments.items()), ""
        )
        raise InputError(
            f"{requested_by}: expected tensors, got {description or 'no inputs'}", hint="Pass at least one tensor."
        )
    if list(tensors) == list(arguments):
        return tensors, None
    return tensors, NestedArguments(tuple(arguments), flattening.constants, build)


@dataclass
class _Flattening:
    """The tensors and constants collected so far."""

    requested_by: str
    tensors: dict[str, torch.Tensor]
    constants: dict[str, object]

    def flatten(self, value: Any, prefix: str) -> Callable[[Mapping[str, torch.Tensor]], Any]:
        """Collect the tensors of a value; return a function that builds the value again.

        Raises:
            InputError: a leaf is neither a tensor nor a constant, cannot be built again, or its name is taken.
        """
        try:
            entries, structure = pytree.tree_flatten_with_path(value)
        except ValueError as error:
            # The registration of the type does not name keys.
            raise InputError(
                f"{self.requested_by}: {prefix or 'the arguments'}: {error}", hint="Pass a dict or a list instead."
            ) from error
        builders = [self._flatten_leaf(leaf, _join_path(prefix, map(_key_text, path))) for path, leaf in entries]
        return lambda tensors: pytree.tree_unflatten([build(tensors) for build in builders], structure)

    def _flatten_leaf(self, leaf: object, name: str) -> Callable[[Mapping[str, torch.Tensor]], Any]:
        """Collect a tensor or a constant; return a function that builds the leaf again.

        Raises:
            InputError: the leaf is neither, or its name is taken.
        """
        if isinstance(leaf, torch.Tensor):
            if name in self.tensors:
                raise InputError(
                    f"{self.requested_by}: two tensors have the name {name!r}", hint="Rename one of their keys."
                )
            self.tensors[name] = leaf
            return lambda tensors: tensors[name]
        if isinstance(leaf, _CONSTANTS):
            self.constants[name] = leaf
            return lambda _tensors: leaf
        members = _read_members(leaf)
        if members is None:
            raise InputError(
                f"{self.requested_by}: {name!r} is a {type(leaf).__name__}, expected a torch.Tensor, or a list, tuple, "
                "dict or dataclass of tensors",
                hint="Pass tensors (torch.from_numpy for arrays); register other containers with torch.export."
                "register_dataclass or torch.utils._pytree.",
            )
        build_members = self.flatten(members, name)
        if _replace_members(leaf, members) is None:
            raise InputError(
                f"{self.requested_by}: {name!r} is a {type(leaf).__name__}, which cannot be copied with new tensors",
                hint="Pass a dict, or a class that is constructed from a mapping.",
            )
        return lambda tensors: _replace_members(leaf, build_members(tensors))


def _join_path(prefix: str, keys: Iterator[str]) -> str:
    return SEPARATOR.join((*([prefix] if prefix else []), *keys))


def _key_text(key: object) -> str:
    """Return one step of a pytree path as text."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _read_members(value: object) -> dict[str, object] | None:
    """Return the members of a dataclass or of a mapping unknown to pytree; `None` for other values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return dict(value) if isinstance(value, Mapping) else None


def _replace_members(template: object, members: Mapping[str, object]) -> Any:
    """Return a copy with other members, `None` if the class does not allow a copy; the template stays unchanged.

    A registration of its type with pytree would outlast the export.
    """
    if dataclasses.is_dataclass(template):
        copied = copy.copy(template)
        for name, value in members.items():
            object.__setattr__(copied, name, value)  # also for frozen dataclasses
        return copied
    copiers = (_deep_copy_members, lambda template, members: type(template)(members))
    created = (_try_copy(make, template, members) for make in copiers)
    return next((mapping for mapping in created if mapping is not None), None)


def _try_copy(make: Callable[[object, Mapping[str, Any]], Any], template: object, members: Mapping[str, Any]) -> Any:
    """Return the copy that ``make`` creates; `None` if the call fails, or the copy has other members than these."""
    try:
        created = make(template, members)
        return (
            created
            if len(created) == len(members) and all(created[name] is members[name] for name in members)
            else None
        )
    except Exception:
        return None


def _deep_copy_members(template: Any, members: Mapping[str, object]) -> Any:
    """Return a copy of a mapping with other members, without copying its own members."""
    copied = copy.deepcopy(template, {id(value): value for value in template.values()})
    for name, value in members.items():
        copied[name] = value
    return copied


def arguments_of_names(
    model: torch.nn.Module | type[torch.nn.Module],
    names: Sequence[str],
    requested_by: str,
    constants: Mapping[str, object] | None = None,
) -> NestedArguments | None:
    """Return the conversion of inputs into the arguments of a forward; `None` if each input is one argument.

    ``features.input_ids`` is a value of the dict ``features``, ``images.0`` the first item of the list ``images``. An
    annotation of the forward may name another container: a tuple, a NamedTuple, a dataclass.

    Args:
        model: Model; its forward takes the arguments.
        names: Names of the inputs, containers and keys joined by dots.
        requested_by: Origin of the names, for messages.
        constants: Further arguments, by name.

    Raises:
        UsageError: a name is used for a tensor and for a container, or a container cannot be built from its names.
    """
    constants = constants or {}
    if not constants and not any("." in name for name in names):
        return None
    hints = _read_annotations(model)
    members = _group_by_member(names, requested_by)
    template = {name: _build_tree(paths, name, hints.get(name), requested_by) for name, paths in members.items()}
    tensors, arguments = flatten_arguments({**template, **constants}, requested_by)
    if set(tensors) != set(names):
        unmatched = sorted({*names} ^ {*tensors})
        raise UsageError(
            f"{requested_by}: {unmatched[0]!r} does not fit the class of its container", hint="Name its fields."
        )
    return arguments


def _group_by_member(paths: Sequence[str], requested_by: str) -> dict[str, list[str]]:
    """Return first name of the paths → rests of the paths; ``""`` for an empty rest.

    Raises:
        UsageError: a name is a tensor and a container.
    """
    members: dict[str, list[str]] = {}
    for path in paths:
        name, _, subpath = path.partition(".")
        members.setdefault(name, []).append(subpath)
    for name, subpaths in members.items():
        if "" in subpaths and len(subpaths) > 1:
            raise UsageError(
                f"{requested_by}: {name!r} is described as a tensor and as a container",
                hint="Describe the tensor, or those inside.",
            )
    return members


def _build_tree(paths: Sequence[str], name: str, hint: object, requested_by: str) -> Any:
    """Return a container of the annotated class, else a list if the keys count from 0, else a dict.

    Args:
        paths: Dotted names of the tensors in the container; ``""`` alone: the value is a tensor.
        name: Name of the parameter, for messages.
        hint: Its annotation.
        requested_by: Source of the names, for messages.
    """
    if list(paths) == [""]:
        return torch.empty(0, device="meta")
    hint = _strip_none(hint)
    members = _group_by_member(paths, requested_by)
    is_counted = sorted(members) == sorted(map(str, range(len(members))))
    origin = get_origin(hint) or hint
    values = {
        key: _build_tree(subpaths, f"{name}.{key}", _member_hint(hint, key), requested_by)
        for key, subpaths in members.items()
    }
    if isinstance(origin, type) and (dataclasses.is_dataclass(origin) or hasattr(origin, "_fields")):
        return _build_record(origin, values, name, requested_by)
    if is_counted and not (isinstance(origin, type) and issubclass(origin, Mapping)):
        sequence = [values[str(position)] for position in range(len(values))]
        return tuple(sequence) if origin is tuple else sequence
    return values


def _build_record(record: Any, values: Mapping[str, object], name: str, requested_by: str) -> Any:
    """Return a dataclass or NamedTuple with these members; other required members are `None`.

    Raises:
        UsageError: there is no such member, or the constructor fails.
    """
    required = [key for key, param in inspect.signature(record).parameters.items() if param.default is param.empty]
    try:
        return record(**{**dict.fromkeys(required), **values})
    except Exception as error:  # the constructor is the user's code
        raise UsageError(
            f"{requested_by}: {name}: {record.__name__} cannot be constructed from {', '.join(values)}: "
            f"{type(error).__name__}: {error}",
            hint=f"Its members: {', '.join(inspect.signature(record).parameters)}.",
        ) from error


def _read_annotations(model: Any) -> Mapping[str, Any]:
    try:
        return typing.get_type_hints(model.forward)
    except (NameError, TypeError, AttributeError):
        return {}


def _strip_none(hint: object) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
        return kinds[0] if len(kinds) == 1 else None
    return hint


def _member_hint(hint: object, key: str) -> Any:
    """Return the annotation of a member; `None` if unknown."""
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
