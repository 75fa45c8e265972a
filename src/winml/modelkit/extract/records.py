"""Records of extracted modules."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Any

from winml.modelkit.records import Record, entry
from winml.modelkit.report.result import Result
from winml.modelkit.tags.address import ModuleIdentity

SCHEMA_VERSION = 1
"""Layout of the manifest, specified in docs/reference/formats.md."""


class ExtractedModule(Record):
    """One module written as a separate model."""

    identity: ModuleIdentity = field(metadata=entry(inline=True))
    file: str
    """Name of the model in the folder."""
    inputs_file: str | None
    """Name of the file with the recorded inputs; `None` if not requested."""
    outputs_file: str | None
    """Name of the file with the recorded outputs of the whole model; `None` if not requested."""
    inputs: tuple[dict[str, Any], ...]
    """Name, shape and dtype of each input."""
    outputs: tuple[dict[str, Any], ...]
    nodes: int
    parameters: int
    size_bytes: int
    """Size of the model with its weights."""
    drawn_in: tuple[str, ...]
    """Names of nodes of other modules, included for lying between nodes of this module."""
    left_out: tuple[str, ...]
    """Names of nodes of this module that are left out, since other modules need their outputs first; these outputs are
    inputs of the extracted model."""
    max_abs_diff: float = field(metadata=entry(within="verification"))
    """Largest difference from the recorded outputs of the whole model."""
    relative_diff: float = field(metadata=entry(within="verification"))
    """``max_abs_diff`` divided by the largest recorded value."""


class RefusedModule(Record):
    """A module refused by the extraction, with the reason."""

    identity: ModuleIdentity = field(metadata=entry(inline=True))
    reason: str


class ExtractResult(
    Result, Record, schema_version=SCHEMA_VERSION, document="extract.table:extract_document", rows="modules"
):
    """The outcome of one extraction."""

    source: str
    """The model as the user wrote it."""
    selector: str
    folder: Path = field(metadata=entry(skip=True))
    tool_version: str = field(metadata=entry(before="source"))
    modules: tuple[ExtractedModule, ...]
    refused: tuple[RefusedModule, ...]
    without_nodes: tuple[ModuleIdentity, ...] = field(metadata=entry(keys=("module", "tag", "class")))
    """Modules without a node in the graph: unused ones, and modules merged into others."""
    notes: tuple[str, ...] = ()
