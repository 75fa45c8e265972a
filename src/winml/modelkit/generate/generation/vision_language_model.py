"""Drives a vision-language model by the generation loop of transformers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from winml.modelkit.errors import UsageError
from winml.modelkit.file_names import DECODER, EMBEDDING, VISION
from winml.modelkit.generate.generation.causal_lm import DecoderModel, open_sessions, passed_cache
from winml.modelkit.models.caches.layout import loop_cache_name
from winml.modelkit.models.inputs.modalities.text import KINDS_PARAMETER
from winml.modelkit.models.tensors import to_numpy
from winml.modelkit.onnx.files.foreign_files import foreign_parser
from winml.modelkit.ort.decoding.decoder import GraphCache
from winml.modelkit.ort.decoding.inputs import TOKEN_TYPES
from winml.modelkit.ort.decoding.vision_language import PIXEL_MASK, VisionLanguageDecoder, VisionLanguageSessions
from winml.modelkit.ort.foreign_libraries import local_files_only

_IMAGES_KEY = "winml_seen_images"
"""Among the arguments of the loop: what the model made of images before their rows were repeated."""


class VisionLanguageModel(DecoderModel):
    """What transformers' loop asks of a language model that is shown images, answered by three graphs.

    Attributes:
        graph: The graphs in their sessions.
        config: The model's config.
        generation_config: What decides how it generates where a call says nothing.
    """

    graph: VisionLanguageDecoder

    def __init__(self, files: Mapping[str, str | os.PathLike[str]], **options: Any) -> None:
        """Open the graphs; config and processor are in the folder of the decoder.

        Args:
            files: The ONNX files of ``vision``, ``embedding`` and ``decoder``.
            **options: Where they run; see :func:`~winml.modelkit.generate.generation.causal_lm.open_sessions`.

        Raises:
            InputError: the files do not belong together, or there is no config beside them.
            UsageError: the provider is unknown or not installed.
            StageError: ONNX Runtime cannot load a file.
        """
        sessions = open_sessions((files[name] for name in (VISION, EMBEDDING, DECODER)), **options)
        graph = VisionLanguageDecoder(VisionLanguageSessions(*sessions))
        self._take_graph(graph, Path(files[DECODER]).parent)

    @property
    def _extra_argument_names(self) -> tuple[str, ...]:
        """What a call may be given beside tokens."""
        kinds = (TOKEN_TYPES,) if self.graph.takes_kinds else ()
        by_image = (KINDS_PARAMETER,) if self.graph.position_rows is not None else ()
        return (*(item.name for item in self.graph.embedder.image_inputs), PIXEL_MASK, *kinds, *by_image)

    @cached_property
    def _positions(self) -> ImagePositions:
        return ImagePositions(self.config, self.graph.position_rows or 1)

    def _prepare_position_ids_for_generation(self, inputs_tensor: torch.Tensor, model_kwargs: Mapping[str, Any]) -> Any:
        # Called by transformers' loop: of a text alone, its own way; with pictures, that of the model.
        if self.graph.position_rows is None:
            loop: Any = super()  # declared for models of torch
            return loop._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)
        return self._positions.of_prompt(model_kwargs.get("input_ids", inputs_tensor), model_kwargs)

    def _validate_model_kwargs(self, model_kwargs: dict[str, object]) -> None:
        # Called by transformers' loop, which knows the names in a signature only.
        names = {*self._extra_argument_names, "labels"}
        model_kwargs.pop("labels", None)  # of processors for training as well; no forward is given them
        others = {name: value for name, value in model_kwargs.items() if name not in names}
        loop: Any = super()  # declared for models of torch
        loop._validate_model_kwargs(others)

    def _expand_inputs_for_generation(
        self, expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: Any = None, **model_kwargs: Any
    ) -> Any:
        # Called by transformers' loop, which repeats the rows of every tensor for beams: patches are no rows.
        loop: Any = super()  # declared for models of torch
        items = self.graph.embedder.image_inputs
        displayed = {item.name: model_kwargs[item.name] for item in items if model_kwargs.get(item.name) is not None}
        if expand_size > 1 and displayed and any(item.grid is not None for item in items):
            seen = self.graph.embedder.see({name: to_numpy(value) for name, value in displayed.items()})
            counts = [self.graph.embedder.count_places(to_numpy(row)) for row in input_ids]
            # An array: the loop repeats tensors.
            model_kwargs = {name: value for name, value in model_kwargs.items() if name not in displayed}
            model_kwargs[_IMAGES_KEY] = {name: _repeated(value, counts, expand_size) for name, value in seen.items()}
        return loop._expand_inputs_for_generation(expand_size, is_encoder_decoder, input_ids, **model_kwargs)

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: object = None,
        past_key_values: GraphCache | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        cache: GraphCache | None = None,
        **images: Any,
    ) -> CausalLMOutputWithPast:
        """Answer tokens; see :meth:`DecoderModel.forward`.

        Args:
            input_ids: Integers of shape [batch, sequence]; some of them may stand for images.
            attention_mask: As there.
            position_ids: As there; of a decoder that takes several of each token, rows of these. None: as the model
                makes them of the text and its pictures.
            past_key_values: As there.
            use_cache: As there.
            return_dict: As there.
            cache: As there.
            **images: What the graph that sees takes, such as ``pixel_values``; with a cache, of the images for which
                these tokens hold places. Not read where they hold none. With them ``token_type_ids``, where the decoder
                is told the kind of each token.

        Raises:
            UsageError: an input is missing, unknown or of a shape the graphs do not take.
            StageError: ONNX Runtime fails.
        """
        cache = passed_cache(cache, past_key_values)
        names = self._extra_argument_names
        if self.graph.position_rows is not None and position_ids is None and input_ids is not None:
            beside = {"attention_mask": attention_mask, loop_cache_name(): cache, **images}
            position_ids = self._positions.of_prompt(torch.as_tensor(input_ids), beside)
            position_ids = position_ids[..., -len(input_ids[0]) :]
        images.pop(KINDS_PARAMETER, None)
        seen_before = images.pop(_IMAGES_KEY, None)
        displayed = {name: to_numpy(images.pop(name)) for name in names if images.get(name) is not None}
        kinds = {TOKEN_TYPES: displayed.pop(TOKEN_TYPES)} if TOKEN_TYPES in displayed else {}
        if cache is None and input_ids is not None:
            seen = seen_before or (self.graph.embedder.see(displayed) if displayed else {})
            cache = self.graph.empty_cache(len(input_ids), {**seen, **kinds})
        elif displayed and isinstance(cache, GraphCache) and self.graph.embedder.count_places(input_ids):
            cache.encoded = {**self.graph.embedder.see(displayed), **kinds}
        others = {name: value for name, value in images.items() if name not in names}
        return super().forward(input_ids, attention_mask, position_ids, None, use_cache, return_dict, cache, **others)

    __call__ = forward


def _repeated(vectors: Any, counts: Sequence[int], times: int) -> Any:
    """Return the vectors of each row so many times, row by row.

    Args:
        vectors: Of all rows.
        counts: How many of them each row holds.
        times: How often.
    """
    pieces = np.split(vectors, np.cumsum(counts)[:-1])
    return np.concatenate([piece for piece in pieces for _ in range(times)])


class ImagePositions:
    """Makes the positions of tokens as the model of a config does."""

    def __init__(self, config: Any, rows: int) -> None:
        """Build the model, without its weights.

        Args:
            config: Of the model.
            rows: How many positions a token has.
        """
        from transformers import AutoModelForImageTextToText

        make: Any = AutoModelForImageTextToText
        words = "the model of config.json cannot be built"
        with local_files_only(), foreign_parser(words, hint="Correct or replace it."), torch.device("meta"):
            self._model = make.from_config(config)
        self._rows = rows

    def of_prompt(self, tokens: torch.Tensor, passed: Mapping[str, Any]) -> torch.Tensor:
        """Return the positions of tokens, and remember by how much later ones are ahead of their number.

        Args:
            tokens: Of shape [batch, sequence].
            passed: What else ``generate()`` is given, such as the grids of pictures and the kinds of tokens.

        Returns:
            Integers of shape [rows, batch, sequence].

        Raises:
            UsageError: there are grids of pictures, and nothing says which tokens stand for them.
        """
        grids = [name for name in passed if name.endswith("grid_thw") and passed[name] is not None]
        if grids and passed.get(KINDS_PARAMETER) is None:
            raise UsageError(
                f"{grids[0]} requires {KINDS_PARAMETER}, which marks the image tokens",
                hint="Pass all outputs of the model's processor for the text and the images.",
            )
        positions = self._model._prepare_position_ids_for_generation(tokens, dict(passed))
        several: torch.Tensor = positions[-self._rows :].expand(self._rows, *tokens.shape[:1], -1)
        return several
