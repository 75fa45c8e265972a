"""The result of cutting modules out of a model: the record of ``winml extract`` and its manifest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winml.modelkit.hierarchy.module_identity import ModuleIdentity

__all__ = ["SCHEMA_VERSION", "ExtractResult", "ExtractedModule", "RefusedModule"]

SCHEMA_VERSION = 1
"""Layout of the manifest, specified in docs/reference/formats.md."""


@dataclass(frozen=True)
class ExtractedModule:
    """One module that became a model of its own."""

    identity: ModuleIdentity
    file: str
    """Name of the model in the folder."""
    inputs_file: str | None
    """Name of the recorded inputs; None where they were not asked for."""
    outputs_file: str | None
    """Name of what the whole model made of them; None where they were not asked for."""
    inputs: tuple[dict[str, Any], ...]
    """Name, shape and dtype of each."""
    outputs: tuple[dict[str, Any], ...]
    nodes: int
    parameters: int
    size_bytes: int
    """Of the model with its weights."""
    drawn_in: tuple[str, ...]
    """Names of nodes of other modules that had to come along because they stand between its own."""
    left_out: tuple[str, ...]
    """Names of its own nodes that others need before the rest can run: what they make is an input."""
    max_abs_diff: float
    """Largest difference from what flowed in the whole model."""
    relative_diff: float
    """The same as a share of the largest value."""

    def as_record(self) -> dict[str, Any]:
        """Return its entry in the manifest."""
        return {
            **self.identity.as_record(),
            "file": self.file,
            "inputs_file": self.inputs_file,
            "outputs_file": self.outputs_file,
            "inputs": list(self.inputs),
            "outputs": list(self.outputs),
            "nodes": self.nodes,
            "parameters": self.parameters,
            "size_bytes": self.size_bytes,
            "drawn_in": list(self.drawn_in),
            "left_out": list(self.left_out),
            "verification": {"max_abs_diff": self.max_abs_diff, "relative_diff": self.relative_diff},
        }


@dataclass(frozen=True)
class RefusedModule:
    """One module that cannot stand alone."""

    identity: ModuleIdentity
    reason: str

    def as_record(self) -> dict[str, Any]:
        """Return its entry in the manifest."""
        return {**self.identity.as_record(), "reason": self.reason}


@dataclass(frozen=True)
class ExtractResult:
    """Everything there is to tell about one extraction."""

    source: str
    """The model as the user wrote it."""
    selector: str
    folder: Path
    tool_version: str
    modules: tuple[ExtractedModule, ...]
    refused: tuple[RefusedModule, ...]
    without_nodes: tuple[ModuleIdentity, ...]
    """Modules of which no node is left in the graph: they computed nothing, or it was merged into others."""
    notes: tuple[str, ...] = ()

    def as_record(self) -> dict[str, Any]:
        """Return the manifest."""
        return {
            "schema_version": SCHEMA_VERSION,
            "tool_version": self.tool_version,
            "source": self.source,
            "selector": self.selector,
            "modules": [module.as_record() for module in self.modules],
            "refused": [module.as_record() for module in self.refused],
            "without_nodes": [
                {"module": item.module, "tag": item.tag, "class": item.class_name} for item in self.without_nodes
            ],
            "notes": list(self.notes),
        }
