"""Conversion of dataset samples to input arrays of a graph, by the processors beside the model.

The tokenizer, image processor or feature extractor of the checkpoint does the conversion; this module adapts its
arrays to the sizes and types of the graph. The outputs of the graph are interpreted elsewhere.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from winml.modelkit.arrays import Array, Arrays, numpy_dtype
from winml.modelkit.errors import InputError, UsageError, opt, spell
from winml.modelkit.onnx.files.foreign_files import foreign_parser
from winml.modelkit.onnx.specs import InputTensorSpec
from winml.modelkit.ort.decoding.inputs import empty_state_sizes
from winml.modelkit.ort.graph_inputs import array_words
from winml.modelkit.samples.columns import match_columns
from winml.modelkit.samples.media import fit_to_grid, resampled
from winml.modelkit.samples.processors import (
    ProcessorKind,
    kinds_for,
    open_processor,
    position_count,
    sentence_length,
    tokenizer_call,
)
from winml.modelkit.words import count_noun

if TYPE_CHECKING:
    from winml.modelkit.samples.data_sets import DataSet
    from winml.modelkit.samples.text_files import TextFile


_ROLES = {"image processor": "image", "feature extractor": "audio"}


class SampleFeeds:
    """Feeds made from the samples of a dataset; can be iterated repeatedly."""

    def __init__(self, data_set: DataSet | TextFile, folder: Path) -> None:
        """Take a dataset, and the folder of an ONNX file or a checkpoint with its processors."""
        self.data_set = data_set
        self._folder = folder
        self._preprocessor: Preprocessor | None = None
        self._roles: dict[str, str] = {}

    def read(self, inputs: Sequence[InputTensorSpec]) -> Iterator[dict[str, Array]]:
        """Yield one array per input for each batch; a graph with a dynamic batch size takes one sample at a time.

        Raises:
            UsageError: a column, a file or a package is missing, or the arrays do not match the inputs of the graph.
            InputError: files are damaged.
        """
        preprocessor = Preprocessor.of(self._folder, inputs, option=self.data_set.request.words)
        required = [role for kind in preprocessor.kinds for role in _find_roles(kind, self.data_set)]
        roles = match_columns(self.data_set, required, optional=("text_pair",) if "text" in required else ())
        self._preprocessor, self._roles = preprocessor, roles
        for batch in preprocessor.batches(self.data_set.rows(roles)):
            yield dict(batch.feeds)

    @property
    def notes(self) -> tuple[str, ...]:
        """Automatic decisions, and skipped samples; available after samples were read."""
        guessed = {role: column for role, column in self._roles.items() if role not in self.data_set.request.columns}
        columns = ", ".join(f"{role} is {column}" for role, column in guessed.items() if role != column)
        column_note = f"columns of {self.data_set.name}: {columns}, recognized by name (set others with {opt.columns})"
        created = self._preprocessor.notes if self._preprocessor is not None else ()
        notes = (*self.data_set.notes, column_note if columns else "", *created, self.data_set.unreadable_note or "")
        return tuple(f"{note[0].upper()}{note[1:]}." for note in notes if note)


def _find_roles(kind: str, data_set: DataSet | TextFile) -> tuple[str, ...]:
    """Return the roles of columns that a processor reads.

    Texts are questions with their contexts, or texts, or words if the dataset has words only.
    """
    if kind in _ROLES:
        return (_ROLES[kind],)
    for roles in (("question", "context"), ("text",), ("tokens",)):
        is_requested = "text" not in data_set.request.columns or roles == ("text",)
        if is_requested and len(match_columns(data_set, (), optional=roles)) == len(roles):
            return roles
    return ("text",)


Sample = Mapping[str, Any]
"""Role → value: text, image, audio."""

LONGEST_TEXT = 512
"""Maximum number of tokens of a text, if neither the graph nor the checkpoint states less. Chosen: the limit of most
encoders."""
_WINDOW_OVERLAP = 128
"""Tokens shared by two windows of a long context. Chosen: as in transformers' question answering pipeline."""
_ONE_AT_A_TIME = "images of different sizes are run one at a time, since the graph takes no pixel mask"
_GROWING_KINDS = frozenset({"key", "value", "indexer"})
"""Kinds of cache states with one entry per token."""


@dataclass(frozen=True)
class Row:
    """One row of a batch: a sample, or a window of a sample."""

    number: int
    """Number of the sample, from 0."""
    sample: Sample
    offsets: Array | None = None
    """First and last character of each token of a text: int64[length, 2]; None if the tokenizer has no offsets."""
    word_ids: tuple[int | None, ...] | None = None
    """Word of each token of a text; None for special tokens."""
    sequence_ids: tuple[int | None, ...] | None = None
    """0 for tokens of the first text, 1 for tokens of the second text of a pair; None for special tokens."""
    image_size: tuple[int, int] | None = None
    """Height and width of an image before resizing."""


@dataclass(frozen=True)
class Batch:
    """Inputs of one run."""

    feeds: Arrays
    """One array per input of the graph."""
    rows: tuple[Row, ...]
    """Rows of the arrays, without the padding rows of a fixed batch size, which repeat the last row."""

    def trimmed(self, output: Array) -> Array:
        """Return an output without the padding rows of the batch."""
        return output[: len(self.rows)]


class Preprocessor:
    """Converts samples to arrays.

    Attributes:
        kinds: Kinds of processors: ``tokenizer``, ``image processor``, ``feature extractor``.
        processors: The transformers object of each kind.
        fixed_batch: Batch size of the graph; None if dynamic.
    """

    def __init__(
        self,
        inputs: Sequence[InputTensorSpec],
        processors: Mapping[ProcessorKind, object],
        longest_text: int,
        option: str,
    ) -> None:
        """Take opened processors; see :meth:`of`."""
        self.kinds = tuple(processors)
        self.processors = dict(processors)
        # The patches of all images are in one row; their grid has a row for each image.
        counted = [spec for spec in inputs if spec.fixed_grid]
        self._has_grid = bool(counted)
        self.fixed_batch = next(
            (int(i.shape[0]) for i in counted or inputs if len(i.shape) > 1 and isinstance(i.shape[0], int)), None
        )
        self._decided: dict[str, None] = {}
        self._cut: dict[str, set[int]] = {"text": set(), "recording": set()}
        self._inputs = {spec.name: spec for spec in inputs}
        self._longest_text = longest_text
        self._option = option
        self._image_arguments: dict[str, Any] = {}

    @classmethod
    def of(cls, folder: Path, inputs: Sequence[InputTensorSpec], *, option: str = "dataset") -> Preprocessor:
        """Open the processors beside a model, or in its checkpoint.

        Args:
            folder: Folder of the ONNX file, or checkpoint folder.
            inputs: Inputs of the graph; their names determine the kinds of processors.
            option: Option with the data, for messages.

        Raises:
            UsageError: files or a package are missing, or the graph has no known input.
            InputError: the files are damaged.
        """
        option = spell(option)
        kinds = kinds_for(spec.name for spec in inputs)
        if not kinds:
            input_words = ", ".join(f"{spec.name} {spec.words}" for spec in inputs) or "nothing"
            raise UsageError(
                f"{option}: the graph takes {input_words}, which no tokenizer, image processor or feature "
                "extractor provides",
                hint="Use .npz files with one array per input.",
            )
        processors = {kind: open_processor(kind, folder, option) for kind in kinds}
        return cls(inputs, processors, text_limit(folder, processors.get("tokenizer")), option)

    @property
    def notes(self) -> tuple[str, ...]:
        """Automatic decisions, and truncations of the samples read so far, one sentence each."""
        limits = {
            "text": f"{self._fixed_size('input_ids', 1) or self._longest_text} tokens",
            "recording": "the model takes",
        }
        cut_notes = (
            f"{count_noun(len(numbers), kind, 'are')} longer than {limits[kind]} and truncated"
            for kind, numbers in self._cut.items()
            if numbers
        )
        return (*self._decided, *cut_notes)

    def batches(self, samples: Iterable[Sample], batch_size: int | None = None) -> Iterator[Batch]:
        """Yield the inputs of each run, batched as the graph requires.

        Texts are ``text``, ``text`` and ``text_pair``, ``tokens`` (words), or ``question`` and ``context``. A context
        that is too long is read in windows: one sample then has several rows.

        Args:
            samples: The samples by role; read lazily.
            batch_size: Batch size if it is dynamic in the graph; None: 1.

        Raises:
            UsageError: the batch size differs from the graph's, a role is missing, or the arrays do not match the
                inputs of the graph.
            InputError: a processor fails on a sample.
        """
        if batch_size is not None and self.fixed_batch not in (None, batch_size):
            raise UsageError(
                f"{opt.batch_size} {batch_size}: the graph has a fixed batch size of {self.fixed_batch}",
                hint=f"Omit it, or export with this size or with {opt.dynamic_batch}.",
            )
        size = self.fixed_batch or batch_size or 1
        numbered = enumerate(samples)
        while chunk := list(itertools.islice(numbered, size)):
            for group in self._group_samples(chunk):
                arrays, rows = self._process_samples(group)
                for start in range(0, len(rows), size):
                    yield self._make_batch(arrays, rows, range(start, min(start + size, len(rows))))

    def _group_samples(self, chunk: Sequence[tuple[int, Sample]]) -> list[Sequence[tuple[int, Sample]]]:
        """Split samples into groups processed together; without a pixel mask, padding counts as part of an image."""
        processor = self.processors.get("image processor")
        if not getattr(processor, "do_pad", False) or "pixel_mask" in self._inputs:
            return [chunk]
        if self._image_arguments or len({_read_cell(sample, "image", self._option).size for _, sample in chunk}) == 1:
            return [chunk]
        if not all(self._fixed_size("pixel_values", axis) for axis in (-2, -1)):
            self._decided[_ONE_AT_A_TIME] = None
        return [[numbered] for numbered in chunk]

    def _process_samples(self, chunk: Sequence[tuple[int, Sample]]) -> tuple[dict[str, Array], list[Row]]:
        """Convert samples by all processors; return the arrays, and the sample of each row."""
        rows = [Row(number, sample) for number, sample in chunk]
        arrays: dict[str, Array] = {}
        for kind, processor in self.processors.items():
            failure = f"{self._option}: the {kind} failed on samples from {chunk[0][0]}"
            with foreign_parser(failure, hint="Check these samples, or use .npz files."):
                if kind == "tokenizer":
                    created, rows = self._tokenize_texts(processor, rows)
                elif kind == "image processor":
                    created, rows = self._process_images(processor, rows)
                else:
                    created = self._process_recordings(processor, rows)
            arrays |= created
        return arrays, rows

    def _tokenize_texts(self, tokenizer: Any, rows: Sequence[Row]) -> tuple[dict[str, Array], list[Row]]:
        """Return the tokens of texts, and the row of each window; only a long context has several windows.

        Cut texts are noted for ``notes``; a tokenizer without a padding token pads with its end token from then on.

        Args:
            tokenizer: The tokenizer of transformers.
            rows: Samples with texts.
        """
        length = self._fixed_size("input_ids", 1)
        texts, arguments = _text_arguments([row.sample for row in rows], self._option)
        if (length or len(rows) > 1 or "text_pair" in arguments) and tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        label = f"{self._option}, samples from {rows[0].number}"
        has_context = "question" in rows[0].sample
        longest = length or self._longest_text
        if has_context:
            stride = min(_WINDOW_OVERLAP, longest // 4, _context_room(tokenizer, rows, longest, self._option) // 2)
            arguments |= {"return_overflowing_tokens": True, "stride": stride}
        with tokenizer_call(tokenizer, texts, arguments.get("text_pair"), label=label):
            tokens = tokenizer(
                texts,
                truncation="only_second" if has_context else True,
                max_length=longest,
                padding="max_length" if length else len(rows) > 1 or has_context,
                return_tensors="np",
                return_token_type_ids="token_type_ids" in self._inputs,
                return_offsets_mapping=tokenizer.is_fast,
                **arguments,
            )
        sources = tokens.get("overflow_to_sample_mapping", range(len(rows)))
        if not tokenizer.is_fast:
            return dict(tokens), [rows[source] for source in sources]
        if not has_context:
            encodings = zip(rows, tokens.encodings, strict=True)
            self._cut["text"].update(row.number for row, encoding in encodings if encoding.overflowing)
        return dict(tokens), [_with_token_info(rows[source], tokens, index) for index, source in enumerate(sources)]

    def _process_images(self, processor: Any, rows: Sequence[Row]) -> tuple[dict[str, Array], list[Row]]:
        """Return the pixels, resized to a graph of fixed sizes, and the rows with the original image sizes.

        The first resizing is noted for ``notes``, and applies to all further images.
        """
        images = [_read_cell(row.sample, "image", self._option).convert("RGB") for row in rows]
        if self._has_grid:
            fitted = [fit_to_grid(image, self._inputs.values(), processor) for image in images]
            arrays = dict(processor(images=fitted, return_tensors="np"))
            arrays["pixel_values"] = arrays["pixel_values"].reshape(len(rows), -1, arrays["pixel_values"].shape[-1])
            return arrays, [*rows]
        arrays = dict(processor(images=images, return_tensors="np", **self._image_arguments))
        size = self._fixed_size("pixel_values", -2), self._fixed_size("pixel_values", -1)
        processed_size = arrays["pixel_values"].shape[-2:]
        if all(size) and size != processed_size and not self._image_arguments:
            # A graph of fixed sizes accepts no other sizes; image processors of detectors size each image individually.
            self._image_arguments = {"size": {"height": size[0], "width": size[1]}}
            if getattr(processor, "do_center_crop", None):
                self._image_arguments["do_center_crop"] = False
            arrays = dict(processor(images=images, return_tensors="np", **self._image_arguments))
            note = (
                f"images are resized to {size[0]} x {size[1]}, the input size of the graph; the image processor is "
                f"configured for {processed_size[0]} x {processed_size[1]}"
            )
            self._decided[note] = None
        sizes = [(image.height, image.width) for image in images]
        return arrays, [replace(row, image_size=size) for row, size in zip(rows, sizes, strict=True)]

    def _process_recordings(self, extractor: Any, rows: Sequence[Row]) -> dict[str, Array]:
        """Return the features of recordings, resampled and padded as extractor and graph require.

        Recordings that the extractor cuts are noted for ``notes``.
        """
        rate_hz = int(extractor.sampling_rate)
        samples = [resampled(_read_cell(row.sample, "audio", self._option), rate_hz) for row in rows]
        length = self._fixed_size("input_values", 1) if len(self._input_shape("input_values")) == 2 else None
        if longest := length or getattr(extractor, "n_samples", None):
            pairs = zip(rows, samples, strict=True)
            self._cut["recording"].update(row.number for row, sound in pairs if len(sound) > longest)
        arguments = _recording_arguments(extractor, length)
        if "attention_mask" in self._inputs:
            arguments["return_attention_mask"] = True
        return dict(extractor(samples, sampling_rate=rate_hz, return_tensors="np", **arguments))

    def _make_batch(self, arrays: Arrays, rows: Sequence[Row], row_numbers: range) -> Batch:
        """Return rows of the arrays as inputs of the graph, padded to its batch size.

        Args:
            arrays: Outputs of the processors, of all rows.
            rows: All rows.
            row_numbers: Numbers of the rows of this batch.

        Raises:
            UsageError: the processors do not provide an input of the graph, or its values do not fit.
        """
        padded = [*row_numbers, *[row_numbers[-1]] * ((self.fixed_batch or 0) - len(row_numbers))]
        if "input_ids" in arrays:
            arrays = {"position_ids": _token_positions(arrays), **arrays}
        feeds: dict[str, Array] = {}
        for spec in sorted(self._inputs.values(), key=lambda spec: spec.cache is None):
            if spec.cache is not None and "input_ids" in arrays:
                feeds[spec.name] = _empty_state(spec, self._input_shape("input_ids"), len(padded), self._option)
                continue
            if spec.name not in arrays:
                processors = " and ".join(f"the {kind}" for kind in self.kinds)
                raise UsageError(
                    f"{self._option}: the graph takes {spec.name} {spec.words}, which {processors} "
                    f"{'do' if len(self.kinds) > 1 else 'does'} not provide",
                    hint="Use .npz files with one array per input.",
                )
            values = np.asarray(arrays[spec.name])[padded]
            if self._has_grid and values.ndim > len(spec.shape):  # patches by image
                values = values.reshape(-1, *values.shape[2:])
            feeds[spec.name] = _cast_to_input(spec, values, self._option)
        return Batch(feeds, tuple(rows[number] for number in row_numbers))

    def _input_shape(self, name: str) -> tuple[int | str | None, ...]:
        return self._inputs[name].shape if name in self._inputs else ()

    def _fixed_size(self, name: str, axis: int) -> int | None:
        """Return the size of an axis of an input; None if the axis is dynamic or the input does not exist."""
        shape = self._input_shape(name)
        size = shape[axis] if -len(shape) <= axis < len(shape) else None
        return size if isinstance(size, int) else None


def _cast_to_input(spec: InputTensorSpec, array: Array, option: str) -> Array:
    """Return an array in the type of the input that takes it.

    Raises:
        UsageError: the sizes differ from those of the input.
    """
    if not spec.takes_sizes(array.shape):
        raise UsageError(
            f"{option}: the graph takes {spec.name} {spec.words}, but the samples are {array_words(array)}",
            hint="Export with these sizes, or use .npz files with one array per input.",
        )
    return array.astype(numpy_dtype(spec.dtype))


def _token_positions(arrays: Arrays) -> Array:
    """Return the position of each token in its text: int64[rows, length], counted without padding."""
    mask = np.asarray(arrays.get("attention_mask", np.ones_like(arrays["input_ids"])))
    positions: Array = (mask.cumsum(axis=1) - 1).clip(0)
    return positions


def _empty_state(spec: InputTensorSpec, tokens: Sequence[int | str | None], rows: int, option: str) -> Array:
    """Return a state of a cache before the first token of a text.

    Args:
        spec: The input for the state.
        tokens: Sizes of the token input of the graph.
        rows: Batch size.
        option: Option with the data, for messages.

    Raises:
        UsageError: the graph cannot read a whole text in one run with an empty cache.
    """
    sizes = empty_state_sizes(spec, tokens[0], rows)
    reads_one = tokens[1] == 1
    if reads_one or (spec.cache is not None and spec.cache.kind in _GROWING_KINDS and all(sizes)):
        reason = "reads one token per run" if reads_one else f"takes {spec.name} {spec.words}"
        raise UsageError(
            f"{option}: each text is evaluated in one run without a KV cache, but the graph {reason}",
            hint=f"Export the model with {opt.no_cache}, or with dynamic sequence and cache lengths.",
        )
    return np.zeros(sizes, numpy_dtype(spec.dtype))


def _text_arguments(samples: Sequence[Sample], option: str) -> tuple[list[Any], dict[str, object]]:
    """Return the first argument of a tokenizer call, and its keyword arguments."""
    first_sample = samples[0]
    if "question" in first_sample:
        questions = [_read_text(sample, "question", option) for sample in samples]
        return questions, {"text_pair": [_read_text(sample, "context", option) for sample in samples]}
    if "tokens" in first_sample:
        return [list(map(str, _read_cell(sample, "tokens", option))) for sample in samples], {
            "is_split_into_words": True
        }
    texts = [_read_text(sample, "text", option) for sample in samples]
    if "text_pair" not in first_sample:
        return texts, {}
    return texts, {"text_pair": [_read_text(sample, "text_pair", option) for sample in samples]}


def text_limit(folder: Path, tokenizer: object, *, at_most: int = LONGEST_TEXT) -> int:
    """Return the maximum number of tokens of a text, by the tokenizer and the files of a model.

    Args:
        folder: Folder of the config.
        tokenizer: The transformers tokenizer; None: use the files only.
        at_most: Upper bound.
    """
    limits = (getattr(tokenizer, "model_max_length", None), position_count(folder), sentence_length(folder))
    return min([at_most, *(int(limit) for limit in limits if limit is not None)])


def _recording_arguments(extractor: Any, length: int | None) -> dict[str, object]:
    """Return the padding arguments for audio: to the length of the graph, or to the longest sample of the batch."""
    if length:
        return {"padding": "max_length", "max_length": length, "truncation": True}
    padding = inspect.signature(extractor.__call__).parameters.get("padding")
    return {"padding": True} if padding is not None and not padding.default else {}


def _context_room(tokenizer: Any, rows: Sequence[Row], longest: int, option: str) -> int:
    """Return the number of context tokens that fit beside the longest question.

    Args:
        tokenizer: The tokenizer of transformers.
        rows: Samples with questions.
        longest: Largest number of tokens in a row.
        option: Option of the dataset, for messages.

    Raises:
        InputError: no context token fits.
    """
    questions = [_read_text(row.sample, "question", option) for row in rows]
    with tokenizer_call(tokenizer, questions, label=f"{option}, samples from {rows[0].number}"):
        tokens = tokenizer(questions, add_special_tokens=False, verbose=False)["input_ids"]
    lengths = [len(numbers) for numbers in tokens]
    room = longest - tokenizer.num_special_tokens_to_add(pair=True) - max(lengths)
    if room > 0:
        return int(room)
    longest_row = next(row for row, length in zip(rows, lengths, strict=True) if length == max(lengths))
    raise InputError(
        f"{option}: the question of sample {longest_row.number}, counted from 0, has {max(lengths)} tokens, which "
        f"leaves no room for its context in a maximum of {longest}",
        hint="Remove it, or export with a longer sequence.",
    )


def _read_cell(sample: Sample, role: str, option: str) -> Any:
    """Return the value of a role in a sample.

    Raises:
        UsageError: the sample has no value for the role.
    """
    if sample.get(role) is None:
        raise UsageError(
            f"{option}: a sample has no {role}, only {', '.join(sample) or 'nothing'}",
            hint=f"Set its column with {opt.columns} {role}=COLUMN.",
        )
    return sample[role]


def _read_text(sample: Sample, role: str, option: str) -> str:
    """Return the text of a role in a sample.

    Raises:
        UsageError: the value is missing, or is no text.
    """
    value = _read_cell(sample, role, option)
    if not isinstance(value, str):
        raise UsageError(
            f"{option}: {role} must be text, but a sample has {type(value).__name__}",
            hint=f"Set its column with {opt.columns} {role}=COLUMN.",
        )
    return value


def _with_token_info(row: Row, tokens: Any, index: int) -> Row:
    """Return a row with the token information of a tokenizer."""
    return replace(
        row,
        offsets=np.asarray(tokens["offset_mapping"][index]),
        word_ids=tuple(tokens.word_ids(index)),
        sequence_ids=tuple(tokens.sequence_ids(index)),
    )
