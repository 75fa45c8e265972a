"""The time of every module of a model, measured in profiled sessions: the records of ``winml perf --by-module``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from winml.modelkit.hierarchy.carry.carrying import CarryReport
from winml.modelkit.measure.module_profile import ModuleProfile, ModuleTime
from winml.modelkit.results.perf_result import SCHEMA_VERSION, PerfResult

__all__ = ["ProfiledDecoder", "ProfiledModules", "module_times_record"]


@dataclass(frozen=True)
class ProfiledModules:
    """The times of a model and of its modules, with the way each executed node got its module."""

    result: PerfResult
    """The whole model, measured with profiling on."""
    profile: ModuleProfile
    tree_source: str
    """What the modules were read from: ``winml tags``, or other names in the file."""
    carried: CarryReport
    """How the executed nodes got their tags."""
    graph_name: str
    node_ms: Mapping[str, float]
    """Time per run of each node of the file itself, by its name, for tools that show the file."""

    def as_record(self, depth: int | None = None) -> dict[str, Any]:
        """Return the JSON of ``winml perf --by-module``.

        Args:
            depth: Levels of the module tree to list. None: all.
        """
        times = module_times_record(self.profile, depth=depth)
        carried = {"tree_source": self.tree_source, "nodes_by_way": dict(self.carried.by_way)}
        return {**self.result.as_record(), "by_module": {**times, **carried}}


@dataclass(frozen=True)
class ProfiledDecoder:
    """The times of a decoder with a cache: of a prompt, and of a step after it."""

    prompt: ProfiledModules
    step: ProfiledModules

    @property
    def phases(self) -> Mapping[str, ProfiledModules]:
        """Both, by name."""
        return {"prompt": self.prompt, "step": self.step}

    def as_record(self, depth: int | None = None) -> dict[str, Any]:
        """Return the JSON of ``winml perf --by-module`` of a decoder: that of any model, for each of the two.

        Args:
            depth: Levels of the module trees to list. None: all.
        """
        records = {name: profiled.as_record(depth) for name, profiled in self.phases.items()}
        return {"schema_version": SCHEMA_VERSION, **records}


def module_times_record(profile: ModuleProfile, *, depth: int | None = None) -> dict[str, Any]:
    """Return the ``by_module`` object specified in FORMATS: times in milliseconds per run, shares from 0 to 1.

    Args:
        profile: The measured times.
        depth: Levels of the tree to list. None: all.
    """
    # A profile without kernel time has shares of 0.
    kernel_ms = profile.kernel_ms or 1.0
    return {
        "tree": [_module_record(root, kernel_ms, depth) for root in profile.roots],
        "unattributed_share": profile.unattributed_share,
        "unattributed_ms": profile.unattributed_ms,
        "unattributed_nodes": dict(profile.unattributed),
        "kernel_ms": profile.kernel_ms,
        "outside_kernels_ms": profile.outside_ms,
        "runs_ms": list(profile.run_ms),
        "classes": [
            {
                "class": entry.class_name,
                "instances": entry.instances,
                "self_ms": entry.self_ms,
                "total_ms": entry.total_ms,
                "share": entry.total_ms / kernel_ms,
                "kernels": entry.kernels,
                "operators_ms": dict(entry.operators),
            }
            for entry in profile.by_class()
        ],
    }


def _module_record(module: ModuleTime, kernel_ms: float, depth: int | None) -> dict[str, Any]:
    levels_left = None if depth is None else depth - 1
    children = () if depth == 1 else module.children
    return {
        "tag": module.tag,
        "module": module.path,
        "class": module.class_name,
        "self_ms": module.self_ms,
        "total_ms": module.total_ms,
        "share": module.total_ms / kernel_ms,
        "kernels": module.kernels,
        "operators_ms": dict(module.operators),
        "output_bytes": module.output_bytes,
        "parameter_bytes": module.parameter_bytes,
        "fused_with": list(module.fused_with),
        "children": [_module_record(child, kernel_ms, levels_left) for child in children],
    }
