"""Do the files of all parts, one after another, generate the text of PyTorch? For models with a decoder.

The model generates in PyTorch, greedily, with its own caches; then it reads several tokens at once after its text. The
files are given the same inputs and tokens: outputs of the first parts go to the decoder, and so do, in every run, the
states that it returned in the run before.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    TextStep,
    as_the_user_calls_it,
    generated_or_reason,
    generated_text,
    generates_alone,
    held_tokens,
    reason_against,
    reason_of_sizes,
    recorded_generation,
)
from winml.modelkit.compare.verification.generation import compare_generation, read_scores
from winml.modelkit.compare.verification.input_draws import InputDraws
from winml.modelkit.compare.verification.reference_run import (
    PreparedPart,
    dtypes_inside,
    prepared_part,
    run_reference,
    with_values,
)
from winml.modelkit.compare.verification.rounding import has_uncertain_scores
from winml.modelkit.compare.verification.single_rows import feeds_by_rows, joined_rows, takes_single_rows
from winml.modelkit.compare.verification.sizes import Draw
from winml.modelkit.errors import StageError, VerificationError, first_line, opt
from winml.modelkit.models.caches.arguments import (
    DECODER_TOKENS,
    ENCODER_MASK,
    ENCODER_OUTPUT_STATES,
    ENCODER_STATES,
    TOKENS,
    empty_states,
)
from winml.modelkit.models.caches.inputs import several_positions
from winml.modelkit.models.inputs.modalities.text import KINDS_PARAMETER
from winml.modelkit.models.parts import ModelPart
from winml.modelkit.models.tensors import to_numpy
from winml.modelkit.onnx.files.graph_reading import graph_of
from winml.modelkit.onnx.files.placing import external_files
from winml.modelkit.onnx.files.reading import read_structure
from winml.modelkit.onnx.specs import InputTensorSpec
from winml.modelkit.ort.decoding.inputs import MASK, POSITIONS, SCORES, plain_value
from winml.modelkit.words import size_words

if TYPE_CHECKING:
    from winml.modelkit.ort.sessions import Session

_Tensors = Mapping[str, torch.Tensor]

MOST_WHOLE_BYTES = 1_000_000_000
"""Chosen: files of more are not run as a whole, nor more weights held, since building takes less."""
_TEXT, _PADDING = 7, 3
"""Chosen: tokens of a row beside the places of its images, and how many of them are padding in the first row."""
_SINGLE_STEPS = 8
"""Chosen: runs of one token, after which the rest of the text of an encoder-decoder is read at once."""


@dataclass(frozen=True)
class TextSample:
    """Inputs of an encoder and tokens of its decoder, as a processor and a tokenizer make them."""

    inputs: Arrays
    """Inputs of the encoder, by name."""
    tokens: Array
    """Tokens of a text, integers [tokens]."""


def decodes_for_others(part: ModelPart, parts: Sequence[ModelPart]) -> bool:
    """Return True if a part decodes the outputs of other parts."""
    return part.cache is not None and len(parts) > 1 and not generates_alone(part)


@dataclass(frozen=True)
class _Reference:
    """The text of PyTorch, and the inputs that it was generated from."""

    inputs: _Tensors
    """Inputs of the first part: images, or a text or recording to encode."""
    text: GeneratedText
    encoded: Arrays = field(default_factory=dict)
    """The outputs of an encoder."""


@dataclass(frozen=True)
class _Decoder:
    """The graph of a decoder behind the files of the other parts."""

    part: ModelPart
    """The decoder without the inputs that are the same in every run."""
    run: Callable[[Draw], Arrays]
    fixed: Arrays = field(default_factory=dict)
    """Inputs that are the same in every run."""
    vectors_of: Callable[[Array], Arrays] | None = None
    """Returns the vectors of tokens by name of the input, for a graph that takes vectors."""


@dataclass(frozen=True)
class TextParts(ABC):
    """The parts of a model that generate a text together, and the files that were made of them."""

    decoder: PreparedPart
    paths: Mapping[str, Path]
    """Name of the part → its file; without those that were not asked for."""

    @staticmethod
    def of(parts: Sequence[ModelPart], decoder: PreparedPart, paths: Mapping[str, Path]) -> TextParts:
        """Return the parts of a model by their roles.

        Args:
            parts: The parts of the model.
            decoder: That of them which decodes what the others made.
            paths: Name of the part → its file.
        """
        others = [part for part in parts if part is not decoder.part]
        assert decoder.part.cache is not None  # it decodes
        if decoder.part.cache.side is None:
            return _VisionLanguageParts(decoder, paths, *others)
        return _EncoderDecoderParts(decoder, paths, *others)

    def compare(self, seed: int) -> GenerationInfo | str:
        """Compare the text of all files with that of PyTorch, token by token; return why not, where it cannot be.

        Args:
            seed: Seed of what is drawn.

        Raises:
            VerificationError: PyTorch generates another text, or ONNX Runtime cannot run a file.
        """
        reference = self._reference(seed)
        if isinstance(reference, str):
            return reference
        prepared = self.decoder
        rounding = Rounding(dtypes_inside(prepared.part.module, reference.encoded))
        with _failures_as_unverified():
            decoder = self._open(reference.inputs, reference.encoded)
            fixed = {name: torch.from_numpy(np.array(value)) for name, value in decoder.fixed.items()}

            def is_uncertain(draw: Draw) -> bool:
                passed = {**draw.inputs, **fixed}
                ordered = {spec.name: passed[spec.name] for spec in prepared.part.inputs}
                return has_uncertain_scores(prepared, replace(draw, inputs=ordered), rounding)

            return compare_generation(
                decoder.part, reference.text, decoder.run, rounding, is_uncertain, decoder.vectors_of
            )

    def measure(self, seed: int, sample: TextSample | None = None) -> OutputFidelity | str:
        """Measure how near the scores of all files are to those of PyTorch; return why not, where they cannot be.

        Args:
            seed: Seed of what is drawn.
            sample: What encoder and decoder of a text read; random tokens follow where these are too few. None: random
                values.

        Raises:
            VerificationError: ONNX Runtime cannot run a file.
        """
        reference = self._measured_reference(seed, sample)
        if isinstance(reference, str):
            return reference
        with _failures_as_unverified():
            decoder = self._open(reference.inputs, reference.encoded)
            read = list(read_scores(decoder.part, reference.text, decoder.run, decoder.vectors_of))
        expected, passed = (np.concatenate(scores, axis=1) for scores in zip(*read, strict=True))
        return output_fidelity(f"{SCORES} of {expected.shape[1]} tokens", [expected], [passed])

    def _reference(self, seed: int) -> _Reference | str:
        """Generate with the model and its weights, which are gone before ONNX Runtime opens files."""
        if reason := self._reason_against():
            return reason
        with with_values(self.decoder) as weighted:
            generate = self._prepare(weighted, seed)
            return generate if isinstance(generate, str) else generated_or_reason(weighted, generate)

    def _reason_against(self) -> str:
        """Return why no text can be compared; empty if one can."""
        return ""

    @abstractmethod
    def _prepare(self, weighted: PreparedPart, seed: int) -> Callable[[], _Reference] | str:
        """Draw inputs, and return a function that generates from them in PyTorch; a text: why nothing is generated."""

    @abstractmethod
    def _measured_reference(self, seed: int, sample: TextSample | None) -> _Reference | str:
        """Return the text whose scores are measured, or why there is none."""

    @abstractmethod
    def _open(self, inputs: _Tensors, encoded: Arrays) -> _Decoder:
        """Run the files of the first parts, and open that of the decoder.

        Args:
            inputs: Of the first part.
            encoded: The outputs of an encoder in PyTorch.
        """

    def _opened_decoder(self, fixed: Arrays) -> Callable[[Draw], Arrays]:
        """Return a function that runs the file of the decoder, row by row if it takes one row at a time.

        Args:
            fixed: Inputs that are the same in every run.
        """
        path = self.paths[self.decoder.part.name]
        run = _opened_file(path).run
        if not takes_single_rows(graph_of(read_structure(path), path)):
            return lambda draw: run({**draw.arrays, **fixed})
        return lambda draw: joined_rows([run(rows) for rows in feeds_by_rows({**draw.arrays, **fixed})])


@dataclass(frozen=True)
class _EncoderDecoderParts(TextParts):
    """Encoder and decoder of one model; PyTorch encodes if there is no file of the encoder."""

    encoder: ModelPart

    def _prepare(self, weighted: PreparedPart, seed: int) -> Callable[[], _Reference] | str:
        model: Any = weighted.model
        encoder = replace(self.encoder, model=model, stored=None, with_weights=None)
        count = self._new_tokens()
        if isinstance(count, str):
            return count
        if not callable(getattr(model, "generate", None)):
            return f"{type(model).__name__} has no generate()"
        inputs = InputDraws(encoder, seed).draw(1, _sizes_of_rows(encoder, ROWS), with_padding=True)

        def generate() -> _Reference:
            with prepared_part(encoder) as prepared:
                encoded = run_reference(prepared, inputs)
            return _Reference(inputs, self._text(model, inputs, encoded, count), encoded)

        return generate

    def _new_tokens(self) -> int | str:
        """Return how many tokens are written to compare; why none are, where none can be."""
        decoder = self.decoder.part
        if reason := reason_of_sizes(decoder):
            return reason
        held = held_tokens(decoder)
        room = decoder.most_tokens if held is None else held + 1
        count = NEW_TOKENS if room is None else min(NEW_TOKENS, room - 1 - SECOND_PROMPT)
        return count if count > 0 else f"the decoder has room for only {room} tokens"

    def _text(self, model: Any, inputs: _Tensors, encoded: Arrays, count: int) -> GeneratedText:
        from transformers import GenerationMixin

        decoder = self.decoder.part
        assert decoder.cache is not None
        argument = decoder.cache.argument
        # Classes that cut long inputs into pieces have a loop of their own around this one; those that let a module
        # inside them generate have none but theirs.
        generate: Any = partial(GenerationMixin.generate, model) if not decoder.path else model.generate
        settings: dict[str, Any] = {"min_new_tokens": count}
        if not decoder.path:
            settings = {"decoder_start_token_id": _start(model)}
        with recorded_generation(decoder, model, count, **settings) as recorded:
            generate(**inputs, use_cache=True)

        def answer(step: TextStep) -> Array:
            tokens = torch.from_numpy(step.tokens)
            passed: dict[str, Any] = {**inputs, DECODER_TOKENS: tokens}
            if decoder.path:
                passed = {TOKENS: tokens, ENCODER_STATES: torch.from_numpy(np.array(encoded[ENCODER_OUTPUT_STATES]))}
            passed = {**passed, **decoder.forward_kwargs, argument: recorded.cache}
            return to_numpy(model.get_submodule(decoder.path)(**passed)[SCORES])

        first = recorded.steps[0].tokens[:, :1]
        return recorded.with_second_prompt(np.repeat(first, SECOND_PROMPT - 1, axis=1), answer)

    def _measured_reference(self, seed: int, sample: TextSample | None) -> _Reference | str:
        """Return random tokens, or those of a sample, with the scores of PyTorch after each: nothing is generated."""
        decoder, count = self.decoder.part, self._new_tokens()
        if isinstance(count, str):
            return count
        if reason := beyond_memory(
            [self.paths[name] for name in (self.encoder.name, decoder.name) if name in self.paths]
        ):
            return reason
        if sample is not None:
            inputs = {name: torch.from_numpy(array) for name, array in sample.inputs.items()}
        else:
            inputs = InputDraws(self.encoder, seed).draw(1, _sizes_of_rows(self.encoder, ROWS), with_padding=True)
        rows = len(next(iter(inputs.values())))
        low, high = _spec_named(decoder, TOKENS).value_range or (0, 1)
        tokens = np.random.default_rng(seed).integers(int(low), int(high) + 1, (rows, count))
        if sample is not None:
            tokens[:, : len(sample.tokens)] = sample.tokens[:count]
        try:
            encoded, expected = self._read_in_pytorch(inputs, tokens)
        except Exception as error:  # code of the model
            return f"PyTorch fails on the text: {type(error).__name__}: {first_line(error)}"
        # The files read the text as their reader does, so that the errors of both, and of the cache, add up.
        single = min(_SINGLE_STEPS, count) if held_tokens(decoder) is None else count
        ends = [*range(1, single + 1), *([count] if single < count else [])]
        runs = zip([0, *ends], ends, strict=False)
        text = GeneratedText.of_runs([(tokens[:, start:end], expected[:, start:end]) for start, end in runs])
        return _Reference(inputs, text, encoded)

    def _read_in_pytorch(self, inputs: dict[str, torch.Tensor], tokens: Array) -> tuple[Arrays, Array]:
        """Return the outputs of the encoder in PyTorch, and the scores after each token of a text."""
        decoder = self.decoder.part
        assert decoder.cache is not None
        with as_the_user_calls_it(self.decoder), prepared_part(self.encoder) as encoder:
            encoded = _answered(encoder, inputs)
        fixed = {name: torch.from_numpy(np.array(value)) for name, value in self._taken(encoded, inputs).items()}
        mask, positions = np.ones_like(tokens), np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape).copy()
        own = {
            name: torch.from_numpy(array) for name, array in ((TOKENS, tokens), (MASK, mask), (POSITIONS, positions))
        }
        passed = {**empty_states(decoder.cache, len(tokens)), **fixed, **own}
        return encoded, _answered(self.decoder, {spec.name: passed[spec.name] for spec in decoder.inputs})[SCORES]

    def _taken(self, encoded: Arrays, inputs: _Tensors) -> dict[str, Array]:
        """Return the inputs of the decoder that are the same in every run, by name.

        Args:
            encoded: The outputs of the encoder.
            inputs: Its inputs.
        """
        decoder = self.decoder.part
        taken = {feed.input: encoded[feed.output] for feed in self.encoder.feeds if feed.part == decoder.name}
        if ENCODER_MASK not in taken and any(spec.name == ENCODER_MASK for spec in decoder.inputs):
            taken[ENCODER_MASK] = to_numpy(inputs[MASK])
        return taken

    def _open(self, inputs: _Tensors, encoded: Arrays) -> _Decoder:
        if self.encoder.name in self.paths:
            arrays = {name: to_numpy(value) for name, value in inputs.items()}
            encoded = _opened_file(self.paths[self.encoder.name]).run(arrays)
        fixed, decoder = self._taken(encoded, inputs), self.decoder.part
        stepping = replace(decoder, inputs=tuple(spec for spec in decoder.inputs if spec.name not in fixed))
        return _Decoder(stepping, self._opened_decoder(fixed), fixed)


@dataclass(frozen=True)
class _VisionLanguageParts(TextParts):
    """Vision encoder, embedding and decoder of one model.

    The text begins with two rows of tokens that hold places for images, one of them padded on the left.
    """

    vision: ModelPart
    embedding: ModelPart

    def _reason_against(self) -> str:
        missing = [part.name for part in (self.vision, self.embedding) if part.name not in self.paths]
        return f"{missing[0]} is not among the files" if missing else ""

    def _measured_reference(self, seed: int, sample: TextSample | None) -> _Reference | str:  # noqa: ARG002  # of encoders
        reason = self._reason_against() or beyond_memory(self.paths.values()) or self._held_words()
        return reason or self._reference(seed)

    def _held_words(self) -> str:
        """Say why PyTorch does not generate with a model whose weights are read piece by piece; empty where it does."""
        size = sum(parameter.numel() * parameter.element_size() for parameter in self.decoder.model.parameters())
        if self.decoder.part.stored is None or size <= MOST_WHOLE_BYTES:
            return ""
        limit = size_words(MOST_WHOLE_BYTES)
        return f"its weights have {size_words(size)}; the limit for generating in PyTorch is {limit}"

    def _prepare(self, weighted: PreparedPart, seed: int) -> Callable[[], _Reference] | str:
        decoder = weighted.part
        if reason := reason_against(decoder):
            return reason
        tokens, mask = self._prompt(seed, is_padded=any(spec.first_values for spec in decoder.inputs))
        room = decoder.most_tokens
        free = room - tokens.shape[1] - SECOND_PROMPT if room is not None else NEW_TOKENS
        if free < 1:
            return f"the model has only {room} positions"
        places = [value for value, _ in self._place_runs]
        is_place = torch.isin(tokens, torch.tensor(places))
        images = self._images(seed, len(tokens))
        displayed = dict(images)
        for spec in decoder.inputs:
            if spec.first_values:
                # The decoder is told of each token whether it holds a place.
                displayed[spec.name] = torch.where(is_place, spec.first_values[0][0], plain_value(spec))
        if several_positions(decoder.inputs) is not None:
            # By these, the model makes the positions.
            displayed[KINDS_PARAMETER] = is_place.long()

        def generate() -> _Reference:
            count = min(free, NEW_TOKENS)
            text = generated_text(decoder, weighted.model, (tokens, mask), count, displayed, places)
            return _Reference(images, text)

        return generate

    @property
    def _place_runs(self) -> tuple[tuple[int, int], ...]:
        """Tokens that hold places for images, each with the number of its places in a row."""
        return _spec_named(self.embedding, TOKENS).first_values

    def _prompt(self, seed: int, *, is_padded: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens that hold places for images, and their mask; the first of several rows is padded on the left.

        A single one is where it is asked for: of rows without padding, some models make no mask, and see ahead in all
        runs.
        """
        length = sum(count for _, count in self._place_runs) + _TEXT
        sizes = {**_sizes_of_rows(self.embedding, ROWS), str(_spec_named(self.embedding, TOKENS).shape[1]): length}
        tokens = InputDraws(self.embedding, seed).draw(1, sizes)[TOKENS]
        mask = torch.ones_like(tokens)
        if len(tokens) > 1 or is_padded:
            tokens[0] = tokens[0].roll(_PADDING)
            mask[0, :_PADDING] = 0
        return tokens, mask

    def _images(self, seed: int, rows: int) -> _Tensors:
        """Return images for so many rows of tokens; of a graph that takes a fixed number, as many draws as it takes."""
        if (grids := next((spec for spec in self.vision.inputs if spec.grid is not None), None)) is not None:
            return self._images_of_grids(grids, seed, rows)
        draws, count = InputDraws(self.vision, seed), self.vision.inputs[0].shape[0]
        if not isinstance(count, int):
            return draws.draw(1, _sizes_of_rows(self.vision, ROWS))
        drawn = [draws.draw(number + 1) for number in range(rows // count)]
        return {name: torch.cat([tensors[name] for tensors in drawn]) for name in drawn[0]}

    def _images_of_grids(self, grids: InputTensorSpec, seed: int, rows: int) -> _Tensors:
        """Return an image for each row of tokens, in whose places it fits: of as many columns as rows, and of fewer."""
        assert grids.grid is not None
        blocks, multiple = sum(count for _, count in self._place_runs), grids.grid.multiple
        heights = [height for height in range(1, blocks + 1) if blocks % height == 0 and height**2 <= blocks]
        edges = [(height, blocks // height) for height in itertools.islice(itertools.cycle(reversed(heights)), rows)]
        values = torch.tensor([[1, height * multiple, width * multiple] for height, width in edges])
        patches = int(values.prod(-1).sum())
        others = tuple(
            spec.model_copy(update={"shape": (patches, *spec.shape[1:])})
            for spec in self.vision.inputs
            if spec.name != grids.name
        )
        drawn = InputDraws(replace(self.vision, inputs=others), seed).draw(1, {})
        return {**drawn, grids.name: values}

    def _open(self, inputs: _Tensors, encoded: Arrays) -> _Decoder:  # noqa: ARG002  # of encoders
        from winml.modelkit.ort.decoding.parts import TokenEmbedder  # imports onnxruntime

        run = self._opened_decoder({})
        embedder = TokenEmbedder(*(_opened_file(self.paths[part.name]) for part in (self.vision, self.embedding)))
        seen = embedder.see({name: to_numpy(value) for name, value in inputs.items()})
        created = {feed.output: feed.input for feed in self.embedding.feeds}

        def vectors(tokens: Array) -> dict[str, Array]:
            answer = embedder.embed(tokens, seen)
            return {name: answer[output] for output, name in created.items()}

        return _Decoder(self.decoder.part, run, vectors_of=vectors)


def beyond_memory(paths: Iterable[Path]) -> str:
    """Return why files are not run one after another where only few bits are compared; empty where they are."""
    size = sum(file.stat().st_size for path in paths for file in (path, *external_files(path)))
    words = f"the files have {size_words(size)}; the limit for running them together is {size_words(MOST_WHOLE_BYTES)}"
    return words if size > MOST_WHOLE_BYTES else ""


def _opened_file(path: Path) -> Session:
    """Return a file in ONNX Runtime, opened with its defaults."""
    from winml.modelkit.ort.sessions import Session  # imports onnxruntime

    return Session(path)


@contextmanager
def _failures_as_unverified() -> Iterator[None]:
    """Tell a file that does not run as one that was not verified.

    Raises:
        VerificationError: ONNX Runtime cannot run a file.
    """
    try:
        yield
    except StageError as error:
        raise VerificationError(
            f"cannot generate with the files: {error.message}",
            hint=f"{opt.no_verify} writes them without comparing.",
            is_graph_wrong=True,
        ) from error


def _sizes_of_rows(part: ModelPart, rows: int) -> dict[str, int]:
    """Return the sizes a part is traced with, and so many rows."""
    batch = part.inputs[0].shape[0]
    return {name: rows if name == batch else size for name, size in part.trace_sizes.items()}


def _spec_named(part: ModelPart, name: str) -> InputTensorSpec:
    return next(spec for spec in part.inputs if spec.name == name)


def _start(model: Any) -> int:
    """Return the token that a text begins with; any is as good where nothing says it."""
    configs = (getattr(model, "generation_config", None), model.config)
    found = (getattr(config, name, None) for name in ("decoder_start_token_id", "bos_token_id") for config in configs)
    return next((token for token in found if isinstance(token, int)), 0)


def _answered(prepared: PreparedPart, inputs: dict[str, torch.Tensor]) -> Arrays:
    from winml.modelkit.compare.verification.streamed_reference import with_streamed_values  # by need

    with with_values(prepared) as held, with_streamed_values(held) as weighted:
        return run_reference(weighted, inputs)
