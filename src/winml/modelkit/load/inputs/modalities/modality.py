"""What a modality has to say about itself.

A new modality is one file beside this one and one line in ``pipeline.py``. Its file imports neither torch nor
transformers at module level, since ``--shape-config`` is read with its keys before they are there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from winml.modelkit.load.inputs.drafts import InputContext, InputDraft, InputLayout
from winml.modelkit.load.inputs.sizes import InputSize, SizeBounds

__all__ = ["BATCH_KEY", "FRAMES_KEY", "DecidedMedium", "Modality", "ShapeKey"]


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
