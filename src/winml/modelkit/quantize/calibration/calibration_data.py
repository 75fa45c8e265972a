"""Calibration samples from data or random values, and activation statistics over the samples.

Arrays are read from ``.npz`` files; texts, images and audio are converted by the processor beside the model. Samples
are read on demand; ``activation_statistics`` measures. The selection of quantized activations is not part of this
module.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import onnx_ir as ir

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.compare.fidelity import QualitySamples, QualitySource
from winml.modelkit.compare.quality_samples import MOST_SAMPLES as MOST_COMPARED
from winml.modelkit.compare.quality_samples import RUNS_BETWEEN_SAMPLES
from winml.modelkit.errors import InputError, QuantizeError, StageError, UsageError, WinMLError, opt, spell
from winml.modelkit.onnx.files.placing import file_digest, model_digest
from winml.modelkit.onnx.files.resumable_results import OtherRequest, ResumableResults
from winml.modelkit.onnx.specs import InputTensorSpec
from winml.modelkit.ort.decoding.inputs import inputs_of_file
from winml.modelkit.ort.graph_inputs import graph_inputs, load_feeds
from winml.modelkit.ort.graph_sessions import open_session
from winml.modelkit.ort.opened_model import RunOptions, Values, random_values, with_fitting_sizes, with_whole_prompts
from winml.modelkit.ort.sessions import Session
from winml.modelkit.quantize.calibration.activation_statistics import (
    OBSERVED_NAME,
    MeasuredValue,
    Ranges,
    SampleReader,
    ValueStatistics,
    measure_channels,
    measure_statistics,
    range_of,
)
from winml.modelkit.quantize.calibration.calibration_files import (
    FORMATS,
    calibration_files,
    calibration_kind,
    npz_files,
    refuse_missing_files,
)
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.precisions import CalibrationMethod
from winml.modelkit.samples.data_sets import DataSet, open_data_set
from winml.modelkit.samples.generated_samples import (
    decoder_data,
    decoding_samples,
    embedding_samples,
    generate_samples,
    has_processors,
    note_on_steps,
)
from winml.modelkit.samples.processors import processor_files
from winml.modelkit.tags.tagging import read_tag
from winml.modelkit.words import count_noun

if TYPE_CHECKING:
    from winml.modelkit.samples.preprocessing import SampleFeeds

_T = TypeVar("_T")

MOST_SAMPLES = 128
"""Default number of samples read from data. Measured: docs/reference/quantization.md; the ranges hardly change
beyond."""
_RANDOM_SAMPLES = 16
"""Number of random samples without data. Chosen: more random values predict real data no better."""

_SOLVING_SAMPLES = 128
"""Number of generated samples for algorithms of weight blocks, and for scales of a KV cache, without data. Chosen: as
many as are read from data; a product with 1536 inputs needs more rows than the tokens of 16 sentences."""

_OTHER_SAMPLES = 1_000_003
"""Added to the seed: ranges come from other samples than the samples that the result is judged on."""
HELD_OUT = 4
"""Every n-th sample is held out. Chosen: three quarters of the samples find nearly the same blocks."""
_DECODING_SAMPLES = 128
"""Number of decoder runs, most of which read one token. Chosen: as many tokens as in one sample of an encoder."""
_SOURCES = {"decoding": "runs while it generates text", "processor": "its processor", "random": "random values"}
_KINDS_OF_SAMPLES = {
    "decoding": "decoder runs while it generates text from prompts of its tokenizer, or from random tokens without a "
    "tokenizer",
    "processor": "samples generated for the processor of the model",
    "random": "samples of random values",
}
"""Kind of generated samples → words."""


@dataclass(frozen=True)
class Calibration:
    """Source of the calibration samples."""

    options: QuantizeOptions
    """Requested data, number of samples and method."""
    model_folder: Path
    """Folder of the tokenizer, image processor or feature extractor."""
    sizes: Mapping[str, int]
    """Sizes of dynamic dimensions, for random values."""
    seed: int = 0
    """Seed of random values and of the sample selection from a dataset."""
    source: Path | None = None
    """File of the float graph, which generates text for decoder samples; ``None``: it is not run for samples."""
    holds_out: bool = False
    """True if every :data:`HELD_OUT`-th sample is held out, for :meth:`held_out_samples`."""
    _generated: list[Values] = field(default_factory=list, compare=False)
    """Samples generated for the processor beside the model, without data; filled on the first read."""
    _fitting: list[RunOptions] = field(default_factory=list, compare=False)
    """Sizes and values of random samples that the source accepts; filled if it refuses the usual samples."""

    @property
    def method(self) -> CalibrationMethod:
        """Method that computes a range from observed values."""
        return self.options.method or "minmax"

    @property
    def has_data(self) -> bool:
        """True if samples come from the user's data."""
        return self.options.calibrating_data is not None

    @property
    def count(self) -> int:
        """Number of samples read, without unreadable and held-out samples.

        Raises:
            UsageError: there are fewer samples than requested.
        """
        return self._total_count - (self._total_count // HELD_OUT if self.holds_out else 0)

    @property
    def _total_count(self) -> int:
        """Number of samples, including held-out samples.

        Raises:
            UsageError: the folder has fewer samples than requested.
        """
        requested = self.options.calibrating_samples
        if not self.has_data:
            if requested is None and (self.options.solves_weights or not self.options.needs_ranges):
                return _SOLVING_SAMPLES
            return requested or (_DECODING_SAMPLES if self._kind == "decoding" else _RANDOM_SAMPLES)
        if self._sample_feeds is not None:
            data_set = self._sample_feeds.data_set
            return len(data_set) - len(data_set.unreadable)
        there = len(npz_files(self._data_path))
        if requested is not None and there < requested:
            raise UsageError(
                f"{opt.calibration_data} {self._data_path}: {there} samples, but {opt.samples} requests {requested}",
                hint=f"Add data, or reduce {opt.samples}.",
            )
        return requested or min(there, MOST_SAMPLES)

    @property
    def files(self) -> tuple[Path, ...]:
        """Files of the samples, in order, and files of their processor."""
        if self.options.calibrating_data is None:
            return ()
        files = tuple(calibration_files(self.options.calibrating_data).values())
        if self._sample_feeds is None:
            return files[: self._total_count]
        return (*files, *processor_files(self.model_folder))

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the data; complete once it has been read."""
        if self._sample_feeds is not None:
            step_note = note_on_steps(self.source) if self.source is not None and self._uses_decoder_runs else ""
            return (*self._sample_feeds.notes, *([step_note] if step_note else []))
        if self.has_data:
            return ()
        note = (
            f"The {self._purposes} come from {self.count} {_KINDS_OF_SAMPLES[self._kind]}, not from data: on real data "
            f"the loss may differ from this comparison. Use {opt.calibration_data} or {opt.dataset} for a result that "
            "you deploy."
        )
        return (note,)

    @property
    def words(self) -> str:
        """Description of the data."""
        source = _SOURCES[self._kind] if not self.has_data else self._data_name
        if self._sample_feeds is not None:
            source = self._sample_feeds.data_set.words
        return f"{count_noun(self.count, 'sample')} of {source}, {self._method_words}"

    @property
    def _method_words(self) -> str:
        """Method of the ranges, or algorithms that solve weights."""
        if self.options.needs_ranges:
            return self.method
        return ", ".join(self.options.solving_algorithms) if self.options.solves_weights else "minmax"

    @property
    def _purposes(self) -> str:
        """Purposes of the samples, in words."""
        options = self.options
        purposes = {
            "ranges of activations": options.needs_ranges,
            f"blocks of weights ({', '.join(options.solving_algorithms)})": options.solves_weights,
            "scales of the KV cache": options.kv_cache is not None,
        }
        return " and ".join(purpose for purpose, is_needed in purposes.items() if is_needed)

    def as_record(self) -> dict[str, object]:
        """Source of the ranges, JSON-ready."""
        data_set = None if self._sample_feeds is None else self._sample_feeds.data_set
        split = {"split": data_set.split} if isinstance(data_set, DataSet) else {}
        return {
            "data": self._data_name if self.has_data else self._kind,
            **split,
            "samples": self.count,
            "method": self._method_words,
        }

    def request(self) -> dict[str, object]:
        """Identify the inputs of the statistics: the content of the data, not its location."""
        options = self.options
        columns: dict[str, object] = {"columns": options.columns} if options.columns else {}
        if options.has_judging_data_alone:
            columns |= {"besides": {"samples": options.samples, "seed": self.seed}}
        drawn = {} if self.has_data else {"seed": self.seed, "sizes": dict(self.sizes), "samples": self.count}
        if self._uses_decoder_runs:
            # Differs from the request of earlier versions, which measured other runs.
            drawn["runs"] = "steps after prompts"
        record = {name: entry for name, entry in self.as_record().items() if name != "method"} if self.has_data else {}
        files = self.files if self.has_data else processor_files(self.model_folder)
        return {**record, **columns, **drawn, "content": [file_digest(path) for path in files]}

    def decoder_data(self) -> Iterator[Arrays] | None:
        """Return the user's data for a decoder; ``None`` without data for processors, or for another graph."""
        if self._sample_feeds is None or self.source is None:
            return None
        return decoder_data(self._sample_feeds, self.source)

    def close(self) -> None:
        """Remove temporary files of a dataset; samples cannot be read afterwards."""
        feeds = self.__dict__.get("_sample_feeds")  # opened only on demand
        if feeds is not None and isinstance(feeds.data_set, DataSet):
            feeds.data_set.close()

    def over_samples(self, measure: Callable[[SampleReader], _T]) -> _T:
        """Run a measurement on the samples; generated samples that the model refuses are replaced by random values.

        Raises:
            QuantizeError: the model does not run on a user's data.
            StageError: the model does not run.
        """
        try:
            return measure(self.read_samples)
        except StageError as error:
            if self._generated and type(error) is StageError:
                self._generated.clear()
                return measure(self._random_samples)
            if not self.has_data and self.source is not None and not self._fitting and type(error) is StageError:
                session = open_session(self.source, as_written=True)
                run = with_fitting_sizes(session, with_whole_prompts(graph_inputs(session), self._run))
                self._fitting.append(run)
                return measure(self._random_samples)
            if type(error) is not StageError or not self.has_data:
                raise
            reason = error.message.partition(f"{OBSERVED_NAME}: ")[2] or error.message
            hint = "Pass values that are valid for the model; see its code or config."
            raise QuantizeError(
                f"{self._data_option} {self._data_name}: the model cannot run on it: {reason}", hint=hint
            ) from error

    def read_samples(self, inputs: Sequence[InputTensorSpec]) -> Iterator[dict[str, Array]]:
        """Yield one array per input for each sample that is not held out.

        Raises:
            UsageError: data does not fit the inputs, or no values can be drawn for an input.
            InputError: a file is damaged.
        """
        for number, sample in enumerate(self._iterate_samples(inputs)):
            if not (self.holds_out and number % HELD_OUT == HELD_OUT - 1):
                yield sample

    def held_out_samples(self, inputs: Sequence[InputTensorSpec]) -> Iterator[dict[str, Array]]:
        """Yield one array per input for each sample that is held out.

        Raises:
            UsageError, InputError: as in :meth:`read_samples`.
        """
        return itertools.islice(self._iterate_samples(inputs), HELD_OUT - 1, None, HELD_OUT)

    def _iterate_samples(self, inputs: Sequence[InputTensorSpec]) -> Iterator[dict[str, Array]]:
        """Yield the samples of the user's data, of a decoding model, of processors, or random samples."""
        if self._uses_decoder_runs:
            yield from self._decoding_samples()
        elif self._sample_feeds is not None:
            yield from self._embedding_samples() or self._sample_feeds.read(inputs)
        elif self.has_data:
            for path in itertools.islice(npz_files(self._data_path), self._total_count):
                yield load_feeds(path, inputs, opt.calibration_data)
        else:
            yield from self._processor_samples(inputs) or self._random_samples(inputs)

    def _decoding_samples(self) -> Iterator[dict[str, Array]]:
        """Yield samples from runs of the decoder while it reads and continues the user's texts, or generated texts."""
        assert self.source is not None  # true for this kind
        seed, data = self.seed + _OTHER_SAMPLES, self.decoder_data()
        count = self.count if data is None else None
        yield from decoding_samples(self.source, self.model_folder, self.sizes, count, seed, data=data)

    @functools.cached_property
    def _uses_decoder_runs(self) -> bool:
        """True if the graph is a decoder with a KV cache that runs: its own runs are then the samples of ranges.

        Algorithms that solve weight blocks, and scales of the cache, use whole prompts, each with many tokens per run.
        Data has to be texts.
        """
        if self.source is None or self.options.solves_weights or not self.options.needs_ranges:
            return False
        if self.has_data:
            # Perplexity is measured on whole texts.
            return not self.holds_out and self.decoder_data() is not None
        if not any(spec.cache for spec in inputs_of_file(self.source)):
            return False
        samples = decoding_samples(self.source, self.model_folder, self.sizes, 1, self.seed)
        with contextlib.suppress(WinMLError):
            return next(samples, None) is not None
        return False

    def _embedding_samples(self) -> Iterator[dict[str, Array]] | None:
        """Return image features and tokens for the embedding of a vision-language model; ``None`` for another graph."""
        if self.source is None:
            return None
        seed = self.seed + _OTHER_SAMPLES
        return embedding_samples(self.source, self.model_folder, self.sizes, seed, self._sample_feeds)

    def _processor_samples(self, inputs: Sequence[InputTensorSpec]) -> list[dict[str, Array]]:
        """Return samples generated for the processor beside the model, stored on the first call.

        ``[]`` without a processor, or if the samples do not fit the inputs.
        """
        if not self._generated:
            with contextlib.suppress(UsageError, InputError):
                embedded = itertools.islice(self._embedding_samples() or (), self.count)
                self._generated.extend(Values(tuple(inputs), feeds) for feeds in embedded)
        if not self._generated and has_processors(inputs, self.model_folder):
            run = RunOptions("", sizes=self.sizes, seed=self.seed + _OTHER_SAMPLES)
            with contextlib.suppress(UsageError, InputError):
                self._generated.extend(generate_samples(inputs, self.model_folder, self.count, run))
        return [dict(values.feeds) for values in self._generated]

    @property
    def _kind(self) -> str:
        """Kind of generated samples."""
        return "decoding" if self._uses_decoder_runs else "processor" if self._generated else "random"

    def samples_to_compare(self, session: Session) -> tuple[Sequence[Arrays], QualitySamples]:
        """First samples of the user's data, for the comparison of the result with its source."""
        source: QualitySource = "file" if self._sample_feeds is None else "dataset"
        step = RUNS_BETWEEN_SAMPLES if self._uses_decoder_runs else 1
        runs = self.read_samples(graph_inputs(session))
        samples = list(itertools.islice(runs, 0, MOST_COMPARED * step, step))
        return samples, QualitySamples(source, len(samples), self.seed)

    @functools.cached_property
    def _sample_feeds(self) -> SampleFeeds | None:
        """Converter of samples to arrays, opened once; ``None`` for arrays and random values."""
        request = self.options.calibration_request(MOST_SAMPLES, self.seed)
        if request is None or (kind := calibration_kind(request.source)) == "arrays":
            return None
        from winml.modelkit.samples.preprocessing import SampleFeeds
        from winml.modelkit.samples.text_files import TextFile

        # A comparison reads its samples as a dataset: others are told from them by the number of their row.
        is_text = kind == "texts" and request.besides is None
        return SampleFeeds(TextFile(request) if is_text else open_data_set(request), self.model_folder)

    @property
    def _data_path(self) -> Path:
        assert self.options.calibrating_data is not None  # checked by the callers
        return Path(self.options.calibrating_data)

    @property
    def _data_option(self) -> str:
        """Option that names the data."""
        return spell("dataset" if self.options.calibration_data is None else "calibration_data")

    @property
    def _data_name(self) -> str:
        """Name of the user's data: file, folder or dataset."""
        return self._data_path.name if self._sample_feeds is None else self._sample_feeds.data_set.name

    @property
    def _run(self) -> RunOptions:
        """The sizes of random values."""
        return RunOptions("", sizes=self.sizes)

    def _random_samples(self, inputs: Sequence[InputTensorSpec]) -> Iterator[dict[str, Array]]:
        """Yield random values for each sample.

        Raises:
            UsageError: no values can be drawn for an input.
        """
        try:
            run = self._fitting[0] if self._fitting else self._run
            run = run if self.options.needs_ranges else with_whole_prompts(inputs, run)
            for number in range(self.count):
                yield dict(random_values(inputs, replace(run, seed=self.seed + number)).feeds)
        except UsageError as error:
            hint = error.hint
            if all(spec.is_array for spec in inputs):
                hint = f"Pass values with {opt.calibration_data} FOLDER, or sizes with {opt.shape_config}."
            raise UsageError(f"random values for calibration: {error.message}", hint=hint) from error


def refuse_missing_data(calibration: Calibration) -> None:
    """Refuse unreadable data before a model is read.

    Raises:
        UsageError: data is missing, has an unsupported format, or has fewer samples than requested.
        InputError: a file is damaged.
    """
    refuse_missing_files(calibration.options)
    if not calibration.count:
        raise UsageError(f"{opt.calibration_data} {calibration.options.calibrating_data}: no samples", hint=FORMATS)


class CalibrationStatistics:
    """Activation statistics, measured once for all graphs derived from one model, optionally stored in a file.

    Values are identified by name. Graphs of one model have equal values under a name unless
    :class:`~winml.modelkit.quantize.calibration.activation_statistics.MeasuredValue` states a change.
    """

    def __init__(
        self,
        calibration: Calibration,
        source: Path | None = None,
        folder: Path | None = None,
    ) -> None:
        """Open the statistics.

        Args:
            calibration: Source of the samples. The file named in its options (``calibration_cache``) is read now.
            source: The model that the graphs are derived from; ``None``: nothing is stored.
            folder: Folder of a file named by the request digest, if the options name no file. Without both, statistics
                live as long as this object.

        Raises:
            UsageError: the file has statistics of a different model or different samples, or is no statistics file.
        """
        self.calibration = calibration
        self._statistics: dict[str, ValueStatistics] = {}
        self._maxima: dict[str, Array] = {}
        self._rows: Mapping[str, Array] = {}
        """Rows measured together with the maxima, until read."""
        self._modules: dict[str, str] = {}
        self._stored: ResumableResults | None = None
        cache_file = calibration.options.calibration_cache
        if source is None or (cache_file is None and folder is None):
            return
        request = {"model": model_digest(source), "samples": calibration.request()}
        digest = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
        path = Path(cache_file) if cache_file is not None else Path(folder or "") / f"{digest}.json"
        self._stored = ResumableResults(path, request)
        outcome = self._stored.read(self._load_record)
        if isinstance(outcome, OtherRequest) and cache_file is not None:
            raise UsageError(
                f"{opt.calibration_cache} {path}: {_cache_problem(outcome)}",
                hint="Use a different file. This one was not changed.",
            )

    def ranges(self, model: ir.Model, values: Sequence[MeasuredValue]) -> Ranges:
        """Return the range of each value; only missing statistics are measured, and stored."""
        method = self.calibration.method
        needs_histogram = method != "minmax"
        keys = {value.name: _statistics_key(value.name, value.change) for value in values}
        missing = [
            value.name
            for value in values
            if (stored := self._statistics.get(keys[value.name])) is None or (needs_histogram and stored.counts is None)
        ]
        if missing:
            measured = self.calibration.over_samples(
                lambda reader: measure_statistics(model, missing, reader, with_histograms=needs_histogram)
            )
            self._statistics.update({keys[name]: statistics for name, statistics in measured.items()})
            self._write_statistics(model, {name: keys[name] for name in missing})
        return {value.name: range_of(self._statistics[keys[value.name]], method, value.bits) for value in values}

    def channel_maxima(self, model: ir.Model, axes: Mapping[str, int]) -> Mapping[str, Array]:
        """Return the maximum absolute value of each channel; only missing values are measured, and stored."""
        keys = {name: _statistics_key(name, f"axis {axis}") for name, axis in axes.items()}
        missing = {name: axis for name, axis in axes.items() if keys[name] not in self._maxima}
        if missing:
            measured = self.calibration.over_samples(lambda reader: measure_channels(model, missing, reader))
            self._maxima.update({keys[name]: maxima for name, maxima in measured.maxima.items()})
            self._rows = measured.rows
            self._write_statistics(model, {name: keys[name] for name in missing})
        return {name: self._maxima[key] for name, key in keys.items()}

    def channel_rows(self, model: ir.Model, names: Sequence[str]) -> Mapping[str, Array]:
        """Return sample rows of values; rows not measured together with the last maxima are measured now.

        Rows are released after the call: the next call measures again.
        """
        rows, self._rows = dict(self._rows), {}
        if missing := [name for name in names if name not in rows]:
            axes = dict.fromkeys(missing, -1)
            rows.update(self.calibration.over_samples(lambda reader: measure_channels(model, axes, reader)).rows)
        return {name: rows[name] for name in names}

    def as_record(self) -> dict[str, object]:
        """Source of the statistics, JSON-ready."""
        return self.calibration.as_record()

    def _write_statistics(self, model: ir.Model, keys: Mapping[str, str]) -> None:
        """Write the statistics file, if any, with the module of each value."""
        if self._stored is None:
            return
        makers = {value.name: node for node in model.graph for value in node.outputs}
        for name, key in keys.items():
            tag = read_tag(makers[name]) if name in makers else None
            self._modules[key] = "" if tag is None else tag.tag
        by_module: dict[str, dict[str, dict[str, object]]] = {}
        for key, statistics in self._statistics.items():
            by_module.setdefault(self._modules.get(key, ""), {})[key] = statistics.as_record()
        for key, maxima in self._maxima.items():
            record = by_module.setdefault(self._modules.get(key, ""), {}).setdefault(key, {})
            record["channels"] = [float(number) for number in maxima]
        self._stored.write({"calibration": self.as_record(), "modules": by_module})

    def _load_record(self, record: Mapping[str, Any]) -> bool:
        """Load statistics and channel maxima from a record of the file; always return True."""
        for tag, values in record["modules"].items():
            for key, value in values.items():
                self._modules[key] = tag
                if "min" in value:
                    self._statistics[key] = ValueStatistics.from_record(value)
                if "channels" in value:
                    self._maxima[key] = np.array(value["channels"], np.float32)
        return True


def _statistics_key(name: str, change: str) -> str:
    """Return the key of a value's statistics: name, and graph change if any."""
    return f"{name} ({change})" if change else name


def _cache_problem(other_request: OtherRequest) -> str:
    """Describe the mismatch of a statistics file: unreadable, another model or other samples."""
    changed = other_request.changed
    if not changed:
        return "is not a file of activation statistics that this version can read"
    return "has statistics of a different model" if "model" in changed else "has statistics of different samples"
