"""What does the model eat?

The one place that decides the inputs of a model: which of the forward's parameters, of which size and type, with which
valid values. Decided from the forward signature, the config and the processor files, by the *names* of parameters and
config attributes and never by the name of a model; so it works for a class and a config without weights as well.
Makes no values (``runtime/feeds.py`` does) and runs no forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from winml.modelkit.errors import InputError, UsageError
from winml.modelkit.graph.dimensions import DynamicDimension
from winml.modelkit.graph.specs import InputTensorSpec
from winml.modelkit.load.checkpoints.processor_files import ProcessorInfo, read_processor_files
from winml.modelkit.load.inputs.modalities import (
    AUDIO,
    IMAGE,
    MODALITIES,
    SAMPLES,
    Draft,
    Modality,
    TakenMedium,
    find_method,
    take_medium,
)
from winml.modelkit.load.inputs.options import INPUT_SPECS_OPTION, SHAPE_CONFIG_OPTION, ShapeConfig
from winml.modelkit.load.inputs.shape_run import run_on_shapes
from winml.modelkit.load.inputs.sizes import InputSizes, KeyedSize, SizeBounds
from winml.modelkit.options import nearest

__all__ = [
    "AxisMeanings",
    "InputDecision",
    "check_input_specs",
    "decide_inputs",
    "forward_keywords",
    "forward_parameters",
    "known_meanings",
]

_DECODER_TASKS = frozenset(
    {"feature-extraction", "text2text-generation", "automatic-speech-recognition", "image-to-text", "pretraining",
     "fill-mask", "text-to-audio", "image-text-to-text", "document-question-answering", "visual-question-answering"}
)  # fmt: skip
"""Tasks in which an encoder-decoder model is given the decoder's tokens; in the others it makes them itself."""

_FIXED_KEYWORDS = {"use_cache": False, "return_dict": True}
"""What every forward is called with where it knows the word: no cache goes in or out, outputs carry names."""


_KINDS_OF_TOKENS = "mm_token_type_ids"
_PLACES = (_KINDS_OF_TOKENS, IMAGE.place_mask)
"""Parameters that say which tokens hold the place of an image."""


@dataclass(frozen=True)
class AxisMeanings:
    """Which key of ``--shape-config`` each axis is, and between which sizes it may vary."""

    keys: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    """Input → key of each axis; None where the size is the architecture's own. Inputs nobody knows are not in it."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Key → its size where it is not left open."""
    bounds: Mapping[str, SizeBounds] = field(default_factory=dict)
    """Key → its bounds, where there are any."""


@dataclass(frozen=True)
class InputDecision:
    """The inputs, and what the user should hear about how they came to be."""

    inputs: tuple[InputTensorSpec, ...]
    """In the order of the forward's parameters."""
    notes: tuple[str, ...] = ()
    """Sentences, such as a size that means nothing for this model."""
    meanings: AxisMeanings = AxisMeanings()
    """What the axes are."""
    dimensions: tuple[DynamicDimension, ...] = ()
    """The names in the shapes, each with the size to trace with; ``dynamic_axes.py`` puts them there."""


def decide_inputs(
    model: torch.nn.Module | type[torch.nn.Module],
    config: Any,
    folder: Path | None = None,
    *,
    task: str | None = None,
    shape: ShapeConfig | None = None,
    batch_size: int | None = None,
) -> InputDecision:
    """Decide the inputs of a transformers model.

    Args:
        model: The model, or its class where there are no weights; its parameters are looked at, never their values.
        config: Its transformers config.
        folder: Checkpoint folder with tokenizer and processor files.
        task: Canonical task; decides whether a decoder is given tokens of its own.
        shape: Sizes the user wants.
        batch_size: Rows of every input; wins over the config, agrees with ``shape``.

    Raises:
        UsageError: a size the model refuses, or the forward asks for an input nobody here knows.
        CheckpointError: a processor file is malformed.
    """
    parameters = forward_parameters(model)
    given = {**(shape.given() if shape else {}), **({"batch_size": batch_size} if batch_size else {})}
    processor = read_processor_files(folder)
    sizes = InputSizes(model, config, processor, given, frozenset(parameters))
    chosen = _choose(parameters, config, processor, task)
    floats = _float_dtype(model, config)
    media = _take_media(chosen, config, sizes, task, floats)
    taken = {name for medium in media for name in medium.drafts}
    chosen = [name for name in chosen if name in taken or not _is_of_medium(name)]
    drafts = [_draft(name, config, sizes, task, floats, media) for name in chosen]
    if "position_ids" in parameters:
        drafts = _with_positions(drafts, sizes, list(parameters))
    drafts = _with_codebooks(drafts, sizes)
    specs = tuple(InputTensorSpec(**draft) for draft in drafts)
    _check_required(model, parameters, [spec.name for spec in specs])
    return InputDecision(specs, (*sizes.notes, *_unused(given, sizes, chosen)), _meanings(drafts, sizes))


def _take_media(
    chosen: Sequence[str], config: Any, sizes: InputSizes, task: str | None, floats: str
) -> list[TakenMedium]:
    """Return what carries images and recordings, of those parameters that are given."""
    media: list[TakenMedium] = []
    for modality in MODALITIES:
        names = [name for name in chosen if name in modality.carriers]
        if names:
            own = [*names, *(name for name in chosen if name in modality.companions)]
            rest = [name for name in chosen if name not in own]

            def others(*more: TakenMedium, rest: Sequence[str] = rest) -> dict[str, Draft]:
                return {name: _draft(name, config, sizes, task, floats, [*media, *more]) for name in rest}

            media.append(take_medium(modality, config, sizes, own, others, task=task, floats=floats))
    return media


def _with_positions(drafts: list[Draft], sizes: InputSizes, order: Sequence[str]) -> list[Draft]:
    """Return the drafts with positions in place of the kinds of tokens, where the model makes the one of the other.

    It does so in Python, row by row, from the values of masks and grids: a graph would keep the positions of one draw.
    """
    named = {draft["name"]: draft for draft in drafts}
    kinds = named.pop(_KINDS_OF_TOKENS, None)
    method = find_method(sizes.structure(), "get_rope_index") if kinds is not None else None
    if kinds is None or method is None:
        return drafts
    known = inspect.signature(method).parameters
    specs = {draft["name"]: InputTensorSpec(**draft) for draft in drafts if draft["name"] in known}
    found = run_on_shapes(method, {name: spec for name, spec in specs.items() if name != "attention_mask"})
    if found is None:
        return drafts
    rows, length = kinds["shape"]
    shape = (len(found[0]), rows, length)
    named["position_ids"] = Draft(name="position_ids", shape=shape, dtype="int64", value_range=_indices(length))
    sizes.tell("position_ids: computed outside of the graph, as get_rope_index of the model does")
    return [named[name] for name in order if name in named]


def _with_codebooks(drafts: list[Draft], sizes: InputSizes) -> list[Draft]:
    """Return the drafts with the tokens of every codebook, where the model takes no other."""
    count = sizes.codebooks()
    named = {draft["name"]: draft for draft in drafts}
    tokens = named.get("decoder_input_ids") or named.get("input_ids")
    if count is None or tokens is None:
        return drafts
    rows, *rest = tokens["shape"]
    single = [_of_one_row(draft) for draft in drafts]
    layouts = {(1, *rest): (rows, *rest), (count, *rest): (rows * count, *rest)}
    layouts |= {(1, *rest, count): (rows, *rest, count), (1, count, *rest): (rows, count, *rest)}
    taken = next((one for one in layouts if _runs(_laid_out(single, tokens["name"], one), sizes)), (1, *rest))
    if taken == (1, *rest):
        return drafts
    if taken[0] != 1:
        sizes.bounds["batch_size"] = SizeBounds(fixed="each row of tokens is one row for every codebook")
    sizes.tell(f"{tokens['name']}: tokens of {count} codebooks")
    return _laid_out(drafts, tokens["name"], layouts[taken])


def _of_one_row(draft: Draft) -> Draft:
    """Return a draft of which the batch is 1, where a forward cannot take one row for another's codebook."""
    shape = tuple(1 if getattr(size, "key", None) == "batch_size" else size for size in draft["shape"])
    return Draft(draft, shape=shape)


def _laid_out(drafts: Sequence[Draft], name: str, shape: tuple[int, ...]) -> list[Draft]:
    return [Draft(draft, shape=shape) if draft["name"] == name else draft for draft in drafts]


def _runs(drafts: Sequence[Draft], sizes: InputSizes) -> bool:
    """Say whether the forward runs as a whole."""
    return run_on_shapes(sizes.structure(), {draft["name"]: InputTensorSpec(**draft) for draft in drafts}) is not None


def _is_of_medium(name: str) -> bool:
    return any(name in (*modality.carriers, *modality.companions) for modality in MODALITIES)


def _meanings(drafts: Sequence[Draft], sizes: InputSizes) -> AxisMeanings:
    keyed = [size for draft in drafts for size in draft["shape"] if isinstance(size, KeyedSize)]
    return AxisMeanings(
        keys={draft["name"]: tuple(getattr(size, "key", None) for size in draft["shape"]) for draft in drafts},
        sizes={size.key: int(size) for size in keyed},
        bounds=sizes.bounds,
    )


def known_meanings(
    model: torch.nn.Module | type[torch.nn.Module],
    config: Any,
    specs: Sequence[InputTensorSpec],
    folder: Path | None = None,
    task: str | None = None,
) -> AxisMeanings:
    """Return what is known about the axes of inputs somebody else described; nothing, where the model is not known."""
    try:
        meanings = decide_inputs(model, config, folder, task=task).meanings
    except UsageError:
        return AxisMeanings()
    ranks = {spec.name: len(spec.shape) for spec in specs}
    keys = {name: keys for name, keys in meanings.keys.items() if ranks.get(name) == len(keys)}
    return AxisMeanings(keys, meanings.sizes, meanings.bounds)


def forward_parameters(model: torch.nn.Module | type[torch.nn.Module]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of ``forward`` by name, without ``self``."""
    try:
        parameters = dict(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):
        raise InputError(
            f"{_class_name(model)}: its forward is no Python function, so its inputs cannot be read off it",
            hint="Give the nn.Module itself: a scripted or traced module does not tell what runs inside it.",
        ) from None
    if isinstance(model, type):
        parameters.pop(next(iter(parameters)))
    return parameters


def forward_keywords(model: torch.nn.Module | type[torch.nn.Module]) -> dict[str, bool]:
    """Return the fixed keywords to call ``forward`` with: no cache, named outputs, as far as it knows the words."""
    known = forward_parameters(model)
    return {name: value for name, value in _FIXED_KEYWORDS.items() if name in known}


def check_input_specs(
    model: torch.nn.Module | type[torch.nn.Module], specs: Sequence[InputTensorSpec], source: str = INPUT_SPECS_OPTION
) -> None:
    """Check a manifest against the forward signature.

    Raises:
        UsageError: a name that is no parameter (names the nearest), or a required parameter that is not described.
    """
    parameters = forward_parameters(model)
    names = _named(parameters)
    kinds = {parameter.kind for parameter in parameters.values()}
    takes_any_name = inspect.Parameter.VAR_KEYWORD in kinds and not names
    # Values of ``*args`` have no names of their own; whatever they are called, they go by position.
    if not takes_any_name and inspect.Parameter.VAR_POSITIONAL not in kinds:
        for spec in specs:
            if spec.name not in names:
                guess = nearest(spec.name, names)
                hint = f"Did you mean {guess!r}?" if guess else f"It takes: {', '.join(names) or 'nothing'}."
                class_name = _class_name(model)
                raise UsageError(f"{source}: {class_name} takes no input {spec.name!r}", hint=hint)
    _check_required(model, parameters, [spec.name for spec in specs])


def _check_required(
    model: torch.nn.Module | type[torch.nn.Module], parameters: Mapping[str, inspect.Parameter], chosen: Sequence[str]
) -> None:
    missing = [
        name
        for name, parameter in _named(parameters).items()
        if parameter.default is inspect.Parameter.empty and name not in chosen
    ]
    if missing or not chosen:
        needs = f"needs {', '.join(missing)}" if missing else "takes none of the inputs known here"
        raise UsageError(
            f"{_class_name(model)}: its forward {needs}, and nothing says of what size and type",
            hint=f"Describe all its inputs with {INPUT_SPECS_OPTION}; its parameters: {', '.join(_named(parameters))}.",
        )


def _named(parameters: Mapping[str, inspect.Parameter]) -> dict[str, inspect.Parameter]:
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {name: parameter for name, parameter in parameters.items() if parameter.kind not in variadic}


def _class_name(model: torch.nn.Module | type[torch.nn.Module]) -> str:
    return model.__name__ if isinstance(model, type) else type(model).__name__


def _choose(
    parameters: Mapping[str, inspect.Parameter], config: Any, processor: ProcessorInfo, task: str | None
) -> list[str]:
    """Return the parameters that are inputs, in the order of the signature."""
    has_text = "input_ids" in parameters
    media = {name for modality in MODALITIES for name in _given_of(modality, parameters, config)}
    has_image = bool(media & {*IMAGE.carriers})
    has_audio = bool(media & {*AUDIO.carriers, *SAMPLES.carriers})

    def wanted(name: str) -> bool:
        if name in media or name in ("input_ids", "bbox"):
            return True
        if name == "attention_mask":
            # Of a vision model it masks patches and is no input a processor makes.
            return has_text or (has_audio and processor.makes_audio_mask is True)
        if name == "token_type_ids":
            return has_text and (_takes_token_types(config, processor) or (has_image and _marks_images(config)))
        if name in _PLACES:
            return has_image
        if name in ("decoder_input_ids", "decoder_input_values"):
            is_required = parameters[name].default is inspect.Parameter.empty
            return is_required or (bool(getattr(config, "is_encoder_decoder", False)) and _gives_decoder(task))
        return False

    return [name for name in parameters if wanted(name)]


def _given_of(modality: Modality, parameters: Mapping[str, inspect.Parameter], config: Any) -> list[str]:
    """Return the parameters of a modality that are inputs."""
    carrier = next((name for name in modality.carriers if name in parameters), None)
    companions = [name for name in modality.companions if name in parameters and _describes(name, parameters)]
    if carrier is None or modality.is_absent(config) or (carrier == "hidden_states" and "grid_thw" not in companions):
        return []
    return [carrier, *companions]


def _describes(name: str, parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Say whether a description of an image is asked for, not merely allowed."""
    return name != "pixel_attention_mask" or "spatial_shapes" in parameters


def _gives_decoder(task: str | None) -> bool:
    return task is None or task in _DECODER_TASKS


def _takes_token_types(config: Any, processor: ProcessorInfo) -> bool:
    types = getattr(config, "type_vocab_size", None)
    if processor.text_inputs is not None:
        return "token_type_ids" in processor.text_inputs and bool(types)
    return types is not None and types >= 2


def _marks_images(config: Any) -> bool:
    """Say whether types of tokens have no vectors of their own, and say which tokens hold the place of an image."""
    return getattr(config, "type_vocab_size", None) is None and IMAGE.token(config) is not None


def _float_dtype(model: torch.nn.Module | type[torch.nn.Module], config: Any) -> str:
    """Return the dtype of inputs that are not indices: that of the weights they meet."""
    parameters = () if isinstance(model, type) else model.parameters()
    dtype = next((p.dtype for p in parameters if p.is_floating_point()), None) or getattr(config, "dtype", None)
    return str(dtype or torch.float32).removeprefix("torch.")


def _draft(
    name: str, config: Any, sizes: InputSizes, task: str | None, floats: str, media: Sequence[TakenMedium]
) -> Draft:
    """Return what one input is made from. With those of ``modalities.py`` the table of all inputs known here."""
    for medium in media:
        if name in medium.drafts:
            return medium.drafts[name]
    rows: tuple[int, ...] = (sizes.size("batch_size", 1),)
    if name == "decoder_input_values":
        shape = (*rows, sizes.decoder_sequence(), sizes.mel_bins())
        return Draft(name=name, shape=shape, dtype=floats)
    if name == "attention_mask" and not sizes.has_text:
        length = _length(media)
        return Draft(name=name, shape=(*rows, length), dtype="int64", value_range=(0, 1))
    return _text_draft(name, config, sizes, rows, task, media)


def _length(media: Sequence[TakenMedium]) -> KeyedSize:
    """Return the number of frames or samples of a recording."""
    sizes = (size for medium in media for draft in medium.drafts.values() for size in draft["shape"])
    keyed = (size for size in sizes if isinstance(size, KeyedSize))
    return next(size for size in keyed if size.key in ("num_frames", "audio_length"))


def _text_draft(
    name: str, config: Any, sizes: InputSizes, rows: tuple[int, ...], task: str | None, media: Sequence[TakenMedium]
) -> Draft:
    if name == "decoder_input_ids":
        shape = (*rows, sizes.decoder_sequence())
        vocabulary = sizes.decoder_vocabulary()
        return Draft(name=name, shape=shape, dtype="int64", value_range=_indices(vocabulary))
    if task == "multiple-choice":
        rows = (*rows, sizes.size("num_choices", 4))
    shape = (*rows, sizes.sequence(sum(medium.count for medium in media)))
    if name == "attention_mask":
        return Draft(name=name, shape=shape, dtype="int64", value_range=(0, 1))
    if name in _PLACES or (name == "token_type_ids" and _marks_images(config)):
        # Text is 0, a picture 1.
        pictured = tuple(
            (1, medium.count) for medium in media if medium.count and not medium.drafts.keys() & {*AUDIO.carriers}
        )
        return Draft(name=name, shape=shape, dtype="int64", value_range=(0, 0), first_values=pictured)
    if name == "token_type_ids":
        types = getattr(config, "type_vocab_size", 0)
        return Draft(name=name, shape=shape, dtype="int64", value_range=_indices(types))
    if name == "bbox":
        corners = getattr(config, "max_2d_position_embeddings", 1024)
        return Draft(name=name, shape=(*shape, 4), dtype="int64", value_range=_indices(corners))
    vocabulary = sizes.vocabulary()
    return Draft(
        name=name,
        shape=shape,
        dtype="int64",
        value_range=sizes.text_tokens(vocabulary),
        last_value=sizes.end_token(vocabulary),
        first_values=tuple(
            (medium.token, medium.count) for medium in media if medium.count and medium.token is not None
        ),
    )


def _indices(count: int) -> tuple[float, float]:
    return (0, max(count, 1) - 1)


def _unused(given: Mapping[str, int], sizes: InputSizes, chosen: Sequence[str]) -> list[str]:
    return [
        f"{SHAPE_CONFIG_OPTION}: {key} {given[key]} means nothing for this model (inputs: {', '.join(chosen)})"
        for key in sizes.unused
    ]
