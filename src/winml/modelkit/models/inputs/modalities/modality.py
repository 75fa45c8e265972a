"""Contract of a modality, and the sizes of sequences shared by several modalities.

A new modality is one file in this folder and one line in ``pipeline.py``. Its file imports neither torch nor
transformers at module level, because ``--shape-config`` is parsed with its keys before their import.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from winml.modelkit.errors import UsageError, opt
from winml.modelkit.models.inputs.drafts import InputContext, InputDraft, InputLayout
from winml.modelkit.models.inputs.sizes import (
    InputSize,
    SizeBounds,
    first_int,
    sub_config,
)
from winml.modelkit.ort.default_sizes import TOKENS


@dataclass(frozen=True)
class ShapeKey:
    """A key of ``--shape-config``."""

    name: str
    description: str
    """One sentence, for the reference."""
    opened_by: Literal["", "batch", "sequence", "image_size"] = ""
    """Option that makes the size dynamic: ``batch`` is ``--dynamic-batch``, ``sequence`` is ``--dynamic-seq-len``, and
    ``image_size`` is ``--dynamic-image-size``; empty: none of them."""
    trace_step: int = 1
    """Difference between successive candidate sizes for tracing."""
    trace_size: int | None = None
    """Size for tracing where the size has a name and no number."""


BATCH_KEY = ShapeKey("batch_size", "Rows of every input.", opened_by="batch", trace_size=2)
FRAMES_KEY = ShapeKey("num_frames", "Frames of audio features, or of a video.", opened_by="sequence")


class Modality:
    """One kind of content. Stateless: methods derive their results from the context."""

    shape_keys: tuple[ShapeKey, ...] = ()
    """Keys of ``--shape-config`` for this modality."""
    description: str = ""
    """Name of the content in reports (``an image``)."""
    carriers: tuple[str, ...] = ()
    """Parameters that hold the content, the preferred one first; the first one that the forward takes is used."""
    companions: tuple[str, ...] = ()
    """Parameters that describe the content."""
    sub_config_name: str = ""
    """Attribute of the config that holds the modality's config; if its value is None, the model lacks the modality."""
    feature_method: str = ""
    """Name of the method that computes the features which replace placeholder tokens."""
    place_token_names: tuple[str, ...] = ()
    """Config attributes that name the placeholder token."""
    place_mask: str = ""
    """Parameter with a mask of the placeholder positions, for models without a placeholder token."""
    place_kind: int = 0
    """Token type of placeholder tokens in models with a token type input; 0 is the type of text."""
    has_place_masks: bool = False
    """True if masks of placeholder positions are inputs whenever the modality is present."""
    place_keys: tuple[str, ...] = ()
    """Keys of the sizes that determine the number of placeholder tokens."""
    rows_key: str = BATCH_KEY.name
    """Key of the number of rows of the modality, in models whose modalities have separate numbers of rows."""

    def media_parameters(self, context: InputContext) -> list[str]:
        """Return the carrier and the companions that are inputs, the carrier first; `[]` without such content."""
        carrier = next((name for name in self.carriers if context.takes(name)), None)
        if carrier is None or self.is_absent(context.config):
            return []
        return [carrier, *(name for name in context.parameters if name in self.companions)]

    def dependent_parameters(self, context: InputContext, media: Sequence[Modality]) -> list[str]:
        """Return further inputs, which are drafted after the layouts of all media."""
        del context, media
        return []

    def layouts(self, context: InputContext, names: Sequence[str], *, has_places: bool) -> Iterator[InputLayout]:
        """Yield the possible layouts of the tensors, the likeliest first.

        Args:
            context: The model.
            names: Result of :meth:`media_parameters`.
            has_places: Whether the text has placeholder tokens for the content.

        Raises:
            UsageError: the model does not support a requested size.
        """
        raise NotImplementedError(f"{type(self).__name__} has carriers and no layouts")

    def draft_dependent(self, name: str, context: InputContext, media: Sequence[DecidedMedium]) -> InputDraft | None:
        """Return the draft of a dependent input; `None` if a required medium is not decided yet."""
        del name, context, media
        return None

    def fit_to_features(
        self, drafts: Mapping[str, InputDraft], accepted: Collection[str], place_count: int
    ) -> Mapping[str, InputDraft]:
        """Adapt the drafts of a layout to the features that the model computes from them.

        Args:
            drafts: Parameter → draft.
            accepted: Parameters that the feature method takes.
            place_count: Number of features per row.
        """
        del accepted, place_count
        return drafts

    def is_absent(self, config: object) -> bool:
        """Return True if a config disables the modality."""
        return getattr(config, self.sub_config_name, self) is None

    def place_token(self, config: object) -> int | None:
        """Return the placeholder token of the content, if the config names one."""
        tokens = (getattr(config, name, None) for name in self.place_token_names)
        return next((token for token in tokens if isinstance(token, int) and token >= 0), None)


@dataclass(frozen=True)
class DecidedMedium:
    """Decided tensors of one modality."""

    modality: Modality
    drafts: Mapping[str, InputDraft]
    """Parameter → its draft."""
    token: int | None = None
    """The placeholder token; `None` if the model has none: any token may be in its place."""
    place_count: int = 0
    """Number of placeholder tokens in each row of text; 0 if the model needs none, or if unknown."""
    sizes: tuple[InputSize, ...] = ()
    """Sizes of all tried layouts, including layouts that the model refused."""
    bounds: Mapping[str, SizeBounds] = field(default_factory=dict)
    """Key → bounds that follow from the layout; they override the bounds of the sizes."""
    notes: tuple[str, ...] = ()
    """Sentences for the user."""


_POSITION_LIMITS = ("max_position_embeddings", "n_positions", "max_encoder_position_embeddings", "max_target_positions")
_DECODER_POSITION_LIMITS = (
    "max_target_positions", "max_decoder_position_embeddings", "max_text_positions", *_POSITION_LIMITS
)  # fmt: skip


def text_config(context: InputContext) -> object:
    """Return the config of the text model."""
    return sub_config(context.config, "text_config", "text_encoder", "encoder")


def text_sequence(context: InputContext, place_count: int, shrinkable_keys: Sequence[str]) -> InputSize:
    """Return the number of tokens per row of text, placeholder tokens included.

    Args:
        context: The model.
        place_count: Number of placeholder tokens for images and recordings.
        shrinkable_keys: Keys of ``--shape-config`` that reduce this number, for the message.

    Raises:
        UsageError: the requested length, or the longest one that the model takes, has no room for text beside the
            placeholder tokens.
    """
    limit = first_int(text_config(context), _POSITION_LIMITS)
    default = min(TOKENS, context.processor.max_tokens or TOKENS)
    size = _choose_within_positions(context, "sequence_length", place_count + default, limit)
    if size.value <= place_count:
        raise _text_room_error(context, size, place_count, shrinkable_keys)
    return dataclasses.replace(size, bounds=dataclasses.replace(size.bounds or SizeBounds(), min=place_count + 1))


def _text_room_error(
    context: InputContext, size: InputSize, place_count: int, shrinkable_keys: Sequence[str]
) -> UsageError:
    """Return the error for a row without room for text.

    Args:
        context: The model and the user's request.
        size: Length of a row.
        place_count: Number of placeholder tokens in a row.
        shrinkable_keys: Sizes whose reduction makes room.

    Raises:
        UsageError: the user requested the length of the row.
    """
    reason = f"images and audio take {place_count} tokens of each row"
    if "sequence_length" in context.sizes.requested:
        context.sizes.refuse("sequence_length", reason)
    limits = (name for name in _POSITION_LIMITS if first_int(text_config(context), (name,)))
    keys = " and ".join(shrinkable_keys)
    smaller = f"Set a smaller {keys} with {opt.shape_config}, or describe" if keys else "Describe"
    return UsageError(
        f"{reason}, and the model takes {size.value} ({', '.join(itertools.islice(limits, 1))}), text included",
        hint=f"{smaller} all inputs with {opt.input_specs}.",
    )


def decoder_sequence(context: InputContext) -> InputSize:
    """Return the tokens per row of the decoder; by default the length of the text."""
    limit = first_int(sub_config(context.config, "decoder", "decoder_config", "text_config"), _DECODER_POSITION_LIMITS)
    default = context.sizes.requested.get("sequence_length", TOKENS) if context.has_text else TOKENS
    return _choose_within_positions(context, "decoder_sequence_length", default, limit)


def _choose_within_positions(context: InputContext, key: str, default: int, declared: int | None) -> InputSize:
    """Choose a sequence length; more than the learned positions is an error, more than the declared ones a note.

    A module that computes its position table extends the table for a longer row; the traced length then bounds the
    graph.

    Args:
        context: The model and the user's request.
        key: Key of the length.
        default: Length without a request.
        declared: Number of positions in the config; `None`: unbounded.

    Raises:
        UsageError: the user requested more positions than the model learned.
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
        note = f"{opt.shape_config}: {key} {size.value} is above the {declared} declared in the config"
        return dataclasses.replace(size, notes=(note,))
    return size


def _table_positions(context: InputContext, declared: int, attribute: str) -> int | None:
    """Return the number of positions that the tables of the model offer a row; `None` without such a table.

    Some tables have rows that no position uses: rows up to the padding index, or the first ``offset`` rows.

    Args:
        context: The model.
        declared: Number of positions in the config.
        attribute: Attribute of a module with its table: ``weight`` of learned positions, ``weights`` of computed ones,
            as in M2M-100, Speech2Text and XGLM.
    """
    import torch

    usable = []
    for name, module in context.structure.named_modules():
        table, padding = getattr(module, attribute, None), getattr(module, "padding_idx", None)
        if not isinstance(table, torch.Tensor) or table.dim() != 2 or not is_position_name(name):
            continue
        offset = int(getattr(module, "offset", 0))
        if len(table) - offset == declared:
            usable.append(min(declared, len(table) - (offset if padding is None else padding + 1)))
    return min(usable, default=None)


def is_position_name(name: str) -> bool:
    """Return True if a module or parameter of this name holds positions."""
    base_name = name.rpartition(".")[2]
    return "position" in base_name or base_name in ("wpe", "pos_embed")
