"""Which inputs does a forward take?

The one place that decides the inputs of a model: which of the forward's parameters, of which size and type, with which
valid values. Decided from the forward signature, the config and the processor files, by the *names* of parameters and
config attributes and never by the name of a model; so it works for a class and a config without weights as well. What
is known of text, images and recordings stands in ``modalities/``. Makes no values (``runtime/feeds.py`` does).
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from winml.modelkit.errors import InputError, UsageError
from winml.modelkit.graph.specs import DynamicDimension, InputTensorSpec, OutputAxis, names_among
from winml.modelkit.load.checkpoints.companion_files import read_processor_files
from winml.modelkit.load.inputs.drafts import InputContext, InputDraft
from winml.modelkit.load.inputs.media import DraftedInputs, decide_medium, with_codebook_tokens, with_positions
from winml.modelkit.load.inputs.modalities.modality import DecidedMedium, Modality
from winml.modelkit.load.inputs.modalities.pipeline import MODALITIES
from winml.modelkit.load.inputs.modalities.text import TEXT_ROWS_KEY
from winml.modelkit.load.inputs.names import INPUT_SPECS_OPTION, SHAPE_CONFIG_OPTION, argument_of
from winml.modelkit.load.inputs.options import ShapeConfig
from winml.modelkit.load.inputs.shape_run import run_on_shapes
from winml.modelkit.load.inputs.sizes import InputSize, InputSizes, SizeBounds
from winml.modelkit.options import nearest

if TYPE_CHECKING:
    from winml.modelkit.load.caches.layout import CacheLayout

__all__ = [
    "AxisMeanings",
    "InputDecision",
    "check_input_specs",
    "decide_inputs",
    "forward_keywords",
    "forward_parameters",
    "known_meanings",
]

_ROW_COUNTS = (5, 7, 11)
"""Chosen: none divides another, and no usual number of labels or heads."""


def _with_rows_apart(inputs: DraftedInputs, context: InputContext, media: Sequence[DecidedMedium]) -> DraftedInputs:
    """Return the inputs with a number of rows for each kind of content, where the model scores every pair of them."""
    keys = {name: medium.modality.rows_key for medium in media for name in medium.drafts}
    keys = {draft.name: keys.get(draft.name, TEXT_ROWS_KEY.name) for draft in inputs.drafts}
    counts = dict(zip(dict.fromkeys(keys.values()), _ROW_COUNTS, strict=False))
    if not context.has_text or not 1 < len(counts) == len(set(keys.values())):
        return inputs
    has_places = any(medium.place_count for medium in media)
    if has_places or any(draft.shape[:1] != (context.batch,) for draft in inputs.drafts):
        return inputs
    if not _scores_pairs(inputs.drafts, keys, counts, context.structure):
        return inputs
    rows = {key: context.sizes.choose(key, context.batch.value) for key in counts}
    return dataclasses.replace(inputs, drafts=tuple(_of_rows(draft, rows[keys[draft.name]]) for draft in inputs.drafts))


def _scores_pairs(
    drafts: Sequence[InputDraft], keys: Mapping[str, str], counts: Mapping[str, int], model: torch.nn.Module
) -> bool:
    """Say whether a forward answers with a number for every pair of rows of two kinds."""
    sized = {draft.name: _of_rows(draft, InputSize(counts[keys[draft.name]])).as_spec() for draft in drafts}
    pairs = set(itertools.permutations(counts.values(), 2))
    outputs = run_on_shapes(model, sized)
    tensors = outputs.values() if isinstance(outputs, Mapping) else ()
    return any(isinstance(tensor, torch.Tensor) and tuple(tensor.shape) in pairs for tensor in tensors)


def _of_rows(draft: InputDraft, rows: InputSize) -> InputDraft:
    return dataclasses.replace(draft, shape=(rows, *draft.shape[1:]))


_FIXED_KEYWORDS = {"use_cache": False, "return_dict": True}
"""What every forward is called with where it knows the word: no cache goes in or out, outputs carry names."""


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
    open_by_default: Mapping[str, str] = field(default_factory=dict)
    """Names in the shapes that no option asked for → the key of ``--shape-config`` that fixes each."""
    output_axes: tuple[OutputAxis, ...] = ()
    """Axes of outputs that are to be open; which outputs there are is known once the model ran."""
    requested_by: str = INPUT_SPECS_OPTION
    """What described the inputs, for messages, where somebody did."""
    cache: CacheLayout | None = None
    """The cache that goes in and out; None without one."""


def decide_inputs(
    model: torch.nn.Module | type[torch.nn.Module],
    config: object,
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
        UsageError: a size the model refuses, or the forward needs an input that no modality knows.
        CheckpointError: a processor file is malformed.
    """
    requested = {**(shape.fixed() if shape else {}), **({"batch_size": batch_size} if batch_size else {})}
    context = InputContext(
        model=model,
        config=config,
        parameters=forward_parameters(model),
        processor=read_processor_files(folder),
        sizes=InputSizes(requested),
        task=task,
        float_dtype=_float_dtype(model, config),
    )
    parameters = _choose_parameters(context)
    media = _decide_media(parameters, context)
    drafted = _collect_inputs(context, media, _draft_dependents(parameters, context, media))
    inputs = _with_rows_apart(with_codebook_tokens(with_positions(drafted, context), context), context, media)
    specs = tuple(draft.as_spec() for draft in inputs.drafts)
    _check_required_parameters(model, context.parameters, [spec.name for spec in specs])
    unused = _unused_sizes(requested, inputs, media)
    return InputDecision(specs, (*dict.fromkeys(inputs.notes), *unused), _axis_meanings(inputs))


@dataclass(frozen=True)
class _ChosenParameters:
    """The parameters that are inputs."""

    media: Mapping[Modality, Sequence[str]]
    """Modality → those that carry its content, the carrier first; in the order in which modalities are decided."""
    dependents: Mapping[str, Modality]
    """The others, each with the modality that drafts it, in the order of the signature."""


def _choose_parameters(context: InputContext) -> _ChosenParameters:
    media = {modality: modality.media_parameters(context) for modality in MODALITIES}
    media = {modality: names for modality, names in media.items() if names}
    owners: dict[str, Modality] = {}
    for modality in MODALITIES:
        for name in modality.dependent_parameters(context, list(media)):
            owners.setdefault(name, modality)
    return _ChosenParameters(media, {name: owners[name] for name in context.parameters if name in owners})


def _decide_media(parameters: _ChosenParameters, context: InputContext) -> list[DecidedMedium]:
    """Return what carries images and recordings."""
    media: list[DecidedMedium] = []
    for modality, names in parameters.media.items():

        def draft_others(medium: DecidedMedium, before: Sequence[DecidedMedium] = tuple(media)) -> list[InputDraft]:
            drafts = {name: draft for earlier in before for name, draft in earlier.drafts.items()}
            return [*drafts.values(), *_draft_dependents(parameters, context, [*before, medium])]

        media.append(decide_medium(modality, names, context, draft_others))
    return media


def _draft_dependents(
    parameters: _ChosenParameters, context: InputContext, media: Sequence[DecidedMedium]
) -> list[InputDraft]:
    """Return the drafts that follow from the media, as far as these are decided."""
    drafts = (owner.draft_dependent(name, context, media) for name, owner in parameters.dependents.items())
    return [draft for draft in drafts if draft is not None]


def _collect_inputs(
    context: InputContext, media: Sequence[DecidedMedium], dependents: Sequence[InputDraft]
) -> DraftedInputs:
    """Return all inputs in the order of the signature, with the notes and bounds of all sizes."""
    drafts = {name: draft for medium in media for name, draft in medium.drafts.items()}
    drafts |= {draft.name: draft for draft in dependents}
    bounds: dict[str, SizeBounds] = {}
    for medium in media:
        bounds |= {**_known_bounds(medium.sizes), **medium.bounds}
    bounds |= _known_bounds([size for draft in dependents for size in draft.shape])
    notes = [note for medium in media for note in medium.notes]
    notes += [note for draft in dependents for note in draft.notes]
    return DraftedInputs(tuple(drafts[name] for name in context.parameters if name in drafts), tuple(notes), bounds)


def _known_bounds(sizes: Sequence[InputSize]) -> dict[str, SizeBounds]:
    return {size.key: size.bounds for size in sizes if size.key is not None and size.bounds is not None}


def _axis_meanings(inputs: DraftedInputs) -> AxisMeanings:
    sizes = [size for draft in inputs.drafts for size in draft.shape]
    return AxisMeanings(
        keys={draft.name: draft.keys for draft in inputs.drafts},
        sizes={size.key: size.value for size in sizes if size.key is not None},
        bounds=inputs.bounds,
    )


def _unused_sizes(requested: Mapping[str, int], inputs: DraftedInputs, media: Sequence[DecidedMedium]) -> list[str]:
    """Return a note for each size the user gave that no input has."""
    sizes = [size for medium in media for size in medium.sizes]
    sizes += [size for draft in inputs.drafts for size in draft.shape]
    used = {size.key for size in sizes if size.key is not None}
    names = ", ".join(draft.name for draft in inputs.drafts)
    return [
        f"{SHAPE_CONFIG_OPTION}: {key} {size} means nothing for this model (inputs: {names})"
        for key, size in requested.items()
        if used.isdisjoint(names_among(key, used))
    ]


def known_meanings(
    model: torch.nn.Module | type[torch.nn.Module],
    config: object,
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
    parameters = forward_parameters(model)
    return {name: value for name, value in _FIXED_KEYWORDS.items() if name in parameters}


def check_input_specs(
    model: torch.nn.Module | type[torch.nn.Module],
    specs: Sequence[InputTensorSpec],
    requested_by: str = INPUT_SPECS_OPTION,
    arguments: Sequence[str] = (),
) -> None:
    """Check a manifest against the forward signature.

    Args:
        model: Whose forward takes the inputs.
        specs: The inputs; ``features.input_ids`` belongs to the parameter ``features``.
        requested_by: What gave them, for messages.
        arguments: Names of further arguments that are given.

    Raises:
        UsageError: a name that is no parameter (names the nearest), or a required parameter that is not described.
    """
    parameters = forward_parameters(model)
    names = _named_parameters(parameters)
    passed = list(dict.fromkeys([*(argument_of(spec.name) for spec in specs), *arguments]))
    kinds = {parameter.kind for parameter in parameters.values()}
    takes_any_name = inspect.Parameter.VAR_KEYWORD in kinds and not names
    # Values of ``*args`` have no names of their own; whatever they are called, they go by position.
    if not takes_any_name and inspect.Parameter.VAR_POSITIONAL not in kinds:
        for name in passed:
            if name not in names:
                guess = nearest(name, names)
                hint = f"Did you mean {guess!r}?" if guess else f"It takes: {', '.join(names) or 'nothing'}."
                if len(names) == 1 and not guess:
                    hint += f" A dict that is this one argument is given as {{{next(iter(names))!r}: {{…}}}}."
                raise UsageError(f"{requested_by}: {_class_name(model)} takes no input {name!r}", hint=hint)
    _check_required_parameters(model, parameters, passed)


def _check_required_parameters(
    model: torch.nn.Module | type[torch.nn.Module], parameters: Mapping[str, inspect.Parameter], chosen: Sequence[str]
) -> None:
    named = _named_parameters(parameters)
    missing = [
        name for name, parameter in named.items() if parameter.default is inspect.Parameter.empty and name not in chosen
    ]
    if missing or not chosen:
        needs = f"needs {', '.join(missing)}" if missing else "takes none of the inputs known here"
        raise UsageError(
            f"{_class_name(model)}: its forward {needs}, and nothing says of what size and type",
            hint=f"Describe all its inputs with {INPUT_SPECS_OPTION}; its parameters: {', '.join(named)}.",
        )


def _named_parameters(parameters: Mapping[str, inspect.Parameter]) -> dict[str, inspect.Parameter]:
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {name: parameter for name, parameter in parameters.items() if parameter.kind not in variadic}


def _class_name(model: torch.nn.Module | type[torch.nn.Module]) -> str:
    return model.__name__ if isinstance(model, type) else type(model).__name__


def _float_dtype(model: torch.nn.Module | type[torch.nn.Module], config: object) -> str:
    """Return the dtype of inputs that are not indices: that of the weights they meet."""
    parameters = () if isinstance(model, type) else model.parameters()
    dtype = next((p.dtype for p in parameters if p.is_floating_point()), None) or getattr(config, "dtype", None)
    return str(dtype or torch.float32).removeprefix("torch.")
