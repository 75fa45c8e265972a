"""Which module does a compiled one stand for?

``torch.compile`` puts a module of its own around the one it is given, as its child ``_orig_mod``, which is no name of
the user's. Works on any object with torch's child modules and never imports torch itself: that part of it takes two
seconds to import, and whoever compiled has imported it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

__all__ = ["uncompiled", "without_compilation"]

_HOME = "torch._dynamo"
"""Where the class lives that stands around a compiled module."""


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` was given, or ``model`` itself where it was not."""
    inner = model._modules.get("_orig_mod") if type(model).__module__.startswith(_HOME) else None
    return model if inner is None else inner


@contextmanager
def without_compilation(model: nn.Module) -> Iterator[None]:
    """Put everything inside ``model`` that was compiled back to what it was before, for the time of the block.

    In place, undone at the end. ``module.compile()``, which exchanges how a module is called, is undone as well.
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
