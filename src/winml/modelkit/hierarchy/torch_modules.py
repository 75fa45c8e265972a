"""Which modules of ``torch.nn`` are modules of the hierarchy?

Decides from a recorded forward pass, or from the scopes in a file; who asks records the calls. Imports no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from winml.modelkit.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "CalledModule",
    "TorchModules",
    "comes_with_torch",
    "comes_with_transformers",
    "hierarchy_paths",
    "normalized_torch_modules",
    "torch_module_notes",
    "uncompiled",
    "without_compilation",
]


TorchModuleRule = Literal["auto", "none", "all"]
TorchModules = TorchModuleRule | tuple[str, ...]
"""Which modules of ``torch.nn`` are in the hierarchy, beside the root: those with only the root above them (``auto``),
``none``, ``all``, or those of the classes listed."""
RULES: tuple[TorchModuleRule, ...] = get_args(TorchModuleRule)

SHOWN_CLASSES = 8
"""Classes named in a note. Chosen: they fit on one line."""


class CalledModule(Protocol):
    """A module that ran."""

    @property
    def path(self) -> str:
        """Dotted module path; ``""`` is the root."""

    @property
    def class_name(self) -> str:
        """Name of its class."""

    @property
    def is_torch_nn(self) -> bool:
        """Whether the class comes with ``torch.nn``."""

    @property
    def is_transformers(self) -> bool:
        """Whether the class comes with transformers, or is derived from one that does."""

    @property
    def calls(self) -> int:
        """How often it was called; 0 where that is unknown."""

    @property
    def stack(self) -> Sequence[str]:
        """Paths of the modules on the call stack of its first call, outermost first, itself excluded."""

    @property
    def callers(self) -> Iterable[str]:
        """Paths of the modules that called it, in any of its calls."""


def comes_with_torch(package: str) -> bool:
    """Say whether a class of this Python module comes with ``torch.nn``."""
    return f"{package}.".startswith("torch.nn.")


def comes_with_transformers(package: str) -> bool:
    """Say whether a class of this Python module comes with transformers, or with a checkpoint it loads."""
    return f"{package}.".startswith(("transformers.", "transformers_modules."))


def normalized_torch_modules(value: Any) -> Any:
    """Return a selection in one form: one of the three words, or a tuple of class names.

    Args:
        value: A word, class names separated by commas, or a list of either; anything else is returned as it is.

    Raises:
        ValueError: one of the words stands beside other names.

    >>> normalized_torch_modules("Linear, LayerNorm"), normalized_torch_modules(["all"]), normalized_torch_modules(())
    (('Linear', 'LayerNorm'), 'all', 'none')
    """
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
        return value
    names = tuple(stripped for name in value if (stripped := name.strip()))
    words = [name for name in names if name in RULES]
    if words and len(names) > 1:
        raise ValueError(f"{words[0]!r} stands alone; give it, or names of classes")
    return words[0] if words else names or "none"


def hierarchy_paths(modules: Iterable[CalledModule], torch_modules: TorchModules) -> frozenset[str]:
    """Return the paths of the modules that are in the hierarchy: the root, those of no torch class, and the selected.

    ``auto`` selects a module of ``torch.nn`` where nothing but the root and other modules of ``torch.nn`` is on its
    call stack. Where the root is a wrapper, which calls one module and that once, that module counts as the root does.
    Inside a class of transformers, which has classes for its parts, none is selected.

    Args:
        modules: The modules that ran.
        torch_modules: The selection.
    """
    called = list(modules)
    is_selected = _selected_by(called, torch_modules)
    return frozenset(
        module.path for module in called if module.path == "" or not module.is_torch_nn or is_selected(module)
    )


def _selected_by(called: Sequence[CalledModule], torch_modules: TorchModules) -> Callable[[CalledModule], bool]:
    if torch_modules in ("none", "all"):
        return lambda _module: torch_modules == "all"
    if torch_modules != "auto":
        return lambda module: module.class_name in torch_modules
    by_path = {module.path: module for module in called}
    wrapped = _wrapped_modules(by_path)

    def is_open(path: str) -> bool:
        outer = by_path[path]
        return not outer.is_transformers and (outer.is_torch_nn or path in wrapped)

    return lambda module: all(map(is_open, module.stack))


def _wrapped_modules(by_path: Mapping[str, CalledModule]) -> set[str]:
    """Return the path of the root, and where it is a wrapper, of the modules inside of it that stand for the model."""
    callees: dict[str, list[CalledModule]] = defaultdict(list)
    for module in by_path.values():
        for caller in module.callers:
            callees[caller].append(module)
    wrapped, outer = {""}, ""
    while outer in by_path and len(callees[outer]) == 1 and callees[outer][0].calls == by_path[outer].calls != 0:
        outer = callees[outer][0].path
        wrapped.add(outer)
    return wrapped


def torch_module_notes(modules: Iterable[CalledModule], torch_modules: TorchModules) -> tuple[str, ...]:
    """Say which classes ``auto`` selected, and which listed classes needed no listing.

    Raises:
        UsageError: a listed class did not run.
    """
    called = list(modules)
    if torch_modules == "auto":
        chosen = hierarchy_paths(called, torch_modules)
        classes = sorted(
            {module.class_name for module in called if module.is_torch_nn and module.path in chosen - {""}}
        )
        displayed = ", ".join(classes[:SHOWN_CLASSES])
        more = f" and {len(classes) - SHOWN_CLASSES} more" if len(classes) > SHOWN_CLASSES else ""
        reason = "no other class stands between them and the root; --torch-module none leaves them out"
        return (f"Classes of torch.nn are modules here: {displayed}{more} ({reason}).",) if classes else ()
    if torch_modules in ("none", "all"):
        return ()
    _refuse_unknown_classes(called, torch_modules)
    own = sorted({module.class_name for module in called if not module.is_torch_nn} & set(torch_modules))
    return tuple(f"{name} is no class of torch.nn: it is a module without --torch-module." for name in own)


def _refuse_unknown_classes(called: Sequence[CalledModule], names: Iterable[str]) -> None:
    present = {module.class_name for module in called}
    displayed = sorted({module.class_name for module in called if module.is_torch_nn})
    for name in sorted(set(names) - present):
        from winml.modelkit.options import nearest

        guess = nearest(name, displayed)
        raise UsageError(
            f"no torch.nn class {name!r} runs in this model" + (f"; did you mean {guess!r}?" if guess else ""),
            hint=f"Classes that run: {', '.join(displayed) or 'none'}.",
        )


# --- Finds the module inside one that ``torch.compile`` wrapped.
#
# ``torch.compile`` returns a wrapper whose child ``_orig_mod`` is the user's module; that name must not appear in
# module paths. Works on any object with torch's child modules. Never imports ``torch._dynamo``, which takes two
# seconds: if it is not imported yet, nothing was compiled.


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
