"""The latencies of modules that were measured on their own: the record of ``winml perf --module``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from winml.modelkit.hierarchy.module_identity import ModuleIdentity
from winml.modelkit.measure.latency import LatencyOptions, LatencyResult
from winml.modelkit.results.perf_result import SCHEMA_VERSION
from winml.modelkit.runtime.devices import ChosenProvider

__all__ = ["ClassSummary", "MeasuredModule", "ModulePerfResult"]


@dataclass(frozen=True)
class MeasuredModule:
    """One call of a module that was measured alone, or the reason why it was not."""

    identity: ModuleIdentity
    inputs: Mapping[str, tuple[str, tuple[int, ...]]]
    """Element type and shape of each input, by name; empty where the module was not cut out."""
    nodes: int
    """Number of nodes; 0 where the module was not cut out."""
    latency: LatencyResult | None
    """None where the measurement failed."""
    session_creation_ms: float | None
    error: str = ""
    """Reason of the failure; empty without one."""

    def as_record(self) -> dict[str, Any]:
        """Return its entry of ``instances``."""
        summary = self.latency.summary.as_record() if self.latency else {}
        names = ("mean", "std", "min", "p50", "p90", "p95", "p99", "max")
        return {
            **self.identity.as_record(),
            **{f"{name}_ms": summary.get(name) for name in names},
            "first_run_ms": None if self.latency is None else round(self.latency.first_run_ms, 6),
            "session_creation_ms": None if self.session_creation_ms is None else round(self.session_creation_ms, 3),
            "nodes": self.nodes,
            "inputs": {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in self.inputs.items()},
            "raw_samples_ms": [round(sample, 6) for sample in self.latency.samples_ms] if self.latency else [],
            "error": self.error or None,
        }


@dataclass(frozen=True)
class ClassSummary:
    """The latencies of all measured modules of one class."""

    class_name: str
    instances: int
    mean_ms: float
    """Mean of the means of its instances."""
    min_ms: float
    """Mean of the fastest instance."""
    max_ms: float
    """Mean of the slowest instance."""
    total_ms: float
    """Sum of the means of its instances."""

    def as_record(self) -> dict[str, Any]:
        """Return its entry of ``classes``."""
        times = {name: round(getattr(self, name), 6) for name in ("mean_ms", "min_ms", "max_ms", "total_ms")}
        return {"class": self.class_name, "instances": self.instances, **times}


@dataclass(frozen=True)
class ModulePerfResult:
    """The outcome of one measurement of modules on their own."""

    model: str
    """As the user wrote it."""
    selector: str
    tool_version: str
    onnxruntime_version: str
    provider: ChosenProvider
    threads: int | None
    """Requested number; None leaves it to ONNX Runtime."""
    seed: int
    input_source: str
    """Where the values of the whole model came from: ``random`` or ``file``."""
    options: LatencyOptions
    instances: tuple[MeasuredModule, ...]
    without_nodes: tuple[ModuleIdentity, ...]
    """Modules without a node in the graph."""
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> tuple[MeasuredModule, ...]:
        """The instances that could not be measured."""
        return tuple(item for item in self.instances if item.latency is None)

    @property
    def module_class(self) -> str | None:
        """The class of all instances; None where they have several."""
        names = {item.identity.class_name for item in self.instances}
        return names.pop() if len(names) == 1 else None

    def classes(self) -> tuple[ClassSummary, ...]:
        """Return the latencies of each class, the longest total first."""
        means: dict[str, list[float]] = defaultdict(list)
        for item in self.instances:
            if item.latency is not None:
                means[item.identity.class_name].append(item.latency.summary.mean)
        summaries = [
            ClassSummary(name, len(times), sum(times) / len(times), min(times), max(times), sum(times))
            for name, times in means.items()
        ]
        return tuple(sorted(summaries, key=lambda entry: entry.total_ms, reverse=True))

    def as_record(self) -> dict[str, Any]:
        """Return the JSON of ``winml perf --module``."""
        return {
            "schema_version": SCHEMA_VERSION,
            "benchmark_info": {
                "model": self.model,
                "selector": self.selector,
                "tool_version": self.tool_version,
                "onnxruntime_version": self.onnxruntime_version,
                "ep": self.provider.provider.name,
                **self.provider.device_record(),
                "ep_options": dict(self.provider.options),
                "threads": self.threads,
                "iterations": self.options.iterations if self.options.duration_s is None else None,
                "warmup": self.options.warmup,
                "duration_s": self.options.duration_s,
                "seed": self.seed,
                "input_source": self.input_source,
                "notes": list(self.notes),
            },
            "module_class": self.module_class,
            "instance_count": len(self.instances),
            "failed_count": len(self.failed),
            "classes": [entry.as_record() for entry in self.classes()],
            "instances": [item.as_record() for item in self.instances],
            "without_nodes": [item.as_record() for item in self.without_nodes],
        }
