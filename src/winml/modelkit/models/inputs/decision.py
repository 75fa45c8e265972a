"""Decision on the inputs of a forward.

The only module that decides the inputs of a model: the parameters of the forward, their sizes, element types and valid
values. The decision uses the forward signature, the config and the processor files, by the *names* of parameters and
config attributes and never by the name of a model; so a class and a config without weights suffice. ``modalities/``
describes text, images and audio; a run without values determines which of their tensors reach a module. Makes no values
(``ort/feeds.py`` does).
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from winml.modelkit.errors import InputError, UsageError, opt, spell
from winml.modelkit.models.checkpoints.processor_files import read_processor_files
from winml.modelkit.models.inputs.drafts import InputContext, InputDraft, InputLayout, index_range, input_shape
from winml.modelkit.models.inputs.modalities.modality import BATCH_KEY, DecidedMedium, Modality
from winml.modelkit.models.inputs.modalities.pipeline import MODALITIES
from winml.modelkit.models.inputs.modalities.text import KINDS_PARAMETER, TEXT_ROWS_KEY
from winml.modelkit.models.inputs.options import ShapeConfig
from winml.modelkit.models.inputs.shape_run import run_on_shapes
from winml.modelkit.models.inputs.sizes import (
    InputSize,
    InputSizes,
    SizeBounds,
    argument_of,
    first_int_anywhere,
)
from winml.modelkit.onnx.specs import ROWS_OF_ONE_KIND, DynamicDimension, InputTensorSpec, OutputAxis, names_among
from winml.modelkit.options import nearest

if TYPE_CHECKING:
    from winml.modelkit.models.caches.layout import CacheLayout

_ROW_COUNTS = (5, 7, 11)
"""Chosen: not divisible by each other, and no usual number of labels or heads."""


def _separate_rows(inputs: _DraftedInputs, context: InputContext, media: Sequence[DecidedMedium]) -> _DraftedInputs:
    """Return the inputs with a separate number of rows per modality if the model scores every pair of rows."""
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
    return replace(inputs, drafts=tuple(_set_rows(draft, rows[keys[draft.name]]) for draft in inputs.drafts))


def _scores_pairs(
    drafts: Sequence[InputDraft], keys: Mapping[str, str], counts: Mapping[str, int], model: torch.nn.Module
) -> bool:
    """Return True if an output of the forward has one number for every pair of rows of two modalities."""
    specs = {draft.name: _set_rows(draft, InputSize(counts[keys[draft.name]])).as_spec() for draft in drafts}
    pairs = set(itertools.permutations(counts.values(), 2))
    outputs = run_on_shapes(model, specs)
    tensors = outputs.values() if isinstance(outputs, Mapping) else ()
    return any(isinstance(tensor, torch.Tensor) and tuple(tensor.shape) in pairs for tensor in tensors)


def _set_rows(draft: InputDraft, rows: InputSize) -> InputDraft:
    return replace(draft, shape=(rows, *draft.shape[1:]))


_FIXED_KEYWORDS = {"use_cache": False, "return_dict": True}
"""Fixed keywords of every forward that accepts them: no cache goes in or out, outputs have names."""


@dataclass(frozen=True)
class AxisMeanings:
    """The key of ``--shape-config`` of each axis, and the bounds of its size."""

    keys: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    """Input → key of each axis; `None` if the architecture fixes the size. Unknown inputs are missing."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Key → its size if not dynamic."""
    bounds: Mapping[str, SizeBounds] = field(default_factory=dict)
    """Key → its bounds, if any."""


@dataclass(frozen=True)
class InputDecision:
    """The inputs, with notes for the user on the decision."""

    inputs: tuple[InputTensorSpec, ...]
    """Inputs in the order of the forward's parameters."""
    notes: tuple[str, ...] = ()
    """Sentences, such as a size that does not apply to this model."""
    meanings: AxisMeanings = AxisMeanings()
    """Meanings of the axes."""
    dimensions: tuple[DynamicDimension, ...] = ()
    """The names in the shapes, each with its size at tracing; set by ``dynamic_axes.py``."""
    open_by_default: Mapping[str, str] = field(default_factory=dict)
    """Names in the shapes that no option requested → the key of ``--shape-config`` that fixes the size."""
    output_axes: tuple[OutputAxis, ...] = ()
    """Axes of outputs that are requested to be dynamic; the outputs are known after the first run of the model."""
    requested_by: str = field(default_factory=lambda: opt.input_specs)
    """Option or argument that described the inputs, for messages."""
    cache: CacheLayout | None = None
    """The cache as input and output; `None` without a cache."""


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
        model: The model, or its class without weights; values of parameters are never read.
        config: Its transformers config.
        folder: Checkpoint folder with tokenizer and processor files.
        task: Canonical task; decides whether the decoder's own tokens are an input.
        shape: Sizes requested by the user.
        batch_size: Rows of every input; wins over the config, agrees with ``shape``.

    Raises:
        UsageError: the model refuses a size, or the forward needs an input that no modality knows.
        CheckpointError: a processor file is malformed.
    """
    requested_sizes = {**(shape.fixed() if shape else {}), **({"batch_size": batch_size} if batch_size else {})}
    context = InputContext(
        model=model,
        config=config,
        parameters=forward_parameters(model),
        processor=read_processor_files(folder),
        sizes=InputSizes(requested_sizes),
        task=task,
        float_dtype=_float_dtype(model, config),
    )
    parameters = _choose_parameters(context)
    media = _decide_media(parameters, context)
    drafted = _collect_inputs(context, media, _draft_dependents(parameters, context, media))
    inputs = _separate_rows(_with_codebook_tokens(_with_positions(drafted, context), context), context, media)
    specs = tuple(draft.as_spec() for draft in inputs.drafts)
    _check_required_parameters(model, context.parameters, [spec.name for spec in specs])
    unused_notes = _unused_sizes(requested_sizes, inputs, media)
    return InputDecision(specs, (*dict.fromkeys(inputs.notes), *unused_notes), _axis_meanings(inputs))


@dataclass(frozen=True)
class _ChosenParameters:
    """The parameters that are inputs."""

    media: Mapping[Modality, Sequence[str]]
    """Modality → parameters with its content, the carrier first; in the order in which modalities are decided."""
    dependents: Mapping[str, Modality]
    """Other parameter → the modality that drafts it, in the order of the signature."""


def _choose_parameters(context: InputContext) -> _ChosenParameters:
    """Assign parameters of the forward to the modalities that know them."""
    media = {modality: modality.media_parameters(context) for modality in MODALITIES}
    media = {modality: names for modality, names in media.items() if names}
    owners: dict[str, Modality] = {}
    for modality in MODALITIES:
        for name in modality.dependent_parameters(context, list(media)):
            owners.setdefault(name, modality)
    return _ChosenParameters(media, {name: owners[name] for name in context.parameters if name in owners})


def _decide_media(parameters: _ChosenParameters, context: InputContext) -> list[DecidedMedium]:
    """Return the decided inputs with images and recordings."""
    media: list[DecidedMedium] = []
    for modality, names in parameters.media.items():

        def draft_others(medium: DecidedMedium, before: Sequence[DecidedMedium] = tuple(media)) -> list[InputDraft]:
            drafts = {name: draft for earlier in before for name, draft in earlier.drafts.items()}
            return [*drafts.values(), *_draft_dependents(parameters, context, [*before, medium])]

        media.append(_decide_medium(modality, names, context, draft_others))
    return media


def _draft_dependents(
    parameters: _ChosenParameters, context: InputContext, media: Sequence[DecidedMedium]
) -> list[InputDraft]:
    """Return the drafts that depend on the media decided so far."""
    drafts = (owner.draft_dependent(name, context, media) for name, owner in parameters.dependents.items())
    return [draft for draft in drafts if draft is not None]


def _collect_inputs(
    context: InputContext, media: Sequence[DecidedMedium], dependents: Sequence[InputDraft]
) -> _DraftedInputs:
    """Return all inputs in the order of the signature, with the notes and bounds of all sizes.

    Args:
        context: The model and the user's request.
        media: Inputs of images, audio and further media.
        dependents: Inputs whose sizes depend on the media, such as token ids.
    """
    drafts = {name: draft for medium in media for name, draft in medium.drafts.items()}
    drafts |= {draft.name: draft for draft in dependents}
    bounds: dict[str, SizeBounds] = {}
    for medium in media:
        bounds |= {**_known_bounds(medium.sizes), **medium.bounds}
    bounds |= _known_bounds([size for draft in dependents for size in draft.shape])
    notes = [note for medium in media for note in medium.notes]
    notes += [note for draft in dependents for note in draft.notes]
    return _DraftedInputs(tuple(drafts[name] for name in context.parameters if name in drafts), tuple(notes), bounds)


def _known_bounds(sizes: Sequence[InputSize]) -> dict[str, SizeBounds]:
    return {size.key: size.bounds for size in sizes if size.key is not None and size.bounds is not None}


def _axis_meanings(inputs: _DraftedInputs) -> AxisMeanings:
    sizes = [size for draft in inputs.drafts for size in draft.shape]
    return AxisMeanings(
        keys={draft.name: draft.keys for draft in inputs.drafts},
        sizes={size.key: size.value for size in sizes if size.key is not None},
        bounds=inputs.bounds,
    )


def _unused_sizes(requested: Mapping[str, int], inputs: _DraftedInputs, media: Sequence[DecidedMedium]) -> list[str]:
    """Return a note for each requested size that no input has."""
    sizes = [size for medium in media for size in medium.sizes]
    sizes += [size for draft in inputs.drafts for size in draft.shape]
    used_keys = {size.key for size in sizes if size.key is not None}
    names = ", ".join(draft.name for draft in inputs.drafts)
    return [
        f"{opt.shape_config}: {key} {size} does not apply to this model (inputs: {names})"
        for key, size in requested.items()
        if used_keys.isdisjoint(names_among(key, used_keys))
    ]


def known_meanings(
    model: torch.nn.Module | type[torch.nn.Module],
    config: object,
    specs: Sequence[InputTensorSpec],
    folder: Path | None = None,
    task: str | None = None,
) -> AxisMeanings:
    """Return the meanings of axes of described inputs; empty if the model is unknown."""
    try:
        meanings = decide_inputs(model, config, folder, task=task).meanings
    except UsageError:
        return AxisMeanings()
    ranks = {spec.name: len(spec.shape) for spec in specs}
    keys = {name: keys for name, keys in meanings.keys.items() if ranks.get(name) == len(keys)}
    return AxisMeanings(keys, meanings.sizes, meanings.bounds)


def select_inputs(whole: InputDecision, names: frozenset[str]) -> InputDecision:
    """Return the inputs of these names with their dimensions; rows per modality become the batch dimension."""
    new_names = {dimension.name: BATCH_KEY.name for dimension in whole.dimensions if dimension.name in ROWS_OF_ONE_KIND}
    inputs = tuple(
        spec.model_copy(update={"shape": tuple(new_names.get(str(size), size) for size in spec.shape)})
        for spec in whole.inputs
        if spec.name in names
    )
    sizes = {size for spec in whole.inputs if spec.name in names for size in spec.shape}
    dimensions = tuple(
        dimension.model_copy(update={"name": new_names.get(dimension.name, dimension.name)})
        for dimension in whole.dimensions
        if dimension.name in sizes
    )
    return replace(whole, inputs=inputs, dimensions=dimensions)


def forward_parameters(model: torch.nn.Module | type[torch.nn.Module]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of ``forward`` by name, without ``self``.

    Raises:
        InputError: the forward is not a Python function.
    """
    try:
        parameters = dict(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):
        raise InputError(
            f"{_class_name(model)}: its forward is not a Python function, so its inputs are unknown",
            hint="Pass the nn.Module: a scripted or traced module does not expose its modules.",
        ) from None
    if isinstance(model, type):
        parameters.pop(next(iter(parameters)))
    return parameters


def forward_keywords(model: torch.nn.Module | type[torch.nn.Module]) -> dict[str, bool]:
    """Return the fixed keywords that ``forward`` accepts: no cache, named outputs."""
    parameters = forward_parameters(model)
    return {name: value for name, value in _FIXED_KEYWORDS.items() if name in parameters}


def patched_inputs(own: InputDecision, patches: Sequence[InputTensorSpec], origin: str) -> tuple[InputTensorSpec, ...]:
    """Return the inputs of a model with descriptions by the user; other inputs stay.

    A described size also applies to the other inputs that have it, such as the length of a text.

    Args:
        own: The inputs that the model takes.
        patches: The descriptions.
        origin: Option that states them, for messages.

    Raises:
        UsageError: the type of an input that is not the model's own is missing.
    """
    by_name = {spec.name: spec for spec in patches}
    sizes: dict[str, int | str] = {}
    for spec in patches:
        keys = own.meanings.keys.get(spec.name, ())
        sizes |= {key: size for key, size in zip(keys, spec.shape, strict=False) if key is not None}

    def resized(spec: InputTensorSpec) -> InputTensorSpec:
        keys = own.meanings.keys.get(spec.name, (None,) * len(spec.shape))
        shape = tuple(sizes.get(key or "", size) for key, size in zip(keys, spec.shape, strict=True))
        return spec if shape == spec.shape else spec.model_copy(update={"shape": shape})

    own_names = [spec.name for spec in own.inputs]
    untyped = next((spec for spec in patches if spec.name not in own_names and not spec.is_typed), None)
    if untyped is not None:
        known = f"; it is known of {', '.join(own_names)} alone" * bool(own_names)
        sizes_text = ",".join(map(str, untyped.shape))
        raise UsageError(
            f"{spell(origin)}: {untyped.name}: the dtype is missing",
            hint=f"State it, such as {untyped.name}=float32[{sizes_text}]{known}.",
        )
    kept = (by_name[item.name].completed_by(item) if item.name in by_name else resized(item) for item in own.inputs)
    return (*kept, *(spec for spec in patches if spec.name not in own_names))


def check_input_specs(
    model: torch.nn.Module | type[torch.nn.Module],
    specs: Sequence[InputTensorSpec],
    requested_by: str = "input_specs",
    arguments: Sequence[str] = (),
) -> None:
    """Check a manifest against the forward signature.

    Args:
        model: Model; its forward takes the inputs.
        specs: The inputs; ``features.input_ids`` belongs to the parameter ``features``.
        requested_by: Origin of the manifest, for messages.
        arguments: Names of further arguments.

    Raises:
        UsageError: a name is no parameter (names the nearest), or a required parameter is not described.
    """
    parameters = forward_parameters(model)
    names = _named_parameters(parameters)
    argument_names = list(dict.fromkeys([*(argument_of(spec.name) for spec in specs), *arguments]))
    kinds = {parameter.kind for parameter in parameters.values()}
    takes_any_name = inspect.Parameter.VAR_KEYWORD in kinds and not names
    # Values of ``*args`` are passed by position, so any input name is valid.
    if not takes_any_name and inspect.Parameter.VAR_POSITIONAL not in kinds:
        for name in argument_names:
            if name not in names:
                guess = nearest(name, names)
                hint = f"Did you mean {guess!r}?" if guess else f"It takes: {', '.join(names) or 'nothing'}."
                if len(names) == 1 and not guess:
                    hint += f" Pass a dict that is one argument as {{{next(iter(names))!r}: {{…}}}}."
                raise UsageError(f"{spell(requested_by)}: {_class_name(model)} takes no input {name!r}", hint=hint)
    _check_required_parameters(model, parameters, argument_names)


def _check_required_parameters(
    model: torch.nn.Module | type[torch.nn.Module], parameters: Mapping[str, inspect.Parameter], chosen: Sequence[str]
) -> None:
    """Refuse inputs without a required parameter of the forward, and an empty list of inputs.

    Raises:
        UsageError: names the missing parameters.
    """
    params = _named_parameters(parameters)
    missing_names = [
        name
        for name, parameter in params.items()
        if parameter.default is inspect.Parameter.empty and name not in chosen
    ]
    if missing_names or not chosen:
        needs = f"needs {', '.join(missing_names)}" if missing_names else "takes none of the inputs known here"
        raise UsageError(
            f"{_class_name(model)}: its forward {needs}, whose shapes and types are unknown",
            hint=f"Describe all its inputs with {opt.input_specs}; its parameters: {', '.join(params)}.",
        )


def _named_parameters(parameters: Mapping[str, inspect.Parameter]) -> dict[str, inspect.Parameter]:
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {name: parameter for name, parameter in parameters.items() if parameter.kind not in variadic}


def _class_name(model: torch.nn.Module | type[torch.nn.Module]) -> str:
    return model.__name__ if isinstance(model, type) else type(model).__name__


def _float_dtype(model: torch.nn.Module | type[torch.nn.Module], config: object) -> str:
    """Return the dtype of inputs that are not indices: the dtype of the model's weights."""
    parameters = () if isinstance(model, type) else model.parameters()
    dtype = next((p.dtype for p in parameters if p.is_floating_point()), None) or getattr(config, "dtype", None)
    return str(dtype or torch.float32).removeprefix("torch.")


_DraftOthers = Callable[[DecidedMedium], Sequence[InputDraft]]
"""Makes the drafts of all other inputs, for a forward that has to run as a whole."""

_MAX_TRIALS = 4
"""Chosen: after the image or audio features, only token embeddings and their positions are computed."""


@dataclass(frozen=True)
class _TrialRun:
    """Result of a trial run with one layout."""

    count: int | None
    """Features per row in place of placeholder tokens; `None` if the model does not take the layout."""
    notes: tuple[str, ...] = ()


def _decide_medium(
    modality: Modality, names: Sequence[str], context: InputContext, draft_others: _DraftOthers
) -> DecidedMedium:
    """Decide the tensors of one modality.

    Args:
        modality: The modality.
        names: Its parameters that are inputs, the carrier first.
        context: The model.
        draft_others: Makes the drafts of the other inputs.

    Raises:
        UsageError: the model does not take a size.
    """
    token = modality.place_token(context.config) if context.has_text else None
    has_places = token is not None or context.takes(modality.place_mask)
    layouts = modality.layouts(context, names, has_places=has_places)
    first_layout, second_layout = next(layouts), next(layouts, None)
    if second_layout is None and not has_places:
        return DecidedMedium(modality, first_layout.drafts, sizes=first_layout.sizes)
    method = _find_method(context.structure, modality.feature_method) if context.has_text else None
    sizes = (*first_layout.sizes, *(second_layout.sizes if second_layout else ()))
    notes: tuple[str, ...] = ()
    for layout in itertools.chain([first_layout], [second_layout] if second_layout else [], layouts):
        sizes = (*sizes, *layout.sizes)
        medium = DecidedMedium(modality, layout.drafts, token, sizes=sizes)
        if method is not None:
            trial = _count_features(method, medium, context, has_places=has_places)
        else:
            trial = _count_placeholders(medium, context, draft_others, has_places=has_places)
        notes += trial.notes
        if trial.count is not None:
            return _with_places(replace(medium, notes=notes, place_count=trial.count), layout, method)
    if has_places:
        note = f"{names[0]}: its layout and number of placeholder tokens are unknown; set them with {opt.input_specs}"
        notes += (note,)
    return DecidedMedium(modality, first_layout.drafts, sizes=sizes, notes=notes)


def _find_method(model: torch.nn.Module, name: str) -> Callable[..., Any] | None:
    """Return a method of a model, else of its first submodule with this method; `None` without a match.

    Methods that accept any positional argument come last: their signature does not list the parameters.
    """
    methods = [getattr(module, name) for module in model.modules() if hasattr(module, name)]
    return next((method for method in methods if not _takes_anything(method)), next(iter(methods), None))


def _runs_with(model: torch.nn.Module, drafts: Iterable[InputDraft]) -> bool:
    """Return True if the forward runs on the shapes of these inputs."""
    return run_on_shapes(model, {draft.name: draft.as_spec() for draft in drafts}) is not None


def _takes_anything(method: Callable[..., object]) -> bool:
    kinds = {parameter.kind for parameter in inspect.signature(method).parameters.values()}
    return inspect.Parameter.VAR_POSITIONAL in kinds


def _select_drafts(method: Callable[..., object], drafts: Mapping[str, InputDraft]) -> dict[str, InputDraft]:
    names = drafts if _takes_anything(method) else inspect.signature(method).parameters
    return {name: draft for name, draft in drafts.items() if name in names}


def _count_features(
    method: Callable[..., object], medium: DecidedMedium, context: InputContext, *, has_places: bool
) -> _TrialRun:
    """Count the features that a method computes from the medium."""
    accepted_drafts = _select_drafts(method, medium.drafts)
    features = run_on_shapes(method, {name: draft.as_spec() for name, draft in accepted_drafts.items()})
    if features is None:
        return _TrialRun(None)
    return _TrialRun(_vectors_per_row(features, context) if has_places else 0)


def _count_placeholders(
    medium: DecidedMedium, context: InputContext, draft_others: _DraftOthers, *, has_places: bool
) -> _TrialRun:
    """Run the forward to count the features that it puts in place of placeholder tokens.

    A forward that fails for lack of placeholder tokens has computed the features before: the output of one of the last
    modules to run. The count is the first with which the forward runs; `None` if it runs with none of them.

    Args:
        medium: Inputs of the images or the audio.
        context: The model and the user's request.
        draft_others: Drafts the other inputs for a count of placeholder tokens.
        has_places: True if the number of features may be the count.
    """
    other_drafts = draft_others(medium)
    notes = tuple(note for draft in other_drafts for note in draft.notes)
    model, outputs = context.structure, list[Any]()
    with ExitStack() as hooks:
        for module in model.modules():
            hooks.enter_context(module.register_forward_hook(lambda _, __, out: outputs.append(out)))
        if _runs_with(model, [*other_drafts, *medium.drafts.values()]):
            return _TrialRun(0, notes)
    for count in itertools.islice(_possible_counts(outputs if has_places else (), context), _MAX_TRIALS):
        with suppress(UsageError):  # more placeholder tokens than fit into a row
            other_drafts = draft_others(replace(medium, place_count=count))
            if _runs_with(model, [*other_drafts, *medium.drafts.values()]):
                return _TrialRun(count, notes)
    return _TrialRun(None, notes)


def _possible_counts(outputs: Sequence[object], context: InputContext) -> Iterator[int]:
    """Yield the distinct numbers of vectors per row in the outputs of modules, the last module first."""
    vectors = (out[0] if isinstance(out, tuple) and out else out for out in reversed(outputs))
    yield from dict.fromkeys(count for out in vectors if (count := _vectors_per_row(out, context)))


def _vectors_per_row(features: object, context: InputContext) -> int:
    """Return the number of features per row that replace placeholder tokens.

    Features have the width of token embeddings; for features of another width, the config may state the number.
    """
    attributes = (getattr(features, name, None) for name in ("pooler_output", "last_hidden_state"))
    vectors = next((value for value in attributes if value is not None), features)
    tensors = [
        value
        for value in (vectors if isinstance(vectors, (list, tuple)) else [vectors])
        if isinstance(value, torch.Tensor)
    ]
    if {tensor.shape[-1] for tensor in tensors if tensor.dim()} <= {context.token_width}:
        return sum(tensor.shape[:-1].numel() for tensor in tensors) // context.batch.value
    return int(getattr(context.config, "num_query_tokens", None) or 0)


def _with_places(medium: DecidedMedium, layout: InputLayout, method: Callable[..., object] | None) -> DecidedMedium:
    """Return a medium with the consequences of its number of placeholder tokens: fixed sizes, and a note.

    Args:
        medium: Inputs of the images or the audio, with the number.
        layout: Their layout.
        method: The method that computes the features, if the model has one.
    """
    modality, count = medium.modality, medium.place_count
    bounds: dict[str, SizeBounds] = {}
    notes = medium.notes
    if count:
        notes += (f"input_ids: each row begins with {count} placeholder tokens for {modality.description}",)
        reason = f"each row has {count} placeholder tokens for {modality.description} of one size"
        keys = {size.key for draft in layout.drafts.values() for size in draft.shape}
        bounds = {key: SizeBounds(fixed=reason) for key in modality.place_keys if key in keys}
    drafts = layout.drafts
    if method is not None:
        drafts = modality.fit_to_features(drafts, _select_drafts(method, drafts).keys(), count)
    return replace(medium, drafts=drafts, bounds={**bounds, **layout.bounds}, notes=notes)


_POSITIONS = "position_ids"
_POSITION_METHOD = "get_rope_index"


@dataclass(frozen=True)
class _DraftedInputs:
    """All inputs, with notes and bounds from drafting."""

    drafts: tuple[InputDraft, ...]
    notes: tuple[str, ...] = ()
    bounds: Mapping[str, SizeBounds] = field(default_factory=dict)
    """Key of ``--shape-config`` → its bounds."""


def _with_positions(inputs: _DraftedInputs, context: InputContext) -> _DraftedInputs:
    """Replace the token types by positions if the model computes positions from the types.

    The model computes these positions in Python, row by row, from the values of masks and grids: a graph would fix the
    positions of one sample.
    """
    by_name = {draft.name: draft for draft in inputs.drafts}
    kinds = by_name.pop(KINDS_PARAMETER, None)
    if kinds is None or not context.takes(_POSITIONS):
        return inputs
    method = _find_method(context.structure, _POSITION_METHOD)
    if method is None:
        return inputs
    arguments = inspect.signature(method).parameters
    specs = {draft.name: draft.as_spec() for draft in inputs.drafts if draft.name in arguments}
    specs.pop("attention_mask", None)
    positions = run_on_shapes(method, specs)
    if positions is None:
        return inputs
    rows, length = kinds.shape
    shape = input_shape(len(positions[0]), rows, length)
    by_name[_POSITIONS] = InputDraft(_POSITIONS, shape, "int64", index_range(length.value))
    note = f"{_POSITIONS}: computed outside the graph, by {_POSITION_METHOD} of the model"
    drafts = tuple(by_name[name] for name in context.parameters if name in by_name)
    return replace(inputs, drafts=drafts, notes=(*inputs.notes, note))


def _with_codebook_tokens(inputs: _DraftedInputs, context: InputContext) -> _DraftedInputs:
    """Return the inputs with the tokens of every codebook, unless the model takes tokens of one codebook."""
    count = first_int_anywhere(context.config, ("num_codebooks",)) or 1
    by_name = {draft.name: draft for draft in inputs.drafts}
    tokens = by_name.get("decoder_input_ids") or by_name.get("input_ids")
    if count == 1 or tokens is None:
        return inputs
    rows, *sizes = tokens.shape
    # With a single row: otherwise a forward could take a row as another codebook.
    single_row_drafts = [_reduce_to_single_row(draft) for draft in inputs.drafts]
    single_shape, stacked_shape = input_shape(1, *sizes), input_shape(count, *sizes)
    final_shapes = [
        (single_shape, tokens.shape),
        (stacked_shape, input_shape(rows.value * count, *sizes)),
        (input_shape(1, *sizes, count), input_shape(rows, *sizes, count)),
        (input_shape(1, count, *sizes), input_shape(rows, count, *sizes)),
    ]
    for single_row_shape, shape in final_shapes:
        if not _runs_with(context.structure, _with_shape(single_row_drafts, tokens.name, single_row_shape)):
            continue
        if single_row_shape is single_shape:
            return inputs
        bounds = dict(inputs.bounds)
        if single_row_shape is stacked_shape:
            bounds["batch_size"] = SizeBounds(fixed="each row of tokens is one row for every codebook")
        note = f"{tokens.name}: tokens of {count} codebooks"
        return _DraftedInputs(_with_shape(inputs.drafts, tokens.name, shape), (*inputs.notes, note), bounds)
    return inputs


def _reduce_to_single_row(draft: InputDraft) -> InputDraft:
    sizes = (1 if size.key == "batch_size" else size for size in draft.shape)
    return replace(draft, shape=input_shape(*sizes))


def _with_shape(drafts: Sequence[InputDraft], name: str, shape: tuple[InputSize, ...]) -> tuple[InputDraft, ...]:
    return tuple(replace(draft, shape=shape) if draft.name == name else draft for draft in drafts)
