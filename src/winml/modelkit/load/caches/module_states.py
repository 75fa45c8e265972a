"""States that modules keep in attributes of their own from run to run, beside the cache that a forward is given.

Found by running the forward on shapes and looking which attributes hold tensors afterwards. No model is known by name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from winml.modelkit.load.caches.layout import CacheState

__all__ = ["STATES", "ModuleState", "found_states", "given_states"]

STATES = "states_of_modules"
"""Chosen: name of the argument that takes the states of modules, and of the result that holds them afterwards."""
_Place = tuple[str, str]
"""Path of a module, and name of the attribute."""


@dataclass(frozen=True)
class ModuleState:
    """One attribute that a module keeps."""

    path: str
    """Of the module."""
    attribute: str
    class_name: str
    """Of the module."""
    state: CacheState


@contextmanager
def found_states(model: nn.Module) -> Iterator[dict[_Place, torch.Tensor]]:
    """Collect the tensors that attributes hold at the end of the block and did not hold before; they are put back.

    Yields:
        Module and attribute → tensor; filled at the end.
    """
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    found: dict[_Place, torch.Tensor] = {}
    try:
        yield found
    finally:
        for path, module in model.named_modules():
            for name, value in list(vars(module).items()):
                is_new = value is not before[path].get(name)
                if is_new and isinstance(value, torch.Tensor):
                    found[path, name] = value
                if is_new and name in before[path]:
                    vars(module)[name] = before[path][name]
                elif is_new:
                    del vars(module)[name]


def given_states(states: tuple[ModuleState, ...], argument: str) -> Callable[[nn.Module], Callable[..., Any]]:
    """Return what makes a forward that is given the states of modules, and returns them with the cache it was given.

    Args:
        states: The states.
        argument: Parameter of the forward that takes the cache, which is changed in place.
    """

    def entry(model: nn.Module) -> Callable[..., Any]:
        forward = model.forward

        @functools.wraps(forward)
        def call(*args: Any, **arguments: Any) -> Any:
            given: Mapping[_Place, torch.Tensor] | None = arguments.pop(STATES, None)
            if given is None:
                # As its user calls it: the modules keep them.
                return forward(*args, **arguments)
            for (path, name), tensor in given.items():
                setattr(model.get_submodule(path), name, tensor)
            outputs = forward(*args, **arguments)
            kept = {
                (item.path, item.attribute): getattr(model.get_submodule(item.path), item.attribute) for item in states
            }
            return {**outputs, argument: arguments[argument], STATES: kept}

        call.__signature__ = _with_parameter(inspect.signature(forward), STATES)  # type: ignore[attr-defined]
        return call

    return entry


def _with_parameter(signature: inspect.Signature, name: str) -> inspect.Signature:
    """Return a signature with one more keyword."""
    further = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
    parameters = sorted([*signature.parameters.values(), further], key=lambda parameter: parameter.kind)
    return signature.replace(parameters=parameters)
