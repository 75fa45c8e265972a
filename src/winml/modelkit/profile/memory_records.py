"""Records of ``winml perf --by-module --memory``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field

from winml.modelkit.records import Record, entry, recorded


class MemoryGrowth(Record):
    """Growth of the process while a session opens a file and runs it, in bytes."""

    growth_bytes: int
    """Resident memory after the runs beyond that before the session."""
    freed_bytes: int
    """Part of it that ONNX Runtime had freed, and the C library had not returned to the system; 0 if unknown."""
    opening_peak_bytes: int
    """Largest growth while the session opened, when ONNX Runtime holds weights twice."""


class HeldValue(Record):
    """A value in memory at the peak."""

    value: str
    operator: str
    """Operator that computed it."""
    tag: str
    """Tag of the module that computed it; empty without one."""
    dtype: str = field(metadata=entry(skip=True))
    shape: tuple[int, ...]
    size_bytes: int


class MemoryPeak(Record):
    """The kernel with the most memory in use in a run."""

    node: str
    operator: str
    tag: str
    activation_bytes: int
    """Values in memory, as allocated."""
    scratch_bytes: int
    """Temporary memory of the kernel."""
    values: tuple[HeldValue, ...]
    """The values, the largest first."""

    @property
    @recorded()
    def reserved_bytes(self) -> int:
        """Memory that ONNX Runtime keeps for later values of the same size."""
        return max(self.activation_bytes - sum(value.size_bytes for value in self.values), 0)


class ModuleBytes(Record):
    """Memory of a module; can be added."""

    weights_bytes: int = 0
    packed_bytes: int = 0
    """Memory of packed copies of weights beyond that of the weights that they replace."""
    peak_bytes: int = 0
    """Values in memory at the peak that the module computed."""
    scratch_bytes: int = 0
    """Largest temporary memory of a kernel."""

    def __add__(self, added: ModuleBytes) -> ModuleBytes:
        return ModuleBytes(
            self.weights_bytes + added.weights_bytes,
            self.packed_bytes + added.packed_bytes,
            self.peak_bytes + added.peak_bytes,
            # One kernel runs at a time.
            max(self.scratch_bytes, added.scratch_bytes),
        )


def sum_memory(parts: Iterable[ModuleBytes | None]) -> ModuleBytes | None:
    """Add the memory of modules; ``None`` if no memory was measured."""
    measured = [part for part in parts if part is not None]
    return sum(measured, ModuleBytes()) if measured else None


class ModuleMemory(Record):
    """Memory of a model, by use and by module, in bytes."""

    weights_bytes: int
    """Weights of the executed graph."""
    packed_bytes: int
    """Packed copies of weights, beyond the weights that they replace."""
    allocator_bytes: int
    """Memory that the arena holds beyond values and scratch: rounding, and the block of later runs."""
    peak: MemoryPeak
    growth: MemoryGrowth = field(metadata=entry("process"))
    modules: Mapping[str, ModuleBytes] = field(metadata=entry(skip=True))
    """Tag → memory of the module without its submodules; empty tag: of no module."""

    @property
    @recorded()
    def unattributed(self) -> ModuleBytes:
        """Memory of no module."""
        return self.modules.get("", ModuleBytes())

    @property
    def named_bytes(self) -> int:
        """Sum of the counted memory: weights, activations at the peak, scratch and the arena."""
        scratch = self.packed_bytes + self.peak.scratch_bytes
        return self.weights_bytes + self.peak.activation_bytes + scratch + self.allocator_bytes

    @property
    @recorded()
    def other_bytes(self) -> int:
        """Growth of the process beyond the counted and the freed memory: graph and kernels of ONNX Runtime. Negative if
        the session reused memory that the process had.
        """
        return self.growth.growth_bytes - self.growth.freed_bytes - self.named_bytes
