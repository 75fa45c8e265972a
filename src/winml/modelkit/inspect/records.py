"""Record of ``winml inspect`` for a PyTorch model as an export would read it, without its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path

from winml.modelkit.file_names import ONLY_PART
from winml.modelkit.inspect.provider_fit import ProviderFit
from winml.modelkit.models.checkpoints.processor_files import ProcessorClass
from winml.modelkit.models.checkpoints.weight_files import StoredSize
from winml.modelkit.models.parts import ModelInfo
from winml.modelkit.onnx.bundle import only_part
from winml.modelkit.onnx.specs import InputTensorSpec, OutputTensorSpec
from winml.modelkit.records import Record, entry, recorded
from winml.modelkit.report.result import Result
from winml.modelkit.tags.torch_modules import TracedModule
from winml.modelkit.tags.tree import ModuleTree


class WeightsOnDisk(Record):
    """The weight files of a checkpoint, as their headers describe them."""

    format: str
    """``safetensors`` or ``pickle``."""
    files: tuple[Path, ...]
    size_bytes: int
    """Size of all files."""
    stored: tuple[StoredSize, ...] = field(metadata=entry(skip=True))
    """Parameters per dtype; empty for pickles: their headers do not list parameters."""

    @recorded(entry("dtypes"))
    def dtypes_entry(self) -> dict[str, dict[str, int]]:
        """Return the number and size of the parameters by dtype."""
        return _size_records(self.stored)


class StoredParameter(Record):
    """A parameter of two or more axes in a checkpoint with quantized weights."""

    name: str
    """Name in the float checkpoint."""
    format: str | None
    """Format of its codes, such as ``gptq``; None for a parameter that is not quantized."""
    precision: str
    """``int4``, ``nf4``, ``float8_e4m3fn`` …, or the dtype of a parameter that is not quantized."""
    bits: int
    block_size: int | None = field(default=None, metadata=entry(omit_none=True))
    """Number of values that share a scale in the operators of the file."""
    has_zero_points: bool = field(default=False, metadata=entry(omit_empty=True))
    is_reordered: bool = field(default=False, metadata=entry(omit_empty=True))
    """True if its groups reorder the input channels (act-order)."""


class StoredBits(Record):
    """Quantization of the weights of a checkpoint."""

    format: str
    """Name of the format: ``gptq``."""
    words: str
    """Text such as ``GPTQ, 4 bits in blocks of 128 (224 weights)``."""
    parameters: tuple[StoredParameter, ...]
    """Parameters in the order of the files."""


class InspectedPart(Record):
    """One graph that an export would write."""

    name: str = field(metadata=entry(skip=True))
    """``model`` for a single part."""
    inputs: tuple[InputTensorSpec, ...]
    outputs: tuple[OutputTensorSpec, ...] | None
    """None if the outputs depend on the values of the inputs."""


class InspectedModel(Result, Record, kind="model", document="inspect.table:model_inspection_document"):
    """The model, inputs, outputs and weights that an export would use."""

    info: ModelInfo = field(metadata=entry(skip=True))
    tasks: Mapping[str, tuple[str, ...]]
    """Every task of the architecture, with the classes that implement it; empty for a factory."""
    inference_class: str | None = field(metadata=entry(skip=True))
    """Class that runs the exported model; None for a factory."""
    processors: tuple[ProcessorClass, ...] = field(metadata=entry(skip=True))
    parts: tuple[InspectedPart, ...] = field(metadata=entry(skip=True))
    """The requested graphs, in execution order."""
    opset_version: int = field(metadata=entry(skip=True))
    parameters: tuple[StoredSize, ...] = field(metadata=entry(skip=True))
    """Parameters of the built model, per dtype; tied parameters count once."""
    weights: WeightsOnDisk | None
    """None if there are no local weight files."""
    modules: int
    """Number of registered modules, including modules that never run."""
    quantization: StoredBits | None = field(default=None, metadata=entry(before="modules", omit_none=True))
    """Quantization of the checkpoint's weights; None if the weights are not quantized."""
    tree: ModuleTree | None = field(default=None, metadata=entry(skip=True))
    """The hierarchy as an export would build it; None if not requested."""
    never_ran: tuple[TracedModule, ...] = field(default=(), metadata=entry(skip=True))
    """Modules that the forward never called, outermost only."""
    tree_source: str = field(default="", metadata=entry(skip=True))
    """Source of the module tree: a description of the forward."""
    notes: tuple[str, ...] = ()
    """Notes for the user, one sentence each."""
    fit: ProviderFit | None = field(default=None, metadata=entry("execution_provider", last=True))
    """Support of the exported file by an execution provider; None if not checked."""

    @property
    def inputs(self) -> tuple[InputTensorSpec, ...]:
        """The inputs of a single part."""
        return only_part(self.parts).inputs

    @property
    def outputs(self) -> tuple[OutputTensorSpec, ...] | None:
        """The outputs of a single part."""
        return only_part(self.parts).outputs

    @property
    def parameter_count(self) -> int:
        """Number of parameters."""
        return sum(entry.count for entry in self.parameters)

    @property
    def parameter_bytes(self) -> int:
        """Size of all parameters in their dtypes."""
        return sum(entry.size_bytes for entry in self.parameters)

    @recorded(entry("model", before="tasks"))
    def model_entry(self) -> dict[str, object]:
        """Return class, type and task of the model."""
        settings = {"source": self.info.source_kind, "task_rule": self.info.task_rule}
        return {**self.info.as_record(), **settings, "inference_class": self.inference_class}

    @recorded(entry("processors", before="weights"))
    def processors_entry(self) -> list[dict[str, object]]:
        """Return the processors of the checkpoint."""
        return [{"role": kind.role, "class": kind.class_name, "origin": kind.origin} for kind in self.processors]

    @recorded(entry("export", before="weights"))
    def export_entry(self) -> dict[str, object]:
        """Return opset, inputs and outputs of an export; for several graphs by part."""
        if len(self.parts) == 1 and self.parts[0].name == ONLY_PART:
            return {"opset_version": self.opset_version, **self.parts[0].as_record()}
        parts = [{"name": part.name, **part.as_record()} for part in self.parts]
        return {"opset_version": self.opset_version, "parts": parts}

    @recorded(entry("parameters", before="weights"))
    def parameters_entry(self) -> dict[str, object]:
        """Return the number and size of the parameters."""
        dtypes = _size_records(self.parameters)
        return {"count": self.parameter_count, "size_bytes": self.parameter_bytes, "dtypes": dtypes}

    @recorded(entry("hierarchy", omit_none=True))
    def hierarchy_entry(self) -> dict[str, object] | None:
        """Return the module tree; None if not requested."""
        if self.tree is None:
            return None
        records = zip(self.tree.as_record(), self.tree, strict=True)
        return {
            "source": self.tree_source,
            "registered": self.tree.registered,
            "modules": [{**record, "parent": node.parent} for record, node in records],
            "never_ran": [{"path": module.path, "class": module.class_name} for module in self.never_ran],
        }


def _size_records(sizes: tuple[StoredSize, ...]) -> dict[str, dict[str, int]]:
    """Return data type → number and bytes of parameters, as JSON values."""
    return {size.dtype: {"count": size.count, "size_bytes": size.size_bytes} for size in sizes}
