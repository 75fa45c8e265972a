"""In which layout does the model take an image or a recording, and how many of its tokens hold a place for it?

Models agree on names, but not on how a picture is laid out. Where the names leave several layouts open, the first one
is taken that the model's own code runs on (``shape_run.py``); that run tells the number of tokens, too. Where no run
decides, the most common layout is used. Which layouts there are is said in ``modalities/``.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from winml.modelkit.errors import UsageError
from winml.modelkit.load.inputs.drafts import InputContext, InputDraft, InputLayout, index_range, input_shape
from winml.modelkit.load.inputs.modalities.modality import DecidedMedium, Modality
from winml.modelkit.load.inputs.modalities.text import KINDS_PARAMETER
from winml.modelkit.load.inputs.names import INPUT_SPECS_OPTION
from winml.modelkit.load.inputs.shape_run import run_on_shapes
from winml.modelkit.load.inputs.sizes import InputSize, SizeBounds, first_int_anywhere

__all__ = [
    "DraftOthers",
    "DraftedInputs",
    "decide_medium",
    "find_method",
    "runs_with",
    "with_codebook_tokens",
    "with_positions",
]


DraftOthers = Callable[[DecidedMedium], Sequence[InputDraft]]
"""Makes the drafts of all other inputs, for a forward that has to run as a whole."""

_MOST_COUNTS = 4
"""Chosen: after the vectors of a medium only those of tokens and their positions are made."""


@dataclass(frozen=True)
class _TrialRun:
    """What a trial run with one layout found out."""

    count: int | None
    """Vectors that stand in place of tokens in each row; None where the model does not take the layout."""
    notes: tuple[str, ...] = ()


def decide_medium(
    modality: Modality, names: Sequence[str], context: InputContext, draft_others: DraftOthers
) -> DecidedMedium:
    """Decide the tensors of one modality.

    Args:
        modality: Which one.
        names: Its parameters that are inputs, the carrier first.
        context: The model.
        draft_others: Makes the drafts of its other inputs.

    Raises:
        UsageError: a size the model does not take.
    """
    token = modality.place_token(context.config) if context.has_text else None
    has_places = token is not None or context.takes(modality.place_mask)
    layouts = modality.layouts(context, names, has_places=has_places)
    first, second = next(layouts), next(layouts, None)
    if second is None and not has_places:
        return DecidedMedium(modality, first.drafts, sizes=first.sizes)
    method = find_method(context.structure, modality.feature_method) if context.has_text else None
    sizes = (*first.sizes, *(second.sizes if second else ()))
    notes: tuple[str, ...] = ()
    for layout in itertools.chain([first], [second] if second else [], layouts):
        sizes = (*sizes, *layout.sizes)
        medium = DecidedMedium(modality, layout.drafts, token, sizes=sizes)
        if method is not None:
            trial = _count_features(method, medium, context, has_places=has_places)
        else:
            trial = _count_places(medium, context, draft_others, has_places=has_places)
        notes += trial.notes
        if trial.count is not None:
            return _with_places(replace(medium, notes=notes, place_count=trial.count), layout, method)
    if has_places:
        note = (
            f"{names[0]}: in which layout the model takes it, and how many tokens hold a place for it, is not known; "
            f"{INPUT_SPECS_OPTION} says it"
        )
        notes += (note,)
    return DecidedMedium(modality, first.drafts, sizes=sizes, notes=notes)


def find_method(model: torch.nn.Module, name: str) -> Callable[..., Any] | None:
    """Return a method of a model, else of the first part of it that has one; None where none has.

    One that passes on whatever it is given does not say what it takes; that of the part it passes it to does.
    """
    methods = [getattr(module, name) for module in model.modules() if hasattr(module, name)]
    return next((method for method in methods if not _takes_anything(method)), next(iter(methods), None))


def runs_with(model: torch.nn.Module, drafts: Iterable[InputDraft]) -> bool:
    """Say whether the forward runs on the shapes of these inputs."""
    return run_on_shapes(model, {draft.name: draft.as_spec() for draft in drafts}) is not None


def _takes_anything(method: Callable[..., object]) -> bool:
    kinds = {parameter.kind for parameter in inspect.signature(method).parameters.values()}
    return inspect.Parameter.VAR_POSITIONAL in kinds


def _accepted_drafts(method: Callable[..., object], drafts: Mapping[str, InputDraft]) -> dict[str, InputDraft]:
    names = drafts if _takes_anything(method) else inspect.signature(method).parameters
    return {name: draft for name, draft in drafts.items() if name in names}


def _count_features(
    method: Callable[..., object], medium: DecidedMedium, context: InputContext, *, has_places: bool
) -> _TrialRun:
    """Count what a feature method makes of the medium."""
    accepted = _accepted_drafts(method, medium.drafts)
    features = run_on_shapes(method, {name: draft.as_spec() for name, draft in accepted.items()})
    if features is None:
        return _TrialRun(None)
    return _TrialRun(_vectors_per_row(features, context) if has_places else 0)


def _count_places(
    medium: DecidedMedium, context: InputContext, draft_others: DraftOthers, *, has_places: bool
) -> _TrialRun:
    """Count the vectors that a forward as a whole puts in place of tokens.

    One that misses places has made the vectors by then: they are what one of the last modules to run returned, that
    with which it runs.
    """
    other_drafts = draft_others(medium)
    notes = tuple(note for draft in other_drafts for note in draft.notes)
    model, outputs = context.structure, list[Any]()
    hooks = [module.register_forward_hook(lambda _, __, out: outputs.append(out)) for module in model.modules()]
    try:
        if runs_with(model, [*other_drafts, *medium.drafts.values()]):
            return _TrialRun(0, notes)
    finally:
        for hook in hooks:
            hook.remove()
    for count in itertools.islice(_possible_counts(outputs if has_places else (), context), _MOST_COUNTS):
        with suppress(UsageError):  # more than a row takes
            other_drafts = draft_others(replace(medium, place_count=count))
            if runs_with(model, [*other_drafts, *medium.drafts.values()]):
                return _TrialRun(count, notes)
    return _TrialRun(None, notes)


def _possible_counts(outputs: Sequence[object], context: InputContext) -> Iterator[int]:
    """Yield how many vectors per row the modules returned, the last to run first, each number once."""
    vectors = (out[0] if isinstance(out, tuple) and out else out for out in reversed(outputs))
    yield from dict.fromkeys(count for out in vectors if (count := _vectors_per_row(out, context)))


def _vectors_per_row(features: object, context: InputContext) -> int:
    """Return how many vectors stand in place of tokens in each row.

    They are as wide as those of tokens; where the model makes others of the medium first, a config may name the number.
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
    """Return a medium with what follows from the number of its places: which sizes are fixed, and a note."""
    modality, count = medium.modality, medium.place_count
    bounds: dict[str, SizeBounds] = {}
    notes = medium.notes
    if count:
        notes += (f"input_ids: each row begins with {count} tokens that hold the place of {modality.description}",)
        reason = f"each row of tokens holds {count} places for {modality.description} of one size"
        bounds = {key: SizeBounds(fixed=reason) for key in _keys_of(layout.drafts) if key in modality.place_keys}
    drafts = layout.drafts
    if method is not None:
        drafts = modality.fit_to_features(drafts, _accepted_drafts(method, drafts).keys(), count)
    return replace(medium, drafts=drafts, bounds={**bounds, **layout.bounds}, notes=notes)


def _keys_of(drafts: Mapping[str, InputDraft]) -> list[str]:
    sizes: Iterator[InputSize] = (size for draft in drafts.values() for size in draft.shape)
    return list(dict.fromkeys(size.key for size in sizes if size.key is not None))


# --- Tokens in another form: positions made outside of the graph, and tokens of several codebooks.


_POSITIONS = "position_ids"
_POSITION_METHOD = "get_rope_index"


@dataclass(frozen=True)
class DraftedInputs:
    """All inputs, and what was learned while they were drafted."""

    drafts: tuple[InputDraft, ...]
    notes: tuple[str, ...] = ()
    bounds: Mapping[str, SizeBounds] = field(default_factory=dict)
    """Key of ``--shape-config`` → its bounds."""


def with_positions(inputs: DraftedInputs, context: InputContext) -> DraftedInputs:
    """Return the inputs with positions in place of the kinds of tokens, where the model makes the one of the other.

    It does so in Python, row by row, from the values of masks and grids: a graph would keep the positions of one draw.
    """
    by_name = {draft.name: draft for draft in inputs.drafts}
    kinds = by_name.pop(KINDS_PARAMETER, None)
    if kinds is None or not context.takes(_POSITIONS):
        return inputs
    method = find_method(context.structure, _POSITION_METHOD)
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
    note = f"{_POSITIONS}: computed outside of the graph, as {_POSITION_METHOD} of the model does"
    drafts = tuple(by_name[name] for name in context.parameters if name in by_name)
    return dataclasses.replace(inputs, drafts=drafts, notes=(*inputs.notes, note))


def with_codebook_tokens(inputs: DraftedInputs, context: InputContext) -> DraftedInputs:
    """Return the inputs with the tokens of every codebook, where the model takes no other."""
    count = first_int_anywhere(context.config, ("num_codebooks",)) or 1
    by_name = {draft.name: draft for draft in inputs.drafts}
    tokens = by_name.get("decoder_input_ids") or by_name.get("input_ids")
    if count == 1 or tokens is None:
        return inputs
    rows, *rest = tokens.shape
    # Of one row each: a forward could take one row for another's codebook.
    single_row_drafts = [_of_one_row(draft) for draft in inputs.drafts]
    plain, beside_each_other = input_shape(1, *rest), input_shape(count, *rest)
    final_shapes = [
        (plain, tokens.shape),
        (beside_each_other, input_shape(rows.value * count, *rest)),
        (input_shape(1, *rest, count), input_shape(rows, *rest, count)),
        (input_shape(1, count, *rest), input_shape(rows, count, *rest)),
    ]
    for single_row_shape, shape in final_shapes:
        if not runs_with(context.structure, _with_shape(single_row_drafts, tokens.name, single_row_shape)):
            continue
        if single_row_shape is plain:
            return inputs
        bounds = dict(inputs.bounds)
        if single_row_shape is beside_each_other:
            bounds["batch_size"] = SizeBounds(fixed="each row of tokens is one row for every codebook")
        note = f"{tokens.name}: tokens of {count} codebooks"
        return DraftedInputs(_with_shape(inputs.drafts, tokens.name, shape), (*inputs.notes, note), bounds)
    return inputs


def _of_one_row(draft: InputDraft) -> InputDraft:
    sizes = (1 if size.key == "batch_size" else size for size in draft.shape)
    return dataclasses.replace(draft, shape=input_shape(*sizes))


def _with_shape(drafts: Sequence[InputDraft], name: str, shape: tuple[InputSize, ...]) -> tuple[InputDraft, ...]:
    return tuple(dataclasses.replace(draft, shape=shape) if draft.name == name else draft for draft in drafts)
