"""Do vision, embedding and decoder, each in a file, generate what the model generates from images and a text?

The model generates in PyTorch, greedily, from two rows of tokens that hold places for images, one of them padded on the
left; then it reads a second prompt. The files are given the same images and tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.compare.fidelity import OutputFidelity, output_fidelity
from winml.modelkit.compare.outputs import GenerationInfo, Rounding
from winml.modelkit.compare.verification.generated_text import (
    NEW_TOKENS,
    ROWS,
    SECOND_PROMPT,
    GeneratedText,
    as_the_user_calls_it,
    generated_text,
    reason_against,
)
from winml.modelkit.compare.verification.generation import compare_generation, read_scores
from winml.modelkit.compare.verification.input_draws import InputDraws
from winml.modelkit.compare.verification.parts.part_files import (
    MOST_WHOLE_BYTES,
    beyond_memory,
    failures_as_unverified,
    opened_decoder,
    opened_file,
    sizes_of_rows,
)
from winml.modelkit.compare.verification.reference_run import PreparedPart, dtypes_inside, with_values
from winml.modelkit.compare.verification.stable_draws import has_uncertain_scores
from winml.modelkit.compare.verification.varied_sizes import Draw
from winml.modelkit.errors import first_line
from winml.modelkit.models.caches.inputs import several_positions
from winml.modelkit.models.inputs.modalities.text import KINDS_PARAMETER
from winml.modelkit.models.parts import ModelPart
from winml.modelkit.models.state_restoration import unchanged_attributes
from winml.modelkit.models.tensors import to_numpy
from winml.modelkit.onnx.specs import InputTensorSpec
from winml.modelkit.ort.decoding.inputs import SCORES, TOKEN_IDS, plain_value
from winml.modelkit.ort.foreign_libraries import quiet_libraries
from winml.modelkit.words import size_words

Tensors = Mapping[str, torch.Tensor]

_TEXT, _PADDING = 7, 3
"""Chosen: tokens of a row beside the places of its images, and how many of them are padding in the first row."""


@dataclass(frozen=True)
class VisionLanguageParts:
    """The parts of one model, and the files that were made of them."""

    vision: ModelPart
    embedding: ModelPart
    decoder: PreparedPart
    paths: Mapping[str, Path]
    """Name of the part → its file; without those that were not asked for."""


@dataclass(frozen=True)
class _Reference:
    """What PyTorch was shown, and what it generated."""

    images: Tensors
    text: GeneratedText


def compare_vision_language_generation(parts: VisionLanguageParts, seed: int) -> GenerationInfo | str:
    """Compare the scores that three files give, token by token, with those of PyTorch; return why not, where it cannot.

    Args:
        parts: The parts and their files.
        seed: Seed of images and tokens.

    Raises:
        VerificationError: the scores of a step differ, or ONNX Runtime cannot run a file.
    """
    reference = _missing_words(parts) or _load_and_generate(parts, seed)
    if isinstance(reference, str):
        return reference
    decoder = parts.decoder.part
    rounding = Rounding(dtypes_inside(decoder.module, {}))

    with failures_as_unverified():
        return compare_generation(
            decoder,
            reference.text,
            _runs(parts),
            rounding,
            lambda draw: has_uncertain_scores(parts.decoder, draw, rounding),
            _vectors_of(parts, reference.images),
        )


def measure_vision_language_text(parts: VisionLanguageParts, seed: int) -> OutputFidelity | str:
    """Measure how near the scores of three files of few bits are to those of PyTorch; return why not, where it cannot.

    Args:
        parts: The parts and their files.
        seed: Seed of images and tokens.

    Raises:
        VerificationError: ONNX Runtime cannot run a file.
    """
    reason = _missing_words(parts) or beyond_memory(parts.paths.values()) or _held_words(parts.decoder)
    reference = reason or _load_and_generate(parts, seed)
    if isinstance(reference, str):
        return reference
    with failures_as_unverified():
        vectors = _vectors_of(parts, reference.images)
        read = list(read_scores(parts.decoder.part, reference.text, _runs(parts), vectors))
    expected, passed = (np.concatenate(scores, axis=1) for scores in zip(*read, strict=True))
    return output_fidelity(f"{SCORES} of {expected.shape[1]} tokens", [expected], [passed])


def _missing_words(parts: VisionLanguageParts) -> str:
    missing = [part.name for part in (parts.vision, parts.embedding) if part.name not in parts.paths]
    return f"{missing[0]} is not among the files" if missing else ""


def _held_words(decoder: PreparedPart) -> str:
    """Say why PyTorch does not generate with a model whose weights are read piece by piece; empty where it does."""
    size = sum(parameter.numel() * parameter.element_size() for parameter in decoder.model.parameters())
    if decoder.part.stored is None or size <= MOST_WHOLE_BYTES:
        return ""
    return f"its weights have {size_words(size)}; the limit for generating in PyTorch is {size_words(MOST_WHOLE_BYTES)}"


def _runs(parts: VisionLanguageParts) -> Callable[[Draw], Arrays]:
    run = opened_decoder(parts.paths[parts.decoder.part.name])
    return lambda draw: run(draw.arrays)


def _load_and_generate(parts: VisionLanguageParts, seed: int) -> _Reference | str:
    """Generate with the model and its weights, which are gone before ONNX Runtime opens files."""
    with with_values(parts.decoder) as weighted:
        return _generate(parts, weighted, seed)


def _generate(parts: VisionLanguageParts, weighted: PreparedPart, seed: int) -> _Reference | str:
    """Let PyTorch generate; return why not, where it cannot."""
    decoder = weighted.part
    if reason := reason_against(decoder):
        return reason
    tokens, mask = _prompt(parts.embedding, seed, is_padded=any(spec.first_values for spec in decoder.inputs))
    room = decoder.most_tokens
    free = room - tokens.shape[1] - SECOND_PROMPT if room is not None else NEW_TOKENS
    if free < 1:
        return f"the model has only {room} positions"
    places = _places(parts.embedding)
    images = _images(parts, seed, len(tokens))
    displayed = {**images, **_kinds(decoder, tokens, places)}
    if several_positions(decoder.inputs) is not None:
        # By these, the model makes the positions.
        displayed[KINDS_PARAMETER] = torch.isin(tokens, torch.tensor(places)).long()
    try:
        with as_the_user_calls_it(weighted), unchanged_attributes(weighted.model), quiet_libraries():
            text = generated_text(decoder, weighted.model, (tokens, mask), min(free, NEW_TOKENS), displayed, places)
    except Exception as error:  # code of the model
        return f"generate() in PyTorch fails: {type(error).__name__}: {first_line(error)}"
    return _Reference(images, text)


def _images(parts: VisionLanguageParts, seed: int, rows: int) -> Tensors:
    """Return images for so many rows of tokens; of a graph that takes a fixed number, as many draws as that takes."""
    vision = parts.vision
    if (grids := next((spec for spec in vision.inputs if spec.grid is not None), None)) is not None:
        return _images_of_grids(parts, grids, seed, rows)
    draws, count = InputDraws(vision, seed), vision.inputs[0].shape[0]
    if not isinstance(count, int):
        return draws.draw(1, sizes_of_rows(vision, ROWS))
    drawn = [draws.draw(number + 1) for number in range(rows // count)]
    return {name: torch.cat([tensors[name] for tensors in drawn]) for name in drawn[0]}


def _images_of_grids(parts: VisionLanguageParts, grids: InputTensorSpec, seed: int, rows: int) -> Tensors:
    """Return an image for each row of tokens, in whose places it fits: of as many columns as rows, and of fewer."""
    assert grids.grid is not None
    blocks, multiple = _place_count(parts.embedding), grids.grid.multiple
    heights = [height for height in range(1, blocks + 1) if blocks % height == 0 and height**2 <= blocks]
    edges = [(height, blocks // height) for height in itertools.islice(itertools.cycle(reversed(heights)), rows)]
    values = torch.tensor([[1, height * multiple, width * multiple] for height, width in edges])
    patches = int(values.prod(-1).sum())
    others = tuple(
        spec.model_copy(update={"shape": (patches, *spec.shape[1:])})
        for spec in parts.vision.inputs
        if spec.name != grids.name
    )
    drawn = InputDraws(replace(parts.vision, inputs=others), seed).draw(1, {})
    return {**drawn, grids.name: values}


def _place_count(embedding: ModelPart) -> int:
    """Return how many places for images a row of tokens holds."""
    spec = next(spec for spec in embedding.inputs if spec.name == TOKEN_IDS)
    return sum(count for _, count in spec.first_values)


def _prompt(embedding: ModelPart, seed: int, *, is_padded: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens that hold places for images, and their mask; the first of several rows is padded on the left.

    A single one is where it is asked for: of rows without padding, some models make no mask, and see ahead in all runs.
    """
    spec = next(spec for spec in embedding.inputs if spec.name == TOKEN_IDS)
    length = _place_count(embedding) + _TEXT
    tokens = InputDraws(embedding, seed).draw(1, {**sizes_of_rows(embedding, ROWS), str(spec.shape[1]): length})[
        TOKEN_IDS
    ]
    mask = torch.ones_like(tokens)
    if len(tokens) > 1 or is_padded:
        tokens[0] = tokens[0].roll(_PADDING)
        mask[0, :_PADDING] = 0
    return tokens, mask


def _kinds(decoder: ModelPart, tokens: torch.Tensor, places: list[int]) -> Tensors:
    """Return what the decoder is told of each token: which of them hold places, where it asks."""
    reported = {spec.name: (plain_value(spec), spec.first_values[0][0]) for spec in decoder.inputs if spec.first_values}
    is_place = torch.isin(tokens, torch.tensor(places))
    return {name: torch.where(is_place, marked, plain) for name, (plain, marked) in reported.items()}


def _places(embedding: ModelPart) -> list[int]:
    """Return the tokens that hold places for images."""
    return [value for spec in embedding.inputs if spec.name == TOKEN_IDS for value, _ in spec.first_values]


def _vectors_of(parts: VisionLanguageParts, images: Tensors) -> Callable[[Array], dict[str, Array]]:
    """Return what makes vectors of tokens with the files: with those of the images where tokens hold their places."""
    from winml.modelkit.ort.decoding.vision_language import TokenEmbedder  # imports onnxruntime

    embedder = TokenEmbedder(*(opened_file(parts.paths[part.name]) for part in (parts.vision, parts.embedding)))
    seen = embedder.see({name: to_numpy(value) for name, value in images.items()})
    created = {feed.output: feed.input for feed in parts.embedding.feeds}

    def vectors(tokens: Array) -> dict[str, Array]:
        answer = embedder.embed(tokens, seen)
        return {name: answer[output] for output, name in created.items()}

    return vectors
