"""Runs a language model that is shown images: a graph that sees, one that embeds tokens, and a decoder.

Images are seen once; the vectors that come of them take the place of the tokens that stand for them. Which output
becomes which input is said by the files (``winml.part``). Needs numpy and ONNX Runtime only. Chooses no token.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.errors import UsageError
from winml.modelkit.ort.decoding.decoder import DecoderGraph, GraphCache, feeds_between
from winml.modelkit.ort.decoding.inputs import TOKEN_IDS, TOKEN_TYPES, TOKEN_VECTORS
from winml.modelkit.ort.graph_inputs import GraphInput, array_words, graph_inputs
from winml.modelkit.ort.sessions import Session

PIXEL_MASK = "pixel_attention_mask"
"""Specified by transformers: which pixels belong to a picture, where a processor fills it up."""
_IMAGES_RANK = 5
"""Rows, images in a row, channels, height and width."""


@dataclass(frozen=True)
class VisionLanguageSessions:
    """The graphs of one model in their sessions."""

    vision: Session
    embedding: Session
    decoder: Session


@dataclass(frozen=True)
class VisionLanguageFiles:
    """What a decoder is shown: the graphs that see and embed, and what the first is given."""

    vision: Path
    embedding: Path
    pixels: Arrays
    """By name of the input; empty without a picture."""
    kinds: Array | None = None
    """Kind of each token of the prompt, where the decoder is told it."""
    positions: Array | None = None
    """Positions of the tokens of the prompt in several rows, where the decoder takes such and there is a picture."""


class TokenEmbedder:
    """The graph that sees, and the one that makes vectors of tokens and of what was seen.

    Attributes:
        image_inputs: What the graph that sees takes, in order.
        places: Tokens that hold places for images.
    """

    def __init__(self, vision: Session, embedding: Session) -> None:
        """Look at how the graphs belong together.

        Raises:
            InputError: they do not say it.
        """
        self._vision, self._embedding = vision, embedding
        self.image_inputs: tuple[GraphInput, ...] = graph_inputs(vision)
        self._seen = feeds_between(vision, embedding)
        by_name = {item.name: item for item in graph_inputs(embedding)}
        self.places = [value for value, _ in by_name[TOKEN_IDS].first_values]
        self._no_features = {name: _no_rows(by_name[name]) for name in self._seen.values()}

    def see(self, passed: Arrays) -> dict[str, Array]:
        """Return what the model makes of images, for :meth:`embed`.

        Args:
            passed: Inputs of the graph that sees, by name.

        Raises:
            UsageError: an input is missing, or has a shape the graph does not take.
            StageError: ONNX Runtime fails.
        """
        feeds = {}
        for item in self.image_inputs:
            if item.name not in passed:
                raise UsageError(
                    f"missing input {item.name!r}: {self._vision.name} takes {item.words}",
                    hint="Pass the outputs of the model's processor for an image.",
                )
            feeds[item.name] = np.ascontiguousarray(passed[item.name].astype(item.dtype, copy=False))
        feeds = self._one_in_each_row(feeds, passed.get(PIXEL_MASK))
        rows = self.image_inputs[0].shape[0]
        count = len(next(iter(feeds.values())))
        # Of a graph that sees a fixed number, as many runs as there are such.
        step = rows if isinstance(rows, int) else max(count, 1)
        pieces = [
            {name: array[start : start + step] for name, array in feeds.items()} for start in range(0, count, step)
        ]
        for item in self.image_inputs:
            if odd := [piece[item.name] for piece in pieces if not item.takes_sizes(piece[item.name].shape)]:
                raise UsageError(
                    f"input {item.name!r} is {array_words(odd[0])}, but {self._vision.name} was built for {item.words}",
                    hint="Pass that size, or build the model with a dynamic size.",
                )
        outputs = [self._vision.run(piece, list(self._seen)) for piece in pieces]
        if not outputs:
            return {}
        return {name: np.concatenate([answer[output] for answer in outputs]) for output, name in self._seen.items()}

    def _one_in_each_row(self, feeds: dict[str, Array], mask: Array | None) -> dict[str, Array]:
        """Return pictures with one in each row, for a graph that sees such; without filler, which is zero.

        Args:
            feeds: As a processor makes them: of rows with several pictures, those with fewer are filled up.
            mask: Which pixels belong to a picture; None: all.

        Raises:
            UsageError: some do not.
        """
        item = self.image_inputs[0]
        pixels = feeds[item.name]
        is_of_rows = len(feeds) == 1 and pixels.ndim == len(item.shape) == _IMAGES_RANK and item.shape[1] == 1
        if is_of_rows:
            pixels = pixels.reshape(-1, 1, *pixels.shape[2:])
            is_real = pixels.any(axis=(1, 2, 3, 4))
            pixels = pixels[is_real]
        if mask is not None and item.name != PIXEL_MASK and PIXEL_MASK not in feeds:
            displayed = mask.reshape(-1, *mask.shape[2:])[is_real] if is_of_rows else mask
            if not displayed.all():
                raise UsageError(
                    f"{PIXEL_MASK} masks pixels, but {self._vision.name} does not support masked pixels",
                    hint="Pass images of the full input size: the processor splits or resizes them.",
                )
        return {**feeds, item.name: pixels}

    def count_places(self, tokens: Any) -> int:
        """Return how many places for images tokens hold."""
        return int(np.isin(np.asarray(tokens), self.places).sum())

    def embed(self, tokens: Array, seen: Arrays) -> dict[str, Array]:
        """Return the vectors of tokens; those of images where tokens hold their places.

        Args:
            tokens: Integers of shape [batch, sequence].
            seen: What :meth:`see` made of images; looked at where tokens hold places.

        Returns:
            By name of the output, of shape [batch, sequence, …].

        Raises:
            UsageError: there are more places than vectors, or fewer.
            StageError: ONNX Runtime fails.
        """
        places = self.count_places(tokens)
        features = self._no_features
        if places:
            features = {name: seen.get(name, empty) for name, empty in self._no_features.items()}
            for array in features.values():
                vectors = array.size // array.shape[-1]
                if vectors != places:
                    raise UsageError(
                        f"the tokens have {places} image placeholders, but the images result in {vectors} embeddings",
                        hint="Create tokens and pixels from the same text and images with the model's processor; "
                        "after a KV cache, pass the pixels of new images only.",
                    )
        return self._embedding.run({TOKEN_IDS: tokens, **features})


class VisionLanguageDecoder(DecoderGraph):
    """A decoder that is given vectors of tokens, with what makes them.

    Attributes:
        embedder: What makes them; what it sees goes to :meth:`empty_cache`.
    """

    fed_input: ClassVar[str] = TOKEN_VECTORS

    def __init__(self, sessions: VisionLanguageSessions) -> None:
        """Look at how the graphs belong together.

        Raises:
            InputError: they do not say it, or the decoder does not generate.
        """
        self.embedder = TokenEmbedder(sessions.vision, sessions.embedding)
        self._vectors = feeds_between(sessions.embedding, sessions.decoder)
        super().__init__(sessions.decoder, values=self._vectors.values())

    @property
    def takes_kinds(self) -> bool:
        """Whether it is told the kind of each token, by which those of an image see each other."""
        return TOKEN_TYPES in self._by_name

    def run(
        self,
        tokens: Array,
        mask: Array | None = None,
        positions: Array | None = None,
        cache: GraphCache | None = None,
    ) -> Array:
        """Answer tokens; see :meth:`DecoderGraph.run`.

        The scores of tokens that stand for images are −∞: none may follow, since there is no picture to show then.
        Images whose places were read are forgotten: further places need further images.
        """
        logits = super().run(tokens, mask, positions, cache)
        if cache is not None and self.embedder.count_places(tokens):
            cache.encoded = {}
        elif cache is not None:
            cache.encoded.pop(TOKEN_TYPES, None)
        logits[..., self.embedder.places] = -np.inf
        return logits

    def token_kinds(self, values: Array, cache: GraphCache | None) -> Array:
        """Return the kind of each token of a run: as given, else that of one that sees only those before it.

        Raises:
            UsageError: kinds of other tokens are given.
        """
        passed = cache.encoded.get(TOKEN_TYPES) if cache is not None else None
        if passed is None:
            return super().token_kinds(values, cache)
        if passed.shape != values.shape[:2]:
            raise UsageError(
                f"{TOKEN_TYPES} is {array_words(passed)}; expected one for each token, {list(values.shape[:2])}",
                hint="Pass the outputs of the model's processor for the same text and images.",
            )
        return passed

    def token_values(self, tokens: Array, cache: GraphCache | None) -> Array:
        """Return the vectors of tokens, side by side, so that they are divided into runs as one.

        Args:
            tokens: Integers of shape [batch, sequence].
            cache: Holds what the model made of images.

        Raises:
            UsageError: there are more places than vectors, or fewer.
        """
        vectors = self.embedder.embed(tokens, {} if cache is None else cache.encoded)
        return np.concatenate([vectors[output] for output in self._vectors], axis=-1)


def _no_rows(item: GraphInput) -> Array:
    """Return the value of an input where there are no images."""
    return np.zeros((0, *(size for size in item.shape[1:] if isinstance(size, int))), np.dtype(item.dtype))
