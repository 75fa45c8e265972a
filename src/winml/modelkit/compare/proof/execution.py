"""Records of how ONNX Runtime executes a file: kernels and times by module.

Part of the JSON of ``winml verify``, with which another environment is compared (``upgrade``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from winml.modelkit.arrays import Arrays
from winml.modelkit.compare.proof.records import ProofBase
from winml.modelkit.ort.devices import ChosenProvider


class RunTimes(ProofBase):
    """Times of equal runs."""

    fastest_ms: float
    median_ms: float
    runs: int
    other_load: float = 0.0
    """Share of the processor's cores that other programs used, 0 to 1."""


class ExecutedModule(ProofBase):
    """Nodes of a module in the file, and its kernels after the optimization of ONNX Runtime, without submodules."""

    module: str
    tag: str
    class_name: str
    nodes: dict[str, int]
    """Operator → nodes in the file."""
    kernels: dict[str, dict[str, int]]
    """Execution provider → operator → kernels in a run."""
    times: RunTimes | None = None
    """Sum of its kernels in a run, with profiling; missing without kernels."""

    @property
    def operators(self) -> Mapping[str, int]:
        """Operator → kernels in a run, on any provider."""
        counts: dict[str, int] = {}
        for operators in self.kernels.values():
            for operator, count in operators.items():
                counts[operator] = counts.get(operator, 0) + count
        return counts

    @property
    def providers(self) -> Mapping[str, int]:
        """Execution provider → kernels in a run."""
        return {provider: sum(operators.values()) for provider, operators in self.kernels.items()}


MeasureExecution = Callable[[Path, Arrays, ChosenProvider | None, int], tuple[ExecutedModule, ...]]
"""Runs a file so many times on values of its inputs, and returns its modules with nodes or kernels."""
