"""Record of a compiled file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from winml.modelkit.records import Record, entry
from winml.modelkit.transform.records import GraphSummary, TransformedFile

if TYPE_CHECKING:
    from winml.modelkit.compile.pipeline import CompiledPart, OutsideNode


@dataclass(frozen=True)
class CompilableProvider(Record):
    """One execution provider that a file can be compiled for."""

    short: str
    name: str
    """Name in ONNX Runtime."""
    is_present: bool
    """Whether it can compile here."""
    devices: tuple[str, ...]
    makes: str
    """What a compiled file holds, in a few words."""
    package: str | None
    """Requirement of the package that brings it on this platform, for pip; None where there is none."""


@dataclass(frozen=True)
class CompiledFile(TransformedFile, schema_version=1):
    """A file that was compiled for an execution provider."""

    before: GraphSummary = field(metadata=entry("nodes_before", attribute="nodes", last=True))
    after: GraphSummary = field(metadata=entry("nodes_after", attribute="nodes", last=True))
    compiled: Mapping[str, Any]
    """What the file says of it: provider, versions, device, options."""
    parts: tuple[CompiledPart, ...]
    """The nodes that stand for what the provider compiled; empty for the CPU provider."""
    outside: tuple[OutsideNode, ...]
    """Beside them, the nodes that the provider left to the CPU provider."""
