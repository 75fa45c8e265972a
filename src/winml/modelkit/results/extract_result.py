"""The result of cutting modules out of a model: the record of ``winml extract`` and its manifest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winml.modelkit.hierarchy.address import ModuleIdentity

__all__ = ["SCHEMA_VERSION", "ExtractResult", "ExtractedModule", "RefusedModule"]

SCHEMA_VERSION = 1
"""Layout of the manifest, specified in docs/reference/formats.md."""


@dataclass(frozen=True)
class ExtractedModule:
    """One module that was written as a model of its own."""

    identity: ModuleIdentity
    file: str
    """Name of the model in the folder."""
    inputs_file: str | None
    """Name of the file with the recorded inputs; None where it was not requested."""
    outputs_file: str | None
    """Name of the file with the recorded outputs of the whole model; None where it was not requested."""
    inputs: tuple[dict[str, Any], ...]
    """Name, shape and dtype of each."""
    outputs: tuple[dict[str, Any], ...]
    nodes: int
    parameters: int
    size_bytes: int
    """Size of the model with its weights."""
    drawn_in: tuple[str, ...]
    """Names of nodes of other modules that are included because they lie between nodes of this module."""
    left_out: tuple[str, ...]
    """Names of nodes of this module that are left out: other modules need them first, so their outputs are inputs."""
    max_abs_diff: float
    """Largest difference from the recorded outputs of the whole model."""
    relative_diff: float
    """``max_abs_diff`` divided by the largest recorded value."""

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
    """One module that cannot be cut out."""

    identity: ModuleIdentity
    reason: str

    def as_record(self) -> dict[str, Any]:
        """Return its entry in the manifest."""
        return {**self.identity.as_record(), "reason": self.reason}


@dataclass(frozen=True)
class ExtractResult:
    """The outcome of one extraction."""

    source: str
    """The model as the user wrote it."""
    selector: str
    folder: Path
    tool_version: str
    modules: tuple[ExtractedModule, ...]
    refused: tuple[RefusedModule, ...]
    without_nodes: tuple[ModuleIdentity, ...]
    """Modules without a node in the graph: they computed nothing, or their nodes were merged into others."""
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
