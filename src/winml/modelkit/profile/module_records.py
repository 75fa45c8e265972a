"""Records of ``winml perf --module`` and ``--by-module``."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from winml.modelkit.ort.device_trace import ModulePlacement
from winml.modelkit.profile.latency import LatencyResult
from winml.modelkit.profile.memory_records import ModuleMemory
from winml.modelkit.profile.module_profile import ModuleProfile, ModuleTime
from winml.modelkit.profile.records import INFO, SCHEMA_VERSION, Measurement, PerfResult
from winml.modelkit.profile.statistics import Ratio, Summary, compare_pairs, percentile
from winml.modelkit.records import Record, entry, json_value, record_keys, recorded
from winml.modelkit.report.result import Result
from winml.modelkit.tags.address import ModuleIdentity
from winml.modelkit.tags.carry.carrying import CarryReport


@dataclass(frozen=True)
class MeasuredModule:
    """Result of one module call measured alone, or the reason of its failure."""

    identity: ModuleIdentity
    inputs: Mapping[str, tuple[str, tuple[int, ...]]]
    """Input name → (element type, shape); empty if the module was not cut out."""
    nodes: int
    """Number of nodes; 0 if the module was not cut out."""
    latency: LatencyResult | None
    """``None`` if the measurement failed."""
    session_creation_ms: float | None
    error: str = ""
    """Reason of the failure; empty without one."""

    def as_record(self) -> dict[str, object]:
        """Entry of ``instances``."""
        latency = self.latency
        summary = dict.fromkeys(record_keys(Summary)) if latency is None else latency.summary.as_record()
        return {
            **self.identity.as_record(),
            **{f"{name}_ms": value for name, value in summary.items()},
            "first_run_ms": None if latency is None else round(latency.first_run_ms, 6),
            "session_creation_ms": json_value(self.session_creation_ms, 3),
            "nodes": self.nodes,
            "inputs": {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in self.inputs.items()},
            "raw_samples_ms": [] if latency is None else json_value(latency.samples_ms, 6),
            "error": self.error or None,
        }


class ClassSummary(Record, digits=6):
    """Latencies of all measured modules of one class."""

    class_name: str = field(metadata=entry("class"))
    instances: int
    mean_ms: float
    """Mean of the medians of its instances."""
    min_ms: float
    """Median of the fastest instance."""
    max_ms: float
    """Median of the slowest instance."""
    total_ms: float
    """Sum of the medians of its instances."""


class ModulePerfResult(Result, Measurement, document="profile.module_table:module_perf_document", rows="instances"):
    """Result of a measurement of single modules."""

    selector: str = field(metadata=entry(within=INFO))
    instances: tuple[MeasuredModule, ...]
    without_nodes: tuple[ModuleIdentity, ...]
    """Modules without a node in the graph."""
    notes: tuple[str, ...] = field(default=(), metadata=entry(within=INFO))

    @property
    def failed(self) -> tuple[MeasuredModule, ...]:
        """Instances without a measurement."""
        return tuple(module for module in self.instances if module.latency is None)

    @recorded(entry(inline=True, before="instances"))
    def _counts(self) -> dict[str, object]:
        return {"instance_count": len(self.instances), "failed_count": len(self.failed)}

    @recorded(entry(within=INFO))
    def iterations(self) -> int | None:
        """Return the requested number of runs; ``None`` if a duration was requested."""
        return self.options.iterations if self.options.duration_s is None else None

    @property
    @recorded(entry(before="instances"))
    def module_class(self) -> str | None:
        """Class of all instances; ``None`` for several classes."""
        names = {module.identity.class_name for module in self.instances}
        return names.pop() if len(names) == 1 else None

    @recorded(entry(before="instances"))
    def classes(self) -> tuple[ClassSummary, ...]:
        """Latencies of each class, in descending order of total time."""
        medians: dict[str, list[float]] = defaultdict(list)
        for module in self.instances:
            if module.latency is not None:
                medians[module.identity.class_name].append(module.latency.summary.p50)
        summaries = [
            ClassSummary(name, len(times), sum(times) / len(times), min(times), max(times), sum(times))
            for name, times in medians.items()
        ]
        return tuple(sorted(summaries, key=lambda entry: entry.total_ms, reverse=True))


@dataclass(frozen=True)
class ProfiledModules(Result, document="profile.module_table:profile_document", rows="by_module.tree"):
    """Times of a model and its modules, and the transfer of tags to executed nodes."""

    result: PerfResult
    """Measurement of the whole model."""
    profile: ModuleProfile
    tree_source: str
    """Source of the module tree: ``winml tags``, or other names in the file."""
    carried: CarryReport
    """Report of the transfer of tags to executed nodes."""
    graph_name: str
    node_ms: Mapping[str, float]
    """Name of a node in the file → time per run, for viewers of the file."""
    placement: tuple[ModulePlacement, ...] = ()
    """Nodes of each module on the device, and the reasons of its other nodes; empty if nothing is compiled."""

    memory: ModuleMemory | None = None
    """Memory by module; ``None`` if not requested."""

    @property
    def phases(self) -> Mapping[str, ProfiledModules]:
        """The single phase, without a name."""
        return {"": self}

    def as_record(self, depth: int | None = None) -> dict[str, object]:
        """Return the JSON of ``winml perf --by-module``.

        Args:
            depth: Levels of the module tree to list. ``None``: all.
        """
        return {**self.result.as_record(), **self.times_record(depth)}

    def times_record(self, depth: int | None = None) -> dict[str, object]:
        """Return the entry ``by_module``.

        Args:
            depth: Levels of the module tree to list. ``None``: all.
        """
        times = module_times_record(self.profile, depth=depth)
        origin = {"tree_source": self.tree_source, "nodes_by_way": dict(self.carried.by_way)}
        placement = {"placement": [entry.as_record() for entry in self.placement]} if self.placement else {}
        memory = {} if self.memory is None else {"memory": self.memory.as_record()}
        fingerprint = {"fingerprint": self.result.fingerprint} if self.result.fingerprint else {}
        return {"by_module": {**times, **memory, **origin, **placement, **fingerprint}}


@dataclass(frozen=True)
class ProfiledDecoder(Result, document="profile.module_table:profile_document"):
    """Times of a decoder with a KV cache: of a prompt, and of a following step."""

    prompt: ProfiledModules
    step: ProfiledModules

    @property
    def phases(self) -> Mapping[str, ProfiledModules]:
        """Phase name → times."""
        return {"prompt": self.prompt, "step": self.step}

    def as_record(self, depth: int | None = None) -> dict[str, object]:
        """Return the JSON of ``winml perf --by-module`` of a decoder, with a record per phase.

        Args:
            depth: Levels of the module trees to list. ``None``: all.
        """
        return {"schema_version": SCHEMA_VERSION, **self.times_record(depth)}

    def times_record(self, depth: int | None = None) -> dict[str, object]:
        """Return a record per phase.

        Args:
            depth: Levels of the module trees to list. ``None``: all.
        """
        return {name: profiled.as_record(depth) for name, profiled in self.phases.items()}


class ModuleRatio(Record):
    """Time of a module in a model beside its baseline, with the modules inside."""

    tag: str
    path: str = field(metadata=entry("module"))
    class_name: str = field(metadata=entry("class"))
    baseline_ms: float
    """Median of the blocks of runs, of which ``ratio`` compares each pair."""
    model_ms: float
    ratio: Ratio | None
    """Ratio of the time in the model to that in the baseline; ``None`` if the module has no kernels or no time."""
    blocks_ms: tuple[Sequence[float], Sequence[float]] = field(default=((), ()), metadata=entry(skip=True))
    """Times of the blocks in the baseline and in the model; ``()`` for a module without kernels."""

    @classmethod
    def of_blocks(
        cls,
        tag: str,
        path: str,
        class_name: str,
        baseline_ms: Sequence[float],
        model_ms: Sequence[float],
        slowdown: float,
    ) -> ModuleRatio:
        """Compare blocks of runs that were measured in alternation.

        Args:
            tag: Tag of the module.
            path: Its path.
            class_name: Its class.
            baseline_ms: Time of each block in the baseline; ``()`` without kernels.
            model_ms: The same in the model.
            slowdown: Median run relative to the fastest.
        """
        is_timed = bool(baseline_ms) and bool(model_ms) and min(baseline_ms) > 0
        ratio = replace(compare_pairs(model_ms, baseline_ms), slowdown=slowdown) if is_timed else None
        baseline_median, model_median = (percentile(times, 50) if times else 0.0 for times in (baseline_ms, model_ms))
        return cls(tag, path, class_name, baseline_median, model_median, ratio, (baseline_ms, model_ms))

    @classmethod
    def of_layers(cls, layers: Sequence[ModuleRatio]) -> ModuleRatio:
        """Add the times of equal layers, block by block."""
        first, *others = layers
        if not others:
            return first
        of_sides = ([layer.blocks_ms[side] for layer in layers if layer.blocks_ms[side]] for side in (0, 1))
        baseline_ms, model_ms = ([math.fsum(times) for times in zip(*blocks, strict=True)] for blocks in of_sides)
        slowdown = max(layer.ratio.slowdown if layer.ratio is not None else 1.0 for layer in layers)
        return cls.of_blocks(first.tag, first.path, first.class_name, baseline_ms, model_ms, slowdown)

    @property
    @recorded()
    def verdict(self) -> str:
        """``faster`` or ``slower`` in the model, ``no difference found`` or ``undecided``; empty without a ratio."""
        if self.ratio is None:
            return ""
        answer = self.ratio.answer("")
        return "undecided" if answer.is_undecided else self.ratio.verdict

    @property
    def verdict_words(self) -> str:
        """The verdict, and the reason for an undecided one that other load on the machine causes."""
        is_disturbed = self.ratio is not None and self.ratio.is_disturbed
        return f"{self.verdict} (other load)" if is_disturbed else self.verdict


@dataclass(frozen=True)
class TorchPhase:
    """Times of modules in PyTorch, measured in alternation with ONNX Runtime."""

    profile: ModuleProfile
    ratios: tuple[ModuleRatio, ...]
    """Modules of the file, the largest ratio first."""

    def times_record(self, depth: int | None) -> dict[str, object]:
        """Return the entry ``by_module``."""
        return {"by_module": module_times_record(self.profile, depth=depth)}


@dataclass(frozen=True)
class TorchModules:
    """Times of modules in PyTorch."""

    phases: Mapping[str, TorchPhase]
    """Phase of a decoder → its times; empty name for other models."""

    def times_record(self, depth: int | None = None) -> dict[str, object]:
        """Return the record of the phase, or a record per phase of a decoder."""
        records = {name: phase.times_record(depth) for name, phase in self.phases.items()}
        return records[""] if "" in records else dict(records)


@dataclass(frozen=True)
class ComparedProfiles(Result, document="profile.module_table:compared_document", rows="by_module.tree"):
    """Latency of a model and of a baseline in alternation, and the times of their modules."""

    result: PerfResult
    """Measurement of both without profiling."""
    model: ProfiledModules | ProfiledDecoder
    baseline: ProfiledModules | ProfiledDecoder | TorchModules
    model_weights: Mapping[str, int]
    """Tag of a module of the model → size of its weights in the file, with those of its submodules; ``{}`` beside
    PyTorch.
    """
    baseline_weights: Mapping[str, int]
    """The same of the baseline."""
    ratios: Mapping[str, tuple[ModuleRatio, ...]] = field(default_factory=dict)
    """Phase → modules beside the baseline, the largest ratio first; empty if they were not measured in alternation."""

    @property
    def phases(self) -> Mapping[str, tuple[ProfiledModules | TorchPhase, ProfiledModules]]:
        """Phase name → times of the baseline and of the model."""
        return {name: (self.baseline.phases[name], phase) for name, phase in self.model.phases.items()}

    def as_record(self, depth: int | None = None) -> dict[str, object]:
        """Return the JSON of ``winml perf --by-module --baseline``.

        Args:
            depth: Levels of the module trees to list. ``None``: all.
        """
        compared = self.result.as_record()
        baseline: dict[str, Any] = {
            **dict(compared["baseline"]),  # type: ignore[call-overload]  # a JSON object
            **self.baseline.times_record(depth),
            "weight_bytes": dict(self.baseline_weights),
        }
        for phase, ratios in self.ratios.items():
            entry = baseline[phase] if phase else baseline
            entry["ratios"] = [ratio.as_record() for ratio in ratios]
        times = self.model.times_record(depth)
        return {**compared, **times, "weight_bytes": dict(self.model_weights), "baseline": baseline}


def module_times_record(profile: ModuleProfile, *, depth: int | None = None) -> dict[str, object]:
    """Return the ``by_module`` object specified in FORMATS: times in milliseconds per run, shares from 0 to 1.

    For a device that counts cycles, keys end in ``_kcycles`` instead of ``_ms``.

    Args:
        profile: The measured times.
        depth: Levels of the tree to list. ``None``: all.
    """
    # A profile without kernel time has shares of 0.
    kernel_ms = profile.kernel_ms or 1.0
    record: dict[str, object] = {
        "unit": profile.unit,
        "tree": [_module_record(root, kernel_ms, depth) for root in profile.roots],
        "unattributed_share": profile.unattributed_share,
        "unattributed_ms": profile.unattributed_ms,
        "unattributed_nodes": dict(profile.unattributed),
        "kernel_ms": profile.kernel_ms,
        "outside_kernels_ms": profile.outside_ms,
        "runs_ms": list(profile.run_ms),
        "classes": [{**entry.as_record(), "share": entry.total_ms / kernel_ms} for entry in profile.by_class()],
    }
    return record if profile.unit == "ms" else _replace_unit(record, f"_{profile.unit}")


def _replace_unit(record: Mapping[str, object], suffix: str) -> dict[str, object]:
    """Replace the unit suffix of all keys of a record, recursively."""

    def convert(value: object) -> object:
        if isinstance(value, Mapping):
            return _replace_unit(value, suffix)
        return [convert(entry) for entry in value] if isinstance(value, list) else value

    nodes = {"operators_ms", "unattributed_nodes"}  # below these keys, keys are operator and node names
    return {
        f"{key.removesuffix('_ms')}{suffix}" if key.endswith("_ms") else key: value if key in nodes else convert(value)
        for key, value in record.items()
    }


def _module_record(module: ModuleTime, kernel_ms: float, depth: int | None) -> dict[str, object]:
    levels_left = None if depth is None else depth - 1
    children = () if depth == 1 else module.children
    return {
        **module.as_record(),
        "share": module.total_ms / kernel_ms,
        "children": [_module_record(child, kernel_ms, levels_left) for child in children],
    }
