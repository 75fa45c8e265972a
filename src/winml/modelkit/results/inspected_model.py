"""A PyTorch model as an export would read it, without its weights: the record of ``winml inspect``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from winml.modelkit.file_names import ONLY_PART
from winml.modelkit.graph.bundle import only_part
from winml.modelkit.graph.specs import InputTensorSpec, OutputTensorSpec
from winml.modelkit.hierarchy.torch_modules import TracedModule
from winml.modelkit.hierarchy.tree import ModuleTree
from winml.modelkit.load.checkpoints.companion_files import ProcessorClass
from winml.modelkit.load.checkpoints.weight_files import StoredSize
from winml.modelkit.load.parts import ModelInfo
from winml.modelkit.records import Record, entry


@dataclass(frozen=True)
class WeightsOnDisk:
    """The weight files of a checkpoint, as their headers describe them."""

    format: str
    """``safetensors`` or ``pickle``."""
    files: tuple[Path, ...]
    size_bytes: int
    """Size of all files."""
    stored: tuple[StoredSize, ...]
    """Parameters per dtype; empty for pickles, whose headers do not list them."""


@dataclass(frozen=True)
class StoredParameter(Record):
    """A parameter of two or more axes in a checkpoint that has weights of few bits."""

    name: str
    """As the float checkpoint would call it."""
    format: str | None
    """Format of its codes, such as ``gptq``; None for one that is no code."""
    precision: str
    """``int4``, ``nf4``, ``float8_e4m3fn`` …, or the type of one that is no code."""
    bits: int
    block_size: int | None = field(default=None, metadata=entry(omit_none=True))
    """Values that share a scale in the operators of the file."""
    has_zero_points: bool = field(default=False, metadata=entry(omit_empty=True))
    is_reordered: bool = field(default=False, metadata=entry(omit_empty=True))
    """Whether its groups hold input channels in an order of their own (act-order)."""


@dataclass(frozen=True)
class StoredBits(Record):
    """In how few bits a checkpoint has its weights."""

    format: str
    """Name of the format: ``gptq``."""
    words: str
    """For people: ``GPTQ, 4 bits in blocks of 128 (224 weights)``."""
    parameters: tuple[StoredParameter, ...]
    """In the order of the files."""


@dataclass(frozen=True)
class InspectedPart(Record):
    """One graph that an export would write."""

    name: str = field(metadata=entry(skip=True))
    """``model`` for the only part."""
    inputs: tuple[InputTensorSpec, ...]
    outputs: tuple[OutputTensorSpec, ...] | None
    """None where they depend on the values of the inputs."""


@dataclass(frozen=True)
class InspectedModel:
    """The model, inputs, outputs and weights that an export would use."""

    info: ModelInfo
    tasks: Mapping[str, tuple[str, ...]]
    """Every task of the architecture, with the classes that implement it; empty for a factory."""
    inference_class: str | None
    """Class that runs the exported model; None for a factory."""
    processors: tuple[ProcessorClass, ...]
    parts: tuple[InspectedPart, ...]
    """The graphs that were asked for, in the order in which they run."""
    opset_version: int
    parameters: tuple[StoredSize, ...]
    """Parameters of the built model, per dtype; tied parameters count once."""
    weights: WeightsOnDisk | None
    """None where there are no local weight files."""
    modules: int
    """Number of registered modules, with those that never run."""
    quantization: StoredBits | None = None
    """In how few bits the checkpoint has its weights; None where it has no codes."""
    tree: ModuleTree | None = None
    """The hierarchy as an export would build it; None where it was not requested."""
    never_ran: tuple[TracedModule, ...] = ()
    """Modules that the forward never called, without the modules inside of them."""
    tree_source: str = ""
    """The values the forward was run on, in words."""
    notes: tuple[str, ...] = ()
    """Notes for the user, one sentence each."""

    @property
    def inputs(self) -> tuple[InputTensorSpec, ...]:
        """The inputs of the only part."""
        return only_part(self.parts).inputs

    @property
    def outputs(self) -> tuple[OutputTensorSpec, ...] | None:
        """The outputs of the only part."""
        return only_part(self.parts).outputs

    @property
    def parameter_count(self) -> int:
        """Number of parameters."""
        return sum(entry.count for entry in self.parameters)

    @property
    def parameter_bytes(self) -> int:
        """Size of all parameters in their dtypes."""
        return sum(entry.size_bytes for entry in self.parameters)

    def as_record(self) -> dict[str, Any]:
        """Return a JSON-ready record: sizes in bytes."""
        record: dict[str, object] = {
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
            "export": {"opset_version": self.opset_version, **self._tensor_record()},
            "parameters": {
                "count": self.parameter_count,
                "size_bytes": self.parameter_bytes,
                "dtypes": _size_records(self.parameters),
            },
            "weights": None if self.weights is None else _weights_record(self.weights),
            **({} if self.quantization is None else {"quantization": self.quantization.as_record()}),
            "modules": self.modules,
            "notes": list(self.notes),
        }
        if self.tree is not None:
            record["hierarchy"] = _tree_record(self.tree, self.never_ran, self.tree_source)
        return record

    def _tensor_record(self) -> dict[str, object]:
        """Return inputs and outputs; of several graphs by part."""
        if len(self.parts) == 1 and self.parts[0].name == ONLY_PART:
            return self.parts[0].as_record()
        return {"parts": [{"name": part.name, **part.as_record()} for part in self.parts]}


def _size_records(sizes: tuple[StoredSize, ...]) -> dict[str, dict[str, int]]:
    return {entry.dtype: {"count": entry.count, "size_bytes": entry.size_bytes} for entry in sizes}


def _weights_record(weights: WeightsOnDisk) -> dict[str, object]:
    return {
        "format": weights.format,
        "files": [str(file) for file in weights.files],
        "size_bytes": weights.size_bytes,
        "dtypes": _size_records(weights.stored),
    }


def _tree_record(tree: ModuleTree, never_ran: tuple[TracedModule, ...], source: str) -> dict[str, object]:
    return {
        "source": source,
        "registered": tree.registered,
        "modules": [{**record, "parent": node.parent} for record, node in zip(tree.as_record(), tree, strict=True)],
        "never_ran": [{"path": module.path, "class": module.class_name} for module in never_ran],
    }
