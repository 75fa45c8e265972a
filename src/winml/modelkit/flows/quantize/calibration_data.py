"""Reads the samples that the ranges of activations are found with: a user's data, or random values.

Arrays are read from ``.npz`` files, and texts are made arrays by the tokenizer beside the model. Samples are read when
their turn comes. What is done with them is decided elsewhere.
"""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from winml.modelkit.errors import InputError, UsageError
from winml.modelkit.flows.quantize.calibration_files import FORMS, TEXT_SUFFIXES, npz_files, refuse_missing_files
from winml.modelkit.quantize.calibration import Ranges, measure_ranges
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.precisions import CalibrationMethod
from winml.modelkit.runtime.graph_inputs import GraphInput, draw_feeds, load_feeds, settle_sizes

__all__ = ["Calibration", "MeasuredOnce", "calibration_of", "refuse_missing_data"]

Array = NDArray[Any]

MOST_SAMPLES = 128
"""Samples read of a user's data where no number is given. Measured: docs/reference/quantization.md; the ranges hardly
change beyond."""
RANDOM_SAMPLES = 16
"""Sets of random values where there is no data. Chosen: more of them say no more about real data."""
LONGEST_TEXT = 512
"""Tokens of a text that are read, where neither the graph nor the tokenizer says. Chosen: what most encoders take."""

_OPTION = "--calibration-data"
_TEXT_COLUMNS = ("text", "sentence", "content", "question")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt")
"""A tokenizer has at least one of them."""


@dataclass(frozen=True)
class Calibration:
    """Where the ranges of activations come from."""

    method: CalibrationMethod
    samples: int | None
    """As asked for."""
    data: Path | None
    model_folder: Path
    """Folder that a tokenizer is looked for in."""
    sizes: Mapping[str, int]
    """Sizes of open dimensions, for random values."""
    seed: int = 0

    @property
    def count(self) -> int:
        """Number of samples that are read.

        Raises:
            UsageError: there are fewer than asked for, or none.
        """
        if self.data is None:
            return self.samples or RANDOM_SAMPLES
        there = _count_samples(self.data)
        if not there:
            raise UsageError(f"{_OPTION} {self.data}: holds no sample", hint=FORMS)
        if self.samples is not None and there < self.samples:
            raise UsageError(
                f"{_OPTION} {self.data}: holds {there} samples, and --samples asks for {self.samples}",
                hint="Give more data, or ask for fewer.",
            )
        return self.samples or min(there, MOST_SAMPLES)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that samples are read from, in their order, and of texts those that a tokenizer is made of."""
        if self.data is None:
            return ()
        if self.data.is_dir():
            return tuple(sorted(self.data.glob("*.npz"))[: self.count])
        tokenizer = (self.model_folder / name for name in _TOKENIZER_FILES if self.data.suffix != ".npz")
        return (self.data, *(path for path in tokenizer if path.is_file()))

    @property
    def notes(self) -> tuple[str, ...]:
        """What to say of the data, one sentence each."""
        if self.data is not None:
            return ()
        note = (
            f"The ranges of activations come from {self.count} sets of random values, not from data: real data may "
            "give other answers than the comparison shows. Give --calibration-data before you use the result."
        )
        return (note,)

    @property
    def words(self) -> str:
        """The data, for people."""
        data = "random values" if self.data is None else self.data.name
        return f"{self.count} samples of {data}, {self.method}"

    def as_record(self) -> dict[str, Any]:
        """Return what the ranges come from, JSON-ready."""
        data = "random" if self.data is None else self.data.name
        return {"data": data, "samples": self.count, "method": self.method}

    def measure(self, model: ir.Model, names: Sequence[str]) -> Ranges:
        """Return the ranges of values of a model; see :func:`~winml.modelkit.quantize.calibration.measure_ranges`."""
        return measure_ranges(model, names, self.read_samples, self.method)

    def read_samples(self, inputs: Sequence[GraphInput]) -> Iterator[dict[str, Array]]:
        """Yield one array per input for each sample.

        Raises:
            UsageError: data does not fit the inputs, or no values can be drawn for one.
            InputError: a file is damaged.
        """
        return itertools.islice(self._all_samples(inputs), self.count)

    def _all_samples(self, inputs: Sequence[GraphInput]) -> Iterator[dict[str, Array]]:
        if self.data is None:
            yield from self._random_samples(inputs)
        elif self.data.suffix in TEXT_SUFFIXES:
            yield from _tokenized(self.data, self.model_folder, inputs)
        else:
            for path in npz_files(self.data):
                yield load_feeds(path, inputs, _OPTION)

    def _random_samples(self, inputs: Sequence[GraphInput]) -> Iterator[dict[str, Array]]:
        try:
            sizes = settle_sizes(inputs, self.sizes).by_name
            for number in range(self.count):
                yield draw_feeds(inputs, sizes, self.seed + number)
        except UsageError as error:
            hint = f"Give values: {_OPTION} folder; or sizes: --shape-config."
            raise UsageError(f"random values for calibration: {error.message}", hint=hint) from error


def calibration_of(options: QuantizeOptions, model: Path, sizes: Mapping[str, int], seed: int) -> Calibration | None:
    """Return where the ranges come from that options need; None where they need none."""
    if not options.needs_ranges:
        return None
    data = None if options.calibration_data is None else Path(options.calibration_data)
    return Calibration(options.method or "minmax", options.samples, data, model.absolute().parent, sizes, seed)


def refuse_missing_data(calibration: Calibration) -> None:
    """Refuse data that cannot be read, before a model is.

    Raises:
        UsageError: there is none, it has a form that is not read, or there are fewer samples than asked for.
        InputError: a file is damaged.
    """
    refuse_missing_files(calibration.data)
    assert calibration.count  # raises where there are too few


def _count_samples(data: Path) -> int:
    if data.suffix in TEXT_SUFFIXES:
        return sum(1 for _ in _texts(data))
    return len(npz_files(data))


def _texts(path: Path) -> Iterator[str]:
    """Yield the texts of a file that are not empty.

    Raises:
        UsageError: it has no column of texts.
        InputError: it is damaged.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            if path.suffix == ".txt":
                rows: Iterable[str] = (line.strip() for line in file)
            elif path.suffix == ".csv":
                rows = (_text_of(row, path) for row in csv.DictReader(file))
            else:
                rows = (_text_of(json.loads(line), path) for line in file if line.strip())
            yield from (text for text in rows if text)
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f"{_OPTION} {path}: cannot be read as text: {error}", hint=FORMS) from error


def _text_of(row: Any, path: Path) -> str:
    if isinstance(row, dict):
        for column in _TEXT_COLUMNS:
            if isinstance(row.get(column), str):
                return str(row[column])
    columns = ", ".join(map(str, row)) if isinstance(row, dict) else "none"
    raise UsageError(
        f"{_OPTION} {path}: no column of texts; its columns: {columns}",
        hint=f"Call the column {', '.join(_TEXT_COLUMNS[:-1])} or {_TEXT_COLUMNS[-1]}.",
    )


def _tokenized(path: Path, folder: Path, inputs: Sequence[GraphInput]) -> Iterator[dict[str, Array]]:
    """Yield the texts of a file as the tokenizer beside the model gives them."""
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise UsageError(
            f"{_OPTION} {path}: texts need a tokenizer, and none lies beside the model in {folder}",
            hint="Copy the checkpoint's tokenizer files there, or give .npz files.",
        )
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise InputError(f"the tokenizer in {folder} cannot be read: {error}", hint="Give .npz files.") from error
    batch, length = _fixed_sizes(inputs)
    longest = length or min(int(tokenizer.model_max_length), LONGEST_TEXT)
    texts = _texts(path)
    while rows := list(itertools.islice(texts, batch)):
        rows += rows[-1:] * (batch - len(rows))
        padding = "max_length" if length else True
        tokens = tokenizer(rows, truncation=True, max_length=longest, padding=padding, return_tensors="np")
        yield _as_inputs(tokens, inputs, path)


def _fixed_sizes(inputs: Sequence[GraphInput]) -> tuple[int, int | None]:
    """Return the batch size, 1 where it is open, and the length, None where it is open."""
    shape = next((item.shape for item in inputs if len(item.shape) == 2), (None, None))
    return (shape[0] if isinstance(shape[0], int) else 1), (shape[1] if isinstance(shape[1], int) else None)


def _as_inputs(tokens: Mapping[str, Any], inputs: Sequence[GraphInput], path: Path) -> dict[str, Array]:
    for item in inputs:
        if item.name not in tokens:
            raise UsageError(
                f"{_OPTION} {path}: the graph takes {item.name} {item.words}, which the tokenizer does not give",
                hint="Give .npz files with one array per input.",
            )
    return {item.name: np.asarray(tokens[item.name]).astype(item.dtype) for item in inputs}


class MeasuredOnce:
    """Ranges of activations that are measured once for graphs made of one file."""

    def __init__(self, calibration: Calibration) -> None:
        """Measure with this data."""
        self._calibration = calibration
        self._ranges: dict[str, tuple[float, float]] = {}

    def measure(self, model: ir.Model, names: Sequence[str]) -> Ranges:
        """Return the ranges of values of a model; only those not asked for before are measured."""
        if missing := [name for name in names if name not in self._ranges]:
            self._ranges.update(self._calibration.measure(model, missing))
        return {name: self._ranges[name] for name in names}

    def as_record(self) -> dict[str, Any]:
        """Return what the ranges come from, JSON-ready."""
        return self._calibration.as_record()
