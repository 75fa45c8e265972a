"""Execution of decoders after other graphs: an encoder, or a vision encoder and the token embedding.

The files (``winml.part``) map outputs to inputs of other graphs. The outputs of an encoder or a vision encoder are
computed once; the decoder runs token by token. Needs numpy and ONNX Runtime only. Does not choose tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.errors import UsageError, opt
from winml.modelkit.file_names import DECODER, EMBEDDING, ENCODER, ONLY_PART, VISION, prompt_parts
from winml.modelkit.onnx.specs import InputTensorSpec
from winml.modelkit.ort.decoding.decoder import DecoderGraph, GraphCache, feeds_between, text_tokens
from winml.modelkit.ort.decoding.inputs import MASK, POSITIONS, TOKEN_IDS, TOKEN_TYPES, TOKEN_VECTORS
from winml.modelkit.ort.graph_inputs import array_words, fitted_array, graph_inputs
from winml.modelkit.ort.sessions import Session

_DECODER_MASK = "encoder_attention_mask"
"""Specified: how transformers and optimum call the mask over the encoder's tokens at the decoder."""
_LENGTH_KEYS = {"input_ids": "sequence_length", "input_features": "num_frames", "input_values": "audio_length"}
"""Encoder input → the key of ``--shape-config`` for its length."""
_NORMS_OVER_LENGTHS = frozenset({"InstanceNormalization", "GroupNormalization", "GroupNorm"})
"""Specified: operators whose mean and variance are taken over all axes behind the channels."""


PIXEL_MASK = "pixel_attention_mask"
"""Specified by transformers: marks the pixels of an image that a processor padded."""
_IMAGES_RANK = 5
"""Rows, images in a row, channels, height and width."""
_OTHER_SIZE_HINT = "Pass that size, or build the model with a dynamic size."


def open_decoder(files: Mapping[str, Path], open_file: Callable[[Path], Session]) -> DecoderGraph:
    """Open the graphs of a generative model.

    Args:
        files: Part → ONNX file.
        open_file: Opens a file.

    Raises:
        InputError: the files do not belong together, or the decoder does not generate.
        StageError: ONNX Runtime cannot load a file.
    """
    decoder = open_file(files.get(DECODER) or files[ONLY_PART])
    if VISION in files:
        return VisionLanguageDecoder(open_file(files[VISION]), open_file(files[EMBEDDING]), decoder)
    if ENCODER in files:
        return EncoderDecoder(open_file(files[ENCODER]), decoder)
    return DecoderGraph(decoder, prompts=[open_file(files[name]) for name in prompt_parts(files)])


class Encoder:
    """The graph of an encoder.

    Attributes:
        session: The graph in its session.
        inputs: Inputs of the graph, in order.
    """

    def __init__(self, encoder: Session, decoder: Session) -> None:
        """Map encoder outputs to decoder inputs as the files state.

        Raises:
            InputError: the files do not state it.
        """
        self.session = encoder
        self.inputs: tuple[InputTensorSpec, ...] = graph_inputs(encoder)
        self._feeds = feeds_between(encoder, decoder)
        self._is_mask_shared = _DECODER_MASK in decoder.inputs and _DECODER_MASK not in self._feeds.values()
        self.fixed_inputs = (*self._feeds.values(), _DECODER_MASK)
        """Inputs of the decoder that are the same in every step."""

    def encode(self, inputs: Arrays) -> dict[str, Array]:
        """Run the encoder; return decoder input → encoder output.

        A text or a recording shorter than the graph's fixed length is padded, if a mask hides the padding.

        Args:
            inputs: Inputs of the encoder by name; a missing mask hides no position.

        Raises:
            UsageError: an input is missing, has an unsupported shape, or cannot be padded.
            StageError: ONNX Runtime fails.
        """
        inputs = self._pad_inputs(inputs)
        feeds = {spec.name: self._fit_input(spec, inputs) for spec in self.inputs}
        outputs = self.session.run(feeds, list(self._feeds))
        encoded = {name: outputs[output] for output, name in self._feeds.items()}
        return {**encoded, _DECODER_MASK: feeds[MASK]} if self._is_mask_shared else encoded

    @property
    def unpadded_inputs(self) -> tuple[InputTensorSpec, ...]:
        """Accepted inputs; dynamic along the length, which :meth:`encode` pads or checks."""
        return tuple(
            spec.model_copy(update={"shape": (spec.shape[0], f"{spec.name}:1", *spec.shape[2:])})
            if self._length is not None and spec.shape[1:2] == (self._length,)
            else spec
            for spec in self.inputs
        )

    @property
    def _length(self) -> int | None:
        """The fixed length of a text or a recording; None if dynamic."""
        lengths = {spec.name: spec.shape[1] for spec in self.inputs if len(spec.shape) == 2}
        length = next((lengths[name] for name in (MASK, *_LENGTH_KEYS) if name in lengths), None)
        return length if isinstance(length, int) else None

    def _pad_inputs(self, inputs: Arrays) -> Arrays:
        """Pad inputs with zeros to the graph's fixed length, if a mask hides the padding.

        Raises:
            UsageError: no mask hides the padding.
        """
        length = self._length
        content = next((spec.name for spec in self.inputs if spec.name != MASK and spec.name in inputs), None)
        if length is None or content is None:
            return inputs
        rows = np.asarray(inputs[content]).shape[:2]
        if rows[1] < length:
            self._refuse_padding(content, rows[1], length)
        arrays = {MASK: np.ones(rows, np.int64), **{name: np.asarray(array) for name, array in inputs.items()}}
        return {
            name: np.pad(array, [(0, 0), (0, length - array.shape[1]), *[(0, 0)] * (array.ndim - 2)])
            if array.shape[:2] == rows and array.shape[1] < length
            else array
            for name, array in arrays.items()
        }

    def _refuse_padding(self, name: str, actual_length: int, length: int) -> None:
        """Refuse an input shorter than the fixed length if padding changes the outputs.

        Raises:
            UsageError: the message has the reason.
        """
        if self._padding_problem is not None:
            raise UsageError(
                f"input {name!r} has a length of {actual_length}, but {self.session.name} was built for {length}: "
                f"padding would change the outputs, because {self._padding_problem}",
                hint=f"Pass exactly {length}{_length_advice(name, actual_length)}.",
            )

    @functools.cached_property
    def _padding_problem(self) -> str | None:
        """Reason why padding changes the outputs; `None` if a mask hides the padding.

        for: Moonshine, whose group norm takes mean and variance over the whole recording. transformers' outputs also
        change for a padded recording.
        """
        from winml.modelkit.onnx.files.reading import read_structure

        if all(spec.name != MASK for spec in self.inputs):
            return "the graph takes no mask for it"
        nodes = read_structure(Path(self.session.name)).graph.node
        is_normalized = any(node.op_type in _NORMS_OVER_LENGTHS for node in nodes)
        return "the model normalizes over the full length" if is_normalized else None

    def _fit_input(self, spec: InputTensorSpec, inputs: Arrays) -> Array:
        """Return the array of an input in its type; a missing mask hides no position.

        Raises:
            UsageError: the input is missing, or has an unsupported shape.
        """
        array = inputs.get(spec.name)
        if array is None and spec.name == MASK:
            tokens = next(iter(inputs.values()))
            array = np.ones(tokens.shape[:2], np.int64)
        if array is None:
            raise UsageError(
                f"missing input {spec.name!r}: {self.session.name} takes {spec.words}",
                hint=f"Its inputs: {', '.join(known_input.name for known_input in self.inputs)}.",
            )
        return fitted_array(spec, np.asarray(array), self.session.name, self._size_hint(spec, np.asarray(array)))

    def _size_hint(self, spec: InputTensorSpec, array: Array) -> str:
        """Return advice on a wrong size of an input."""
        if (
            self._length is not None
            and spec.shape[1:2] == (self._length,)
            and array.ndim > 1
            and array.shape[1] > self._length
        ):
            most = "exactly" if self._padding_problem else "at most"
            return f"Pass {most} {self._length}{_length_advice(spec.name, array.shape[1])}."
        return _OTHER_SIZE_HINT


class EncoderDecoder(DecoderGraph):
    """A decoder that reads the outputs of an encoder.

    Attributes:
        encoder: The graph of the encoder.
        text: Start and end tokens; None if the files next to the model state them.
    """

    def __init__(self, encoder: Session, decoder: Session) -> None:
        """Connect the graphs.

        Raises:
            InputError: the files do not connect them, or the decoder does not generate.
        """
        self.encoder = Encoder(encoder, decoder)
        self.text = text_tokens(decoder)
        super().__init__(decoder, self.encoder.fixed_inputs)

    @property
    def first_inputs(self) -> tuple[InputTensorSpec, ...]:
        """Inputs of the encoder."""
        return self.encoder.inputs

    def encode(self, inputs: Arrays) -> dict[str, Array]:
        """Run the encoder; see :meth:`Encoder.encode`."""
        return self.encoder.encode(inputs)


def _length_advice(name: str, length: int) -> str:
    """Return advice to build the model for a length, as the end of a sentence."""
    key = _LENGTH_KEYS.get(name)
    size_words = f" with {opt.shape_config} '{{\"{key}\": {length}}}'" if key else f" for {length}"
    return f", or build the model{size_words}"


_FEATURES = "image_features"
"""Key of the image features that are inserted into the token embeddings here."""


class TokenEmbedder:
    """The vision encoder, and the graph that embeds tokens and image features.

    Attributes:
        image_inputs: Inputs of the vision encoder, in order.
        places: Ids of the image placeholder tokens.
    """

    def __init__(self, vision: Session, embedding: Session) -> None:
        """Connect the graphs.

        Raises:
            InputError: the files do not connect them.
        """
        self._vision, self._embedding = vision, embedding
        self.image_inputs: tuple[InputTensorSpec, ...] = graph_inputs(vision)
        # An embedding of tokens alone leaves the image features to whoever runs it.
        self._inserts = [*embedding.inputs] == [TOKEN_IDS]
        self._seen = dict.fromkeys(vision.outputs, _FEATURES) if self._inserts else feeds_between(vision, embedding)
        by_name = {spec.name: spec for spec in graph_inputs(embedding)}
        self.places = [value for value, _ in by_name[TOKEN_IDS].first_values]
        taken = () if self._inserts else self._seen.values()
        self._no_features = {name: _empty_value(by_name[name]) for name in taken}

    def encode_images(self, inputs: Arrays) -> dict[str, Array]:
        """Encode images for :meth:`embed`; `{}` for no images.

        Args:
            inputs: Inputs of the vision encoder, by name.

        Raises:
            UsageError: an input is missing, or has an unsupported shape.
            StageError: ONNX Runtime fails.
        """
        for spec in self.image_inputs:
            if spec.name not in inputs:
                raise UsageError(
                    f"missing input {spec.name!r}: {self._vision.name} takes {spec.words}",
                    hint="Pass the outputs of the model's processor for an image.",
                )
        feeds = {spec.name: inputs[spec.name] for spec in self.image_inputs}
        feeds = self._arrange_images(feeds, inputs.get(PIXEL_MASK))
        # A graph with a fixed number of images runs once per group of that size.
        steps = {
            spec.name: rows if isinstance(rows := spec.shape[0], int) else max(len(feeds[spec.name]), 1)
            for spec in self.image_inputs
        }
        runs = max(math.ceil(len(feeds[name]) / step) for name, step in steps.items())
        outputs = []
        for run in range(runs):
            images = {name: feeds[name][run * step : (run + 1) * step] for name, step in steps.items()}
            piece = {
                spec.name: fitted_array(spec, images[spec.name], self._vision.name, _OTHER_SIZE_HINT)
                for spec in self.image_inputs
            }
            self._refuse_other_grids(piece)
            outputs.append(self._vision.run(piece, list(self._seen)))
        if not outputs:
            return {}
        return {
            name: np.concatenate([piece_outputs[output] for piece_outputs in outputs])
            for output, name in self._seen.items()
        }

    def _refuse_other_grids(self, images: Arrays) -> None:
        """Refuse images of other sizes than those of the graph, of which the numbers of patches may be equal.

        Raises:
            UsageError: states both grids.
        """
        for spec in self.image_inputs:
            if (grid := spec.fixed_grid) and (images[spec.name] != grid).any():
                raise UsageError(
                    f"{spec.name} is {images[spec.name].tolist()}, but {self._vision.name} was built for images of "
                    f"{list(grid)} frames, rows and columns of patches",
                    hint="Resize the images to the height and width of the build.",
                )

    def _arrange_images(self, feeds: dict[str, Array], mask: Array | None) -> dict[str, Array]:
        """Rearrange images to one per row, if the graph requires it, without the all-zero filler images.

        Args:
            feeds: Output of a processor: rows with fewer images are filled up.
            mask: Valid pixels; None: all.

        Raises:
            UsageError: an image has padded pixels.
        """
        spec = self.image_inputs[0]
        pixels = feeds[spec.name]
        is_of_rows = len(feeds) == 1 and pixels.ndim == len(spec.shape) == _IMAGES_RANK and spec.shape[1] == 1
        if is_of_rows:
            pixels = pixels.reshape(-1, 1, *pixels.shape[2:])
            is_real = pixels.any(axis=(1, 2, 3, 4))
            pixels = pixels[is_real]
        if mask is not None and spec.name != PIXEL_MASK and PIXEL_MASK not in feeds:
            valid_pixels = mask.reshape(-1, *mask.shape[2:])[is_real] if is_of_rows else mask
            if not valid_pixels.all():
                raise UsageError(
                    f"{PIXEL_MASK} masks pixels, but {self._vision.name} does not support masked pixels",
                    hint="Pass images of the full input size: the processor splits or resizes them.",
                )
        return {**feeds, spec.name: pixels}

    def count_places(self, tokens: Any) -> int:
        """Count the image placeholders in tokens."""
        return int(np.isin(np.asarray(tokens), self.places).sum())

    def embed(self, tokens: Array, image_features: Arrays) -> dict[str, Array]:
        """Embed tokens, with image features in place of the placeholders.

        Args:
            tokens: Integers of shape [batch, sequence].
            image_features: Result of :meth:`encode_images`; used if tokens contain placeholders.

        Returns:
            Output name → embeddings of shape
            [batch, sequence, …].

        Raises:
            UsageError: the numbers of placeholders and image embeddings differ.
            StageError: ONNX Runtime fails.
        """
        slots = self.count_places(tokens)
        features = self._no_features
        if slots:
            features = {name: image_features.get(name, empty) for name, empty in self._no_features.items()}
            given = (
                [image_features[_FEATURES]] if self._inserts and _FEATURES in image_features else [*features.values()]
            )
            for array in given or [np.zeros((0, 1), np.float32)]:
                vectors = array.size // array.shape[-1]
                if vectors != slots:
                    raise UsageError(
                        f"the tokens have {slots} image placeholders, but the images result in {vectors} embeddings",
                        hint="Create tokens and pixels from the same text and images with the model's processor; "
                        "after a KV cache, pass the pixels of new images only.",
                    )
        vectors = self._embedding.run({TOKEN_IDS: tokens, **features})
        if self._inserts and slots:
            (name,) = vectors
            vectors[name] = np.array(vectors[name])  # ONNX Runtime's memory is read-only
            size = vectors[name].shape[-1]
            vectors[name][np.isin(tokens, self.places)] = image_features[_FEATURES].reshape(-1, size)
        return vectors


class VisionLanguageDecoder(DecoderGraph):
    """A decoder of token embeddings, with the vision encoder and the embedding graph.

    Attributes:
        embedder: The vision encoder and embedding graph; its image features are passed to :meth:`empty_cache`.
    """

    fed_input: ClassVar[str] = TOKEN_VECTORS

    def __init__(self, vision: Session, embedding: Session, decoder: Session) -> None:
        """Connect the graphs.

        Raises:
            InputError: the files do not connect them, or the decoder does not generate.
        """
        self.embedder = TokenEmbedder(vision, embedding)
        self._vectors = feeds_between(embedding, decoder)
        super().__init__(decoder, values=self._vectors.values())

    @property
    def first_inputs(self) -> tuple[InputTensorSpec, ...]:
        """Inputs of the vision encoder."""
        return self.embedder.image_inputs

    def encode(self, inputs: Arrays) -> dict[str, Array]:
        """Run the vision encoder on images; return its outputs and the token types.

        Args:
            inputs: Inputs of the vision encoder by name, none without images; ``token_type_ids`` if the decoder takes
                them.
        """
        kinds = {name: array for name, array in inputs.items() if name == TOKEN_TYPES}
        images = {name: array for name, array in inputs.items() if name not in (TOKEN_TYPES, POSITIONS)}
        return {**(self.embedder.encode_images(images) if images else {}), **kinds}

    @property
    def takes_kinds(self) -> bool:
        """True if the decoder takes token types, so that image tokens attend to each other."""
        return TOKEN_TYPES in self._by_name

    def run(
        self,
        tokens: Array,
        mask: Array | None = None,
        positions: Array | None = None,
        cache: GraphCache | None = None,
    ) -> Array:
        """Compute the logits of tokens; see :meth:`DecoderGraph.run`.

        The scores of image placeholders are −∞: a generated placeholder would have no image. Images are dropped after
        their placeholders were read: further placeholders need further images.
        """
        logits = super().run(tokens, mask, positions, cache)
        if cache is not None and self.embedder.count_places(tokens):
            cache.encoded = {}
        elif cache is not None:
            cache.encoded.pop(TOKEN_TYPES, None)
        logits[..., self.embedder.places] = -np.inf
        return logits

    def token_kinds(self, values: Array, cache: GraphCache | None) -> Array:
        """Return the type of each token of a run: as passed, else the type of a causal token.

        Raises:
            UsageError: the passed types do not fit the tokens.
        """
        kinds = cache.encoded.get(TOKEN_TYPES) if cache is not None else None
        if kinds is None:
            return super().token_kinds(values, cache)
        if kinds.shape != values.shape[:2]:
            raise UsageError(
                f"{TOKEN_TYPES} is {array_words(kinds)}; expected one for each token, {list(values.shape[:2])}",
                hint="Pass the outputs of the model's processor for the same text and images.",
            )
        return kinds

    def token_values(self, tokens: Array, cache: GraphCache | None) -> Array:
        """Return the embeddings of tokens, concatenated along the last axis.

        Args:
            tokens: Integers of shape [batch, sequence].
            cache: Holds the image features.

        Raises:
            UsageError: the numbers of placeholders and image embeddings differ.
        """
        vectors = self.embedder.embed(tokens, {} if cache is None else cache.encoded)
        return np.concatenate([vectors[output] for output in self._vectors], axis=-1)


def _empty_value(spec: InputTensorSpec) -> Array:
    """Return the empty value of an image input."""
    return np.zeros((0, *(size for size in spec.shape[1:] if isinstance(size, int))), np.dtype(spec.dtype))
