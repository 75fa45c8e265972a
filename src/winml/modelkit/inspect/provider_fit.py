"""The record of ``winml inspect --ep``: whether an execution provider runs a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from winml.modelkit.records import Record, entry, recorded

Basis = Literal["provider", "kernels", "document"]
"""Who said it: the provider itself, when a session was opened; the list of its kernels in the installed ONNX Runtime;
or its documentation."""

FindingKind = Literal["open size", "unknown size", "operator", "dtype", "refused", "graph"]
"""What keeps nodes from the provider: a size it needs fixed, one that depends on data, an operator or an element type
it lacks, something else about the nodes, or the graph as a whole."""


@dataclass(frozen=True)
class Finding(Record):
    """One thing that keeps nodes from the provider."""

    kind: FindingKind
    what: str
    """The dynamic dimension, the operator, or operator and element type."""
    reason: str
    """Why, in the words of who said it where there are some."""
    remedy: str
    """What to do about it."""
    modules: Mapping[str, int]
    """Module → its nodes that are concerned, the most first: dotted path, the tag where that is unknown."""
    nodes: tuple[str, ...]
    """Their names."""


@dataclass(frozen=True)
class ListedLimit(Record):
    """An operator that the documentation lists with a condition, which is not checked."""

    operator: str
    limit: str
    count: int
    """Nodes that have this operator."""


@dataclass(frozen=True)
class ProviderFit(Record):
    """Whether a provider runs a file."""

    provider: str
    """Short name."""
    name: str
    """Its name in ONNX Runtime."""
    device: str
    basis: Basis
    source: str
    """Version of the provider or of ONNX Runtime, or address and version of the document."""
    nodes: int
    """Nodes that were judged: those a session still has when it asks its providers, else all of the file."""
    taken: int
    """Those of them that the provider runs."""
    findings: tuple[Finding, ...]
    """What keeps nodes from the provider, the most nodes first."""
    limits: tuple[ListedLimit, ...]
    notes: tuple[str, ...]

    @property
    @recorded(entry(before="nodes"))
    def runs_all(self) -> bool:
        """Whether nothing keeps a node from the provider, as far as it is known."""
        return not self.findings
