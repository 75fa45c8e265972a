"""Do encoder and decoder, each in a file, generate what the encoder-decoder generates?

The model generates in PyTorch, greedily, with its own caches; then tokens at once after what it wrote. The files are
given the same inputs and tokens: the encoder's answer goes to the decoder, and in every run what the decoder returned
in the run before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.compare.outputs import GenerationInfo, Rounding
from winml.modelkit.errors import StageError, VerificationError, first_line
from winml.modelkit.export.state_restoration import unchanged_attributes
from winml.modelkit.export.tensors import to_numpy
from winml.modelkit.graph.bundle import PartFeed
from winml.modelkit.graph.files.graph_reading import graph_of
from winml.modelkit.graph.files.placing import external_files
from winml.modelkit.graph.files.reading import read_structure
from winml.modelkit.load.caches.arguments import (
    DECODER_TOKENS,
    ENCODER_MASK,
    ENCODER_OUTPUT_STATES,
    ENCODER_STATES,
    TOKENS,
)
from winml.modelkit.load.parts import ModelPart
from winml.modelkit.runtime.decoding.inputs import MASK, SCORES
from winml.modelkit.runtime.foreign_libraries import quiet_libraries
from winml.modelkit.verify.generated_text import (
    GeneratedText,
    as_the_user_calls_it,
    final_cache,
    held_tokens,
    plain_generation,
    token_count,
)
from winml.modelkit.verify.generation import compare_generation
from winml.modelkit.verify.input_draws import InputDraws
from winml.modelkit.verify.reference_run import PreparedPart, dtypes_inside, prepared_part, run_reference, with_values
from winml.modelkit.verify.single_rows import feeds_by_rows, joined_rows, takes_single_rows
from winml.modelkit.verify.stable_draws import is_decided_by_rounding
from winml.modelkit.verify.varied_sizes import Draw
from winml.modelkit.words import size_words

if TYPE_CHECKING:
    from winml.modelkit.runtime.sessions import Session

# --- Runs the files of several parts, and their model, to compare a text that all of them make together.


MOST_WHOLE_BYTES = 1_000_000_000
"""Chosen: files of more are not run as a whole, nor more weights held, since building takes less."""


def beyond_memory(paths: Iterable[Path]) -> str:
    """Return why files are not run one after another where only few bits are compared; empty where they are."""
    size = sum(file.stat().st_size for path in paths for file in (path, *external_files(path)))
    words = f"the files have {size_words(size)}; the limit for running them together is {size_words(MOST_WHOLE_BYTES)}"
    return words if size > MOST_WHOLE_BYTES else ""


def opened_file(path: Path) -> Session:
    """Return a file in ONNX Runtime, opened with its defaults."""
    from winml.modelkit.runtime.sessions import Session  # imports onnxruntime

    return Session(path)


def opened_decoder(path: Path) -> Callable[[Arrays], Arrays]:
    """Return what runs a decoder in a file as :func:`opened_file` does, row by row where it takes no more."""
    run = opened_file(path).run
    if not takes_single_rows(graph_of(read_structure(path), path)):
        return run
    return lambda feeds: joined_rows([run(rows) for rows in feeds_by_rows(feeds)])


@contextmanager
def failures_as_unverified() -> Iterator[None]:
    """Tell a file that does not run as one that was not verified.

    Raises:
        VerificationError: ONNX Runtime cannot run a file.
    """
    try:
        yield
    except StageError as error:
        raise VerificationError(
            f"cannot generate with the files: {error.message}",
            hint="--no-verify writes them without comparing.",
            is_graph_wrong=True,
        ) from error


def is_rounding(prepared: PreparedPart, inputs: Mapping[str, torch.Tensor], rounding: Rounding) -> bool:
    """Say whether rounding decides what PyTorch answers to inputs of a part."""
    with with_values(prepared) as weighted:
        draw = Draw(inputs, run_reference(weighted, inputs), {})
        return is_decided_by_rounding(weighted, draw, [SCORES], rounding)


def sizes_of_rows(part: ModelPart, rows: int) -> dict[str, int]:
    """Return the sizes a part is traced with, and so many rows."""
    batch = part.inputs[0].shape[0]
    return {name: rows if name == batch else size for name, size in part.trace_sizes.items()}


_NEW_TOKENS = 32
_SECOND_PROMPT = 4
_ROWS = 2


@dataclass(frozen=True)
class EncoderDecoderParts:
    """Encoder and decoder of one model, and the files that were made of them."""

    encoder: ModelPart
    decoder: PreparedPart
    decoder_path: Path
    encoder_path: Path | None
    """None where it was not asked for: PyTorch encodes."""

    @property
    def feeds(self) -> tuple[PartFeed, ...]:
        """What of the encoder's answer the decoder takes."""
        return tuple(feed for feed in self.encoder.feeds if feed.part == self.decoder.part.name)

    def taken(self, encoded: Arrays, inputs: Mapping[str, torch.Tensor]) -> dict[str, Array]:
        """Return what the decoder takes in every run, by name of its input.

        Args:
            encoded: The outputs of the encoder.
            inputs: Its inputs.
        """
        taken = {feed.input: encoded[feed.output] for feed in self.feeds}
        if ENCODER_MASK not in taken and any(spec.name == ENCODER_MASK for spec in self.decoder.part.inputs):
            taken[ENCODER_MASK] = to_numpy(inputs[MASK])
        return taken


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
    reference = _loaded_and_generated(parts, seed)
    if isinstance(reference, str):
        return reference
    with failures_as_unverified():
        return _compare(parts, reference)


def _loaded_and_generated(parts: EncoderDecoderParts, seed: int) -> _Reference | str:
    """Generate with the model and its weights, which are gone before ONNX Runtime opens files."""
    with with_values(parts.decoder) as weighted:
        return _generate(parts, weighted, seed)


def _generate(parts: EncoderDecoderParts, weighted: PreparedPart, seed: int) -> _Reference | str:
    """Let PyTorch encode and generate; return why not, where it cannot."""
    model: Any = weighted.model
    encoder = replace(parts.encoder, model=model, stored=None, with_weights=None)
    decoder = parts.decoder.part
    count = new_tokens(decoder)
    if isinstance(count, str):
        return count
    if not callable(getattr(model, "generate", None)):
        return f"{type(model).__name__} has no generate()"
    inputs = InputDraws(encoder, seed).draw(1, sizes_of_rows(encoder, _ROWS), with_padding=True)
    try:
        with unchanged_attributes(model), quiet_libraries(), as_the_user_calls_it(weighted):
            with prepared_part(encoder) as prepared:
                encoded = run_reference(prepared, inputs)
            text = _text(decoder, model, inputs, encoded, count)
    except Exception as error:  # code of the model
        return f"generate() in PyTorch fails: {type(error).__name__}: {first_line(error)}"
    return _Reference(inputs, encoded, text)


def new_tokens(decoder: ModelPart) -> int | str:
    """Return how many tokens are written to compare; why none are, where none can be."""
    held, room = held_tokens(decoder), decoder.most_tokens
    if token_count(decoder) not in (1, *(item.name for item in decoder.dimensions)):
        return "the number of tokens is fixed"
    if held is not None:
        if all(spec.name != MASK for spec in decoder.inputs):
            return "the length of the cache is fixed, and no mask hides its empty entries"
        room = held + 1
    count = _NEW_TOKENS if room is None else min(_NEW_TOKENS, room - 1 - _SECOND_PROMPT)
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
    with plain_generation(model, count, decoder.path, **settings), final_cache(module, argument) as cache:
        result = generate(**inputs, use_cache=True, return_dict_in_generate=True, output_logits=True)
    tokens = result.sequences
    runs = [(to_numpy(tokens[:, i : i + 1]), to_numpy(scores)[:, None]) for i, scores in enumerate(result.logits)]
    # The last token was chosen and not read yet.
    second = torch.cat([tokens[:, -1:], tokens[:, :1].expand(-1, _SECOND_PROMPT - 1)], dim=1)
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
    run = opened_file(parts.decoder_path).run
    encoded = reference.encoded
    if parts.encoder_path is not None:
        encoded = opened_file(parts.encoder_path).run(
            {name: to_numpy(value) for name, value in reference.inputs.items()}
        )
    fixed = parts.taken(encoded, reference.inputs)
    tensors = {name: torch.from_numpy(np.array(value)) for name, value in fixed.items()}
    # What was encoded is the same in every run.
    stepping = replace(decoder, inputs=tuple(spec for spec in decoder.inputs if spec.name not in fixed))
    rounding = Rounding(dtypes_inside(decoder.module, encoded))

    def is_uncertain(draw: Draw) -> bool:
        passed = {**draw.inputs, **tensors}
        return is_rounding(parts.decoder, {spec.name: passed[spec.name] for spec in decoder.inputs}, rounding)

    return compare_generation(
        stepping,
        reference.text,
        lambda draw: run({**{name: to_numpy(value) for name, value in draw.inputs.items()}, **fixed}),
        rounding,
        is_uncertain,
    )
