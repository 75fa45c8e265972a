"""Are the rows of texts and those of images or recordings counted apart?

A dual encoder scores every text with every image, so that one image goes with any number of labels. Which models do
that is seen by running the forward on shapes with unequal numbers of rows. For: ``clip``, ``siglip``, ``clap``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import torch

from winml.modelkit.load.inputs.drafts import InputContext, InputDraft
from winml.modelkit.load.inputs.media import DraftedInputs
from winml.modelkit.load.inputs.modalities.modality import DecidedMedium
from winml.modelkit.load.inputs.modalities.text import TEXT_ROWS_KEY
from winml.modelkit.load.inputs.shape_run import run_on_shapes
from winml.modelkit.load.inputs.sizes import InputSize

__all__ = ["with_rows_apart"]

_ROW_COUNTS = (5, 7, 11)
"""Chosen: none divides another, and no usual number of labels or heads."""


def with_rows_apart(inputs: DraftedInputs, context: InputContext, media: Sequence[DecidedMedium]) -> DraftedInputs:
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
