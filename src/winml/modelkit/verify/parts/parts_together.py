"""Do the files of all parts, one after another, return the outputs of PyTorch? For models with a decoder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.compare.fidelity import OutputFidelity, output_fidelity
from winml.modelkit.compare.outputs import GenerationInfo
from winml.modelkit.errors import first_line
from winml.modelkit.export.tensors import to_numpy
from winml.modelkit.load.caches.arguments import TOKENS, empty_states
from winml.modelkit.load.parts import ModelPart
from winml.modelkit.runtime.decoding.inputs import MASK, POSITIONS, SCORES
from winml.modelkit.verify.generated_text import as_the_user_calls_it, generates_alone, held_tokens
from winml.modelkit.verify.input_draws import InputDraws
from winml.modelkit.verify.parts.encoder_decoder import (
    EncoderDecoderParts,
    beyond_memory,
    compare_encoder_decoder_generation,
    failures_as_unverified,
    new_tokens,
    opened_file,
    sizes_of_rows,
)
from winml.modelkit.verify.parts.vision_language import (
    VisionLanguageParts,
    compare_vision_language_generation,
    measure_vision_language_text,
)
from winml.modelkit.verify.reference_run import PreparedPart, prepared_part, run_reference, with_values
from winml.modelkit.verify.streamed_reference import with_streamed_values

# --- How much of PyTorch's scores is left when encoder and decoder, each in a file of few bits, answer together?
#
# PyTorch reads a text at once. The files read it as their reader does: what the encoder's file answered goes to the
# decoder's, and in every run what that returned in the run before. So the errors of both, and of the cache, add up.


_ROWS = 2
_SINGLE_STEPS = 8
"""Chosen: runs of one token, after which the rest of the text is read at once."""


@dataclass(frozen=True)
class TextSample:
    """What encoder and decoder read in use."""

    inputs: Arrays
    """Of the encoder, by name."""
    tokens: Array
    """Of a text, integers [tokens]."""


def measure_encoder_decoder_text(
    parts: EncoderDecoderParts, seed: int, sample: TextSample | None = None
) -> OutputFidelity | str:
    """Measure how near the scores of a text are to those of PyTorch; return why not, where they cannot be.

    Args:
        parts: The parts and their files.
        seed: Seed of what is encoded, and of the text.
        sample: What is encoded, and tokens of the text; random ones follow where these are too few. None: all random.

    Raises:
        VerificationError: ONNX Runtime cannot run a file.
    """
    decoder = parts.decoder.part
    count = new_tokens(decoder)
    if isinstance(count, str):
        return count
    paths = [path for path in (parts.encoder_path, parts.decoder_path) if path is not None]
    if reason := beyond_memory(paths):
        return reason
    if sample is not None:
        inputs = {name: torch.from_numpy(array) for name, array in sample.inputs.items()}
    else:
        inputs = InputDraws(parts.encoder, seed).draw(1, sizes_of_rows(parts.encoder, _ROWS), with_padding=True)
    rows = len(next(iter(inputs.values())))
    spec = next(spec for spec in decoder.inputs if spec.name == TOKENS)
    low, high = spec.value_range or (0, 1)
    tokens = np.random.default_rng(seed).integers(int(low), int(high) + 1, (rows, count))
    if sample is not None:
        tokens[:, : len(sample.tokens)] = sample.tokens[:count]
    try:
        encoded, expected = _reference(parts, inputs, tokens)
    except Exception as error:  # code of the model
        return f"PyTorch fails on the text: {type(error).__name__}: {first_line(error)}"
    with failures_as_unverified():
        if parts.encoder_path is not None:
            arrays = {name: to_numpy(value) for name, value in inputs.items()}
            encoded = opened_file(parts.encoder_path).run(arrays)
        scores = np.concatenate([*_scores(parts, parts.taken(encoded, inputs), tokens)], axis=1)
    return output_fidelity(f"{SCORES} of {count} tokens", [expected], [scores])


def _reference(parts: EncoderDecoderParts, inputs: dict[str, torch.Tensor], tokens: Array) -> tuple[Arrays, Array]:
    """Return what the encoder answers in PyTorch, and the scores after each token of a text."""
    decoder = parts.decoder.part
    assert decoder.cache is not None
    with as_the_user_calls_it(parts.decoder), prepared_part(parts.encoder) as encoder:
        encoded = _answered(encoder, inputs)
    passed = {
        TOKENS: torch.from_numpy(tokens),
        **{name: torch.from_numpy(np.array(value)) for name, value in parts.taken(encoded, inputs).items()},
    }
    states = empty_states(decoder.cache, len(tokens))
    told = _told_of_tokens(decoder, len(tokens), 0, tokens.shape[1], 0)
    passed |= {name: torch.from_numpy(value) for name, value in told.items()}
    ordered = {spec.name: passed[spec.name] if spec.name in passed else states[spec.name] for spec in decoder.inputs}
    return encoded, _answered(parts.decoder, ordered)[SCORES]


def _answered(prepared: PreparedPart, inputs: dict[str, torch.Tensor]) -> Arrays:
    with with_values(prepared) as held, with_streamed_values(held) as weighted:
        return run_reference(weighted, inputs)


def _scores(parts: EncoderDecoderParts, taken: Arrays, tokens: Array) -> Iterator[Array]:
    """Yield the scores of the decoder's file, run by run."""
    cache = parts.decoder.part.cache
    assert cache is not None
    run = opened_file(parts.decoder_path).run
    decoder, (rows, count) = parts.decoder.part, tokens.shape
    held = held_tokens(decoder)
    states: Arrays = {name: to_numpy(value) for name, value in empty_states(cache, rows, held or 0).items()}
    ends = [*range(1, min(_SINGLE_STEPS, count) + 1), count] if held is None else range(1, count + 1)
    for start, end in zip([0, *ends], ends, strict=False):
        if start == end:
            return
        told = _told_of_tokens(decoder, rows, start, end, held or start)
        output = run({TOKENS: tokens[:, start:end], **taken, **told, **states})
        states = {
            state.input: output[state.output]
            if held is None or state.token_axis is None
            else np.take(output[state.output], range(-held, 0), axis=state.token_axis)
            for state in cache.states
        }
        yield output[SCORES]


def _told_of_tokens(decoder: ModelPart, rows: int, start: int, end: int, cached: int) -> Arrays:
    """Return mask and positions of tokens, where a decoder takes these of its own: one of fixed sizes does."""
    mask = np.zeros((rows, cached + end - start), np.int64)
    mask[:, -end:] = 1
    told: Arrays = {MASK: mask, POSITIONS: np.broadcast_to(np.arange(start, end), (rows, end - start)).copy()}
    names = {spec.name for spec in decoder.inputs}
    return {name: value for name, value in told.items() if name in names}


def decodes_for_others(part: ModelPart, parts: Sequence[ModelPart]) -> bool:
    """Say whether a part decodes what other parts made."""
    return part.cache is not None and len(parts) > 1 and not generates_alone(part)


def compare_text_together(
    parts: Sequence[ModelPart], decoder: PreparedPart, paths: Mapping[str, Path], seed: int
) -> GenerationInfo | str:
    """Compare the text of all files with that of PyTorch, token by token; return why not, where it cannot be.

    Args:
        parts: The parts of the model.
        decoder: That of them which decodes what the others made.
        paths: Name of the part → its file; without those that were not asked for.
        seed: Seed of what is drawn.

    Raises:
        VerificationError: PyTorch generates another text, or ONNX Runtime cannot run a file.
    """
    found = _grouped(parts, decoder, paths)
    if isinstance(found, VisionLanguageParts):
        return compare_vision_language_generation(found, seed)
    return compare_encoder_decoder_generation(found, seed)


def measure_text_together(
    parts: Sequence[ModelPart],
    decoder: PreparedPart,
    paths: Mapping[str, Path],
    seed: int,
    sample: TextSample | None = None,
) -> OutputFidelity | str:
    """Measure how near the scores of all files are to those of PyTorch; see :func:`compare_text_together`.

    ``sample`` is what encoder and decoder of a text read; None: random values.
    """
    found = _grouped(parts, decoder, paths)
    return (
        measure_vision_language_text(found, seed)
        if isinstance(found, VisionLanguageParts)
        else measure_encoder_decoder_text(found, seed, sample)
    )


def _grouped(
    parts: Sequence[ModelPart], decoder: PreparedPart, paths: Mapping[str, Path]
) -> VisionLanguageParts | EncoderDecoderParts:
    others = [part for part in parts if part is not decoder.part]
    assert decoder.part.cache is not None  # it decodes
    if decoder.part.cache.side is None:
        vision, maker = others
        return VisionLanguageParts(vision, maker, decoder, paths)
    (encoder,) = others
    return EncoderDecoderParts(encoder, decoder, paths[decoder.part.name], paths.get(encoder.name))
