"""Times of modules in PyTorch, measured with forward hooks in alternation with a session."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from winml.modelkit.ort.kernel_times import KernelTime, RunProfile
from winml.modelkit.profile.latency import PAIRS, Run, measure_block
from winml.modelkit.profile.module_profile import ModuleProfile, charge_modules
from winml.modelkit.profile.module_records import ModuleRatio
from winml.modelkit.profile.statistics import percentile, summarize
from winml.modelkit.progress import Progress
from winml.modelkit.tags import address

if TYPE_CHECKING:
    from torch import nn

_NS_PER_US = 1000.0
_US_PER_MS = 1000.0


class ModuleClock:
    """Times of the calls of modules, run by run, without the calls of other timed modules inside."""

    def __init__(self) -> None:
        """Start without a run."""
        self._runs: list[dict[str, int]] = []
        self._inside: list[list[int]] = []
        """[start, time of timed modules inside] of each running call, in nanoseconds."""

    @contextmanager
    def timing(self, model: nn.Module, paths: Collection[str]) -> Iterator[None]:
        """Time the calls of these modules until the block ends; a call of the model is a run."""

        def before(_module: object, _arguments: object) -> None:
            self._inside.append([time.perf_counter_ns(), 0])

        def after_of(path: str) -> Callable[..., None]:
            def after(_module: object, _arguments: object, _output: object) -> None:
                start_ns, inside_ns = self._inside.pop()
                took_ns = time.perf_counter_ns() - start_ns
                if self._inside:
                    self._inside[-1][1] += took_ns
                self._runs[-1][path] = self._runs[-1].get(path, 0) + took_ns - inside_ns

            return after

        def start_run(_module: object, _arguments: object) -> None:
            self._runs.append({})
            self._inside.clear()

        with ExitStack() as hooks:
            hooks.callback(model.register_forward_pre_hook(start_run).remove)
            for path, module in model.named_modules():
                if not path or path in paths:
                    hooks.callback(module.register_forward_pre_hook(before).remove)
                    hooks.callback(module.register_forward_hook(after_of(path)).remove)
            yield

    def profile(self) -> RunProfile:
        """Return the times as a profile: a kernel for each module and run, named by the path of the module."""
        kernels, run_us, start = list[KernelTime](), list[float](), 0.0
        for run, times in enumerate(self._runs):
            for path, self_ns in times.items():
                took = self_ns / _NS_PER_US
                kernels.append(KernelTime(path, "PyTorch", run, start, took, took, None, None, "PyTorch"))
                start += took
            run_us.append(sum(times.values()) / _NS_PER_US)
        return RunProfile(tuple(kernels), tuple(run_us))


def run_alternately(runs: Sequence[Run], count: int, warmup: int, progress: Progress | None) -> tuple[list[int], int]:
    """Call functions in alternating blocks.

    Args:
        runs: The functions.
        count: Number of counted calls of each; rounded up to whole blocks.
        warmup: Number of calls of each before.
        progress: Called between blocks.

    Returns:
        The positions of the counted calls among all calls of one function, and the size of a block.
    """
    for run in runs:
        for _ in range(warmup):
            run()
    size = max(1, count // PAIRS)
    blocks = -(-count // size)
    for turn in range(blocks):
        for run in runs if turn % 2 == 0 else reversed(runs):
            measure_block(run, size)
        if progress is not None:
            progress((turn + 1) * size, (turn + 1) / blocks)
    # A block begins with a call that is not counted.
    calls = range(blocks * (size + 1))
    return [warmup + position for position in calls if position % (size + 1)], size


def select_runs(profile: RunProfile, runs: Sequence[int]) -> RunProfile:
    """Keep some runs of a profile, numbered from 0."""
    numbers = {run: number for number, run in enumerate(runs)}
    kernels = (replace(kernel, run=numbers[kernel.run]) for kernel in profile.kernels if kernel.run in numbers)
    return replace(profile, kernels=tuple(kernels), run_us=tuple(profile.run_us[run] for run in runs))


def charge_torch_modules(times: RunProfile, model: ModuleProfile) -> ModuleProfile:
    """Assign times of PyTorch to the modules of a file.

    ONNX Runtime charges the kernel that fused several modules to one of them. If a module has no other kernel, its time
    in PyTorch is charged to the same module.

    Args:
        times: Times of the modules in PyTorch.
        model: Times of the modules in ONNX Runtime.
    """
    modules = list(model.modules())
    owners: dict[str, str] = {}
    for module in modules:
        for tag in module.fused_with:
            owners.setdefault(tag, module.tag)
    tags = {module.path: module.tag if module.kernels else owners.get(module.tag, module.tag) for module in modules}
    tags[""] = model.roots[0].tag if model.roots else ""
    return charge_modules(times, tags, [(module.tag, module.path, module.class_name) for module in modules])


def compare_modules(model: ModuleProfile, baseline: ModuleProfile, block: int) -> tuple[ModuleRatio, ...]:
    """Compare the time of each module in a model and in its baseline, the largest ratio first.

    Args:
        model: Times of the model.
        baseline: Times of the baseline, of as many runs.
        block: Number of consecutive runs of each, which are compared by their median.
    """
    model_ms, baseline_ms = _times_of_blocks(model, block), _times_of_blocks(baseline, block)
    slowdown = max(summarize(profile.run_ms).slowdown for profile in (model, baseline))
    rows = [
        ModuleRatio.of_blocks(
            module.tag,
            module.path,
            module.class_name,
            baseline_ms.get(module.tag, ()),
            model_ms.get(module.tag, ()),
            slowdown,
        )
        for module in model.modules()
    ]
    return tuple(sorted(rows, key=lambda row: -1.0 if row.ratio is None else row.ratio.value, reverse=True))


def _times_of_blocks(profile: ModuleProfile, block: int) -> Mapping[str, list[float]]:
    """Tag → median time of the runs of each block in milliseconds, submodules included."""
    runs = len(profile.run_ms)
    times: dict[str, list[float]] = defaultdict(lambda: [0.0] * runs)
    for kernel in profile.profile.kernels:
        for tag in address.lineage(profile.tags.get(kernel.node, "")):
            times[tag][kernel.run] += kernel.self_us
    return {
        tag: [percentile(of_runs[start : start + block], 50) / _US_PER_MS for start in range(0, runs, block)]
        for tag, of_runs in times.items()
    }
