"""How do the flat inputs of a graph become the arguments of a forward?

An argument may hold its tensors in lists, tuples, dicts, dataclasses and whatever else is registered with torch's
pytree. Every tensor becomes one input, named by its path: ``features.input_ids``, ``images.0``.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree  # not public; torch.export flattens arguments with it

from winml.modelkit.errors import InputError
from winml.modelkit.load.inputs.input_names import SEPARATOR

__all__ = ["NestedArguments", "flatten_arguments"]

_CONSTANTS = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.layout,
)  # fmt: skip
"""What a forward may be given besides tensors; the same in every call."""
_LONGEST_SHOWN = 60


@dataclass(frozen=True)
class NestedArguments:
    """Arguments with a place for every tensor."""

    names: tuple[str, ...]
    """Names of the arguments, in order."""
    constants: Mapping[str, Any]
    """Path → value, for what is no tensor."""
    _build: Callable[[Mapping[str, torch.Tensor]], dict[str, Any]]
    _results: Callable[[Any], Any] | None = None

    def build(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return the arguments by name, with these tensors in their places; containers are new in each call."""
        return self._build(tensors)

    def results(self, outputs: Any) -> Any:
        """Return what the forward returned in the form whose tensors become outputs; as it is, as a rule."""
        return outputs if self._results is None else self._results(outputs)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return a sentence on every constant but None, which stands for what is left out."""
        shown = {name: repr(value) for name, value in self.constants.items() if value is not None}
        return tuple(
            f"{name} is the constant {text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + '…'}: "
            "only tensors become inputs of the graph"
            for name, text in shown.items()
        )


def flatten_arguments(
    arguments: Mapping[str, Any], given_by: str
) -> tuple[dict[str, torch.Tensor], NestedArguments | None]:
    """Return the tensors in arguments by path, and how to build the arguments again.

    Args:
        arguments: Values by the name of the argument.
        given_by: What gave them, for messages.

    Returns:
        The tensors in order, and None in place of the builder where every argument is a tensor.

    Raises:
        InputError: there is no tensor, a value is neither tensor nor constant nor a known container, or two tensors
            have one path.
    """
    flattening = _Flattening(given_by, {}, {})
    try:
        build = flattening.flatten(dict(arguments), "")
    except RecursionError:
        raise InputError(f"{given_by}: the arguments contain themselves", hint="Give a tree of containers.") from None
    tensors = flattening.tensors
    if not tensors:
        given = next((f"{type(value).__name__} for {name!r}, and no tensor" for name, value in arguments.items()), "")
        raise InputError(f"{given_by} gave {given or 'no inputs'}", hint="Give at least one tensor.")
    if list(tensors) == list(arguments):
        return tensors, None
    return tensors, NestedArguments(tuple(arguments), flattening.constants, build)


@dataclass
class _Flattening:
    """The tensors and constants found so far."""

    given_by: str
    tensors: dict[str, torch.Tensor]
    constants: dict[str, Any]

    def flatten(self, value: Any, prefix: str) -> Callable[[Mapping[str, torch.Tensor]], Any]:
        """Take the tensors out of a value; return what builds it again."""
        try:
            entries, structure = pytree.tree_flatten_with_path(value)
        except ValueError as error:
            # A registered type whose registration names no keys.
            raise InputError(
                f"{self.given_by}: {prefix or 'the arguments'}: {error}", hint="Give a dict or a list instead."
            ) from error
        builders = [self._leaf(leaf, _joined(prefix, map(_key_words, path))) for path, leaf in entries]
        return lambda tensors: pytree.tree_unflatten([build(tensors) for build in builders], structure)

    def _leaf(self, leaf: Any, name: str) -> Callable[[Mapping[str, torch.Tensor]], Any]:
        if isinstance(leaf, torch.Tensor):
            if name in self.tensors:
                raise InputError(
                    f"{self.given_by} gave two tensors at {name!r}", hint="Rename one of the keys that hold them."
                )
            self.tensors[name] = leaf
            return lambda tensors: tensors[name]
        if isinstance(leaf, _CONSTANTS):
            self.constants[name] = leaf
            return lambda _tensors: leaf
        members = _members(leaf)
        if members is None:
            raise InputError(
                f"{self.given_by} gave {type(leaf).__name__} for {name!r}, expected a torch.Tensor, or a list, tuple, "
                "dict or dataclass of tensors",
                hint="Give tensors (torch.from_numpy for arrays); register other containers with torch.export."
                "register_dataclass or torch.utils._pytree.",
            )
        build_members = self.flatten(members, name)
        if _with_members(leaf, members) is None:
            raise InputError(
                f"{self.given_by} gave {type(leaf).__name__} for {name!r}, of which no copy with other tensors can be "
                "made",
                hint="Give a dict, or a class that is made from a mapping.",
            )
        return lambda tensors: _with_members(leaf, build_members(tensors))


def _joined(prefix: str, keys: Iterator[str]) -> str:
    return SEPARATOR.join((*([prefix] if prefix else []), *keys))


def _key_words(key: Any) -> str:
    """Return one step of a path of pytree."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _members(value: Any) -> dict[str, Any] | None:
    """Return what a dataclass or a mapping that pytree does not know holds; None for anything else."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return dict(value) if isinstance(value, Mapping) else None


def _with_members(template: Any, members: Mapping[str, Any]) -> Any:
    """Return a copy with other members, None where none can be made; the template stays as it is.

    Registering its type with pytree would outlast the export.
    """
    if dataclasses.is_dataclass(template):
        copied = copy.copy(template)
        for name, value in members.items():
            object.__setattr__(copied, name, value)  # also where it is frozen
        return copied
    ways = (_deep_copy_with, lambda template, members: type(template)(members))
    made = (_made_or_none(make, template, members) for make in ways)
    return next((mapping for mapping in made if mapping is not None), None)


def _made_or_none(make: Callable[[Any, Mapping[str, Any]], Any], template: Any, members: Mapping[str, Any]) -> Any:
    try:
        made = make(template, members)
        return made if len(made) == len(members) and all(made[name] is members[name] for name in members) else None
    except Exception:
        return None


def _deep_copy_with(template: Any, members: Mapping[str, Any]) -> Any:
    """Return a copy of a mapping with other members, whose own ones are not copied."""
    copied = copy.deepcopy(template, {id(value): value for value in template.values()})
    for name, value in members.items():
        copied[name] = value
    return copied
