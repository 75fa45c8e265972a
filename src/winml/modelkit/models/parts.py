"""Records of a loaded model and of its parts, used by all later stages.

The records do not depend on the way of loading. Imports neither torch nor transformers.
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
"""Specified: names in transformers of the token input and of the embedding input of a part."""


class ModelInfo(Record):
    """Properties of a model besides its weights."""

    name_or_path: str
    """Name or path as passed by the user."""
    class_name: str = field(metadata=entry("class"))
    """Class of the model."""
    library: str
    """``transformers``, ``diffusers``, or ``torch`` for a model of neither."""
    library_version: str
    task: str | None = field(default=None, metadata=entry(before="library", omit_none=True))
    """Canonical task; `None` if the model has none."""
    task_rule: str | None = field(default=None, metadata=entry(skip=True))
    """The rule that decided the task, as a sentence."""
    model_type: str | None = field(default=None, metadata=entry(omit_none=True))
    """transformers' model type."""
    source_kind: str = field(default="live", metadata=entry(skip=True))
    """``folder``, ``config``, ``script``, ``hub``, ``pipeline`` or ``type`` (no checkpoint); ``live`` for a module."""
    source_format: str | None = field(default=None, metadata=entry(omit_none=True))
    """Quantization format of the checkpoint, such as ``gptq``; `None` if it is not quantized."""
    revision: str | None = field(default=None, metadata=entry(omit_none=True))
    """Requested revision of a Hub id."""
    random_weights: bool = field(default=False, metadata=entry(omit_empty=True))
    """True if all weights are random."""
    seed: int = field(default=0, metadata=entry(omit_empty=True))
    """Seed of random weights, either of all weights or of weights that the checkpoint lacks."""
    adapters: tuple[str, ...] = field(default=(), metadata=entry(omit_empty=True))
    """Adapters as passed by the user: ``PATH`` if merged, ``NAME=PATH`` if switched at run time."""
    companions: Mapping[str, Path] = field(default_factory=dict, metadata=entry(skip=True))
    """Config, tokenizer and processor files of the checkpoint: name beside the ONNX file → file."""


@dataclass(frozen=True)
class ModelPart:
    """One part of a loaded model, exported as one graph. Most models have one part, the whole model."""

    model: torch.nn.Module
    """The whole model, in evaluation mode; the same object in every part. Module paths and tags refer to it."""
    inputs: tuple[InputTensorSpec, ...]
    """Inputs of the part's forward, in this order."""
    name: str = ONLY_PART
    """``model`` for the only part; else ``encoder``, ``decoder``, ``vision`` and the like."""
    path: str = ""
    """Path of the part's module in ``model``; ``""`` is the whole model."""
    entry: Callable[[torch.nn.Module], Callable[..., Any]] | None = None
    """Module of the part → function called instead of its forward; `None`: the forward."""
    forward_kwargs: Mapping[str, bool | int] = field(default_factory=dict)
    """Fixed keywords of every call: a cache or none, named outputs."""
    arguments: NestedArguments | None = None
    """Conversion of the tensors of ``inputs`` into arguments of the forward; `None` if each tensor is one argument."""
    example: Mapping[str, torch.Tensor] | None = None
    """Values from the user to try first, if any; they fit ``inputs``."""
    are_ranges_examples: bool = False
    """True if the value ranges of ``inputs`` are the ranges of an example: other values may be valid, too."""
    dimensions: tuple[DynamicDimension, ...] = ()
    """The names in the shapes of ``inputs``, each with its size at tracing; `()` if all sizes are fixed."""
    smallest_sizes: Mapping[str, int] = field(default_factory=dict)
    """Name among ``dimensions`` → smallest size of the graph if samples are larger: a prompt without an image."""
    open_by_default: Mapping[str, str] = field(default_factory=dict)
    """Names among ``dimensions`` that no option requested → the key of ``--shape-config`` that fixes the size."""
    openable_sizes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Option that makes sizes dynamic → key of ``--shape-config`` → fixed size."""
    output_axes: tuple[OutputAxis, ...] = ()
    """Requested dynamic axes of outputs."""
    stored: Mapping[str, ir.TensorProtocol] | None = None
    """Path in ``model`` → parameter or persistent buffer, by reference into the weight files.

    `None` if the parameters of ``model`` hold values.
    """
    with_weights: Callable[..., torch.nn.Module] | None = None
    """Loads the model with the weights of this part if ``model`` has no weights; with ``dtype``, in another type."""
    with_references: Callable[..., torch.nn.Module] | None = None
    """Loads the model with references to the weight files (``DeferredTensor``), if ``model`` has no weights."""
    feeds: tuple[PartFeed, ...] = ()
    """Connections of outputs to inputs of another part, or of this part in its next run."""
    cache: CacheLayout | None = None
    """The cache as input and output; `None` without a cache."""
    first_position: int = 0
    """Position of the first token in the forward; the graph's position inputs count from 0."""
    marked: tuple[InputTensorSpec, ...] = ()
    """Arguments of the model that the graph reads from marks in another input: token types in embeddings."""
    branches: tuple[LoraBranch, ...] = ()
    """LoRA branches of the graph beside its modules: over quantized weights, and of swappable adapters."""
    adapters: tuple[Adapter, ...] = ()
    """Adapters that are switched at run time."""
    text: TextTokens | None = None
    """First and last tokens of a generated text; `None`: as in the files beside the model."""
    notes: tuple[str, ...] = ()
    """Sentences on the decision of its inputs."""

    @property
    def module(self) -> torch.nn.Module:
        """The module of the part."""
        return self.model.get_submodule(self.path)

    @property
    def open_grids(self) -> str | None:
        """Input with the image grid sizes, if dynamic; only TorchScript supports such a dynamic grid."""
        return next((spec.name for spec in self.inputs if spec.grid is not None), None)

    @property
    def most_tokens(self) -> int | None:
        """Positions for tokens per row; `None`: unlimited, or no token input."""
        tokens = next((spec.shape[1] for spec in self.inputs if spec.name in _TOKENS and len(spec.shape) > 1), None)
        return next((dimension.max for dimension in self.dimensions if dimension.name == tokens), None)

    @property
    def trace_sizes(self) -> dict[str, int]:
        """Traced size of every dynamic dimension."""
        return {dimension.name: dimension.example or 1 for dimension in self.dimensions}


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model, part by part."""

    info: ModelInfo
    parts: tuple[ModelPart, ...]
    """Parts (at least one), in the order in which they run."""
    model_notes: tuple[str, ...] = ()
    """Sentences for the user about the whole model."""
    requested_names: tuple[str, ...] = ()
    """Names of the requested parts; `()`: all."""

    @classmethod
    def of_parts(
        cls,
        info: ModelInfo,
        parts: tuple[ModelPart, ...],
        before: Sequence[str] = (),
        after: Sequence[str] = (),
        *,
        requested_names: tuple[str, ...] = (),
    ) -> LoadedModel:
        """Return a model; notes go to the part if there is only one.

        Args:
            info: Its properties.
            parts: Its parts.
            before: Notes on the model that precede the notes on inputs.
            after: Notes that follow them.
            requested_names: Names of the requested parts; empty: all.
        """
        if len(parts) > 1:
            return cls(info, parts, (*before, *after), requested_names)
        return cls(info, (replace(parts[0], notes=(*before, *parts[0].notes, *after)),))

    @property
    def requested_parts(self) -> tuple[ModelPart, ...]:
        """The requested parts."""
        return tuple(part for part in self.parts if not self.requested_names or part.name in self.requested_names)

    @property
    def only_part(self) -> ModelPart:
        """The part, if the model has one.

        Raises:
            UsageError: the model has several parts.
        """
        return only_part(self.parts)

    @property
    def notes(self) -> tuple[str, ...]:
        """All sentences for the user."""
        return (*(note for part in self.parts for note in part.notes), *self.model_notes)

    @property
    def model(self) -> torch.nn.Module:
        """The whole model."""
        return self.parts[0].model

    def part_taking(self, names: Collection[str]) -> ModelPart | None:
        """Return the part with all of these inputs; `None` without a match."""
        return next((part for part in self.parts if set(names) <= {spec.name for spec in part.inputs}), None)

    def describe(self, part: ModelPart) -> PartDescription | None:
        """Return the description of a part for its file; `None` for the only part of a model without feeds."""
        if len(self.parts) == 1 and not part.feeds:
            return None
        names = tuple(model_part.name for model_part in self.parts)
        return PartDescription(part.name, names, part.feeds, part.most_tokens, part.text)
