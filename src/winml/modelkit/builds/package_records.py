"""Records of a model package."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path

from winml.modelkit.records import Record, entry, recorded
from winml.modelkit.report.result import Result


class PackagedVariant(Record):
    """One variant of a package."""

    name: str
    providers: tuple[str, ...]
    """Execution providers for which ONNX Runtime chooses it."""
    nodes: int
    """Nodes of all parts."""
    size_bytes: int
    """Bytes of the files that only this variant has."""
    shared_bytes: int
    """Bytes of shared weights that it reads."""
    separate_bytes: int
    """Bytes of its models in a build folder of its own."""
    quality: str
    """Lowest SQNR of its outputs relative to the source, ``equal outputs``, or ``not compared``."""
    latency_ms: float | None
    """Median time of a run on the CPU of this machine; None for another provider or several parts."""


class PackageResult(
    Result, Record, document="builds.package_table:package_document", rows="variants", schema_version=1
):
    """A model package."""

    folder: Path
    model: str
    """Name of the model, as the user wrote it."""
    parts: tuple[str, ...]
    """Components of the package."""
    variants: tuple[PackagedVariant, ...]
    """Variants; of several for one provider, ONNX Runtime chooses the first."""
    companions: tuple[str, ...]
    """Config, tokenizer and processor files in the root of the package."""
    shared_bytes: int
    """Bytes of weights that several variants read."""
    size_bytes: int
    """Bytes of all files."""
    seconds: float
    notes: tuple[str, ...] = field(default=(), metadata=entry(last=True))

    @property
    @recorded(entry(before="size_bytes"))
    def separate_bytes(self) -> int:
        """Bytes of the models in a folder for each variant."""
        return sum(variant.separate_bytes for variant in self.variants)
