"""What is known of a model before any weight is read: the record its report is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winml.modelkit.graph.specs import InputTensorSpec, OutputTensorSpec
from winml.modelkit.hierarchy.tracing import TracedModule
from winml.modelkit.hierarchy.tree import ModuleTree
from winml.modelkit.load.checkpoints.processor_classes import ProcessorClass
from winml.modelkit.load.checkpoints.weight_files import StoredSize
from winml.modelkit.load.parts import ModelInfo

__all__ = ["InspectedModel", "WeightsOnDisk"]


@dataclass(frozen=True)
class WeightsOnDisk:
    """The weight files of a checkpoint, as their headers describe them."""

    format: str
    """``safetensors`` or ``pickle``."""
    files: tuple[Path, ...]
    size_bytes: int
    """Of the files."""
    stored: tuple[StoredSize, ...]
    """Per dtype; empty where only reading the files would tell (pickles)."""


@dataclass(frozen=True)
class InspectedModel:
    """What an export of a model will be."""

    info: ModelInfo
    tasks: Mapping[str, tuple[str, ...]]
    """Every task the architecture has, with the classes that serve it; empty for a factory."""
    inference_class: str | None
    """Class that runs the exported model; None for a factory."""
    processors: tuple[ProcessorClass, ...]
    inputs: tuple[InputTensorSpec, ...]
    outputs: tuple[OutputTensorSpec, ...] | None
    """None where they cannot be known without values."""
    opset_version: int
    parameters: tuple[StoredSize, ...]
    """Of the model the class builds, per dtype; tied ones count once."""
    weights: WeightsOnDisk | None
    """None where no weight files are here."""
    modules: int
    """Registered modules, whether they run or not."""
    tree: ModuleTree | None = None
    """The hierarchy as an export would build it; None where it was not asked for."""
    never_ran: tuple[TracedModule, ...] = ()
    """Modules the forward never called, without those inside of them."""
    tree_source: str = ""
    """What the forward was run on, in words."""
    notes: tuple[str, ...] = ()
    """Sentences the user should hear."""

    @property
    def parameter_count(self) -> int:
        """Number of parameters."""
        return sum(entry.count for entry in self.parameters)

    @property
    def parameter_bytes(self) -> int:
        """What they take in their dtypes."""
        return sum(entry.size_bytes for entry in self.parameters)

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready record: sizes in bytes."""
        record: dict[str, Any] = {
            "kind": "model",
            "model": {
                **self.info.as_record(),
                "source": self.info.source_kind,
                "task_rule": self.info.task_rule,
                "inference_class": self.inference_class,
            },
            "tasks": {task: list(classes) for task, classes in self.tasks.items()},
            "processors": [
                {"role": item.role, "class": item.class_name, "origin": item.origin} for item in self.processors
            ],
            "export": {
                "opset_version": self.opset_version,
                "inputs": [spec.as_record() for spec in self.inputs],
                "outputs": None if self.outputs is None else [spec.as_record() for spec in self.outputs],
            },
            "parameters": {
                "count": self.parameter_count,
                "size_bytes": self.parameter_bytes,
                "dtypes": _size_records(self.parameters),
            },
            "weights": None if self.weights is None else _weights_record(self.weights),
            "modules": self.modules,
            "notes": list(self.notes),
        }
        if self.tree is not None:
            record["hierarchy"] = _tree_record(self.tree, self.never_ran, self.tree_source)
        return record


def _size_records(sizes: tuple[StoredSize, ...]) -> dict[str, dict[str, int]]:
    return {entry.dtype: {"count": entry.count, "size_bytes": entry.size_bytes} for entry in sizes}


def _weights_record(weights: WeightsOnDisk) -> dict[str, Any]:
    return {
        "format": weights.format,
        "files": [str(file) for file in weights.files],
        "size_bytes": weights.size_bytes,
        "dtypes": _size_records(weights.stored),
    }


def _tree_record(tree: ModuleTree, never_ran: tuple[TracedModule, ...], source: str) -> dict[str, Any]:
    return {
        "source": source,
        "registered": tree.registered,
        "modules": [{**record, "parent": node.parent} for record, node in zip(tree.as_record(), tree, strict=True)],
        "never_ran": [{"path": module.path, "class": module.class_name} for module in never_ran],
    }
