"""Text: rows of tokens, with masks, types and boxes of the tokens, and the input tokens of a decoder.

Counts the placeholder tokens for other content in each row; independent of the layout of this content.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from winml.modelkit.errors import UsageError, opt
from winml.modelkit.models.inputs.drafts import InputContext, InputDraft, index_range, input_shape
from winml.modelkit.models.inputs.modalities.modality import (
    DecidedMedium,
    Modality,
    ShapeKey,
    decoder_sequence,
    text_config,
    text_sequence,
)
from winml.modelkit.models.inputs.sizes import InputSize, first_int, sub_config
from winml.modelkit.ort.default_sizes import CHOICES

KINDS_PARAMETER = "mm_token_type_ids"
"""Parameter with the type of each token: text, or placeholder for other content."""

_VOCABULARY_SIZES = ("vocab_size", "src_vocab_size")
_DECODER_VOCABULARY_SIZES = ("decoder_vocab_size", "tgt_vocab_size", "vocab_size")
_PLACE_TOKENS = tuple(
    f"{medium}_token_{ending}" for medium in ("image", "video", "audio", "speech") for ending in ("id", "index")
)
"""Config attributes that name placeholder tokens for other content."""
_LAYOUT_COORDINATES = 1024
"""Coordinates of boxes on a page if the config states none: the value of LayoutLM."""


TEXT_ROWS_KEY = ShapeKey("text_batch_size", "Rows of text, where a model scores each with each image.", "batch")


class Text(Modality):
    """Tokens, and inputs that describe each token."""

    rows_key = TEXT_ROWS_KEY.name
    shape_keys = (
        TEXT_ROWS_KEY,
        ShapeKey("sequence_length", "Tokens per row of text.", opened_by="sequence"),
        ShapeKey("past_sequence_length", "Tokens in the cache before a run, where the graph takes a cache."),
        ShapeKey(
            "decoder_sequence_length",
            "Tokens per row for the decoder of an encoder-decoder model.",
            opened_by="sequence",
        ),
        ShapeKey("num_choices", "Answers per question (multiple choice)."),
    )

    def dependent_parameters(self, context: InputContext, media: Sequence[Modality]) -> list[str]:
        """Return the parameters with tokens or properties of tokens."""
        has_masks = any(modality.has_place_masks for modality in media)
        masks = {KINDS_PARAMETER, *(modality.place_mask for modality in media if modality.has_place_masks)}
        is_input = {
            "input_ids": True,
            "bbox": True,
            # In a vision model the mask is over patches, and no processor makes it.
            "attention_mask": context.has_text,
            "token_type_ids": context.has_text and (_takes_token_types(context) or _marks_places(context, media)),
            "decoder_input_ids": context.gives_decoder_input("decoder_input_ids"),
            **dict.fromkeys(masks, has_masks),
        }
        return [name for name in context.parameters if is_input.get(name)]

    def draft_dependent(self, name: str, context: InputContext, media: Sequence[DecidedMedium]) -> InputDraft | None:
        """Return the draft of one text parameter."""
        if name == "decoder_input_ids":
            # A decoder may have a separate vocabulary.
            decoder = sub_config(context.config, "decoder", "decoder_config", "text_config")
            vocabulary = first_int(decoder, _DECODER_VOCABULARY_SIZES) or _vocabulary_size(context)
            shape = input_shape(context.batch, decoder_sequence(context))
            return InputDraft(name, shape, "int64", index_range(vocabulary))
        shape = _token_shape(context, media)
        if name == "attention_mask":
            return InputDraft(name, shape, "int64", (0, 1))
        types = getattr(context.config, "type_vocab_size", None)
        if name == "token_type_ids" and types is not None:
            return InputDraft(name, shape, "int64", index_range(types))
        if name == "bbox":
            coordinates = getattr(context.config, "max_2d_position_embeddings", _LAYOUT_COORDINATES)
            return InputDraft(name, input_shape(*shape, 4), "int64", index_range(coordinates))
        if name == "input_ids":
            return _draft_tokens(context, shape, media)
        # Other parameters hold token types: 0 for text, another value for placeholder tokens.
        kinds = ((medium.modality.place_kind, medium.place_count) for medium in media if medium.place_count)
        return InputDraft(name, shape, "int64", (0, 0), first_values=tuple(run for run in kinds if run[0]))


def _token_shape(context: InputContext, media: Sequence[DecidedMedium]) -> tuple[InputSize, ...]:
    """Return the shape of tokens: rows, choices if there are any, and tokens."""
    choices = (context.sizes.choose("num_choices", CHOICES),) if context.task == "multiple-choice" else ()
    sizes = [size for medium in media for size in medium.sizes]
    free_keys = {size.key for size in sizes} - {size.key for size in sizes if size.is_declared}
    media_keys = dict.fromkeys(key for medium in media for key in medium.modality.shape_keys if key.opened_by)
    shrinkable = [key.name for key in media_keys if key.name in free_keys]
    length = text_sequence(context, sum(medium.place_count for medium in media), shrinkable)
    return (context.batch, *choices, length)


def _draft_tokens(context: InputContext, shape: tuple[InputSize, ...], media: Sequence[DecidedMedium]) -> InputDraft:
    vocabulary = _vocabulary_size(context)
    placeholders = ((medium.token, medium.place_count) for medium in media if medium.place_count)
    return InputDraft(
        name="input_ids",
        shape=shape,
        dtype="int64",
        value_range=_text_token_range(context.config, vocabulary),
        last_value=_end_token(text_config(context), vocabulary),
        first_values=tuple((token, count) for token, count in placeholders if token is not None),
    )


def _takes_token_types(context: InputContext) -> bool:
    types = getattr(context.config, "type_vocab_size", None)
    if context.processor.text_inputs is not None:
        return "token_type_ids" in context.processor.text_inputs and bool(types)
    return types is not None and types >= 2


def _marks_places(context: InputContext, media: Sequence[Modality]) -> bool:
    """Return True if token types mark placeholder tokens of an image and have no embeddings."""
    has_places = any(
        modality.has_place_masks and modality.place_token(context.config) is not None for modality in media
    )
    return has_places and getattr(context.config, "type_vocab_size", None) is None


def _vocabulary_size(context: InputContext) -> int:
    """Return the number of tokens in the vocabulary of the text input."""
    configs = (text_config(context), context.config)
    config_size = next((size for config in configs if (size := first_int(config, _VOCABULARY_SIZES))), None)
    return config_size or _count_embeddings(context)


def _count_embeddings(context: InputContext) -> int:
    """Return the number of token embeddings of a model.

    Raises:
        UsageError: the model has none.
    """
    import torch

    structure: Any = context.structure
    try:
        return int(structure.get_input_embeddings().num_embeddings)
    except (AttributeError, NotImplementedError):
        # Custom code of a checkpoint may not declare its embedding table.
        tables = [module for module in structure.modules() if isinstance(module, torch.nn.Embedding)]
    if not tables:
        raise UsageError(
            "input_ids: neither the config nor the model states the vocabulary size",
            hint=f"Describe all inputs with {opt.input_specs}.",
        )
    return int(tables[0].num_embeddings)


def _text_token_range(config: object, vocabulary: int) -> tuple[int, int]:
    """Return the first and the last token of the longest range without placeholder tokens."""
    place_tokens = {getattr(config, name, None) for name in _PLACE_TOKENS}
    token_ids = {token for token in place_tokens if isinstance(token, int) and 0 <= token < vocabulary}
    edges = sorted({-1, vocabulary, *token_ids})
    start, end = max(itertools.pairwise(edges), key=lambda pair: pair[1] - pair[0])
    return start + 1, max(end - 1, start + 1)


def _end_token(config: object, vocabulary: int) -> int | None:
    """Return the end-of-sequence token if the config names exactly one inside the vocabulary; else `None`."""
    token = getattr(config, "eos_token_id", None)
    return token if isinstance(token, int) and 0 <= token < vocabulary else None
