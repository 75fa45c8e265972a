"""Runs an encoder and a decoder, each a graph: the encoder once, the decoder token by token.

Which output of the encoder becomes which input of the decoder is said by the files (``winml.part``). Needs numpy and
ONNX Runtime only. Chooses no token.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.errors import UsageError
from winml.modelkit.ort.decoding.decoder import DecoderGraph, GraphCache, feeds_between, text_tokens
from winml.modelkit.ort.decoding.inputs import MASK
from winml.modelkit.ort.graph_inputs import GraphInput, array_words, graph_inputs
from winml.modelkit.ort.sessions import Session

_DECODER_MASK = "encoder_attention_mask"
"""Specified: how transformers and optimum call the mask over the encoder's tokens at the decoder."""
_LENGTH_KEYS = {"input_ids": "sequence_length", "input_features": "num_frames", "input_values": "audio_length"}
"""What an encoder reads → the key of ``--shape-config`` for how much of it."""
_NORMS_OVER_LENGTHS = frozenset({"InstanceNormalization", "GroupNormalization", "GroupNorm"})
"""Specified: operators whose mean and variance are taken over all axes behind the channels."""


class EncoderDecoder:
    """An encoder and the decoder that reads what it answers.

    Attributes:
        inputs: What the encoder takes, in order.
        decoder: The graph of the decoder.
        text: How a text begins and ends; None where the files beside the model say it.
    """

    def __init__(self, encoder: Session, decoder: Session) -> None:
        """Look at how the graphs belong together.

        Raises:
            InputError: they do not say it, or the decoder does not generate.
        """
        self._encoder = encoder
        self.inputs: tuple[GraphInput, ...] = graph_inputs(encoder)
        self._feeds = feeds_between(encoder, decoder)
        self.text = text_tokens(decoder)
        self.decoder = DecoderGraph(decoder, {*self._feeds.values(), _DECODER_MASK})

    def encode(self, passed: Arrays) -> dict[str, Array]:
        """Return what the decoder takes of the encoder's answer, by name of its input.

        A text or a recording shorter than the one length the graph takes is padded, where a mask hides the padding.

        Args:
            passed: Inputs of the encoder by name; a mask that is not given hides nothing.

        Raises:
            UsageError: an input is missing, has a shape the graph does not take, or cannot be padded.
            StageError: ONNX Runtime fails.
        """
        passed = self._padded(passed)
        feeds = {item.name: self._fitted(item, passed) for item in self.inputs}
        answer = self._encoder.run(feeds, list(self._feeds))
        encoded = {name: answer[output] for output, name in self._feeds.items()}
        if _DECODER_MASK in self.decoder.encoded and _DECODER_MASK not in encoded:
            encoded[_DECODER_MASK] = feeds[MASK]
        return encoded

    def start(self, passed: Arrays) -> GraphCache:
        """Encode, and return the state of the decoder before its first token; see :meth:`encode`."""
        encoded = self.encode(passed)
        return self.decoder.empty_cache(len(next(iter(encoded.values()))), encoded)

    @property
    def unpadded_inputs(self) -> tuple[GraphInput, ...]:
        """Inputs as they may be fed: open along the length, to which :meth:`encode` pads or which it demands."""
        return tuple(
            replace(item, shape=(item.shape[0], None, *item.shape[2:]))
            if self._length is not None and item.shape[1:2] == (self._length,)
            else item
            for item in self.inputs
        )

    @property
    def _length(self) -> int | None:
        """The one length of a text or a recording that the graph takes; None where it is open."""
        lengths = {item.name: item.shape[1] for item in self.inputs if len(item.shape) == 2}
        length = next((lengths[name] for name in (MASK, *_LENGTH_KEYS) if name in lengths), None)
        return length if isinstance(length, int) else None

    def _padded(self, passed: Arrays) -> Arrays:
        """Return inputs with zeros up to the length of the graph, where that is a number and a mask hides them."""
        length = self._length
        content = next((item.name for item in self.inputs if item.name != MASK and item.name in passed), None)
        if length is None or content is None:
            return passed
        rows = np.asarray(passed[content]).shape[:2]
        if rows[1] < length:
            self._refuse_padding(content, rows[1], length)
        arrays = {MASK: np.ones(rows, np.int64), **{name: np.asarray(array) for name, array in passed.items()}}
        return {
            name: np.pad(array, [(0, 0), (0, length - array.shape[1]), *[(0, 0)] * (array.ndim - 2)])
            if array.shape[:2] == rows and array.shape[1] < length
            else array
            for name, array in arrays.items()
        }

    def _refuse_padding(self, name: str, passed: int, length: int) -> None:
        if self._unpaddable is not None:
            raise UsageError(
                f"input {name!r} has a length of {passed}, but {self._encoder.name} was built for {length}: "
                f"padding would change the outputs, because {self._unpaddable}",
                hint=f"Pass exactly {length}{_other_length(name, passed)}.",
            )

    @functools.cached_property
    def _unpaddable(self) -> str | None:
        """Why padding changes the answer; None where a mask hides it.

        for: Moonshine, whose group norm takes mean and variance over the whole recording. transformers answers
        otherwise of a padded recording as well.
        """
        from winml.modelkit.onnx.files.reading import read_structure

        if all(item.name != MASK for item in self.inputs):
            return "the graph takes no mask for it"
        nodes = read_structure(Path(self._encoder.name)).graph.node
        is_normalized = any(node.op_type in _NORMS_OVER_LENGTHS for node in nodes)
        return "the model normalizes over the full length" if is_normalized else None

    def _fitted(self, item: GraphInput, passed: Arrays) -> Array:
        array = passed.get(item.name)
        if array is None and item.name == MASK:
            tokens = next(iter(passed.values()))
            array = np.ones(tokens.shape[:2], np.int64)
        if array is None:
            raise UsageError(
                f"missing input {item.name!r}: {self._encoder.name} takes {item.words}",
                hint=f"Its inputs: {', '.join(other.name for other in self.inputs)}.",
            )
        array = np.ascontiguousarray(np.asarray(array).astype(item.dtype, copy=False))
        if not item.takes_sizes(array.shape):
            raise UsageError(
                f"input {item.name!r} is {array_words(array)}, but {self._encoder.name} was built for {item.words}",
                hint=self._way_out(item, array),
            )
        return array

    def _way_out(self, item: GraphInput, array: Array) -> str:
        if self._length is not None and item.shape[1:2] == (self._length,) and array.shape[1] > self._length:
            most = "exactly" if self._unpaddable else "at most"
            return f"Pass {most} {self._length}{_other_length(item.name, array.shape[1])}."
        return "Pass that size, or build the model with a dynamic size."


def _other_length(name: str, length: int) -> str:
    key = _LENGTH_KEYS.get(name)
    words = f" with --shape-config '{{\"{key}\": {length}}}'" if key else f" for {length}"
    return f", or build the model{words}"
