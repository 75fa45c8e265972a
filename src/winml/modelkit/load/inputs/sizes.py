"""How big are the inputs of this model?

Every size is the user's where given, else the config's or the processor's, else a modest default; a size the model is
known to refuse is an error. Goes by names of config attributes, never by the name of a model. Which inputs there are is
decided in ``inputs.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from winml.modelkit.errors import UsageError
from winml.modelkit.load.checkpoints.processor_files import ProcessorInfo
from winml.modelkit.load.inputs.options import INPUT_SPECS_OPTION, SHAPE_CONFIG_OPTION

__all__ = ["InputSizes", "KeyedSize", "PatchGrid", "SizeBounds"]

_DEFAULT_SEQUENCE = 128
"""Tokens per row unless the model takes fewer: chosen, long enough for masks and position buckets to matter."""
_DEFAULT_IMAGE = 224
"""Pixels per edge where neither config nor processor says: the edge most vision models were trained at."""
_DEFAULT_SAMPLING_RATE_HZ = 16_000
"""Rate of nearly all speech models; raw audio is one second of it unless asked otherwise."""
_DEFAULT_CHANNELS = 3
_DEFAULT_MEL_BINS = 80
_DEFAULT_FRAMES = 256
"""Frames of audio features where the model takes any number: 2.56 s at the usual 100 frames per second."""
_DEFAULT_VIDEO_FRAMES = 16
_DEFAULT_PATCH = 16
_USUAL_MEL_BINS = (80, 128)
"""Features per frame of nearly all speech models, for those whose config does not say."""
_FRAMES_PER_POSITION = 2
"""A spectrogram encoder with ``max_source_positions`` halves the frames once before it counts positions."""

_LIMITS = ("max_position_embeddings", "n_positions", "max_encoder_position_embeddings", "max_target_positions")
_DECODER_LIMITS = ("max_target_positions", "max_decoder_position_embeddings", "max_text_positions", *_LIMITS)
_VOCABULARIES = ("vocab_size", "src_vocab_size")
_DECODER_VOCABULARIES = ("decoder_vocab_size", "tgt_vocab_size", "vocab_size")
_MEDIUM_SIZES = ("height", "width", "num_frames", "audio_length")
"""Keys that the number of tokens of an image or a recording follows from."""

_FRAME_FEATURES = ("input_feat_per_channel", "feature_projection_input_dim")
_MEL_BINS = ("num_mel_bins", "input_feat_size", "input_dim", "feature_projection_input_dim", "feature_size")
_PATCHES_MERGED = ("spatial_merge_size", "merge_size", "merge_kernel_size", "pooling_kernel_size", "downsample_factor")
"""Names for how many patches per edge become one token; pictures are whole numbers of these."""

_PLACE_TOKENS = tuple(
    f"{medium}_token_{ending}" for medium in ("image", "video", "audio", "speech") for ending in ("id", "index")
)
"""Names for tokens that hold the place of something that is no text."""


class KeyedSize(int):
    """A size that knows which key of ``--shape-config`` it is."""

    def __new__(cls, value: int, key: str) -> KeyedSize:  # noqa: ARG004, PYI034  # ``Self`` came with Python 3.11
        """Return ``value``; ``__init__`` adds the key."""
        return super().__new__(cls, value)

    def __init__(self, value: int, key: str) -> None:  # noqa: ARG002  # __new__ took it
        """Remember the key."""
        self.key = key


@dataclass(frozen=True)
class SizeBounds:
    """Between which sizes a key may vary, as far as config and structure say."""

    min: int = 1
    max: int | None = None
    fixed: str = ""
    """Why it cannot vary at all, as a clause (``the model takes 80 only``); empty where it can."""


@dataclass(frozen=True)
class PatchGrid:
    """A picture as a row of patches."""

    rows: int
    columns: int
    patch: int
    """Pixels per edge of a patch."""
    channels: int
    depth: int
    """Frames of a video that make one patch; a picture is repeated as often."""

    @property
    def count(self) -> int:
        """Number of patches."""
        return self.rows * self.columns

    @property
    def values(self) -> int:
        """Numbers in one patch."""
        return self.channels * self.depth * self.patch * self.patch


class InputSizes:
    """Sizes of one model's inputs; remembers which of the user's keys meant something."""

    def __init__(
        self,
        model: torch.nn.Module | type[torch.nn.Module],
        config: Any,
        processor: ProcessorInfo,
        given: Mapping[str, int],
        parameters: frozenset[str],
    ) -> None:
        self._model = model
        self._config = config
        self._processor = processor
        self._given = given
        self._parameters = parameters
        self._used: set[str] = set()
        self._declared: set[str] = set()
        self._notes: list[str] = []
        self.bounds: dict[str, SizeBounds] = {}
        """Bounds of the keys asked for so far, where there are any."""
        self._text = _part(config, "text_config", "text_encoder", "encoder")
        self._decoder = _part(config, "decoder", "decoder_config", "text_config")
        self._vision = _part(config, "vision_config", "image_config", "encoder")
        self._audio = _part(config, "audio_config", "encoder_config", "encoder")

    @property
    def has_text(self) -> bool:
        """Whether the model reads tokens."""
        return self.takes("input_ids")

    def takes(self, parameter: str) -> bool:
        """Say whether the forward has a parameter."""
        return parameter in self._parameters

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the user about the sizes asked for so far."""
        return tuple(dict.fromkeys(self._notes))

    def tell(self, note: str) -> None:
        """Add a sentence for the user."""
        self._notes.append(note)

    @property
    def unused(self) -> tuple[str, ...]:
        """Keys the user gave and no input asked for."""
        return tuple(key for key in self._given if key not in self._used)

    def size(self, key: str, default: int) -> KeyedSize:
        """Return the user's size for ``key``, else ``default``."""
        self._used.add(key)
        return KeyedSize(self._given.get(key, default), key)

    def sequence(self, places: int = 0) -> int:
        """Return the tokens per row of text, ``places`` of which are held for something else.

        Raises:
            UsageError: the user or the model wants fewer than those and one more.
        """
        limit = _first_int(self._text, _LIMITS)
        default = min(_DEFAULT_SEQUENCE, self._processor.max_tokens or _DEFAULT_SEQUENCE)
        length = self._within_positions("sequence_length", places + default, limit)
        if length > places:
            bounds = self.bounds.get("sequence_length", SizeBounds())
            self.bounds["sequence_length"] = replace(bounds, min=places + 1)
            return length
        reason = f"images and recordings take {places} tokens of each row"
        if "sequence_length" in self._given:
            self._refuse("sequence_length", reason)
        limits = (name for name in _LIMITS if _first_int(self._text, (name,)))
        free = [key for key in _MEDIUM_SIZES if key in self._used - self._declared]
        smaller = f"Give a smaller {' and '.join(free)} with {SHAPE_CONFIG_OPTION}, or describe" if free else "Describe"
        raise UsageError(
            f"{reason}, and the model takes {length} ({', '.join(itertools.islice(limits, 1))}), with text among them",
            hint=f"{smaller} all inputs with {INPUT_SPECS_OPTION}.",
        )

    def decoder_sequence(self) -> int:
        """Return the tokens per row given to the decoder; as many as the text's unless asked otherwise."""
        limit = _first_int(self._decoder, _DECODER_LIMITS)
        default = self._given.get("sequence_length", _DEFAULT_SEQUENCE) if self.has_text else _DEFAULT_SEQUENCE
        return self._within_positions("decoder_sequence_length", default, limit)

    def vocabulary(self) -> int:
        """Return the number of tokens of the text input."""
        declared = _first_int(self._text, _VOCABULARIES) or _first_int(self._config, _VOCABULARIES)
        return declared or self._embedded_tokens()

    def text_tokens(self, vocabulary: int) -> tuple[int, int]:
        """Return the first and the last of the longest run of tokens that hold no place for something else."""
        held = {getattr(self._config, name, None) for name in _PLACE_TOKENS}
        edges = sorted(
            {-1, vocabulary, *(token for token in held if isinstance(token, int) and 0 <= token < vocabulary)}
        )
        start, end = max(itertools.pairwise(edges), key=lambda pair: pair[1] - pair[0])
        return start + 1, max(end - 1, start + 1)

    def token_width(self) -> int | None:
        """Return the size of the vector of a token, where the model says."""
        structure: Any = self.structure()
        try:
            return int(structure.get_input_embeddings().weight.shape[-1])
        except (AttributeError, NotImplementedError):
            return None

    def codebooks(self) -> int | None:
        """Return how many tokens of an audio codec make one, where the config says that it is several."""
        count = _declared_anywhere(self._config, ("num_codebooks",))
        return count if count is not None and count > 1 else None

    def decoder_vocabulary(self) -> int:
        """Return the number of tokens of the decoder, which may have a vocabulary of its own."""
        return _first_int(self._decoder, _DECODER_VOCABULARIES) or self.vocabulary()

    def end_token(self, vocabulary: int) -> int | None:
        """Return the end-of-sequence token where the config names exactly one inside the vocabulary."""
        token = getattr(self._text, "eos_token_id", None)
        return token if isinstance(token, int) and 0 <= token < vocabulary else None

    def image(self, task: str | None) -> tuple[int, ...]:
        """Return channels, height and width, with the frames before them for a video model."""
        backbone = _part(self._config, "backbone_config")
        parts = [(self._vision, "image_size"), (backbone, "image_size"), (self._vision, "input_size")]
        named = (_image_size(getattr(part, name, None)) for part, name in parts)
        declared = next((size for size in named if size), None)
        fixed = declared if self._is_image_fixed(declared) else None
        height, width = fixed or self._processor.image_size or declared or (_DEFAULT_IMAGE, _DEFAULT_IMAGE)
        plane = (self.size("height", height), self.size("width", width))
        if declared is not None:
            self._declared |= {"height", "width"}
        if fixed is not None:
            reason = f"the model takes images of {fixed[0]}x{fixed[1]} pixels only"
            self.bounds |= {key: SizeBounds(fixed=reason) for key in ("height", "width")}
            if plane != fixed:
                self._refuse("height" if plane[0] != fixed[0] else "width", reason)
        declared_channels = _first_int(self._vision, ("num_channels", "in_channels"))
        channels = self._exactly("num_channels", declared_channels, _DEFAULT_CHANNELS)
        frames = getattr(self._vision, "num_frames", None)
        if isinstance(frames, int) or task == "video-classification":
            return (self.size("num_frames", frames or _DEFAULT_VIDEO_FRAMES), channels, *plane)
        return (channels, *plane)

    def audio_layouts(self) -> list[tuple[int, ...]]:
        """Return the sizes that ``input_values`` may have after the batch, the likeliest first: samples of one or more
        channels, or frames and features of a spectrogram.
        """
        kernels = getattr(self._audio, "conv_kernel", None)
        if kernels is None and hasattr(self._audio, "num_mel_bins"):
            frames = self._exactly("num_frames", _first_int(self._audio, ("max_length",)), _DEFAULT_FRAMES)
            return [(frames, self.mel_bins())]
        samples = self.size("audio_length", self._processor.sampling_rate_hz or _DEFAULT_SAMPLING_RATE_HZ)
        shortest = _receptive_field(kernels or (), getattr(self._audio, "conv_stride", ()))
        self.bounds["audio_length"] = SizeBounds(min=shortest)
        if samples < shortest:
            self._refuse("audio_length", f"the model's convolutions need at least {shortest} samples")
        channels = _first_int(self._audio, ("audio_channels",))
        if channels is not None:
            return [(channels, samples)]
        return [(samples,)] if kernels is not None else [(samples,), (1, samples)]

    def audio_feature_layouts(self) -> list[tuple[int, ...]]:
        """Return the sizes that ``input_features`` may have after the batch, the likeliest first.

        Raises:
            UsageError: the model refuses the frames or features the user wants.
        """
        frames = -(-_DEFAULT_FRAMES // self._frame_step()) * self._frame_step()
        per_frame = _first_int(self._audio, _FRAME_FEATURES)
        if per_frame is not None:
            return [(self.size("num_frames", frames), per_frame * (_first_int(self._audio, ("input_channels",)) or 1))]
        positions = _first_int(self._audio, ("max_source_positions",))
        if positions is not None:
            return [(self.mel_bins(), self._exactly("num_frames", _FRAMES_PER_POSITION * positions, frames))]
        features = _declared_anywhere(self._config, _MEL_BINS)
        square = _first_int(self._audio, ("spec_size",))
        if features is not None and square is not None:
            # The spectrogram is folded into a square picture.
            return [(1, self.size("num_frames", square * max(square // features, 1)), features)]
        stacked = _declared_anywhere(self._config, ("num_stacked_frames",)) or 1
        layouts: list[tuple[int, ...]] = []
        for count in [features] if features is not None else _USUAL_MEL_BINS:
            bins = self._exactly("num_mel_bins", features, count) if stacked == 1 else stacked * count
            layouts += [(self.size("num_frames", frames), bins), (bins, self.size("num_frames", frames))]
        if features is not None and (several := self._frames_at_once(features)):
            layouts.append((self.size("num_frames", frames), several))
        return layouts

    def _frames_at_once(self, features: int) -> int | None:
        """Return what the first projection takes, if it is several frames' features."""
        layers = (layer for layer in self.structure().modules() if isinstance(layer, torch.nn.Linear))
        first = next(layers, None)
        return first.in_features if first is not None and first.in_features % features == 0 else None

    def _frame_step(self) -> int:
        """Return what the number of frames is a multiple of."""
        window = _declared_anywhere(self._config, ("n_window",))
        return 2 * window if window else 1

    def patch_grid(self) -> PatchGrid:
        """Return the picture of a model that takes a row of patches.

        Raises:
            UsageError: a height or width that is no whole number of patches, merged as the model merges them.
        """
        patch = _image_size(getattr(self._vision, "patch_size", None)) or (_DEFAULT_PATCH, _DEFAULT_PATCH)
        merges = (_first_edge(part, _PATCHES_MERGED) for part in (self._vision, self._config))
        unit = patch[0] * next((merged for merged in merges if merged), 1)
        usual = max(_DEFAULT_IMAGE // unit, 1) * unit
        edges = [self.size(key, usual) for key in ("height", "width")]
        for edge in edges:
            if edge % unit:
                self._refuse(edge.key, f"the model takes multiples of {unit} only")
        channels = _first_int(self._vision, ("num_channels", "in_channels", "in_chans")) or _DEFAULT_CHANNELS
        depth = _first_int(self._vision, ("temporal_patch_size", "patch_temporal")) or 1
        return PatchGrid(edges[0] // patch[0], edges[1] // patch[0], patch[0], channels, depth)

    def mel_bins(self) -> int:
        """Return the features per audio frame."""
        return self._exactly("num_mel_bins", _first_int(self._audio, ("num_mel_bins",)), _DEFAULT_MEL_BINS)

    def _exactly(self, key: str, declared: int | None, default: int) -> KeyedSize:
        """Return the size the config declares, which the user may repeat but not change; else theirs or a default."""
        if declared is None:
            return self.size(key, default)
        self._declared.add(key)
        self.bounds[key] = SizeBounds(fixed=f"the model takes {declared} only")
        size = self.size(key, declared)
        if size != declared:
            self._refuse(key, f"the model takes {declared} only")
        return size

    def _refuse(self, key: str, reason: str) -> None:
        raise UsageError(
            f"{SHAPE_CONFIG_OPTION}: {key} {self._given[key]}: {reason}", hint=f"Leave {key} out, or give such a size."
        )

    def _within_positions(self, key: str, default: int, declared: int | None) -> int:
        """Return a sequence length, which learned positions bound firmly and others only by declaration."""
        if declared is None:
            return self.size(key, default)
        usable = self._learned_positions(declared)
        length = self.size(key, min(default, usable or declared))
        self.bounds[key] = SizeBounds(max=usable)
        if usable is not None and length > usable:
            self._refuse(key, f"the model has {usable} positions")
        if length > declared:
            self._notes.append(f"{SHAPE_CONFIG_OPTION}: {key} {length} is beyond the {declared} the config declares")
        return length

    def _learned_positions(self, declared: int) -> int | None:
        """Return how many positions a row may have where they are looked up in a table, else None.

        Some tables keep rows that no position uses: those up to the padding index, or the first ``offset``.
        """
        usable = []
        for name, table in self.structure().named_modules():
            weight, padding = getattr(table, "weight", None), getattr(table, "padding_idx", None)
            if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or not _is_position_name(name):
                continue
            offset = int(getattr(table, "offset", 0))
            if len(weight) - offset == declared:
                usable.append(declared - (0 if padding is None else padding + 1))
        return min(usable, default=None)

    def _is_image_fixed(self, declared: tuple[int, int] | None) -> bool:
        """Return whether the model has one learned position per patch and was not asked to interpolate them."""
        patch = _image_size(getattr(self._vision, "patch_size", None))
        if declared is None or patch is None or "interpolate_pos_encoding" not in self._parameters:
            return False
        patches = (declared[0] // patch[0]) * (declared[1] // patch[1])
        special = 2  # class and distillation tokens have positions of their own
        return any(
            len(values.shape) >= 2 and patches <= values.shape[-2] <= patches + special
            for name, values in self.structure().named_parameters()
            if _is_position_name(name.removesuffix(".weight"))
        )

    def _embedded_tokens(self) -> int:
        structure: Any = self.structure()
        try:
            return int(structure.get_input_embeddings().num_embeddings)
        except (AttributeError, NotImplementedError):
            # Code of a checkpoint's own need not say which table it is.
            tables = [module for module in structure.modules() if isinstance(module, torch.nn.Embedding)]
        if not tables:
            raise UsageError(
                "input_ids: neither the config nor the model says how many tokens there are",
                hint=f"Describe all inputs with {INPUT_SPECS_OPTION}.",
            )
        return int(tables[0].num_embeddings)

    def structure(self) -> torch.nn.Module:
        """Return the model, or one without storage if there is only its class."""
        if isinstance(self._model, type):
            with torch.device("meta"):
                self._model = self._model(self._config).eval()
        return self._model


def _is_position_name(name: str) -> bool:
    last = name.rpartition(".")[2]
    return "position" in last or last in ("wpe", "pos_embed")


def _part(config: Any, *names: str) -> Any:
    """Return the first sub-config of one of these names, else the config itself."""
    return next(_parts(config, names), config)


def _parts(config: Any, names: tuple[str, ...]) -> Iterator[Any]:
    for name in names:
        part = getattr(config, name, None)
        if hasattr(part, "model_type"):
            yield part


def _first_int(config: Any, names: tuple[str, ...]) -> int | None:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _declared_anywhere(config: Any, names: tuple[str, ...]) -> int | None:
    """Return the number under the first of these names that the config or any config in it has."""
    parts = [config]
    for part in parts:
        parts += [value for value in vars(part).values() if hasattr(value, "model_type")]
    return next((value for name in names for part in parts if (value := _first_int(part, (name,)))), None)


def _first_edge(config: Any, names: tuple[str, ...]) -> int | None:
    """Return the first number, or the first of a pair of numbers, under these names."""
    pairs = (_image_size(getattr(config, name, None)) for name in names)
    return next((pair[0] for pair in pairs if pair), None)


def _image_size(value: Any) -> tuple[int, int] | None:
    """Return height and width of a config's size: one number, a pair, or an object with both."""
    if isinstance(value, Mapping):
        value = (value.get("height"), value.get("width"))
    elif isinstance(value, int):
        value = (value, value)
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(edge, int) for edge in value):
        return value[0], value[1]
    return None


def _receptive_field(kernels: Any, strides: Any) -> int:
    """Return the fewest samples that a stack of convolutions turns into one frame."""
    field = 1
    for kernel, stride in reversed(list(zip(kernels, strides, strict=True))):
        field = (field - 1) * stride + kernel
    return field
