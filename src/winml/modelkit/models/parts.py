"""The records of a loaded model and of its parts, which all later stages take.

Other rooms read them without knowing how a model was loaded. Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winml.modelkit.file_names import ONLY_PART
from winml.modelkit.onnx.bundle import PartDescription, PartFeed, TextTokens, only_part
from winml.modelkit.onnx.specs import DynamicDimension, InputTensorSpec, OutputAxis
from winml.modelkit.records import Record, entry

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch

    from winml.modelkit.models.caches.layout import CacheLayout
    from winml.modelkit.models.checkpoints.adapters import Adapter
    from winml.modelkit.models.inputs.nested_arguments import NestedArguments
    from winml.modelkit.onnx.lora_branches import LoraBranch

_TOKENS = ("input_ids", "inputs_embeds")
"""Specified: what transformers calls the input of a part that is given tokens, or what stands for them."""


@dataclass(frozen=True)
class ModelInfo(Record):
    """What is known about a model besides its weights."""

    name_or_path: str
    """As passed by the user."""
    class_name: str = field(metadata=entry("class"))
    """Class of the model."""
    library: str
    """``transformers``, or ``torch`` for a model that is no transformers model."""
    library_version: str
    task: str | None = field(default=None, metadata=entry(before="library", omit_none=True))
    """Canonical task; None where the model has none."""
    task_rule: str | None = field(default=None, metadata=entry(skip=True))
    """The rule that decided the task, as a sentence."""
    model_type: str | None = field(default=None, metadata=entry(omit_none=True))
    """transformers' model type."""
    source_kind: str = field(default="live", metadata=entry(skip=True))
    """``folder``, ``config``, ``script``, ``hub`` or ``type`` (no checkpoint); ``live`` for a module handed over."""
    source_format: str | None = field(default=None, metadata=entry(omit_none=True))
    """Format in which the checkpoint has weights of few bits, such as ``gptq``; None where it has none."""
    revision: str | None = field(default=None, metadata=entry(omit_none=True))
    """Revision of a Hub id that was asked for."""
    random_weights: bool = field(default=False, metadata=entry(omit_empty=True))
    """Whether the weights mean nothing."""
    seed: int = field(default=0, metadata=entry(omit_empty=True))
    """Seed of weights that are random, all of them or those that the checkpoint lacks."""
    adapters: tuple[str, ...] = field(default=(), metadata=entry(omit_empty=True))
    """Adapters as they were named: ``PATH`` where merged, ``NAME=PATH`` where switched at run time."""
    companions: Mapping[str, Path] = field(default_factory=dict, metadata=entry(skip=True))
    """Config, tokenizer and processor files of the checkpoint: name beside the ONNX file → file."""


@dataclass(frozen=True)
class ModelPart:
    """One part of a loaded model: what becomes one graph. Most models have one, which is all of the model."""

    model: torch.nn.Module
    """The whole model, in evaluation mode; the same one in every part. Module paths and tags are its own."""
    inputs: tuple[InputTensorSpec, ...]
    """What the forward of the part is to be given, in this order."""
    name: str = ONLY_PART
    """``model`` for the only part; else ``encoder``, ``decoder``, ``vision`` and the like."""
    path: str = ""
    """Where the module of the part is in ``model``; ``""`` is the whole model."""
    entry: Callable[[torch.nn.Module], Callable[..., Any]] | None = None
    """Given the module of the part, returns what is called in place of its forward; None: the forward."""
    forward_kwargs: Mapping[str, bool | int] = field(default_factory=dict)
    """Fixed keywords of every call: a cache or none, named outputs."""
    arguments: NestedArguments | None = None
    """How the tensors of ``inputs`` become the arguments of the forward; None where each is one."""
    example: Mapping[str, torch.Tensor] | None = None
    """Values to try first, where the user gave some; they fit ``inputs``."""
    are_ranges_examples: bool = False
    """Whether the value ranges of ``inputs`` are merely those of an example: other values may be valid, too."""
    dimensions: tuple[DynamicDimension, ...] = ()
    """The names in the shapes of ``inputs``, each with the size to trace with; empty where all sizes are fixed."""
    smallest_sizes: Mapping[str, int] = field(default_factory=dict)
    """Name among ``dimensions`` → smallest size of the graph, where samples are larger: a prompt without an image."""
    open_by_default: Mapping[str, str] = field(default_factory=dict)
    """Names among ``dimensions`` that no option asked for → the key of ``--shape-config`` that fixes each."""
    output_axes: tuple[OutputAxis, ...] = ()
    """Axes of outputs that are to be open."""
    stored: Mapping[str, ir.TensorProtocol] | None = None
    """Parameters and persistent buffers by their path in ``model``, by reference into the weight files, where the
    parameters of ``model`` hold no values; None where they do."""
    with_weights: Callable[..., torch.nn.Module] | None = None
    """Loads the same model with the weights of this part, where ``model`` has none; with ``dtype``, in another type."""
    with_references: Callable[..., torch.nn.Module] | None = None
    """Loads the same model with parameters that refer to the weight files (``DeferredTensor``), in the same case."""
    feeds: tuple[PartFeed, ...] = ()
    """Which outputs become inputs of another part, or of this one in its next run."""
    cache: CacheLayout | None = None
    """The cache that goes in and out; None without one."""
    first_position: int = 0
    """What the forward calls the position of the first token, which its inputs count from 0."""
    branches: tuple[LoraBranch, ...] = ()
    """LoRA that the graph has beside its modules: over weights in few bits, and of adapters that are switched."""
    adapters: tuple[Adapter, ...] = ()
    """Adapters that are switched at run time."""
    text: TextTokens | None = None
    """How a text that it writes begins and ends; None: the files beside the model say it."""
    notes: tuple[str, ...] = ()
    """Sentences on how its inputs were decided."""

    @property
    def module(self) -> torch.nn.Module:
        """The module of the part."""
        return self.model.get_submodule(self.path)

    @property
    def open_grids(self) -> str | None:
        """Name of the input that says the sizes of pictures, where these are open; TorchScript alone follows it."""
        return next((spec.name for spec in self.inputs if spec.grid is not None), None)

    @property
    def most_tokens(self) -> int | None:
        """Tokens per row that it has positions for; None: any number, or it takes none."""
        tokens = next((spec.shape[1] for spec in self.inputs if spec.name in _TOKENS and len(spec.shape) > 1), None)
        return next((item.max for item in self.dimensions if item.name == tokens), None)

    @property
    def trace_sizes(self) -> dict[str, int]:
        """Return the size of every dimension that is left open, as it is traced."""
        return {dimension.name: dimension.example or 1 for dimension in self.dimensions}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be called, part by part."""

    info: ModelInfo
    parts: tuple[ModelPart, ...]
    """At least one, in the order in which they run."""
    model_notes: tuple[str, ...] = ()
    """Sentences about the whole model that the user should hear."""
    wanted: tuple[str, ...] = ()
    """Names of the parts that were asked for; empty: all."""

    @classmethod
    def of_parts(
        cls,
        info: ModelInfo,
        parts: tuple[ModelPart, ...],
        before: Sequence[str] = (),
        after: Sequence[str] = (),
        *,
        wanted: tuple[str, ...] = (),
    ) -> LoadedModel:
        """Return a model; all that is said of a model of one part belongs to this.

        Args:
            info: What is known of it.
            parts: Its parts.
            before: Notes on the model that come before those on inputs.
            after: Notes that come after them.
            wanted: Names of the parts that were asked for; empty: all.
        """
        if len(parts) > 1:
            return cls(info, parts, (*before, *after), wanted)
        return cls(info, (replace(parts[0], notes=(*before, *parts[0].notes, *after)),))

    @property
    def requested_parts(self) -> tuple[ModelPart, ...]:
        """The parts that were asked for."""
        return tuple(part for part in self.parts if not self.wanted or part.name in self.wanted)

    @property
    def only_part(self) -> ModelPart:
        """The part, if the model has one.

        Raises:
            UsageError: the model has several parts.
        """
        return only_part(self.parts)

    @property
    def notes(self) -> tuple[str, ...]:
        """All sentences that the user should hear."""
        return (*(note for part in self.parts for note in part.notes), *self.model_notes)

    @property
    def model(self) -> torch.nn.Module:
        """The whole model."""
        return self.parts[0].model

    def part_taking(self, names: Collection[str]) -> ModelPart | None:
        """Return the part that all of these are inputs of; None where there is none."""
        return next((part for part in self.parts if set(names) <= {spec.name for spec in part.inputs}), None)

    def describe(self, part: ModelPart) -> PartDescription | None:
        """Return what the file of a part says about it; None for the only part of a model that feeds nothing."""
        if len(self.parts) == 1 and not part.feeds:
            return None
        names = tuple(item.name for item in self.parts)
        return PartDescription(part.name, names, part.feeds, part.most_tokens, part.text)
