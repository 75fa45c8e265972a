"""Makes texts, pictures and recordings like those a model gets in use, if the user gives none.

Sentences have the words of a tokenizer, as often as words are used, and the lengths of sentences; pictures and
recordings have the spectra of photographs and of speech.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from winml.modelkit.arrays import Array
from winml.modelkit.ort.default_sizes import IMAGE_EDGE
from winml.modelkit.samples.media import Recording

if TYPE_CHECKING:
    from PIL.Image import Image


FEWEST_WORDS = 8
"""Words of a vocabulary below which no sentences are made of it."""
_SENTENCE_WORDS = (2.8, 0.5)
"""Mean and deviation of the logarithm of the number of words in a sentence. Chosen: 16 words in the median,
7 to 37 in 90 % of the sentences."""
_SHORTEST, _LONGEST = 3, 60
_WORD_STARTS = ("\u0120", "\u2581")
"""Specified by byte-level BPE and by SentencePiece: what a token at the start of a word begins with."""
_PIECE = "##"
"""Specified by WordPiece: what a token inside of a word begins with."""
_SECONDS = 2.0
"""Length of a recording. Chosen: some words."""


def vocabulary(tokenizer: Any, value_range: tuple[float, float] | None) -> list[str]:
    """Return the whole words among the tokens that the model takes, the most frequent first."""
    most = math.inf if value_range is None else value_range[1]
    special = set(tokenizer.all_special_ids)
    tokens = sorted(
        (number, token) for token, number in tokenizer.get_vocab().items() if number <= most and number not in special
    )
    starts = [token[1:] for _, token in tokens if token.startswith(_WORD_STARTS)]
    words = starts or [token for _, token in tokens if not token.startswith(_PIECE)]
    return [word for word in words if word.isascii() and word.isalpha() and (len(word) > 1 or word in "aI")]


def sentence(generator: np.random.Generator, words: Sequence[str]) -> str:
    """Return words as often as each is in a language: the second half as often as the first, the third a third."""
    mean, deviation = _SENTENCE_WORDS
    length = int(np.clip(round(float(generator.lognormal(mean, deviation))), _SHORTEST, _LONGEST))
    shares = 1 / np.arange(1, len(words) + 1)
    chosen = generator.choice(len(words), length, p=shares / shares.sum())
    return f"{' '.join(words[number] for number in chosen).capitalize()}."


def picture(generator: np.random.Generator) -> Image:
    """Return a picture whose amplitudes fall with the frequency as those of photographs do."""
    import PIL.Image

    edge = IMAGE_EDGE
    frequencies = np.hypot(np.fft.fftfreq(edge)[:, None], np.fft.rfftfreq(edge)[None, :])
    gray, *colours = (_shaped_noise(generator, frequencies, (edge, edge)) for _ in range(4))
    # The channels of a photograph are nearly alike.
    channels = np.stack([0.9 * gray + 0.4 * colour for colour in colours], axis=-1)
    centre = generator.uniform(90, 160)
    return PIL.Image.fromarray(np.clip(centre + generator.uniform(35, 65) * channels, 0, 255).astype(np.uint8))


def recording(generator: np.random.Generator, rate_hz: int) -> Recording:
    """Return sound whose amplitudes fall with the frequency, and that swells and fades as syllables do."""
    length = int(_SECONDS * rate_hz)
    noise = _shaped_noise(generator, np.fft.rfftfreq(length, 1 / rate_hz), (length,))
    times = np.arange(length) / rate_hz
    envelope = 0.55 + 0.45 * np.sin(2 * np.pi * (generator.uniform(3, 5) * times + generator.random()))
    return Recording((0.1 * noise * envelope).clip(-1, 1).astype(np.float32), rate_hz)


def _shaped_noise(generator: np.random.Generator, frequencies: Array, shape: tuple[int, ...]) -> Array:
    """Return noise of unit variance whose amplitude is the inverse of the frequency."""
    spectrum = np.fft.rfftn(generator.standard_normal(shape), axes=range(len(shape)))
    noise = np.fft.irfftn(
        spectrum / np.maximum(frequencies, frequencies[frequencies > 0].min()), shape, axes=range(len(shape))
    )
    noise -= noise.mean()
    result: Array = noise / noise.std()
    return result
