"""Records which modules a forward pass calls, in what order, and from which module.

Uses forward hooks on a live module. Works on any object with torch's hook methods and never imports torch. Does not
decide which modules make up the hierarchy; ``tree`` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from winml.modelkit.hierarchy.torch_modules import comes_with_torch, comes_with_transformers

if TYPE_CHECKING:
    from torch import nn

__all__ = ["CallTrace", "TracedModule", "joined_traces", "module_of_error", "record_calls"]


@dataclass(frozen=True)
class TracedModule:
    """One registered module and its calls in the forward pass."""

    path: str
    """Dotted path as in ``named_modules()``; the first one for a module registered twice. ``""`` is the root."""
    class_name: str
    is_torch_nn: bool
    """Whether the class comes with ``torch.nn``."""
    parameters: Mapping[str, tuple[int, ...]]
    """Shape of each parameter registered on the module itself, by name; a tied parameter belongs to its first owner."""
    trainable: frozenset[str]
    """Names in ``parameters`` that require a gradient."""
    is_leaf: bool
    """Whether it has no child modules."""
    execution_order: int | None
    """Position among the modules by first call, from 0; None where it never ran."""
    calls: int
    stack: tuple[str, ...]
    """Paths of the modules on the call stack of its first call, outermost first, itself excluded."""
    is_transformers: bool = False
    """Whether the class comes with transformers, or is derived from one that does."""
    callers: frozenset[str] = frozenset()
    """Paths of the modules that called it, in any of its calls."""


@dataclass
class CallTrace:
    """The module calls that :func:`record_calls` recorded; complete when its block ends."""

    modules: list[TracedModule] = field(default_factory=list)
    """Every registered module, in registration order."""

    def by_path(self) -> dict[str, TracedModule]:
        """Index the modules by path."""
        return {module.path: module for module in self.modules}

    @property
    def execution_steps(self) -> int:
        """Number of module calls in the forward pass."""
        return sum(module.calls for module in self.modules)


@contextmanager
def record_calls(model: nn.Module) -> Iterator[CallTrace]:
    """Record every module call made inside the block.

    Hooks are attached to ``model`` for the time of the block and always removed at its end.

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

    def watch(path: str, module: nn.Module) -> Iterator[Any]:
        def enter(_module: object, _args: Any) -> None:
            stacks.setdefault(path, tuple(running))
            counts[path] = counts.get(path, 0) + 1
            callers.setdefault(path, set()).update(running[-1:])
            running.append(path)

        def leave(_module: object, _args: Any, _output: object) -> None:
            running.pop()

        # First to enter and last to leave: what the user's own hooks compute counts as inside the module.
        yield module.register_forward_pre_hook(enter, prepend=True)
        yield module.register_forward_hook(leave, always_call=True)

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            for handle in watch(path, module):
                hooks.callback(handle.remove)
        yield trace
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


def joined_traces(traces: Sequence[CallTrace]) -> CallTrace:
    """Return the traces of several runs of one model as if they had been one run, in this order."""
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


def module_of_error(error: BaseException, model: nn.Module) -> str | None:
    """Return the path of the innermost module in whose method ``error`` was raised; None if it was raised elsewhere."""
    paths = {id(module): path for path, module in model.named_modules()}
    innermost_path = None
    traceback = error.__traceback__
    while traceback is not None:
        innermost_path = paths.get(id(traceback.tb_frame.f_locals.get("self")), innermost_path)
        traceback = traceback.tb_next
    return innermost_path
