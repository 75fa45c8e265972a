"""Recording of the module calls of a forward pass, and selection of the ``torch.nn`` modules in the hierarchy.

The selection uses the recorded calls or the scopes in a file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from winml.modelkit.errors import UsageError, opt
from winml.modelkit.progress import count_progress

if TYPE_CHECKING:
    from torch import nn

TorchModuleRule = Literal["auto", "none", "all"]
TorchModules = TorchModuleRule | tuple[str, ...]
"""Selection of the ``torch.nn`` modules in the hierarchy, besides the root: modules with only the root above them
(``auto``), ``none``, ``all``, or the listed classes.
"""
RULES: tuple[TorchModuleRule, ...] = get_args(TorchModuleRule)

_MAX_LISTED_CLASSES = 8
"""Maximum number of classes named in a note. Chosen: they fit on one line."""


def comes_with_torch(package: str) -> bool:
    """Return True if a Python module belongs to ``torch.nn``."""
    return f"{package}.".startswith("torch.nn.")


def comes_with_transformers(package: str) -> bool:
    """Return True if a Python module belongs to transformers, or to a checkpoint's remote code."""
    return f"{package}.".startswith(("transformers.", "transformers_modules."))


def normalized_torch_modules(value: Any) -> Any:
    """Normalize a selection to ``auto``, ``none``, ``all`` or a tuple of class names.

    Args:
        value: A word, class names separated by commas, or a list of either; any other value is returned unchanged.

    Raises:
        ValueError: ``auto``, ``none`` or ``all`` is combined with other names, or every name is empty.

    >>> normalized_torch_modules("Linear, LayerNorm"), normalized_torch_modules(["all"]), normalized_torch_modules(())
    (('Linear', 'LayerNorm'), 'all', 'none')
    """
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
        return value
    names = tuple(stripped for name in value if (stripped := name.strip()))
    if value and not names:
        raise ValueError("the name is empty; expected auto, none, all or class names")
    rules = [name for name in names if name in RULES]
    if rules and len(names) > 1:
        raise ValueError(f"{rules[0]!r} cannot be combined with class names; pass one or the other")
    return rules[0] if rules else names or "none"


def hierarchy_paths(modules: Iterable[TracedModule], torch_modules: TorchModules) -> frozenset[str]:
    """Return the paths of the hierarchy modules: the root, modules of no torch class, and the selected modules.

    ``auto`` selects a module of ``torch.nn`` if only the root and other modules of ``torch.nn`` are on its call stack.
    If the root is a wrapper that calls a single module once, the wrapped module counts as a root too. No module inside
    a class of transformers is selected, because transformers has classes for its parts.

    Args:
        modules: The modules that ran.
        torch_modules: The selection.
    """
    called = list(modules)
    is_selected = _selection_predicate(called, torch_modules)
    return frozenset(
        module.path for module in called if module.path == "" or not module.is_torch_nn or is_selected(module)
    )


def _selection_predicate(called: Sequence[TracedModule], torch_modules: TorchModules) -> Callable[[TracedModule], bool]:
    """Return the predicate of a selection, for modules of ``torch.nn``."""
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


def _wrapped_modules(by_path: Mapping[str, TracedModule]) -> set[str]:
    """Return the path of the root and, if the root is a wrapper, the paths of the wrapped modules."""
    callees: dict[str, list[TracedModule]] = defaultdict(list)
    for module in by_path.values():
        for caller in module.callers:
            callees[caller].append(module)
    wrapped, outer = {""}, ""
    while outer in by_path and len(callees[outer]) == 1 and callees[outer][0].calls == by_path[outer].calls != 0:
        outer = callees[outer][0].path
        wrapped.add(outer)
    return wrapped


def torch_module_notes(modules: Iterable[TracedModule], torch_modules: TorchModules) -> tuple[str, ...]:
    """Return notes on the classes selected by ``auto``, and on listed classes outside ``torch.nn``.

    Raises:
        UsageError: a listed class did not run.
    """
    called = list(modules)
    if torch_modules == "auto":
        chosen = hierarchy_paths(called, torch_modules)
        classes = sorted(
            {module.class_name for module in called if module.is_torch_nn and module.path in chosen - {""}}
        )
        class_names = ", ".join(classes[:_MAX_LISTED_CLASSES])
        rest_words = f" and {len(classes) - _MAX_LISTED_CLASSES} more" if len(classes) > _MAX_LISTED_CLASSES else ""
        reason = f"only the root is above them; {opt.torch_module} none excludes them"
        return (f"Classes of torch.nn in the hierarchy: {class_names}{rest_words} ({reason}).",) if classes else ()
    if torch_modules in ("none", "all"):
        return ()
    _refuse_unknown_classes(called, torch_modules)
    model_classes = sorted({module.class_name for module in called if not module.is_torch_nn} & set(torch_modules))
    return tuple(
        f"{name} is not a class of torch.nn: it is in the hierarchy without {opt.torch_module}."
        for name in model_classes
    )


def _refuse_unknown_classes(called: Sequence[TracedModule], names: Iterable[str]) -> None:
    """Refuse a class name without an executed module.

    Raises:
        UsageError: the hint lists the classes of ``torch.nn`` that ran.
    """
    present = {module.class_name for module in called}
    torch_classes = sorted({module.class_name for module in called if module.is_torch_nn})
    for name in sorted(set(names) - present):
        from winml.modelkit.options import nearest

        guess = nearest(name, torch_classes)
        raise UsageError(
            f"no torch.nn class {name!r} runs in this model" + (f"; did you mean {guess!r}?" if guess else ""),
            hint=f"Classes that run: {', '.join(torch_classes) or 'none'}.",
        )


_WRAPPER_PACKAGE = "torch._dynamo"
"""Package of the class that wraps a compiled module."""


def unwrap_compiled(model: nn.Module) -> nn.Module:
    """Return the module inside a ``torch.compile`` wrapper, or ``model`` itself if not wrapped.

    ``torch._dynamo`` is not imported here, because importing takes two seconds; without an earlier import no module is
    compiled.
    """
    inner = model._modules.get("_orig_mod") if type(model).__module__.startswith(_WRAPPER_PACKAGE) else None
    return model if inner is None else inner


@contextmanager
def suspend_compilation(model: nn.Module) -> Iterator[None]:
    """Replace every compiled module inside ``model`` by its uncompiled module inside the block.

    In place, undone at the end. Covers ``torch.compile(module)`` and ``module.compile()``.
    """
    calls = [(module, call) for module in model.modules() if (call := module._compiled_call_impl) is not None]
    wrapped = [
        (module._modules, name, child)
        for module in model.modules()
        for name, child in module._modules.items()
        if child is not None and unwrap_compiled(child) is not child
    ]
    try:
        for module, _ in calls:
            module._compiled_call_impl = None
        for children, name, child in wrapped:
            children[name] = unwrap_compiled(child)
        yield
    finally:
        for children, name, child in wrapped:
            children[name] = child
        for module, call in calls:
            module._compiled_call_impl = call


@dataclass(frozen=True)
class TracedModule:
    """One registered module and its calls in the forward pass."""

    path: str
    """Dotted path as in ``named_modules()``; the first one for a module registered twice. ``""`` is the root."""
    class_name: str
    is_torch_nn: bool
    """True if the class comes with ``torch.nn``."""
    parameters: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shape of each parameter registered on the module itself, by name; a tied parameter belongs to its first owner."""
    trainable: frozenset[str] = frozenset()
    """Names in ``parameters`` that require a gradient."""
    is_leaf: bool = True
    """True if the module has no child modules."""
    execution_order: int | None = None
    """Position among the modules by first call, from 0; None if the module never ran."""
    calls: int = 0
    """Number of calls; 0 if unknown."""
    stack: tuple[str, ...] = ()
    """Paths of the modules on the call stack of the first call, outermost first, without the module itself."""
    is_transformers: bool = False
    """True if the class, or a base class, comes with transformers."""
    callers: frozenset[str] = frozenset()
    """Paths of the modules that called the module."""


@dataclass
class CallTrace:
    """Module calls recorded by :func:`record_calls`; complete when its block ends."""

    modules: list[TracedModule] = field(default_factory=list)
    """Every registered module, in registration order."""

    def by_path(self) -> dict[str, TracedModule]:
        """Index the modules by path."""
        return {module.path: module for module in self.modules}

    def as_record(self) -> list[dict[str, Any]]:
        """Return the modules as JSON values."""
        return [
            {
                **vars(module),
                "parameters": {name: list(shape) for name, shape in module.parameters.items()},
                "trainable": sorted(module.trainable),
                "stack": list(module.stack),
                "callers": sorted(module.callers),
            }
            for module in self.modules
        ]

    @classmethod
    def of_record(cls, record: Iterable[Mapping[str, Any]]) -> CallTrace:
        """Read the JSON values of :meth:`as_record`."""
        return cls(
            [
                TracedModule(
                    **{
                        **module,
                        "parameters": {name: tuple(shape) for name, shape in module["parameters"].items()},
                        "trainable": frozenset(module["trainable"]),
                        "stack": tuple(module["stack"]),
                        "callers": frozenset(module["callers"]),
                    }
                )
                for module in record
            ]
        )

    @property
    def execution_steps(self) -> int:
        """Number of module calls in the forward pass."""
        return sum(module.calls for module in self.modules)


@contextmanager
def record_calls(model: nn.Module) -> Iterator[CallTrace]:
    """Record every module call made inside the block.

    Hooks are attached to ``model`` inside the block and always removed at its end.

    Args:
        model: The root; call it inside the block.

    Yields:
        A trace that is filled in when the block ends without an error.
    """
    trace = CallTrace()
    stacks: dict[str, tuple[str, ...]] = {}
    counts: dict[str, int] = {}
    callers: dict[str, set[str]] = {}
    running: list[str] = []
    modules = sum(1 for _ in model.modules())

    def watch(path: str, module: nn.Module) -> Iterator[Any]:
        """Attach hooks to a module, and yield their handles."""

        def enter(_module: object, _args: Any) -> None:
            stacks.setdefault(path, tuple(running))
            count_progress(len(stacks), modules, f"module {len(stacks)} of {modules}")
            counts[path] = counts.get(path, 0) + 1
            callers.setdefault(path, set()).update(running[-1:])
            running.append(path)

        def leave(_module: object, _args: Any, _output: object) -> None:
            running.pop()

        # First to enter and last to leave: computation in the user's own hooks counts as inside the module.
        yield module.register_forward_pre_hook(enter, prepend=True)
        yield module.register_forward_hook(leave, always_call=True)

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            for handle in watch(path, module):
                hooks.callback(handle.remove)
        yield trace
    count_progress(0, 1, "")
    order = {path: position for position, path in enumerate(stacks)}
    seen_tensors: set[int] = set()
    for path, module in model.named_modules():
        own_parameters = {
            name: value for name, value in module.named_parameters(recurse=False) if id(value) not in seen_tensors
        }
        seen_tensors.update(map(id, own_parameters.values()))
        trace.modules.append(
            TracedModule(
                path=path,
                class_name=type(module).__name__,
                is_torch_nn=comes_with_torch(type(module).__module__),
                is_transformers=any(comes_with_transformers(cls.__module__) for cls in type(module).__mro__),
                parameters={name: tuple(value.shape) for name, value in own_parameters.items()},
                trainable=frozenset(name for name, value in own_parameters.items() if value.requires_grad),
                is_leaf=not any(True for _ in module.children()),
                execution_order=order.get(path),
                calls=counts.get(path, 0),
                stack=stacks.get(path, ()),
                callers=frozenset(callers.get(path, ())),
            )
        )


def join_traces(traces: Sequence[CallTrace]) -> CallTrace:
    """Join the traces of several runs of a model in order, as if from a single run."""
    joined = traces[0].by_path()
    for trace in traces[1:]:
        earlier_count = sum(module.execution_order is not None for module in joined.values())
        for later in trace.modules:
            earlier = joined.get(later.path)
            order = None if later.execution_order is None else later.execution_order + earlier_count
            if earlier is None or earlier.execution_order is None:
                joined[later.path] = replace(later, execution_order=order)
            else:
                joined[later.path] = replace(
                    earlier, calls=earlier.calls + later.calls, callers=earlier.callers | later.callers
                )
    return CallTrace(list(joined.values()))


def add_captured_modules(trace: CallTrace, scopes: Iterable[Sequence[str]]) -> CallTrace:
    """Return a trace with further modules from a capture; a capture with a symbolic number of rows contains all
    branches.

    Args:
        trace: A run of the model.
        scopes: Paths of the modules on the call stack of each captured node, outermost first.
    """
    modules = trace.by_path()
    order = sum(module.execution_order is not None for module in modules.values())
    for scope in scopes:
        for depth, path in enumerate(scope):
            if modules[path].execution_order is None:
                stack = tuple(scope[:depth])
                modules[path] = replace(
                    modules[path], execution_order=order, calls=1, stack=stack, callers=frozenset(stack[-1:])
                )
                order += 1
    return CallTrace(list(modules.values()))


def module_of_error(error: BaseException, model: nn.Module) -> str | None:
    """Return the path of the innermost module with a method in a traceback; `None` without such a module."""
    paths = {id(module): path for path, module in model.named_modules()}
    innermost_path = None
    traceback = error.__traceback__
    while traceback is not None:
        innermost_path = paths.get(id(traceback.tb_frame.f_locals.get("self")), innermost_path)
        traceback = traceback.tb_next
    return innermost_path


_PARAMETRIZATIONS = "parametrizations"
"""Specified by torch: name of the child with the modules that compute parameters of its parent."""


def operator_remedy(module: str | None, otherwise: str) -> str:
    """Return the remedy for an operator without ONNX form: for one that computes a parameter, to store its value.

    Args:
        module: Path of the module that calls the operator.
        otherwise: The remedy for any other module.

    >>> operator_remedy("parametrizations.weight.0", "")
    'Store the weight before the export: torch.nn.utils.parametrize.remove_parametrizations(model, "weight").'
    """
    names = (module or "").split(".")
    if _PARAMETRIZATIONS not in names[:-1]:
        return otherwise
    position = names.index(_PARAMETRIZATIONS)
    owner = ".".join(names[:position])
    target = f'model.get_submodule("{owner}")' if owner else "model"
    name = names[position + 1]
    return (
        f'Store the {name} before the export: torch.nn.utils.parametrize.remove_parametrizations({target}, "{name}").'
    )
