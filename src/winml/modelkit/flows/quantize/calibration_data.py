"""Reads the samples that the ranges of activations are found with: a user's data, or random values.

Arrays are read from ``.npz`` files; texts, pictures and recordings are made arrays by what lies beside the model.
Samples are read when their turn comes. What is done with them is decided elsewhere.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from winml.modelkit.arrays import Array
from winml.modelkit.errors import QuantizeError, StageError, UsageError
from winml.modelkit.evaluate.data_sets import DataSet, DataSetRequest, TextFile, open_data_set
from winml.modelkit.evaluate.preprocessing import SampleFeeds
from winml.modelkit.evaluate.processors import processor_files
from winml.modelkit.flows.quantize.calibration_files import (
    FORMS,
    OPTION,
    calibration_files,
    calibration_kind,
    npz_files,
    refuse_missing_files,
)
from winml.modelkit.quantize.calibration import OBSERVED_NAME, Ranges, measure_ranges
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.precisions import CalibrationMethod
from winml.modelkit.runtime.graph_inputs import GraphInput, draw_feeds, load_feeds, settle_sizes

__all__ = ["Calibration", "MeasuredOnce", "calibration_of", "refuse_missing_data"]


MOST_SAMPLES = 128
"""Samples read of a user's data where no number is given. Measured: docs/reference/quantization.md; the ranges hardly
change beyond."""
RANDOM_SAMPLES = 16
"""Sets of random values where there is no data. Chosen: more of them say no more about real data."""


@dataclass(frozen=True)
class Calibration:
    """Where the ranges of activations come from."""

    options: QuantizeOptions
    """What is asked for: the data, how many samples of it, by which method."""
    model_folder: Path
    """Folder that a tokenizer, image processor or feature extractor is looked for in."""
    sizes: Mapping[str, int]
    """Sizes of open dimensions, for random values."""
    seed: int = 0
    """Of random values, and of the samples that are drawn of a data set."""

    @property
    def method(self) -> CalibrationMethod:
        """How a range is made of the values seen."""
        return self.options.method or "minmax"

    @property
    def has_data(self) -> bool:
        """Whether values are a user's, and not random."""
        return self.options.calibration_data is not None

    @property
    def count(self) -> int:
        """Number of samples that are read, without those that turned out not to open.

        Raises:
            UsageError: there are fewer than asked for, or none.
        """
        requested = self.options.samples
        if not self.has_data:
            return requested or RANDOM_SAMPLES
        if self._sample_feeds is not None:
            data_set = self._sample_feeds.data_set
            return len(data_set) - len(data_set.unreadable)
        there = len(npz_files(self._path))
        if requested is not None and there < requested:
            raise UsageError(
                f"{OPTION} {self._path}: holds {there} samples, and --samples asks for {requested}",
                hint="Give more data, or ask for fewer.",
            )
        return requested or min(there, MOST_SAMPLES)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that samples are read from, in their order, and those of what makes them arrays."""
        if self.options.calibration_data is None:
            return ()
        files = tuple(calibration_files(self.options.calibration_data).values())
        if self._sample_feeds is None:
            return files[: self.count]
        return (*files, *processor_files(self.model_folder))

    @property
    def notes(self) -> tuple[str, ...]:
        """What to say of the data, one sentence each; complete once it was read."""
        if self.has_data:
            return self._sample_feeds.notes if self._sample_feeds is not None else ()
        note = (
            f"The ranges of activations come from {self.count} sets of random values, not from data: real data may "
            "give other answers than the comparison shows. Give --calibration-data before you use the result."
        )
        return (note,)

    @property
    def words(self) -> str:
        """The data, for people."""
        words = "sample" if self.count == 1 else "samples"
        return f"{self.count} {words} of {self._name if self.has_data else 'random values'}, {self.method}"

    def as_record(self) -> dict[str, object]:
        """Return what the ranges come from, JSON-ready."""
        data_set = None if self._sample_feeds is None else self._sample_feeds.data_set
        split = {"split": data_set.split} if isinstance(data_set, DataSet) else {}
        return {
            "data": self._name if self.has_data else "random",
            **split,
            "samples": self.count,
            "method": self.method,
        }

    def close(self) -> None:
        """Remove temporary files of a data set; no sample can be read after."""
        feeds = self.__dict__.get("_sample_feeds")  # opened only where it was asked for
        if feeds is not None and isinstance(feeds.data_set, DataSet):
            feeds.data_set.close()

    def measure(self, model: ir.Model, names: Sequence[str]) -> Ranges:
        """Return the ranges of values of a model; see :func:`~winml.modelkit.quantize.calibration.measure_ranges`."""
        try:
            return measure_ranges(model, names, self.read_samples, self.method)
        except StageError as error:
            if type(error) is not StageError or not self.has_data:
                raise
            reason = error.message.partition(f"{OBSERVED_NAME}: ")[2] or error.message
            hint = "Give values that the model takes: its own code or config says which."
            raise QuantizeError(f"{OPTION} {self._name}: the model does not run on it: {reason}", hint=hint) from error

    def read_samples(self, inputs: Sequence[GraphInput]) -> Iterator[dict[str, Array]]:
        """Yield one array per input for each sample.

        Raises:
            UsageError: data does not fit the inputs, or no values can be drawn for one.
            InputError: a file is damaged.
        """
        if self._sample_feeds is not None:
            yield from self._sample_feeds.read(inputs)
        elif self.has_data:
            for path in itertools.islice(npz_files(self._path), self.count):
                yield load_feeds(path, inputs, OPTION)
        else:
            yield from self._random_samples(inputs)

    @functools.cached_property
    def _sample_feeds(self) -> SampleFeeds | None:
        """What makes arrays of samples; None where they are arrays already, or random. Opened once."""
        data = self.options.calibration_data
        if data is None or (kind := calibration_kind(data)) == "arrays":
            return None
        request = DataSetRequest(
            data,
            split=self.options.split,
            columns=self.options.columns,
            samples=self.options.samples,
            most=MOST_SAMPLES,
            seed=self.seed,
            option=OPTION,
        )
        return SampleFeeds(TextFile(request) if kind == "texts" else open_data_set(request), self.model_folder)

    @property
    def _path(self) -> Path:
        assert self.options.calibration_data is not None  # asked before
        return Path(self.options.calibration_data)

    @property
    def _name(self) -> str:
        return self._path.name if self._sample_feeds is None else self._sample_feeds.data_set.name

    def _random_samples(self, inputs: Sequence[GraphInput]) -> Iterator[dict[str, Array]]:
        try:
            sizes = settle_sizes(inputs, self.sizes).by_name
            for number in range(self.count):
                yield draw_feeds(inputs, sizes, self.seed + number)
        except UsageError as error:
            hint = f"Give values: {OPTION} folder; or sizes: --shape-config."
            raise UsageError(f"random values for calibration: {error.message}", hint=hint) from error


def calibration_of(
    options: QuantizeOptions, model_folder: Path, sizes: Mapping[str, int], seed: int
) -> Calibration | None:
    """Return where the ranges come from that options need; None where they need none.

    Args:
        options: What is asked for.
        model_folder: Folder that a tokenizer, image processor or feature extractor is looked for in.
        sizes: Sizes of open dimensions, for random values.
        seed: Of what is drawn.
    """
    return Calibration(options, model_folder, sizes, seed) if options.needs_ranges else None


def refuse_missing_data(calibration: Calibration) -> None:
    """Refuse data that cannot be read, before a model is.

    Raises:
        UsageError: there is none, it has a form that is not read, or there are fewer samples than asked for.
        InputError: a file is damaged.
    """
    refuse_missing_files(calibration.options)
    if not calibration.count:
        raise UsageError(f"{OPTION} {calibration.options.calibration_data}: holds no sample", hint=FORMS)


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

    def as_record(self) -> dict[str, object]:
        """Return what the ranges come from, JSON-ready."""
        return self._calibration.as_record()
