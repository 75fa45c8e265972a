"""Finds the module inside one that ``torch.compile`` wrapped.

``torch.compile`` returns a wrapper whose child ``_orig_mod`` is the user's module; that name must not appear in module
paths. Works on any object with torch's child modules. Never imports ``torch._dynamo``, which takes two seconds: if it
is not imported yet, nothing was compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

__all__ = ["uncompiled", "without_compilation"]

_WRAPPER_PACKAGE = "torch._dynamo"
"""Package of the class that wraps a compiled module."""


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module inside a ``torch.compile`` wrapper, or ``model`` itself where it is no wrapper."""
    inner = model._modules.get("_orig_mod") if type(model).__module__.startswith(_WRAPPER_PACKAGE) else None
    return model if inner is None else inner


@contextmanager
def without_compilation(model: nn.Module) -> Iterator[None]:
    """Replace every compiled module inside ``model`` by its uncompiled form for the time of the block.

    In place, undone at the end. Covers ``torch.compile(module)`` and ``module.compile()``.
    """
    calls = [(module, call) for module in model.modules() if (call := module._compiled_call_impl) is not None]
    wrapped = [
        (module._modules, name, child)
        for module in model.modules()
        for name, child in module._modules.items()
        if child is not None and uncompiled(child) is not child
    ]
    try:
        for module, _ in calls:
            module._compiled_call_impl = None
        for children, name, child in wrapped:
            children[name] = uncompiled(child)
        yield
    finally:
        for children, name, child in wrapped:
            children[name] = child
        for module, call in calls:
            module._compiled_call_impl = call
