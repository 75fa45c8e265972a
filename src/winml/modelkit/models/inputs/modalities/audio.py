"""Audio: features per frame (a spectrogram), or samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from winml.modelkit.models.inputs.drafts import ALL_VALID, InputContext, InputDraft, InputLayout, input_shape
from winml.modelkit.models.inputs.modalities.modality import (
    FRAMES_KEY,
    DecidedMedium,
    Modality,
    ShapeKey,
    decoder_sequence,
)
from winml.modelkit.models.inputs.sizes import InputSize, SizeBounds, first_int, first_int_anywhere, sub_config
from winml.modelkit.ort.default_sizes import AUDIO_FRAMES, MEL_BINS, SAMPLING_RATE_HZ, USUAL_MEL_BINS

_FEATURES_MASK = "input_features_mask"
_FRAME_MASKS = (_FEATURES_MASK, "feature_attention_mask")
_HIDDEN_FRAMES_MASK = "audio_mel_mask"
"""Inverted mask: true for hidden frames."""
_IS_LONGER = "is_longer"
_DECODER_FEATURES = "decoder_input_values"

_FRAME_FEATURES = ("input_feat_per_channel", "feature_projection_input_dim")
_MEL_BINS = ("num_mel_bins", "input_feat_size", "input_dim", "feature_projection_input_dim", "feature_size")
_FRAMES_PER_POSITION = 2
"""A spectrogram encoder with ``max_source_positions`` halves the frames once before it counts positions."""


_ROWS_KEY = ShapeKey("audio_batch_size", "Rows of audio, where a model scores each with each text.", "batch")


class _Recording(Modality):
    """Common base of features and samples."""

    description = "an audio clip"
    rows_key = _ROWS_KEY.name
    sub_config_name = "audio_config"
    feature_method = "get_audio_features"
    place_token_names = ("audio_token_id", "audio_token_index")
    place_keys = ("num_frames", "audio_length")

    def dependent_parameters(self, context: InputContext, media: Sequence[Modality]) -> list[str]:
        """Return the mask over the recording if the feature extractor makes a mask, and the model takes no text."""
        has_mask = self in media and not context.has_text and context.processor.makes_audio_mask is True
        return ["attention_mask"] if has_mask and context.takes("attention_mask") else []

    def draft_dependent(self, name: str, context: InputContext, media: Sequence[DecidedMedium]) -> InputDraft | None:
        """Return the draft of the mask over the recording."""
        shape_sizes = (size for medium in media for draft in medium.drafts.values() for size in draft.shape)
        length = next((size for size in shape_sizes if size.key in self.place_keys), None)
        return InputDraft(name, input_shape(context.batch, length), "int64", (0, 1)) if length else None


class AudioFeatures(_Recording):
    """A spectrogram: frames, and features of each frame."""

    shape_keys = (_ROWS_KEY, FRAMES_KEY, ShapeKey("num_mel_bins", "Audio features per frame."))
    carriers = ("input_features", "audio_mel")
    companions = (*_FRAME_MASKS, _HIDDEN_FRAMES_MASK, _IS_LONGER)

    def dependent_parameters(self, context: InputContext, media: Sequence[Modality]) -> list[str]:
        """Return the mask over the recording, and the spectrogram that a decoder continues."""
        is_not_default = context.gives_decoder_input(_DECODER_FEATURES)
        return [*super().dependent_parameters(context, media), *([_DECODER_FEATURES] if is_not_default else [])]

    def draft_dependent(self, name: str, context: InputContext, media: Sequence[DecidedMedium]) -> InputDraft | None:
        """Return the draft of one dependent input."""
        if name == _DECODER_FEATURES:
            shape = input_shape(context.batch, decoder_sequence(context), _mel_bins(context))
            return InputDraft(name, shape, context.float_dtype)
        return super().draft_dependent(name, context, media)

    def layouts(self, context: InputContext, names: Sequence[str], *, has_places: bool) -> Iterator[InputLayout]:
        """Yield [frames, features] and [features, frames], with their masks."""
        del has_places
        carrier, *companions = names
        for sizes in _feature_sizes(context):
            shape = input_shape(context.batch, *sizes)
            drafts = [InputDraft(carrier, shape, context.float_dtype), *_audio_companions(companions, shape)]
            yield InputLayout({draft.name: draft for draft in drafts})

    def fit_to_features(
        self, drafts: Mapping[str, InputDraft], accepted: Collection[str], place_count: int
    ) -> Mapping[str, InputDraft]:
        """Return the drafts with a mask over the features if the feature method takes no mask.

        The forward then selects features by the mask.
        """
        mask = drafts.get(_FEATURES_MASK)
        if mask is None or not place_count or _FEATURES_MASK in accepted:
            return drafts
        shape = input_shape(mask.shape[0], place_count)
        return {**drafts, _FEATURES_MASK: dataclasses.replace(mask, shape=shape, dtype="bool")}


class AudioSamples(_Recording):
    """Samples of one or more channels."""

    shape_keys = (
        _ROWS_KEY,
        ShapeKey("audio_length", "Samples of raw audio.", opened_by="sequence", trace_size=SAMPLING_RATE_HZ),
    )
    carriers = ("input_values",)
    place_kind = 1

    def layouts(self, context: InputContext, names: Sequence[str], *, has_places: bool) -> Iterator[InputLayout]:
        """Yield samples without and with a channel axis, or the spectrogram that some models call by the same name."""
        del has_places
        for sizes in _sample_sizes(context):
            draft = InputDraft(names[0], input_shape(context.batch, *sizes), context.float_dtype)
            yield InputLayout({draft.name: draft})


def _audio_config(context: InputContext) -> Any:
    return sub_config(context.config, "audio_config", "encoder_config", "encoder")


def _audio_companions(names: Sequence[str], shape: Sequence[InputSize]) -> Iterator[InputDraft]:
    """Yield the drafts of masks and flags for the length of the recording."""
    batch, *sizes = shape
    frames = next((size for size in sizes if size.key == "num_frames"), sizes[0])
    for name in names:
        if name in _FRAME_MASKS:
            yield InputDraft(name, (batch, frames), "int64", ALL_VALID)
        elif name == _HIDDEN_FRAMES_MASK:
            yield InputDraft(name, (batch, frames), "bool", (0, 0))
        elif name == _IS_LONGER:
            yield InputDraft(name, input_shape(batch, 1), "bool", ALL_VALID)


def _mel_bins(context: InputContext) -> InputSize:
    """Return the features per audio frame."""
    config_bins = first_int(_audio_config(context), ("num_mel_bins",))
    return context.sizes.choose_exactly("num_mel_bins", config_bins, MEL_BINS)


def _sample_sizes(context: InputContext) -> list[tuple[InputSize | int, ...]]:
    """Return the possible sizes of samples after the batch, the likeliest first.

    Raises:
        UsageError: the user requests fewer samples than the model takes.
    """
    audio, sizes = _audio_config(context), context.sizes
    kernels = getattr(audio, "conv_kernel", None)
    if kernels is None and hasattr(audio, "num_mel_bins"):
        frames = sizes.choose_exactly("num_frames", first_int(audio, ("max_length",)), AUDIO_FRAMES)
        return [(frames, _mel_bins(context))]
    shortest = _receptive_field(kernels or (), getattr(audio, "conv_stride", ()))
    rate_hz = context.processor.sampling_rate_hz or SAMPLING_RATE_HZ
    samples = sizes.choose("audio_length", rate_hz, bounds=SizeBounds(min=shortest))
    if samples.value < shortest:
        sizes.refuse("audio_length", f"the model's convolutions need at least {shortest} samples")
    channels = first_int(audio, ("audio_channels",))
    if channels is not None:
        return [(channels, samples)]
    return [(samples,)] if kernels is not None else [(samples,), (1, samples)]


def _feature_sizes(context: InputContext) -> list[tuple[InputSize | int, ...]]:
    """Return the possible sizes of features after the batch, the likeliest first.

    Raises:
        UsageError: the model refuses the requested frames or features.
    """
    audio, sizes = _audio_config(context), context.sizes
    window = first_int_anywhere(context.config, ("n_window",))
    step = 2 * window if window else 1
    frames = sizes.choose("num_frames", -(-AUDIO_FRAMES // step) * step)
    per_frame = first_int(audio, _FRAME_FEATURES)
    if per_frame is not None:
        return [(frames, per_frame * (first_int(audio, ("input_channels",)) or 1))]
    positions = first_int(audio, ("max_source_positions",))
    if positions is not None:
        exact = sizes.choose_exactly("num_frames", _FRAMES_PER_POSITION * positions, AUDIO_FRAMES)
        return [(_mel_bins(context), exact)]
    features = first_int_anywhere(context.config, _MEL_BINS)
    square = first_int(audio, ("spec_size",))
    if features is not None and square is not None:
        # The spectrogram is folded into a square picture.
        frames_of_picture = square * max(square // features, 1)
        count = min(context.processor.audio_frames or frames_of_picture, frames_of_picture)
        return [(1, sizes.choose("num_frames", count), features)]
    stacked = first_int_anywhere(context.config, ("num_stacked_frames",)) or 1
    layouts: list[tuple[InputSize | int, ...]] = []
    for count in [features] if features is not None else USUAL_MEL_BINS:
        bins = sizes.choose_exactly("num_mel_bins", features, count) if stacked == 1 else stacked * count
        layouts += [(frames, bins), (bins, frames)]
    if features is not None and (stacked_features := _find_stacked_features(context, features)):
        layouts.append((frames, stacked_features))
    return layouts


def _find_stacked_features(context: InputContext, features: int) -> int | None:
    """Return the input width of the first projection if it is a multiple of a frame's features, else `None`."""
    import torch

    layers = (layer for layer in context.structure.modules() if isinstance(layer, torch.nn.Linear))
    projection = next(layers, None)
    return projection.in_features if projection is not None and projection.in_features % features == 0 else None


def _receptive_field(kernels: Sequence[int], strides: Sequence[int]) -> int:
    """Return the smallest number of samples that a stack of convolutions reduces to one frame."""
    field = 1
    for kernel, stride in reversed(list(zip(kernels, strides, strict=True))):
        field = (field - 1) * stride + kernel
    return field
