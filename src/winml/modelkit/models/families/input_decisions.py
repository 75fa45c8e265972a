"""Selection of the parts of a transformers model: the first family that supports the model determines them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.overrides import TorchFunctionMode

from winml.modelkit.errors import UsageError, opt
from winml.modelkit.file_names import DECODER, ONLY_PART, PROMPT
from winml.modelkit.models.caches.arguments import arguments_with_cache, forward_with_states
from winml.modelkit.models.caches.decision import cached_keywords, decision_with_cache
from winml.modelkit.models.caches.finding import tensors_in
from winml.modelkit.models.checkpoints.config import CheckpointConfig
from winml.modelkit.models.checkpoints.task import canonical_task
from winml.modelkit.models.families import family
from winml.modelkit.models.families.encoder_decoder import encoder_decoder_parts
from winml.modelkit.models.families.image_prompts import image_prompt_parts
from winml.modelkit.models.families.vision_language import vision_language_parts
from winml.modelkit.models.inputs.decision import InputDecision, select_inputs
from winml.modelkit.models.inputs.nested_arguments import NestedArguments
from winml.modelkit.models.inputs.shape_run import run_on_shapes
from winml.modelkit.models.parts import ModelPart
from winml.modelkit.options import suggest
from winml.modelkit.registries import Registry

if TYPE_CHECKING:
    from winml.modelkit.models.request import ModelRequest


def _decoder_parts(
    model: torch.nn.Module, checkpoint: CheckpointConfig, task: str, request: ModelRequest
) -> family.FoundParts:
    """Return the only part of a decoder with a cache: one graph for the prompt and every later step.

    Raises:
        UsageError: no graph can take this kind of cache, or sizes do not fit the cache.
    """
    decision = decision_with_cache(model, checkpoint, task, request)
    if decision.cache is None:
        return family.FoundParts(notes=decision.notes)
    cache = decision.cache
    names = [spec.name for spec in decision.inputs if spec.cache is None]
    part = family.part_of_decision(
        model,
        decision,
        cached_keywords(model, request),
        arguments_with_cache(cache, names),
        feeds=cache.feeds_to(ONLY_PART),
        cache=cache,
        entry=forward_with_states(cache.of_modules, cache.argument) if cache.of_modules else None,
    )
    lengths = request.prompt_lengths
    if not lengths:
        return family.FoundParts((part,))
    if decision.dimensions:
        note = f"{opt.prompt_length} has no effect: a graph with dynamic sizes reads a prompt of any length in one run."
        return family.FoundParts((replace(part, notes=(*part.notes, note)),))
    step = replace(part, name=DECODER, feeds=cache.feeds_to(DECODER))
    prompts = []
    for length in lengths:
        prompt = decision_with_cache(model, checkpoint, task, request.with_sizes({"sequence_length": length}))
        name = PROMPT if len(lengths) == 1 else f"{PROMPT}_{length}"
        prompts.append(replace(step, name=name, inputs=prompt.inputs))
    return family.FoundParts((*prompts, step))


@dataclass(frozen=True)
class _Encoder:
    """One encoder of a dual encoder."""

    part: str
    method: str
    """Specified by transformers: the method that returns the embeddings."""
    output: str
    """Specified: name of the embeddings in transformers, optimum and transformers.js."""


_ENCODERS: Final = (
    _Encoder("text", "get_text_features", "text_embeds"),
    _Encoder("vision", "get_image_features", "image_embeds"),
    _Encoder("audio", "get_audio_features", "audio_embeds"),
)


def _dual_encoder_parts(
    model: torch.nn.Module, checkpoint: CheckpointConfig, task: str, request: ModelRequest
) -> family.FoundParts:
    """Return an encoder of text and an encoder of images or audio, if the user requests a part.

    The method of an encoder returns its embeddings, pooled and projected. The whole model is one graph unless a part
    is requested.

    Raises:
        UsageError: the model does not take these sizes or inputs.
    """
    encoders = [encoder for encoder in _ENCODERS if callable(getattr(model, encoder.method, None))]
    if not request.submodel or len(encoders) < 2 or encoders[0].part != "text":
        return family.FoundParts()
    whole = family.decide_model_inputs(model, checkpoint, task, request)
    read_names = {encoder.part: _read_inputs(getattr(model, encoder.method), whole) for encoder in encoders}
    decisions = {encoder.part: select_inputs(whole, read_names[encoder.part]) for encoder in encoders}
    if not all(decision.inputs for decision in decisions.values()):
        return family.FoundParts()
    return family.FoundParts(tuple(_make_encoder_part(model, encoder, decisions[encoder.part]) for encoder in encoders))


def _make_encoder_part(model: torch.nn.Module, encoder: _Encoder, decision: InputDecision) -> ModelPart:
    names = tuple(spec.name for spec in decision.inputs)

    def name_outputs(outputs: Any) -> Mapping[str, torch.Tensor]:
        # In older versions of transformers, the method returns the embeddings without a record.
        pooled = outputs if isinstance(outputs, torch.Tensor) else outputs["pooler_output"]
        return {encoder.output: pooled}

    entry: Callable[[torch.nn.Module], Callable[..., Any]] = attrgetter(encoder.method)
    return family.part_of_decision(
        model, decision, {}, NestedArguments(names, {}, dict, name_outputs), name=encoder.part, entry=entry
    )


def _read_inputs(method: Callable[..., object], whole: InputDecision) -> frozenset[str]:
    """Return the inputs that an encoder method reads; all its inputs if the method does not run alone.

    A method may accept an input only for the whole model, such as a mask of the other encoder's tokens.
    """
    parameters = inspect.signature(method).parameters
    sizes = {dimension.name: dimension.example or 1 for dimension in whole.dimensions}
    specs = {
        spec.name: spec.model_copy(update={"shape": tuple(sizes.get(str(size), size) for size in spec.shape)})
        for spec in whole.inputs
        if spec.name in parameters
    }
    read_names: set[str] = set()

    def call_method(**tensors: torch.Tensor) -> Any:
        with _ReadRecorder(tensors, read_names):
            return method(**tensors)

    if run_on_shapes(call_method, specs) is None:
        return frozenset(specs)
    needed = {name for name in specs if parameters[name].default is inspect.Parameter.empty}
    return frozenset(read_names | needed)


class _ReadRecorder(TorchFunctionMode):
    """Record which tensors are used in computation; reading an attribute of a tensor does not count."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], read_names: set[str]) -> None:
        super().__init__()
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._read_names = read_names

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, and record the tensors among its arguments."""
        if getattr(func, "__name__", "") != "__get__":
            tensors = tensors_in((args, kwargs))
            self._read_names.update(self._names[id(tensor)] for tensor in tensors if id(tensor) in self._names)
        return func(*args, **(kwargs or {}))


FAMILIES: Registry[family.Family] = Registry(
    "families",
    "model family",
    {
        "encoder-decoder": encoder_decoder_parts,
        "vision-language": vision_language_parts,
        "decoder": _decoder_parts,
        "dual-encoder": _dual_encoder_parts,
        "image-prompts": image_prompt_parts,
    },
    lambda: FunctionType,
)
"""Families in the order of their checks.

Families of plug-ins are checked first, because they know models that built-in families would misclassify. A family is
detected by the inputs and outputs of a model, never by its name.
"""


def decide_parts(
    model: torch.nn.Module, checkpoint: CheckpointConfig, task: str, request: ModelRequest
) -> tuple[ModelPart, ...]:
    """Return all parts of a transformers model, with or without storage, in the order in which they run.

    Raises:
        UsageError: the model does not take these sizes or inputs, or a requested part does not exist.
    """
    notes: list[str] = []
    parts: tuple[ModelPart, ...] = ()
    for name in sorted(FAMILIES, key=lambda name: name in FAMILIES.built_in_names):
        family_parts = FAMILIES[name](model, checkpoint, canonical_task(task), request)
        notes = notes or [*family_parts.notes]  # only the first reason for a single graph is reported
        if parts := family_parts.parts:
            break
    parts = parts or (family.single_part_model(model, checkpoint, canonical_task(task), request, tuple(notes)),)
    refuse_unknown_parts(request.submodel, parts, type(model).__name__)
    return parts


def refuse_unknown_parts(requested: Sequence[str], parts: Sequence[ModelPart], name: str) -> None:
    """Refuse parts that a model does not have.

    Args:
        requested: Names of the requested parts.
        parts: Parts of the model.
        name: The model, for the message.

    Raises:
        UsageError: names the part, and the available parts.
    """
    names = [part.name for part in parts]
    for part in requested:
        if len(names) == 1:
            raise UsageError(
                f"{opt.submodel} {part}: {name} is exported as one graph, without parts", hint=f"Remove {opt.submodel}."
            )
        if part not in names:
            raise UsageError(
                f"{opt.submodel} {part}: {name} has no such part",
                hint=suggest(part, names, also=f"It has {', '.join(names)}."),
            )
