"""Construction of the module hierarchy from a recorded forward pass, and assignment of tags.

A hierarchy module is an executed module of no plain ``torch.nn`` class, or selected by ``torch_modules``; the root is
always included. Pure records: no torch, no graph.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from winml.modelkit.tags import address
from winml.modelkit.tags.selector import ModuleAddress
from winml.modelkit.tags.torch_modules import (
    CallTrace,
    TorchModules,
    TracedModule,
    hierarchy_paths,
    normalized_torch_modules,
    torch_module_notes,
)


@dataclass(frozen=True)
class ModuleNode(ModuleAddress):
    """One hierarchy module."""

    is_torch_nn: bool
    parent: str | None
    """Path of the innermost hierarchy module around the first call; None for the root."""
    execution_order: int
    """Position among the hierarchy modules by first call, from 0."""
    calls: int
    is_leaf: bool
    """True if no hierarchy module runs inside the module."""
    parameter_shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the parameters that belong to no deeper hierarchy module, by name relative to ``path``."""
    parameter_count: int
    """Number of parameter elements in the module and its descendants; tied parameters count once."""
    trainable_count: int

    @property
    def depth(self) -> int:
        """Number of segments of the tag."""
        return address.depth(self.tag)


class ModuleTree:
    """The hierarchy modules of one model, in execution order."""

    def __init__(self, nodes: Iterable[ModuleNode], trace: CallTrace, notes: tuple[str, ...] = ()) -> None:
        self.nodes = tuple(nodes)
        self.notes = notes
        """Notes for the user on the selected modules, one sentence each."""
        self.registered = len(trace.modules)
        """Number of registered modules, executed or not."""
        self.execution_steps = trace.execution_steps
        """Number of module calls in the forward pass, plain ``torch.nn`` modules included."""
        self._called = {module.path: module.class_name for module in trace.modules if module.calls}
        self._by_path = {node.path: node for node in self.nodes}
        self._children: dict[str | None, list[ModuleNode]] = defaultdict(list)
        for node in self.nodes:
            self._children[node.parent].append(node)

    def __iter__(self) -> Iterator[ModuleNode]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def root(self) -> ModuleNode:
        """The root module."""
        return self._by_path[""]

    def get(self, path: str) -> ModuleNode | None:
        """Return the hierarchy module at a path; `None` without such a module."""
        return self._by_path.get(path)

    def children(self, path: str) -> list[ModuleNode]:
        """Return the hierarchy modules called directly by the module at ``path``, in execution order."""
        return self._children.get(path, [])

    def scope(self, path: str) -> str:
        """Return the prefix of the names of nodes in the module at ``path``.

        A slash precedes every called module. Containers without calls stay joined by a dot, as torch writes:
        ``encoder.layer.0.attention`` → ``/encoder/layer.0/attention``.
        """
        scope, pending = "", ""
        path_segments = path.split(".") if path else []
        for position, segment in enumerate(path_segments):
            pending = f"{pending}.{segment}" if pending else segment
            if ".".join(path_segments[: position + 1]) in self._called or position == len(path_segments) - 1:
                scope, pending = f"{scope}/{pending}", ""
        return scope

    def class_name(self, path: str) -> str:
        """Return the class of an executed module, in the hierarchy or not."""
        return self._called[path]

    def as_record(self) -> list[dict[str, object]]:
        """Return ``winml.hierarchy.tree`` of FORMATS: path, tag, class, calls and parameter count of each module."""
        return [
            {
                "path": node.path,
                "tag": node.tag,
                "class": node.class_name,
                "execution_order": node.execution_order,
                "calls": node.calls,
                "parameters": node.parameter_count,
            }
            for node in self.nodes
        ]


def build_tree(
    trace: CallTrace, torch_modules: TorchModules = "auto", all_parts: CallTrace | None = None
) -> ModuleTree:
    """Build the hierarchy from a recorded forward pass.

    Args:
        trace: The calls :func:`~winml.modelkit.tags.torch_modules.record_calls` recorded, the root's included.
        torch_modules: Which modules of ``torch.nn`` to include: ``auto``, ``none``, ``all``, or class names.
        all_parts: The runs of all parts of the model, if ``trace`` is the run of one part. Modules and tags are derived
            from all runs, so that a module has the same tag in each part.

    Raises:
        UsageError: a class in ``torch_modules`` did not run in this model.
    """
    selection: TorchModules = normalized_torch_modules(torch_modules)
    all_called = _called_modules(all_parts or trace)
    notes = torch_module_notes(all_called, selection)
    in_hierarchy = hierarchy_paths(all_called, selection)
    modules = trace.by_path()
    executed = [module for module in _called_modules(trace) if module.path in in_hierarchy]
    chosen = {module.path for module in executed}
    parents = _calling_modules(executed)
    tagged = [module for module in all_called if module.path in in_hierarchy]
    classes = {module.path: module.class_name for module in tagged}
    tags = address.assign_tags(
        classes,
        _calling_modules(tagged),
        lambda _parent, family: address.sibling_segments([(path, classes[path]) for path in family]),
    )
    holders = {path: _nearest_prefix(path, chosen) for path in modules}
    is_leaf = chosen - set(parents.values())
    nodes = [
        ModuleNode(
            path=module.path,
            tag=tags[module.path],
            class_name=module.class_name,
            is_torch_nn=module.is_torch_nn,
            parent=parents[module.path],
            execution_order=order,
            calls=module.calls,
            is_leaf=module.path in is_leaf,
            parameter_shapes={
                f"{path}.{name}".removeprefix(f"{module.path}.").removeprefix("."): shape
                for path, holder in holders.items()
                if holder == module.path
                for name, shape in modules[path].parameters.items()
            },
            parameter_count=_count_parameters(modules.values(), module.path),
            trainable_count=_count_parameters(modules.values(), module.path, only_trainable=True),
        )
        for order, module in enumerate(executed)
    ]
    return ModuleTree(nodes, trace, notes)


def _called_modules(trace: CallTrace) -> list[TracedModule]:
    """Return the executed modules, sorted by first call."""
    called = (module for module in trace.modules if module.execution_order is not None)
    return sorted(called, key=lambda module: module.execution_order or 0)


def _calling_modules(executed: list[TracedModule]) -> dict[str, str | None]:
    """Return path of an executed module → nearest executed module on the stack of its first call; root → `None`."""
    chosen = {module.path for module in executed}
    return {module.path: next((up for up in reversed(module.stack) if up in chosen), None) for module in executed}


def _nearest_prefix(path: str, chosen: set[str]) -> str:
    """Return a path, or its longest prefix, in ``chosen``, which contains the root."""
    while path not in chosen:
        path = path.rpartition(".")[0]
    return path


def _count_parameters(modules: Iterable[TracedModule], path: str, *, only_trainable: bool = False) -> int:
    """Return the number of parameter elements in a module and its descendants."""
    prefix = f"{path}." if path else ""
    return sum(
        math.prod(shape)
        for module in modules
        if module.path == path or module.path.startswith(prefix)
        for name, shape in module.parameters.items()
        if not only_trainable or name in module.trainable
    )
