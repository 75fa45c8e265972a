"""Do encoder and decoder, each in a file, generate what the encoder-decoder generates?

The model generates in PyTorch, greedily, with its own caches; then tokens at once after what it wrote. The files are
given the same inputs and tokens: the encoder's answer goes to the decoder, and in every run what the decoder returned
in the run before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

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
    greedy_generation,
    held_tokens,
    reason_of_sizes,
)
from winml.modelkit.compare.verification.generation import compare_generation, read_scores
from winml.modelkit.compare.verification.input_draws import InputDraws
from winml.modelkit.compare.verification.parts.part_files import (
    beyond_memory,
    failures_as_unverified,
    opened_file,
    sizes_of_rows,
)
from winml.modelkit.compare.verification.reference_run import (
    PreparedPart,
    dtypes_inside,
    prepared_part,
    run_reference,
    with_values,
)
from winml.modelkit.compare.verification.stable_draws import has_uncertain_scores
from winml.modelkit.compare.verification.varied_sizes import Draw
from winml.modelkit.errors import first_line
from winml.modelkit.models.caches.arguments import (
    DECODER_TOKENS,
    ENCODER_MASK,
    ENCODER_OUTPUT_STATES,
    ENCODER_STATES,
    TOKENS,
    empty_states,
)
from winml.modelkit.models.parts import ModelPart
from winml.modelkit.models.state_restoration import unchanged_attributes
from winml.modelkit.models.tensors import to_numpy
from winml.modelkit.ort.decoding.inputs import MASK, POSITIONS, SCORES
from winml.modelkit.ort.foreign_libraries import quiet_libraries


@dataclass(frozen=True)
class EncoderDecoderParts:
    """Encoder and decoder of one model, and the files that were made of them."""

    encoder: ModelPart
    decoder: PreparedPart
    decoder_path: Path
    encoder_path: Path | None
    """None where it was not asked for: PyTorch encodes."""

    def taken(self, encoded: Arrays, inputs: Mapping[str, torch.Tensor]) -> dict[str, Array]:
        """Return what the decoder takes in every run, by name of its input.

        Args:
            encoded: The outputs of the encoder.
            inputs: Its inputs.
        """
        name = self.decoder.part.name
        taken = {feed.input: encoded[feed.output] for feed in self.encoder.feeds if feed.part == name}
        if ENCODER_MASK not in taken and any(spec.name == ENCODER_MASK for spec in self.decoder.part.inputs):
            taken[ENCODER_MASK] = to_numpy(inputs[MASK])
        return taken

    def encode(self, encoded: Arrays, inputs: Mapping[str, torch.Tensor]) -> Arrays:
        """Return the outputs of the encoder's file; ``encoded``, those of PyTorch, if there is no file."""
        if self.encoder_path is None:
            return encoded
        return opened_file(self.encoder_path).run({name: to_numpy(value) for name, value in inputs.items()})

    def stepping_decoder(self, fixed: Arrays) -> ModelPart:
        """Return the decoder without the inputs that are the same in every run."""
        decoder = self.decoder.part
        return replace(decoder, inputs=tuple(spec for spec in decoder.inputs if spec.name not in fixed))

    def open_decoder(self, fixed: Arrays) -> Callable[[Draw], Arrays]:
        """Return what runs the file of the decoder, fed with the inputs that are the same in every run as well."""
        run = opened_file(self.decoder_path).run
        return lambda draw: run({**draw.arrays, **fixed})


@dataclass(frozen=True)
class _Reference:
    """What PyTorch encoded and generated."""

    inputs: Mapping[str, torch.Tensor]
    encoded: Arrays
    """The outputs of the encoder."""
    text: GeneratedText


def compare_encoder_decoder_generation(parts: EncoderDecoderParts, seed: int) -> GenerationInfo | str:
    """Compare the scores that two files give, token by token, with those of PyTorch; return why not, where it cannot.

    Args:
        parts: The parts and their files.
        seed: Seed of what is encoded.

    Raises:
        VerificationError: the scores of a step differ, or ONNX Runtime cannot run a file.
    """
    # The model and its weights are gone before ONNX Runtime opens files.
    with with_values(parts.decoder) as weighted:
        reference = _generate(parts, weighted, seed)
    if isinstance(reference, str):
        return reference
    with failures_as_unverified():
        return _compare(parts, reference)


def _generate(parts: EncoderDecoderParts, weighted: PreparedPart, seed: int) -> _Reference | str:
    """Let PyTorch encode and generate; return why not, where it cannot."""
    model: Any = weighted.model
    encoder = replace(parts.encoder, model=model, stored=None, with_weights=None)
    decoder = parts.decoder.part
    count = _new_tokens(decoder)
    if isinstance(count, str):
        return count
    if not callable(getattr(model, "generate", None)):
        return f"{type(model).__name__} has no generate()"
    inputs = InputDraws(encoder, seed).draw(1, sizes_of_rows(encoder, ROWS), with_padding=True)
    try:
        with unchanged_attributes(model), quiet_libraries(), as_the_user_calls_it(weighted):
            with prepared_part(encoder) as prepared:
                encoded = run_reference(prepared, inputs)
            text = _text(decoder, model, inputs, encoded, count)
    except Exception as error:  # code of the model
        return f"generate() in PyTorch fails: {type(error).__name__}: {first_line(error)}"
    return _Reference(inputs, encoded, text)


def _new_tokens(decoder: ModelPart) -> int | str:
    """Return how many tokens are written to compare; why none are, where none can be."""
    if reason := reason_of_sizes(decoder):
        return reason
    held = held_tokens(decoder)
    room = decoder.most_tokens if held is None else held + 1
    count = NEW_TOKENS if room is None else min(NEW_TOKENS, room - 1 - SECOND_PROMPT)
    return count if count > 0 else f"the decoder has room for only {room} tokens"


def _text(
    decoder: ModelPart, model: Any, inputs: Mapping[str, torch.Tensor], encoded: Arrays, count: int
) -> GeneratedText:
    from transformers import GenerationMixin

    assert decoder.cache is not None
    # Classes that cut long inputs into pieces have a loop of their own around this one; those that let a module inside
    # them generate have none but theirs.
    generate: Any = partial(GenerationMixin.generate, model) if not decoder.path else model.generate
    settings = {"decoder_start_token_id": _start(model)} if not decoder.path else {"min_new_tokens": count}
    module, argument = model.get_submodule(decoder.path), decoder.cache.argument
    with greedy_generation(decoder, model, count, **settings) as cache:
        result = generate(**inputs, use_cache=True, return_dict_in_generate=True, output_logits=True)
    tokens = result.sequences
    runs = [(to_numpy(tokens[:, i : i + 1]), to_numpy(scores)[:, None]) for i, scores in enumerate(result.logits)]
    # The last token was chosen and not read yet.
    second = torch.cat([tokens[:, -1:], tokens[:, :1].expand(-1, SECOND_PROMPT - 1)], dim=1)
    if decoder.path:
        passed = {TOKENS: second, ENCODER_STATES: torch.from_numpy(np.array(encoded[ENCODER_OUTPUT_STATES]))}
    else:
        passed = {**inputs, DECODER_TOKENS: second}
    output = module(**passed, **decoder.forward_kwargs, **{argument: cache()})
    return GeneratedText.of_runs([*runs, (to_numpy(second), to_numpy(output[SCORES]))])


def _start(model: Any) -> int:
    """Return the token that a text begins with; any is as good where nothing says it."""
    configs = (getattr(model, "generation_config", None), model.config)
    found = (getattr(config, name, None) for name in ("decoder_start_token_id", "bos_token_id") for config in configs)
    return next((token for token in found if isinstance(token, int)), 0)


def _compare(parts: EncoderDecoderParts, reference: _Reference) -> GenerationInfo:
    decoder = parts.decoder.part
    encoded = parts.encode(reference.encoded, reference.inputs)
    fixed = parts.taken(encoded, reference.inputs)
    tensors = {name: torch.from_numpy(np.array(value)) for name, value in fixed.items()}
    rounding = Rounding(dtypes_inside(decoder.module, encoded))

    def is_uncertain(draw: Draw) -> bool:
        passed = {**draw.inputs, **tensors}
        ordered = {spec.name: passed[spec.name] for spec in decoder.inputs}
        return has_uncertain_scores(parts.decoder, replace(draw, inputs=ordered), rounding)

    return compare_generation(
        parts.stepping_decoder(fixed), reference.text, parts.open_decoder(fixed), rounding, is_uncertain
    )


@dataclass(frozen=True)
class TextSample:
    """What encoder and decoder read in use."""

    inputs: Arrays
    """Of the encoder, by name."""
    tokens: Array
    """Of a text, integers [tokens]."""


_SINGLE_STEPS = 8
"""Chosen: runs of one token, after which the rest of the text is read at once."""


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
    count = _new_tokens(decoder)
    if isinstance(count, str):
        return count
    paths = [path for path in (parts.encoder_path, parts.decoder_path) if path is not None]
    if reason := beyond_memory(paths):
        return reason
    if sample is not None:
        inputs = {name: torch.from_numpy(array) for name, array in sample.inputs.items()}
    else:
        inputs = InputDraws(parts.encoder, seed).draw(1, sizes_of_rows(parts.encoder, ROWS), with_padding=True)
    rows = len(next(iter(inputs.values())))
    spec = next(spec for spec in decoder.inputs if spec.name == TOKENS)
    low, high = spec.value_range or (0, 1)
    tokens = np.random.default_rng(seed).integers(int(low), int(high) + 1, (rows, count))
    if sample is not None:
        tokens[:, : len(sample.tokens)] = sample.tokens[:count]
    try:
        encoded, expected = _read_in_pytorch(parts, inputs, tokens)
    except Exception as error:  # code of the model
        return f"PyTorch fails on the text: {type(error).__name__}: {first_line(error)}"
    # The files read the text as their reader does, so that the errors of both, and of the cache, add up.
    single = min(_SINGLE_STEPS, count) if held_tokens(decoder) is None else count
    ends = [*range(1, single + 1), *([count] if single < count else [])]
    runs = zip([0, *ends], ends, strict=False)
    text = GeneratedText.of_runs([(tokens[:, start:end], expected[:, start:end]) for start, end in runs])
    with failures_as_unverified():
        fixed = parts.taken(parts.encode(encoded, inputs), inputs)
        read = read_scores(parts.stepping_decoder(fixed), text, parts.open_decoder(fixed))
        scores = np.concatenate([passed for _, passed in read], axis=1)
    return output_fidelity(f"{SCORES} of {count} tokens", [expected], [scores])


def _read_in_pytorch(
    parts: EncoderDecoderParts, inputs: dict[str, torch.Tensor], tokens: Array
) -> tuple[Arrays, Array]:
    """Return what the encoder answers in PyTorch, and the scores after each token of a text."""
    decoder = parts.decoder.part
    assert decoder.cache is not None
    with as_the_user_calls_it(parts.decoder), prepared_part(parts.encoder) as encoder:
        encoded = _answered(encoder, inputs)
    passed = {
        TOKENS: torch.from_numpy(tokens),
        **{name: torch.from_numpy(np.array(value)) for name, value in parts.taken(encoded, inputs).items()},
    }
    mask, positions = np.ones_like(tokens), np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape).copy()
    passed |= {MASK: torch.from_numpy(mask), POSITIONS: torch.from_numpy(positions)}
    passed = {**empty_states(decoder.cache, len(tokens)), **passed}
    return encoded, _answered(parts.decoder, {spec.name: passed[spec.name] for spec in decoder.inputs})[SCORES]


def _answered(prepared: PreparedPart, inputs: dict[str, torch.Tensor]) -> Arrays:
    from winml.modelkit.compare.verification.streamed_reference import with_streamed_values  # by need

    with with_values(prepared) as held, with_streamed_values(held) as weighted:
        return run_reference(weighted, inputs)
