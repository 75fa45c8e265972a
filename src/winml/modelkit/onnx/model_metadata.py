"""Writes the metadata of a model file, and reads the outputs that a graph declares."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from winml.modelkit import metadata_keys
from winml.modelkit.onnx.bundle import PartDescription
from winml.modelkit.onnx.specs import DynamicDimension, InputTensorSpec, OutputTensorSpec
from winml.modelkit.tags.tree import ModuleTree


def output_specs(graph: ir.Graph) -> tuple[OutputTensorSpec, ...]:
    """Return the declared outputs of a graph."""
    return tuple(
        OutputTensorSpec.model_construct(
            name=value.name,
            shape=tuple(size if isinstance(size, int) else str(size) for size in value.shape or ()),
            dtype=str(value.dtype.numpy()) if value.dtype is not None else "undefined",
        )
        for value in graph.outputs
    )


@dataclass(frozen=True)
class ModelDescription:
    """Description of the model in a file."""

    tree: ModuleTree
    info: Mapping[str, Any]
    """Facts about the source model."""
    inputs: Sequence[InputTensorSpec]
    outputs: Sequence[OutputTensorSpec]
    export: Mapping[str, Any]
    """Exporter and its settings."""
    part: PartDescription | None = None
    """Description of the part; None for a model of one part."""
    bounds: Sequence[DynamicDimension] = ()
    """Bounds of the dynamic dimensions."""

    def as_metadata(self) -> dict[str, object]:
        """Return each metadata key with its JSON value."""
        record: dict[str, object] = {
            metadata_keys.INPUTS_KEY: [spec.as_record() for spec in self.inputs],
            metadata_keys.OUTPUTS_KEY: [spec.as_record() for spec in self.outputs],
            metadata_keys.MODEL_KEY: self.info,
            metadata_keys.EXPORT_KEY: self.export,
            metadata_keys.TREE_KEY: self.tree.as_record(),
        }
        if self.bounds:
            record[metadata_keys.DIMENSIONS_KEY] = [bound.as_record() for bound in self.bounds]
        return record if self.part is None else {**record, metadata_keys.PART_KEY: self.part.as_record()}


def write_model_metadata(model: ir.Model, description: ModelDescription) -> None:
    """Write exporter, source model, inputs, outputs, module tree and part to the metadata, in place."""
    model.metadata_props.pop(metadata_keys.DIMENSIONS_KEY, None)
    for key, record in description.as_metadata().items():
        model.metadata_props[key] = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
