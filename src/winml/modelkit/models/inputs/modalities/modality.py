"""The contract of a modality, and the sizes of sequences that several of them share.

A new modality is one file beside this one and one line in ``pipeline.py``. Its file imports neither torch nor
transformers at module level, since ``--shape-config`` is read with its keys before they are there.
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
    """Which of ``--dynamic-batch``, ``--dynamic-seq-len`` and ``--dynamic-image-size`` leaves it open."""
    trace_step: int = 1
    """Sizes to trace with are tried this far apart."""
    trace_size: int | None = None
    """Size to trace with where nothing is known but the name."""


BATCH_KEY = ShapeKey("batch_size", "Rows of every input.", opened_by="batch", trace_size=2)
FRAMES_KEY = ShapeKey("num_frames", "Frames of audio features, or of a video.", opened_by="sequence")


class Modality:
    """One kind of content. Without state; what is asked of it is answered from the context."""

    shape_keys: tuple[ShapeKey, ...] = ()
    """Keys of ``--shape-config`` it understands."""
    description: str = ""
    """Its content, for people (``an image``)."""
    carriers: tuple[str, ...] = ()
    """Parameters that hold the content; the first one a forward has is used."""
    companions: tuple[str, ...] = ()
    """Parameters that describe it."""
    sub_config_name: str = ""
    """Sub-config; a model whose sub-config is None lacks the modality."""
    feature_method: str = ""
    """What a model calls its code that turns the content into what stands in place of tokens."""
    place_token_names: tuple[str, ...] = ()
    """Config attributes that name the token which holds a place."""
    place_mask: str = ""
    """Parameter that says which tokens hold a place for it, where no token of its own does."""
    place_kind: int = 0
    """Kind of the tokens that hold its places, where a model is told the kind of each; 0 is that of text."""
    has_place_masks: bool = False
    """Whether masks over the tokens that say where its places are, are inputs where it is."""
    place_keys: tuple[str, ...] = ()
    """Keys of the sizes that the number of places follows from."""
    rows_key: str = BATCH_KEY.name
    """Key of its rows, where a model counts them apart from those of other content."""

    def media_parameters(self, context: InputContext) -> list[str]:
        """Return the carrier and the companions that are inputs, the carrier first; nothing where it has no content."""
        carrier = next((name for name in self.carriers if context.takes(name)), None)
        if carrier is None or self.is_absent(context.config):
            return []
        return [carrier, *(name for name in context.parameters if name in self.companions)]

    def dependent_parameters(self, context: InputContext, media: Sequence[Modality]) -> list[str]:
        """Return further inputs, which are drafted when the layouts of all media are known."""
        del context, media
        return []

    def layouts(self, context: InputContext, names: Sequence[str], *, has_places: bool) -> Iterator[InputLayout]:
        """Yield the ways in which the tensors may be laid out, the likeliest first.

        Args:
            context: The model.
            names: What :meth:`media_parameters` returned.
            has_places: Whether tokens hold a place for the content.

        Raises:
            UsageError: a size the model does not take.
        """
        raise NotImplementedError(f"{type(self).__name__} has carriers and no layouts")

    def draft_dependent(self, name: str, context: InputContext, media: Sequence[DecidedMedium]) -> InputDraft | None:
        """Return one of the dependent inputs; None where it depends on a medium that is not decided yet."""
        del name, context, media
        return None

    def fit_to_features(
        self, drafts: Mapping[str, InputDraft], accepted: Collection[str], place_count: int
    ) -> Mapping[str, InputDraft]:
        """Return the drafts of a layout as they are once it is known what the model makes of it.

        Args:
            drafts: Parameter → draft.
            accepted: Parameters that the feature method takes.
            place_count: How many vectors it makes for each row.
        """
        del accepted, place_count
        return drafts

    def is_absent(self, config: object) -> bool:
        """Say whether a config switches the modality off."""
        return getattr(config, self.sub_config_name, self) is None

    def place_token(self, config: object) -> int | None:
        """Return the token that holds a place for the content, if the config names one."""
        tokens = (getattr(config, name, None) for name in self.place_token_names)
        return next((token for token in tokens if isinstance(token, int) and token >= 0), None)


@dataclass(frozen=True)
class DecidedMedium:
    """The content of one modality as the model takes it."""

    modality: Modality
    drafts: Mapping[str, InputDraft]
    """Parameter → its draft."""
    token: int | None = None
    """The token that holds a place for it; None where any does."""
    place_count: int = 0
    """How many of them each row of text has; 0 where the model needs none, or that is not known."""
    sizes: tuple[InputSize, ...] = ()
    """All sizes that were looked at, those of layouts the model did not take as well."""
    bounds: Mapping[str, SizeBounds] = field(default_factory=dict)
    """Key → bounds that follow from the layout; they win over those of the sizes."""
    notes: tuple[str, ...] = ()
    """Sentences for the user."""


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
        note = f"{opt.shape_config}: {key} {size.value} is above the {declared} declared in the config"
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
