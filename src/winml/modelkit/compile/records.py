"""Record of a compiled file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

from winml.modelkit.records import Record, entry
from winml.modelkit.transform.records import GraphSummary, TransformedFile

if TYPE_CHECKING:
    from winml.modelkit.compile.pipeline import CompiledPart, OutsideNode
    from winml.modelkit.ort.device_trace import ModulePlacement


class CompilableProvider(Record):
    """An execution provider with support for compilation."""

    short: str
    name: str
    """Name in ONNX Runtime."""
    is_present: bool
    """True if the provider is available on this machine."""
    devices: tuple[str, ...]
    makes: str
    """Content of a compiled file in a few words."""
    package: str | None
    """pip requirement of the package with the provider for this platform; `None` if no package has it."""


class CompiledFile(TransformedFile, schema_version=1, document="compile.table:compilation_document"):
    """A file compiled for an execution provider."""

    before: GraphSummary = field(metadata=entry("nodes_before", attribute="nodes", last=True))
    after: GraphSummary = field(metadata=entry("nodes_after", attribute="nodes", last=True))
    compiled: Mapping[str, Any]
    """Record in the metadata of the file: provider, versions, device, options."""
    parts: tuple[CompiledPart, ...]
    """The nodes that replace compiled parts; empty for the CPU provider."""
    outside: tuple[OutsideNode, ...]
    """Nodes outside of compiled parts, which run on the CPU provider."""
    modules: tuple[ModulePlacement, ...] = ()
    """Nodes of each module in compiled parts, and the reasons of its other nodes; empty for the CPU provider."""
