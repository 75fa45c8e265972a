"""Default sizes of dimensions stated neither by the user nor by the model.

The only table of default sizes: ``models/`` uses it for the inputs of a model, ``ort/`` for dynamic dimensions of any
ONNX graph. No heavy imports.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

from winml.modelkit.errors import spell_flag
from winml.modelkit.onnx.specs import current_name
from winml.modelkit.words import command_line

BATCH = 1
"""Rows of every input: chosen, the smallest."""
TOKENS = 128
"""Tokens per row unless the model takes fewer: chosen, long enough for masks and position buckets to matter."""
CHOICES = 4
"""Answers per question of a multiple-choice model: chosen, as the common data sets have."""
IMAGE_EDGE = 224
"""Pixels per edge if neither config nor processor states it: the training size of most vision models."""
IMAGE_CHANNELS = 3
"""Red, green and blue."""
PATCH_EDGE = 16
"""Pixels per edge of a patch, as in the first vision transformers."""
VIDEO_FRAMES = 16
"""Frames of a video: the training length of most video models."""
SAMPLING_RATE_HZ = 16_000
"""Sampling rate of nearly all speech models; the default length of raw audio is one second."""
AUDIO_FRAMES = 256
"""Frames of audio features where the model takes any number: 2.56 s at the usual 100 frames per second."""
UNKNOWN_SIZE = 8
"""Size of a dimension of unknown meaning: chosen, small and a power of two."""
MEL_BINS = 80
"""Features per frame of most speech models."""
USUAL_MEL_BINS = (MEL_BINS, 128)
"""Features per frame of nearly all speech models, for configs that do not state it."""

_DECODER_TOKENS_OF_A_GRAPH = 16
"""Chosen: a decoder's row is short in use. At export it is as long as the text's, so that positions matter."""
_PAST_TOKENS_OF_A_GRAPH = 16
"""Chosen: a nonempty cache, so that its values affect the outputs, at low cost."""
_LATENT_EDGE = 32
"""Chosen: half of the smallest edge that pipelines are trained with, at a quarter of its cost."""
_CHOICES_OF_A_GRAPH = 2
"""Chosen: the fewest that are a choice, as each costs a whole row."""

_DEFAULT_SIZES: Mapping[str, int] = {
    "batch_size": BATCH,
    "text_batch_size": BATCH,
    "image_batch_size": BATCH,
    "audio_batch_size": BATCH,
    "sequence_length": TOKENS,
    "past_sequence_length": _PAST_TOKENS_OF_A_GRAPH,
    # Number of encoded tokens: some keys are fed and the others computed, so that both paths matter.
    "past_encoder_sequence_length": _PAST_TOKENS_OF_A_GRAPH,
    "decoder_sequence_length": _DECODER_TOKENS_OF_A_GRAPH,
    "num_choices": _CHOICES_OF_A_GRAPH,
    "height": IMAGE_EDGE,
    "width": IMAGE_EDGE,
    # Latents of a diffusion pipeline: of 256 pixels per edge, as patches of two by two for Flux.
    "latent_height": _LATENT_EDGE,
    "latent_width": _LATENT_EDGE,
    "packed_height_width": _LATENT_EDGE * _LATENT_EDGE // 4,
    "num_channels": IMAGE_CHANNELS,
    "num_frames": AUDIO_FRAMES,
    "num_mel_bins": MEL_BINS,
    "audio_length": SAMPLING_RATE_HZ,
    # Points that the pipeline of transformers passes in one run, for an object each.
    "point_batch_size": 64,
    "nb_points_per_image": 1,
}
"""Name of a dynamic dimension → default size for running a graph."""


def default_size(name: str) -> int | None:
    """Return the default size of a dynamic dimension of a graph; `None` for an unknown name."""
    return _DEFAULT_SIZES.get(current_name(name))


def fixing_command(model: str, open_names: Iterable[str]) -> str:
    """Return the command that fixes the dynamic dimensions of a file, at sizes of an example; for messages.

    Args:
        model: The file, as written by the user.
        open_names: Its dynamic dimensions, except sums of other dimensions.
    """
    sizes = {name: default_size(name) or 1 for name in open_names}
    are_plain = all(_PLAIN_NAME.fullmatch(name) for name in sizes)
    text = ",".join(f"{name}={size}" for name, size in sizes.items()) if are_plain else json.dumps(sizes)
    return command_line(["winml", "export", "-m", model, "-o", "fixed.onnx", spell_flag("shape_config"), text])


_PLAIN_NAME = re.compile(r"[\w.:/+*-]+")
"""A name that needs no JSON in a pair of name and size."""
