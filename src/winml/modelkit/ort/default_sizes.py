"""Which size does a dimension get when neither the user nor the model says one?

The one table of default sizes: ``models/`` takes them for the inputs of a model, ``ort/`` for open dimensions of any
ONNX graph. Imports nothing heavy.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping

from winml.modelkit.onnx.specs import current_name

BATCH = 1
"""Rows of every input: chosen, the smallest."""
TOKENS = 128
"""Tokens per row unless the model takes fewer: chosen, long enough for masks and position buckets to matter."""
CHOICES = 4
"""Answers per question of a multiple-choice model: chosen, as the common data sets have."""
IMAGE_EDGE = 224
"""Pixels per edge where neither config nor processor says: the edge most vision models were trained at."""
IMAGE_CHANNELS = 3
"""Red, green and blue."""
PATCH_EDGE = 16
"""Pixels per edge of a patch: that of the first vision transformers."""
VIDEO_FRAMES = 16
"""Frames of a video: what most video models were trained on."""
SAMPLING_RATE_HZ = 16_000
"""Rate of nearly all speech models; raw audio is one second of it unless asked otherwise."""
AUDIO_FRAMES = 256
"""Frames of audio features where the model takes any number: 2.56 s at the usual 100 frames per second."""
MEL_BINS = 80
"""Features per frame of most speech models."""
USUAL_MEL_BINS = (MEL_BINS, 128)
"""Features per frame of nearly all speech models, for those whose config does not say."""

_DECODER_TOKENS_OF_A_GRAPH = 16
"""Chosen: a decoder's row is short in use. At export it is as long as the text's, so that positions matter."""
_PAST_TOKENS_OF_A_GRAPH = 16
"""Chosen: a cache that is not empty, so that what reads it matters, and costs little."""
_CHOICES_OF_A_GRAPH = 2
"""Chosen: the fewest that are a choice, as each costs a whole row."""

_DEFAULT_SIZES: Mapping[str, int] = {
    "batch_size": BATCH,
    "text_batch_size": BATCH,
    "image_batch_size": BATCH,
    "audio_batch_size": BATCH,
    "sequence_length": TOKENS,
    "past_sequence_length": _PAST_TOKENS_OF_A_GRAPH,
    # Of what was encoded: some keys are given and the others computed, so that both ways matter.
    "past_encoder_sequence_length": _PAST_TOKENS_OF_A_GRAPH,
    "decoder_sequence_length": _DECODER_TOKENS_OF_A_GRAPH,
    "num_choices": _CHOICES_OF_A_GRAPH,
    "height": IMAGE_EDGE,
    "width": IMAGE_EDGE,
    "num_channels": IMAGE_CHANNELS,
    "num_frames": AUDIO_FRAMES,
    "num_mel_bins": MEL_BINS,
    "audio_length": SAMPLING_RATE_HZ,
}
"""Name of a dynamic dimension → the size a graph is run with where nobody gave one."""


def default_size(name: str) -> int | None:
    """Return the size a dynamic dimension of a graph is run with where nobody gave one; None: its name says nothing."""
    return _DEFAULT_SIZES.get(current_name(name))


def fixing_command(model: str, open_names: Iterable[str]) -> str:
    """Return the command that fixes the dynamic dimensions of a file, at sizes of an example; for messages.

    Args:
        model: The file, as the user calls it.
        open_names: Its dynamic dimensions, without those that are sums of others.
    """
    sizes = {name: default_size(name) or 1 for name in open_names}
    return f"winml export -m {shlex.quote(model)} -o fixed.onnx --shape-config '{json.dumps(sizes)}'"
