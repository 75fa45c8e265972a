"""Measurement of how ONNX Runtime executes a file, by module, for the result of a verification."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

from winml.modelkit.arrays import Arrays
from winml.modelkit.compare.proof.execution import ExecutedModule, RunTimes
from winml.modelkit.ort.devices import ChosenProvider, choose_provider
from winml.modelkit.ort.kernel_times import KernelTime
from winml.modelkit.profile.by_module import profile_kernels
from winml.modelkit.profile.statistics import percentile

_MS = 1000.0
"""Microseconds in a millisecond."""


def measure_execution(
    path: Path, feeds: Arrays, provider: ChosenProvider | None, runs: int
) -> tuple[ExecutedModule, ...]:
    """Run a file with profiling, and return the modules with nodes or kernels, in the order of the module tree.

    Kernels without a module have the tag ``""``.

    Args:
        path: The ONNX file.
        feeds: Values of its inputs.
        provider: Execution provider; ``None``: the CPU provider.
        runs: Number of runs.

    Raises:
        UsageError: the file has no module information.
        StageError: ONNX Runtime cannot run the file, or its provider records no kernel.
    """
    profiled = profile_kernels(path, feeds, provider or choose_provider(None, None, {}), runs)
    kernels: dict[str, list[KernelTime]] = defaultdict(list)
    for kernel in profiled.profile.profile.kernels:
        kernels[profiled.profile.tags.get(kernel.node, "")].append(kernel)
    identities = {module.tag: (module.path, module.class_name) for module in profiled.profile.modules()}
    modules = []
    for tag, (path_in_model, class_name) in {**identities, "": ("", "")}.items():
        own: list[KernelTime] = kernels.get(tag, [])
        nodes: Mapping[str, int] = profiled.nodes.get(tag, {})
        if own or nodes:
            modules.append(
                ExecutedModule(
                    module=path_in_model,
                    tag=tag,
                    class_name=class_name,
                    nodes=dict(sorted(nodes.items())),
                    kernels=_count_kernels(own, runs - 1),
                    times=_sum_times(own, runs) if own else None,
                )
            )
    return tuple(modules)


def _count_kernels(kernels: list[KernelTime], run: int) -> dict[str, dict[str, int]]:
    """Provider → operator → kernels in a run."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for kernel in kernels:
        if kernel.run == run:
            counts[kernel.provider][kernel.op_type] += 1
    return {provider: dict(sorted(operators.items())) for provider, operators in sorted(counts.items())}


def _sum_times(kernels: list[KernelTime], runs: int) -> RunTimes:
    """Return the times of the kernels of a module in each run."""
    sums = [0.0] * runs
    for kernel in kernels:
        sums[kernel.run] += kernel.self_us / _MS
    return RunTimes(fastest_ms=round(min(sums), 4), median_ms=round(percentile(sums, 50), 4), runs=runs)
