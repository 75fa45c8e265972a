"""Runs the forward hooks of a module where they belong: the root's around its real forward, others in their scope.

NOTE: reads the dictionaries in which torch keeps the hooks of a module (docs/decisions/0004-private-seams.md).
``tests/integration/test_forward_hooks.py`` fails when one moves.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["detached_hooks", "has_hooks"]

_HOOK_DICTIONARIES = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def has_hooks(module: nn.Module) -> bool:
    """Say whether a module has hooks of its own before or after its forward."""
    return bool(module._forward_pre_hooks or module._forward_hooks)


class _Keywords(dict[str, object]):
    """Arguments by keyword; one that was given by position is found as well, as a hook may expect either."""

    def __init__(self, keywords: dict[str, object], signature: inspect.Signature, args: tuple[object, ...]) -> None:
        super().__init__(keywords)
        self._by_position = signature.bind_partial(*args).arguments

    def __missing__(self, name: str) -> Any:
        return self._by_position[name]


def _without_repetitions(
    signature: inspect.Signature, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[Any, ...], dict[str, object]]:
    """Return arguments where a keyword takes the place of the same argument given by position."""
    bound = signature.bind_partial(*args)
    repeated = {name for name in kwargs if name in bound.arguments}
    bound.arguments.update({name: kwargs[name] for name in repeated})
    return bound.args, {name: value for name, value in kwargs.items() if name not in repeated}


@contextmanager
def detached_hooks(module: nn.Module, forward: Callable[..., object]) -> Iterator[Callable[..., Any]]:
    """Take the hooks of a module away for the time of the block; yields ``forward`` with these hooks around it.

    A hook sees the arguments and the outputs of ``forward``, not what it is replaced by. Hooks that are registered
    inside the block are others.
    """
    if not has_hooks(module):
        yield forward
        return
    hooks = {name: getattr(module, name) for name in _HOOK_DICTIONARIES}
    for name in _HOOK_DICTIONARIES:
        setattr(module, name, OrderedDict())
    try:
        yield _with_hooks(module, forward, hooks)
    finally:
        for name, dictionary in hooks.items():
            setattr(module, name, dictionary)


def _with_hooks(module: nn.Module, forward: Callable[..., object], hooks: Mapping[str, Any]) -> Callable[..., Any]:
    signature = inspect.signature(forward)
    before = [
        (hook, key in hooks["_forward_pre_hooks_with_kwargs"]) for key, hook in hooks["_forward_pre_hooks"].items()
    ]
    after = [(hook, key in hooks["_forward_hooks_with_kwargs"]) for key, hook in hooks["_forward_hooks"].items()]

    def call(*args: object, **kwargs: object) -> Any:
        # Hooks without keywords see the arguments only where these are given by position.
        bound = signature.bind(*args, **kwargs)
        args, kwargs = bound.args, bound.kwargs
        for hook, takes in before:
            changed = hook(module, args, _Keywords(kwargs, signature, args)) if takes else hook(module, args)
            if changed is not None and takes:
                args, kwargs = _without_repetitions(signature, *changed)
            elif changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
        outputs = forward(*args, **kwargs)
        for hook, takes in after:
            keywords = _Keywords(kwargs, signature, args)
            changed = hook(module, args, keywords, outputs) if takes else hook(module, args, outputs)
            outputs = outputs if changed is None else changed
        return outputs

    call.__signature__ = signature  # type: ignore[attr-defined]  # read by inspect.signature
    return call
