"""What does the file say about itself?

Writes the model metadata of FORMATS, in place, and reads the outputs a graph declares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from winml.modelkit.graph.specs import InputTensorSpec, OutputTensorSpec
from winml.modelkit.hierarchy.tree import ModuleTree
from winml.modelkit.metadata_keys import EXPORT_KEY, INPUTS_KEY, MODEL_KEY, OUTPUTS_KEY, TREE_KEY

__all__ = ["output_specs", "write_model_metadata"]


def output_specs(graph: ir.Graph) -> tuple[OutputTensorSpec, ...]:
    """Return the outputs of a graph as it declares them."""
    return tuple(
        OutputTensorSpec.model_construct(
            name=value.name,
            shape=tuple(size if isinstance(size, int) else str(size) for size in value.shape or ()),
            dtype=str(value.dtype.numpy()) if value.dtype is not None else "undefined",
        )
        for value in graph.outputs
    )


def write_model_metadata(
    model: ir.Model,
    *,
    tree: ModuleTree,
    info: Mapping[str, Any],
    inputs: Sequence[InputTensorSpec],
    outputs: Sequence[OutputTensorSpec],
    export: dict[str, Any],
) -> None:
    """Write who made the file, from what (``info``), its inputs and outputs, and the module tree; in place."""
    records = {
        INPUTS_KEY: [spec.as_record() for spec in inputs],
        OUTPUTS_KEY: [spec.as_record() for spec in outputs],
        MODEL_KEY: info,
        EXPORT_KEY: export,
        TREE_KEY: tree.as_record(),
    }
    for key, record in records.items():
        model.metadata_props[key] = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
