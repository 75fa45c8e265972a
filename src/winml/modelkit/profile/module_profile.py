"""Assignment of kernel times to modules, and totals over the module tree.

Reads the profile of a run and the tag of every node of the executed graph. Runs nothing, and does not determine tags.
The time of a kernel is its mean over the middle half of the runs, in milliseconds, so that a run interrupted by another
program does not count; of clock cycles it is the minimum, since cycles of waiting threads are counted in most runs. All
other times are sums of kernel times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from winml.modelkit.ort.kernel_times import KernelTime, RunProfile
from winml.modelkit.profile.memory_records import ModuleBytes, sum_memory
from winml.modelkit.profile.statistics import middle_mean
from winml.modelkit.records import Record, entry
from winml.modelkit.tags import address

_MS = 1000.0
"""Microseconds in a millisecond."""


class ModuleTime(Record):
    """Time of one module."""

    tag: str
    path: str = field(metadata=entry("module"))
    """Dotted module path; ``""`` for the root or an unknown path."""
    class_name: str = field(metadata=entry("class"))
    self_ms: float
    """Time of the module's own kernels."""
    total_ms: float
    """Time of the kernels of the module and its submodules."""
    kernels: float
    """Number of the module's own kernels per run."""
    total_kernels: float
    """Number of kernels of the module and its submodules per run."""
    operators: Mapping[str, float] = field(metadata=entry("operators_ms"))
    """Operator → milliseconds of the module's own kernels, in descending order."""
    output_bytes: int | None
    """Size of the outputs of the module's own kernels in one run; ``None`` if not recorded."""
    parameter_bytes: int | None
    """Size of the weights read by the module's own kernels in one run; ``None`` if not recorded."""
    fused_with: tuple[str, ...] = ()
    """Tags of the other modules fused into its kernels."""
    memory: ModuleBytes | None = field(default=None, metadata=entry(omit_none=True))
    """Memory of the module and its submodules; ``None`` if not measured."""
    children: tuple[ModuleTime, ...] = field(default=(), metadata=entry(skip=True))

    def walk(self) -> Iterator[ModuleTime]:
        """Yield this module and its submodules, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()


class ClassTime(Record):
    """Time of all modules of one class."""

    class_name: str = field(metadata=entry("class"))
    instances: int
    self_ms: float
    total_ms: float
    """The time of a module inside another of the same class is counted once."""
    kernels: float
    total_kernels: float
    """Kernels of a module inside another of the same class are counted once."""
    operators: Mapping[str, float] = field(metadata=entry("operators_ms"))


@dataclass(frozen=True)
class ModuleProfile:
    """Times of all modules of a model."""

    roots: tuple[ModuleTime, ...]
    """The root module; several if the tags of the graph have no common root."""
    kernel_ms: float
    """Total time of all kernels per run."""
    unattributed_ms: float
    """Time of kernels whose node has no module."""
    unattributed: Mapping[str, float]
    """Node without a module → milliseconds, in descending order."""
    outside_ms: float
    """Time per run without a running kernel."""
    run_ms: tuple[float, ...]
    """Duration of each run, with profiling on."""
    node_ms: Mapping[tuple[str, str], float] = field(repr=False)
    """(name, operator) of an executed node → time per run."""
    profile: RunProfile = field(repr=False)
    """The measured kernels."""
    tags: Mapping[str, str] = field(repr=False)
    """Name of an executed node → tag."""

    @property
    def unit(self) -> str:
        """Unit of all times: ``ms``, or ``kcycles`` for a device that counts clock cycles, in thousands."""
        return "kcycles" if self.profile.unit == "cycles" else "ms"

    @property
    def whole_ms(self) -> float:
        """Duration of a run with profiling on: kernels, and time without a running kernel."""
        return self.kernel_ms + self.outside_ms

    @property
    def unattributed_share(self) -> float:
        """Share of the kernel time without a module, 0 to 1."""
        return self.unattributed_ms / self.kernel_ms if self.kernel_ms else 0.0

    def modules(self) -> Iterator[ModuleTime]:
        """Yield every module, parents first."""
        for root in self.roots:
            yield from root.walk()

    def by_class(self) -> tuple[ClassTime, ...]:
        """Sum the modules of each class, in descending order of time."""
        return _sum_classes(self.roots)


@dataclass
class _TagSum:
    """Sums over the nodes of one tag: times per run, kernels and bytes over all runs."""

    milliseconds: float = 0.0
    kernels: int = 0
    operators: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    output_bytes: int | None = None
    parameter_bytes: int | None = None
    fused_with: set[str] = field(default_factory=set)
    memory: ModuleBytes | None = None

    def add_time(self, op_type: str, milliseconds: float) -> None:
        self.milliseconds += milliseconds
        self.operators[op_type] += milliseconds

    def add(self, kernel: KernelTime, fused_tags: Iterable[str]) -> None:
        self.fused_with.update(fused_tags)
        self.kernels += 1
        self.output_bytes = _add_bytes(self.output_bytes, kernel.output_bytes)
        self.parameter_bytes = _add_bytes(self.parameter_bytes, kernel.parameter_bytes)


def kernel_times_ms(profile: RunProfile) -> dict[tuple[str, str], float]:
    """(name, operator) of an executed node → time per run.

    A node that runs several times in a run, as in a loop, counts with its sum.
    """
    runs = len(profile.run_us)
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * runs)
    for kernel in profile.kernels:
        sums[kernel.node, kernel.op_type][kernel.run] += kernel.self_us
    return {node: _typical_time(of_runs, profile) / _MS for node, of_runs in sums.items()}


def _typical_time(of_runs: Sequence[float], profile: RunProfile) -> float:
    """Return the time over the runs of a profile: the mean of the middle half; of clock cycles the minimum."""
    return min(of_runs) if profile.unit == "cycles" else middle_mean(of_runs)


def _outside_ms(profile: RunProfile) -> float:
    """Time per run without a running kernel; 0 for parallel kernels."""
    outside_us = list(profile.run_us)
    for kernel in profile.kernels:
        outside_us[kernel.run] -= kernel.self_us
    return max(_typical_time(outside_us, profile), 0.0) / _MS


def charge_modules(
    profile: RunProfile,
    tags: Mapping[str, str],
    modules: Sequence[tuple[str, str, str]],
    fused: Mapping[str, Iterable[str]] | None = None,
    memory: Mapping[str, ModuleBytes] | None = None,
) -> ModuleProfile:
    """Assign every kernel to the module of its node.

    Args:
        profile: The measured kernels.
        tags: Name of an executed node → tag; ``""`` for an untagged node.
        modules: (tag, module path, class) of each module, in execution order; missing parents are added.
        fused: Name of a node → tags of the other modules fused into it.
        memory: Tag → memory of the module without its submodules; ``None`` if not measured.

    Returns:
        The module tree. The self times of its modules and ``unattributed_ms`` add up to ``kernel_ms``.
    """
    runs = len(profile.run_us)
    node_ms = kernel_times_ms(profile)
    sums: dict[str, _TagSum] = defaultdict(_TagSum)
    untagged_ms: dict[str, float] = defaultdict(float)
    for (node, op_type), milliseconds in node_ms.items():
        if tag := tags.get(node, ""):
            sums[tag].add_time(op_type, milliseconds)
        else:
            untagged_ms[node or op_type] += milliseconds
    for kernel in profile.kernels:
        if tag := tags.get(kernel.node, ""):
            sums[tag].add(kernel, (fused or {}).get(kernel.node, ()))
    if memory is not None:
        for tag in {*sums, *memory, *(tag for tag, _, _ in modules)} - {""}:
            sums[tag].memory = memory.get(tag, ModuleBytes())
    unattributed = _sort_by_time(untagged_ms)
    return ModuleProfile(
        roots=_build_tree(sums, modules, runs),
        kernel_ms=sum(node_ms.values()),
        unattributed_ms=sum(unattributed.values()),
        unattributed=unattributed,
        outside_ms=_outside_ms(profile),
        run_ms=tuple(value / _MS for value in profile.run_us),
        node_ms=node_ms,
        profile=profile,
        tags=tags,
    )


def _build_tree(
    sums: Mapping[str, _TagSum], modules: Sequence[tuple[str, str, str]], runs: int
) -> tuple[ModuleTime, ...]:
    """Build the tree of module times, with missing parents; return the roots."""
    identities = {tag: (path, class_name) for tag, path, class_name in modules}
    tags = dict.fromkeys(tag for tag_below in (*identities, *sums) for tag in address.lineage(tag_below))
    children: dict[str, list[str]] = defaultdict(list)
    for tag in tags:
        children[address.nearest_ancestor(tag, tags)].append(tag)

    # Children follow their parents in ``tags``, so the reverse order builds every child before its parent.
    module_times: dict[str, ModuleTime] = {}
    for tag in reversed(tags):
        child_times = tuple(module_times[child] for child in children[tag])
        path, class_name = identities.get(tag, ("", address.last_segment(tag).partition(".")[0]))
        module_times[tag] = _module_time(tag, path, class_name, sums.get(tag, _TagSum()), child_times, runs)
    return tuple(module_times[tag] for tag in children[""])


def _module_time(
    tag: str, path: str, class_name: str, tag_sum: _TagSum, children: tuple[ModuleTime, ...], runs: int
) -> ModuleTime:
    """Create the time of a module, from the sums of its tag and the times of its submodules."""
    self_ms, kernels = tag_sum.milliseconds, tag_sum.kernels / runs
    return ModuleTime(
        tag=tag,
        path=path,
        class_name=class_name,
        self_ms=self_ms,
        total_ms=self_ms + sum(child.total_ms for child in children),
        kernels=kernels,
        total_kernels=kernels + sum(child.total_kernels for child in children),
        operators=_sort_by_time(tag_sum.operators),
        output_bytes=None if tag_sum.output_bytes is None else tag_sum.output_bytes // runs,
        parameter_bytes=None if tag_sum.parameter_bytes is None else tag_sum.parameter_bytes // runs,
        fused_with=tuple(sorted(tag_sum.fused_with)),
        memory=sum_memory([tag_sum.memory, *(child.memory for child in children)]),
        children=children,
    )


def _sort_by_time(times: Mapping[str, float]) -> dict[str, float]:
    """Sort times in descending order."""
    return dict(sorted(times.items(), key=lambda pair: -pair[1]))


def _add_bytes(total_bytes: int | None, kernel_bytes: int | None) -> int | None:
    """Add the bytes of a kernel to a sum; ``None`` if no kernel has recorded bytes so far."""
    return total_bytes if kernel_bytes is None else kernel_bytes + (total_bytes or 0)


def _sum_classes(roots: Iterable[ModuleTime]) -> tuple[ClassTime, ...]:
    """Sum the modules of each class, in descending order of time."""
    instances: dict[str, list[ModuleTime]] = defaultdict(list)
    totals_ms: dict[str, float] = defaultdict(float)
    total_kernels: dict[str, float] = defaultdict(float)
    # (module, classes of its ancestors)
    stack: list[tuple[ModuleTime, frozenset[str]]] = [(root, frozenset()) for root in roots]
    while stack:
        module, ancestor_classes = stack.pop()
        instances[module.class_name].append(module)
        if module.class_name not in ancestor_classes:
            totals_ms[module.class_name] += module.total_ms
            total_kernels[module.class_name] += module.total_kernels
        stack += [(child, ancestor_classes | {module.class_name}) for child in module.children]
    class_times = [
        _class_time(name, modules, totals_ms[name], total_kernels[name]) for name, modules in instances.items()
    ]
    return tuple(sorted(class_times, key=lambda entry: entry.total_ms, reverse=True))


def _class_time(name: str, modules: Sequence[ModuleTime], total_ms: float, total_kernels: float) -> ClassTime:
    """Create the time of a class, from its modules and its totals without nested modules."""
    return ClassTime(
        class_name=name,
        instances=len(modules),
        self_ms=sum(module.self_ms for module in modules),
        total_ms=total_ms,
        kernels=sum(module.kernels for module in modules),
        total_kernels=total_kernels,
        operators=sum_operators(modules),
    )


def sum_operators(modules: Iterable[ModuleTime]) -> dict[str, float]:
    """Return operator → milliseconds in all modules, in descending order."""
    operators: dict[str, float] = defaultdict(float)
    for module in modules:
        for operator, milliseconds in module.operators.items():
            operators[operator] += milliseconds
    return _sort_by_time(operators)
