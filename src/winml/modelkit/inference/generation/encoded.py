"""Runs an encoder and a decoder, each a graph: the encoder once, the decoder token by token.

Which output of the encoder becomes which input of the decoder is said by the files (``winml.part``). Needs numpy and
ONNX Runtime only. Chooses no token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from winml.modelkit.errors import UsageError
from winml.modelkit.inference.generation.graph import DecoderGraph, GraphCache, feeds_between, text_tokens
from winml.modelkit.runtime.graph_inputs import GraphInput, array_words, graph_inputs
from winml.modelkit.runtime.sessions import Session

__all__ = ["EncodedDecoder"]

Array = NDArray[Any]

_MASK, _DECODER_MASK = "attention_mask", "encoder_attention_mask"
"""Specified: how transformers and optimum call the mask over the encoder's tokens, at the encoder and the decoder."""


class EncodedDecoder:
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

    def encode(self, given: Mapping[str, Array]) -> dict[str, Array]:
        """Return what the decoder takes of the encoder's answer, by name of its input.

        Args:
            given: Inputs of the encoder by name; a mask that is not given hides nothing.

        Raises:
            UsageError: an input is missing, or has a shape the graph does not take.
            StageError: ONNX Runtime fails.
        """
        feeds = {item.name: self._fitted(item, given) for item in self.inputs}
        answer = self._encoder.run(feeds, list(self._feeds))
        encoded = {name: answer[output] for output, name in self._feeds.items()}
        if _DECODER_MASK in self.decoder.encoded:
            encoded[_DECODER_MASK] = feeds[_MASK]
        return encoded

    def start(self, given: Mapping[str, Array]) -> GraphCache:
        """Encode, and return the state of the decoder before its first token; see :meth:`encode`."""
        encoded = self.encode(given)
        return self.decoder.empty_cache(len(next(iter(encoded.values()))), encoded)

    def _fitted(self, item: GraphInput, given: Mapping[str, Array]) -> Array:
        array = given.get(item.name)
        if array is None and item.name == _MASK:
            tokens = next(iter(given.values()))
            array = np.ones(tokens.shape[:2], np.int64)
        if array is None:
            raise UsageError(
                f"input {item.name!r} is not given, and {self._encoder.name} takes {item.words}",
                hint=f"Its inputs: {', '.join(other.name for other in self.inputs)}.",
            )
        array = np.ascontiguousarray(np.asarray(array).astype(item.dtype, copy=False))
        if not item.takes_sizes(array.shape):
            raise UsageError(
                f"input {item.name!r} is {array_words(array)}, and {self._encoder.name} was built for {item.words}",
                hint="Give that size, or build the model with it left open.",
            )
        return array
