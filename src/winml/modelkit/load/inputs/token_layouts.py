"""Tokens in another form: positions made outside of the graph, and tokens of several codebooks."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from winml.modelkit.load.inputs.config_values import first_int_anywhere
from winml.modelkit.load.inputs.context import InputContext
from winml.modelkit.load.inputs.drafts import InputDraft, index_range, input_shape
from winml.modelkit.load.inputs.media import find_method, runs_with
from winml.modelkit.load.inputs.modalities.text import KINDS_PARAMETER
from winml.modelkit.load.inputs.shape_run import run_on_shapes
from winml.modelkit.load.inputs.sizes import InputSize, SizeBounds

__all__ = ["DraftedInputs", "with_codebook_tokens", "with_positions"]

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
