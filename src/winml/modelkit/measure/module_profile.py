"""Which module takes the time? Kernel times charged to the modules of their nodes, added up over the tree.

Takes what a profiled run recorded and the tag of every node of the graph as it was executed; neither runs anything nor
decides which tag a node has. Times are means over the runs, in milliseconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from winml.modelkit.hierarchy import address
from winml.modelkit.runtime.kernel_times import KernelTime, RunProfile

__all__ = ["ClassTime", "ModuleProfile", "ModuleTime", "charge_modules"]

_MS = 1000.0
"""Microseconds in a millisecond."""


@dataclass(frozen=True)
class ModuleTime:
    """One module and what ran in it."""

    tag: str
    path: str
    """Dotted module path; ``""`` is the root, or not known."""
    class_name: str
    self_ms: float
    """Kernels of the module itself."""
    total_ms: float
    """Kernels of the module and of all below it."""
    kernels: float
    """Kernels of the module itself, per run."""
    operators: Mapping[str, float]
    """Milliseconds per operator, of the module itself, the longest first."""
    output_bytes: int | None
    """What the module's own kernels made in one run; None where the profile does not say."""
    parameter_bytes: int | None
    """Weights its own kernels read in one run; None where the profile does not say."""
    children: tuple[ModuleTime, ...] = ()

    def walk(self) -> Iterator[ModuleTime]:
        """Yield this module and all below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True)
class ClassTime:
    """All modules of one class together."""

    class_name: str
    instances: int
    self_ms: float
    total_ms: float
    """A module inside another of the same class counts once."""
    kernels: float
    operators: Mapping[str, float]


@dataclass(frozen=True)
class ModuleProfile:
    """Where the time of a model goes."""

    roots: tuple[ModuleTime, ...]
    """The root module; several where the tags of the graph share none."""
    kernel_ms: float
    """All kernels, per run: ONNX Runtime's own sum."""
    unattributed_ms: float
    """Kernels whose node has no module."""
    unattributed: Mapping[str, float]
    """Milliseconds per node that has no module, the longest first."""
    outside_ms: float
    """Time of a run in which no kernel ran."""
    run_ms: tuple[float, ...]
    """Duration of each run, with profiling on."""
    profile: RunProfile = field(repr=False)
    """What was measured, kernel by kernel."""
    tags: Mapping[str, str] = field(repr=False)
    """Tag of each node of the executed graph, by its name."""

    @property
    def unattributed_share(self) -> float:
        """Share of the kernel time that is charged to no module, 0 to 1."""
        return self.unattributed_ms / self.kernel_ms if self.kernel_ms else 0.0

    def modules(self) -> Iterator[ModuleTime]:
        """Yield every module, parents first."""
        for root in self.roots:
            yield from root.walk()

    def by_class(self) -> tuple[ClassTime, ...]:
        """Add up the modules of each class, the longest first."""
        return _classes(self.roots)


@dataclass
class _Sum:
    """What is charged to one tag, over all runs."""

    microseconds: float = 0.0
    kernels: int = 0
    operators: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    output_bytes: int | None = None
    parameter_bytes: int | None = None

    def add(self, kernel: KernelTime) -> None:
        self.microseconds += kernel.self_us
        self.kernels += 1
        self.operators[kernel.op_type] += kernel.self_us
        self.output_bytes = _plus(self.output_bytes, kernel.output_bytes)
        self.parameter_bytes = _plus(self.parameter_bytes, kernel.parameter_bytes)


def charge_modules(
    profile: RunProfile, tags: Mapping[str, str], modules: Sequence[tuple[str, str, str]]
) -> ModuleProfile:
    """Charge every kernel to the module of its node.

    Args:
        profile: What was measured.
        tags: Tag of each node of the graph as it was executed, by its name; ``""`` where it has none.
        modules: Tag, module path and class of the modules, in execution order; parents that are missing are added.

    Returns:
        The tree. The self times of its modules and ``unattributed_ms`` add up to ``kernel_ms``.
    """
    runs = len(profile.run_us)
    sums: dict[str, _Sum] = defaultdict(_Sum)
    nameless: dict[str, float] = defaultdict(float)
    for kernel in profile.kernels:
        tag = tags.get(kernel.node, "")
        if tag:
            sums[tag].add(kernel)
        else:
            nameless[kernel.node or kernel.op_type] += kernel.self_us
    unattributed = _longest_first(nameless, runs * _MS)
    return ModuleProfile(
        roots=_build_tree(sums, modules, runs),
        kernel_ms=profile.kernel_us / runs / _MS,
        unattributed_ms=sum(unattributed.values()),
        unattributed=unattributed,
        outside_ms=profile.outside_us / runs / _MS,
        run_ms=tuple(value / _MS for value in profile.run_us),
        profile=profile,
        tags=tags,
    )


def _build_tree(sums: Mapping[str, _Sum], modules: Sequence[tuple[str, str, str]], runs: int) -> tuple[ModuleTime, ...]:
    known = {tag: (path, class_name) for tag, path, class_name in modules}
    tags = dict.fromkeys(_with_parents([*known, *sums]))
    children: dict[str, list[str]] = defaultdict(list)
    for tag in tags:
        children[_parent(tag)].append(tag)

    # A child comes after its parent in ``tags``, so going backwards finds all children built.
    built: dict[str, ModuleTime] = {}
    for tag in reversed(tags):
        below = tuple(built[child] for child in children[tag])
        path, class_name = known.get(tag, ("", address.parse_tag(tag)[-1].partition(".")[0]))
        built[tag] = _module_time(tag, path, class_name, sums.get(tag, _Sum()), below, runs)
    return tuple(built[tag] for tag in children[""])


def _module_time(
    tag: str, path: str, class_name: str, own: _Sum, below: tuple[ModuleTime, ...], runs: int
) -> ModuleTime:
    self_ms = own.microseconds / runs / _MS
    return ModuleTime(
        tag=tag,
        path=path,
        class_name=class_name,
        self_ms=self_ms,
        total_ms=self_ms + sum(child.total_ms for child in below),
        kernels=own.kernels / runs,
        operators=_longest_first(own.operators, runs * _MS),
        output_bytes=None if own.output_bytes is None else own.output_bytes // runs,
        parameter_bytes=None if own.parameter_bytes is None else own.parameter_bytes // runs,
        children=below,
    )


def _with_parents(tags: Iterable[str]) -> Iterator[str]:
    for tag in tags:
        segments = address.parse_tag(tag)
        yield from (address.format_tag(segments[:depth]) for depth in range(1, len(segments) + 1))


def _parent(tag: str) -> str:
    segments = address.parse_tag(tag)
    return address.format_tag(segments[:-1]) if len(segments) > 1 else ""


def _longest_first(times: Mapping[str, float], divisor: float = 1.0) -> dict[str, float]:
    return {name: value / divisor for name, value in sorted(times.items(), key=lambda item: -item[1])}


def _plus(left: int | None, right: int | None) -> int | None:
    return left if right is None else right + (left or 0)


def _classes(roots: Iterable[ModuleTime]) -> tuple[ClassTime, ...]:
    members: dict[str, list[ModuleTime]] = defaultdict(list)
    totals: dict[str, float] = defaultdict(float)
    pending: list[tuple[ModuleTime, frozenset[str]]] = [(root, frozenset()) for root in roots]
    while pending:
        module, above = pending.pop()
        members[module.class_name].append(module)
        if module.class_name not in above:
            totals[module.class_name] += module.total_ms
        pending += [(child, above | {module.class_name}) for child in module.children]
    found = [_class_time(name, group, totals[name]) for name, group in members.items()]
    return tuple(sorted(found, key=lambda entry: entry.total_ms, reverse=True))


def _class_time(name: str, group: Sequence[ModuleTime], total_ms: float) -> ClassTime:
    operators: dict[str, float] = defaultdict(float)
    for module in group:
        for operator, milliseconds in module.operators.items():
            operators[operator] += milliseconds
    return ClassTime(
        class_name=name,
        instances=len(group),
        self_ms=sum(module.self_ms for module in group),
        total_ms=total_ms,
        kernels=sum(module.kernels for module in group),
        operators=_longest_first(operators),
    )
