"""Record of ``winml inspect --ep``: the support of a file by an execution provider."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Literal

from winml.modelkit.records import Record, entry, recorded

if TYPE_CHECKING:
    from winml.modelkit.ort.device_trace import ModulePlacement

Basis = Literal["provider", "kernels", "document", "compilation"]
"""Source of the result: the provider itself, by a session; the list of its kernels in the installed ONNX Runtime; its
documentation; or the trace in a compiled file."""

FindingKind = Literal["open size", "unknown size", "operator", "dtype", "refused", "graph"]
"""Cause of unsupported nodes: a dynamic dimension, a data-dependent size, an unsupported operator or element type,
another property of the nodes, or the graph as a whole."""


class Finding(Record):
    """One cause of unsupported nodes."""

    kind: FindingKind
    what: str
    """The dynamic dimension, the operator, or operator and element type."""
    reason: str
    """Reason, in the words of its source if available."""
    remedy: str
    """Remedy."""
    modules: Mapping[str, int]
    """Module → number of its affected nodes, in descending order: dotted path, or the tag if the path is unknown."""
    nodes: tuple[str, ...]
    """Names of the nodes."""


class ListedLimit(Record):
    """An operator with a condition in the documentation, which is not checked."""

    operator: str
    limit: str
    count: int
    """Number of nodes with this operator."""


class ModuleCopies(Record):
    """Values of one module that are copied between the CPU and the device in each run."""

    module: str
    """Dotted path of the module that computes the values; of inputs and weights, of their first reader."""
    to_device: int
    to_cpu: int
    values: tuple[str, ...]
    """Names of the values."""

    @property
    def words(self) -> str:
        """The numbers of copies, for people."""
        counts = ((self.to_device, "to the device"), (self.to_cpu, "back"))
        directions = ", ".join(f"{count} {direction}" for count, direction in counts if count)
        return f"{self.module or '(the root)'} {directions}"


class ProviderFit(Record):
    """Support of a file by a provider."""

    provider: str
    """Short name."""
    name: str
    """Name in ONNX Runtime."""
    device: str
    basis: Basis
    source: str
    """Version of the provider or of ONNX Runtime, or address and version of the document."""
    nodes: int
    """Number of checked nodes: nodes of the session when the provider is queried, else all nodes of the file."""
    taken: int
    """Number of nodes that the provider supports."""
    findings: tuple[Finding, ...]
    """Causes of unsupported nodes, the most frequent first."""
    limits: tuple[ListedLimit, ...]
    notes: tuple[str, ...]
    copies: tuple[ModuleCopies, ...] = ()
    """Copies between nodes on the CPU and nodes on the device, the most first; without inputs and outputs of the graph.
    Empty unless the provider was asked by a session, and for compiling providers."""
    modules: tuple[ModulePlacement, ...] = ()
    """Supported nodes of each module, and the reasons of its other nodes."""

    precisions: Mapping[str, str] = field(default_factory=dict, metadata=entry(omit_empty=True))
    """Precision → reason why the provider does not run it, ``""`` if it does; ``{}`` if nothing is known of it."""
    precisions_source: str = field(default="", metadata=entry(omit_empty=True))
    """Versions and device that were asked for the precisions, as text."""
    fingerprint: str = field(default="", metadata=entry(omit_empty=True))
    """Digest of the structure of the file, by which ``winml view`` assigns the result."""

    @property
    @recorded(entry(before="nodes"))
    def runs_all(self) -> bool:
        """True if no unsupported node is known."""
        return not self.findings
