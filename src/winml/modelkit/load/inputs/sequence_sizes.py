"""How many tokens are in one row of text, and in one given to the decoder?

As many as the user asks for, within what the model takes: positions that are looked up in a table bound a row firmly,
others only by what the config declares.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from winml.modelkit.errors import UsageError
from winml.modelkit.load.inputs.drafts import InputContext
from winml.modelkit.load.inputs.names import INPUT_SPECS_OPTION, SHAPE_CONFIG_OPTION
from winml.modelkit.load.inputs.sizes import InputSize, SizeBounds, first_int, sub_config
from winml.modelkit.runtime.default_sizes import TOKENS

__all__ = ["decoder_sequence", "is_position_name", "text_config", "text_sequence"]

_POSITION_LIMITS = ("max_position_embeddings", "n_positions", "max_encoder_position_embeddings", "max_target_positions")
_DECODER_POSITION_LIMITS = (
    "max_target_positions", "max_decoder_position_embeddings", "max_text_positions", *_POSITION_LIMITS
)  # fmt: skip


def text_config(context: InputContext) -> object:
    """Return the config of the part that reads text."""
    return sub_config(context.config, "text_config", "text_encoder", "encoder")


def text_sequence(context: InputContext, place_count: int, shrinkable_keys: Sequence[str]) -> InputSize:
    """Return the tokens per row of text.

    Args:
        context: The model.
        place_count: How many of them are held for images and recordings.
        shrinkable_keys: Keys of ``--shape-config`` that make those fewer, for the message.

    Raises:
        UsageError: the user or the model wants fewer than those and one more.
    """
    limit = first_int(text_config(context), _POSITION_LIMITS)
    default = min(TOKENS, context.processor.max_tokens or TOKENS)
    size = _choose_within_positions(context, "sequence_length", place_count + default, limit)
    if size.value <= place_count:
        raise _no_room_for_text(context, size, place_count, shrinkable_keys)
    return dataclasses.replace(size, bounds=dataclasses.replace(size.bounds or SizeBounds(), min=place_count + 1))


def _no_room_for_text(
    context: InputContext, size: InputSize, place_count: int, shrinkable_keys: Sequence[str]
) -> UsageError:
    reason = f"images and recordings take {place_count} tokens of each row"
    if "sequence_length" in context.sizes.requested:
        context.sizes.refuse("sequence_length", reason)
    limits = (name for name in _POSITION_LIMITS if first_int(text_config(context), (name,)))
    keys = " and ".join(shrinkable_keys)
    smaller = f"Give a smaller {keys} with {SHAPE_CONFIG_OPTION}, or describe" if keys else "Describe"
    return UsageError(
        f"{reason}, and the model takes {size.value} ({', '.join(itertools.islice(limits, 1))}), with text among them",
        hint=f"{smaller} all inputs with {INPUT_SPECS_OPTION}.",
    )


def decoder_sequence(context: InputContext) -> InputSize:
    """Return the tokens per row given to the decoder; as many as the text's unless asked otherwise."""
    limit = first_int(sub_config(context.config, "decoder", "decoder_config", "text_config"), _DECODER_POSITION_LIMITS)
    default = context.sizes.requested.get("sequence_length", TOKENS) if context.has_text else TOKENS
    return _choose_within_positions(context, "decoder_sequence_length", default, limit)


def _choose_within_positions(context: InputContext, key: str, default: int, declared: int | None) -> InputSize:
    """Return a sequence length, which learned positions bound firmly and others only by declaration.

    A module that computes its table makes a larger one for a longer row, which then bounds the graph.
    """
    if declared is None:
        return context.sizes.choose(key, default)
    learned, computed = (_table_positions(context, declared, attribute) for attribute in ("weight", "weights"))
    usable = min((count for count in (learned, computed) if count is not None), default=None)
    size = context.sizes.choose(key, min(default, usable or declared), bounds=SizeBounds(max=usable))
    if learned is not None and size.value > learned:
        context.sizes.refuse(key, f"the model has {learned} positions")
    if usable is not None and size.value > usable:
        size = dataclasses.replace(size, bounds=SizeBounds(max=size.value))
    if size.value > declared:
        note = f"{SHAPE_CONFIG_OPTION}: {key} {size.value} is beyond the {declared} the config declares"
        return dataclasses.replace(size, notes=(note,))
    return size


def _table_positions(context: InputContext, declared: int, attribute: str) -> int | None:
    """Return how many positions a row may have where they are looked up in a table, else None.

    Some tables keep rows that no position uses: those up to the padding index, or the first ``offset``.

    Args:
        context: The model.
        declared: How many positions the config declares.
        attribute: Where a module keeps its table: ``weight`` of learned positions, ``weights`` of computed ones, as in
            M2M-100, Speech2Text and XGLM.
    """
    import torch

    usable = []
    for name, table in context.structure.named_modules():
        weight, padding = getattr(table, attribute, None), getattr(table, "padding_idx", None)
        if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or not is_position_name(name):
            continue
        offset = int(getattr(table, "offset", 0))
        if len(weight) - offset == declared:
            usable.append(min(declared, len(weight) - (offset if padding is None else padding + 1)))
    return min(usable, default=None)


def is_position_name(name: str) -> bool:
    """Say whether a module or parameter of this name holds positions."""
    last = name.rpartition(".")[2]
    return "position" in last or last in ("wpe", "pos_embed")
