"""Reads calibration samples, a user's data or random values, and measures the ranges of activations with them.

Arrays are read from ``.npz`` files; texts, images and audio become arrays by what lies beside the model. Samples are
read when their turn comes. Which activations are quantized is decided elsewhere.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.compare.fidelity import QualitySamples, QualitySource
from winml.modelkit.errors import InputError, QuantizeError, StageError, UsageError
from winml.modelkit.evaluate.data_sets import DataSet, DataSetRequest, TextFile, open_data_set
from winml.modelkit.evaluate.preprocessing import SampleFeeds
from winml.modelkit.evaluate.processors import processor_files
from winml.modelkit.flows.quality_samples import MOST_SAMPLES as MOST_COMPARED
from winml.modelkit.flows.quality_samples import has_processors, made_values
from winml.modelkit.flows.quantize.calibration_files import (
    FORMATS,
    OPTION,
    calibration_files,
    calibration_kind,
    npz_files,
    refuse_missing_files,
)
from winml.modelkit.graph.files.recovery import temporary_folder
from winml.modelkit.graph.files.writing import write_model
from winml.modelkit.hierarchy.tagging import read_tag
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.precisions import CalibrationMethod
from winml.modelkit.runtime.graph_inputs import GraphInput, draw_feeds, graph_inputs, load_feeds, settle_sizes
from winml.modelkit.runtime.opened_model import RunOptions, Values
from winml.modelkit.runtime.sessions import Session

__all__ = ["Calibration", "MeasuredOnce", "calibration_of", "measure_ranges", "refuse_missing_data"]

MOST_SAMPLES = 128
"""Samples read of a user's data where no number is given. Measured: docs/reference/quantization.md; the ranges hardly
change beyond."""
RANDOM_SAMPLES = 16
"""Sets of random values where there is no data. Chosen: more of them say no more about real data."""

SOLVING_SAMPLES = 128
"""Samples made for algorithms that find blocks of weights, where there is no data. Chosen: as many as are read of data;
a product with 1536 inputs needs more rows than the tokens of 16 sentences."""

_OTHER_SAMPLES = 1_000_003
"""Added to the seed: what ranges come from is not what the result is judged on."""
_SOURCES = {True: "its processor", False: "random values"}
_KINDS_OF_SAMPLES = {True: "samples made for the processor of the model", False: "sets of random values"}
"""Whether what lies beside the model makes arrays → what ranges come from without data."""


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
    _made: list[Values] = field(default_factory=list, compare=False)
    """Samples that what lies beside the model makes, where there is no data; known once they were read."""

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
            return requested or (SOLVING_SAMPLES if self.options.solves_weights else RANDOM_SAMPLES)
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
        found = (
            "ranges of activations" if self.options.needs_ranges else f"blocks of weights ({self.options.algorithm})"
        )
        note = (
            f"The {found} come from {self.count} {_KINDS_OF_SAMPLES[self._is_made]}, not from data: real "
            "data may give other answers than the comparison shows. Give --calibration-data before you use the result."
        )
        return (note,)

    @property
    def words(self) -> str:
        """The data, for people."""
        words = "sample" if self.count == 1 else "samples"
        return f"{self.count} {words} of {self._name if self.has_data else _SOURCES[self._is_made]}, {self._use}"

    @property
    def _use(self) -> str:
        """What is done with the samples: how ranges are made of values, or the algorithm that finds weights."""
        return self.method if self.options.needs_ranges else self.options.algorithm

    def as_record(self) -> dict[str, object]:
        """Return what the ranges come from, JSON-ready."""
        data_set = None if self._sample_feeds is None else self._sample_feeds.data_set
        split = {"split": data_set.split} if isinstance(data_set, DataSet) else {}
        return {
            "data": self._name if self.has_data else "processor" if self._is_made else "random",
            **split,
            "samples": self.count,
            "method": self._use,
        }

    def close(self) -> None:
        """Remove temporary files of a data set; no sample can be read after."""
        feeds = self.__dict__.get("_sample_feeds")  # opened only where it was asked for
        if feeds is not None and isinstance(feeds.data_set, DataSet):
            feeds.data_set.close()

    def measure(self, model: ir.Model, names: Sequence[str]) -> Ranges:
        """Return the ranges of values of a model; see :func:`measure_ranges`."""
        try:
            return measure_ranges(model, names, self.read_samples, self.method)
        except StageError as error:
            if self._is_made and type(error) is StageError:
                self._made.clear()
                return measure_ranges(model, names, self._random_samples, self.method)
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
            yield from self._made_samples(inputs) or self._random_samples(inputs)

    def _made_samples(self, inputs: Sequence[GraphInput]) -> list[dict[str, Array]]:
        """Return samples for the processor beside the model; none where there is none, or the model takes others."""
        if not self._made and has_processors(inputs, self.model_folder):
            run = RunOptions("", sizes=self.sizes, seed=self.seed + _OTHER_SAMPLES)
            with contextlib.suppress(UsageError, InputError):
                self._made.extend(made_values(inputs, self.model_folder, self.count, run))
        return [dict(values.feeds) for values in self._made]

    @property
    def _is_made(self) -> bool:
        return bool(self._made)

    def samples_to_compare(self, session: Session) -> tuple[Sequence[Arrays], QualitySamples]:
        """Return the first samples of a user's data, on which the result is compared with its source."""
        source: QualitySource = "file" if self._sample_feeds is None else "dataset"
        samples = list(itertools.islice(self.read_samples(graph_inputs(session)), MOST_COMPARED))
        return samples, QualitySamples(source, len(samples), self.seed)

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
    """Return where the samples come from that options need; None where they need none.

    Args:
        options: What is asked for.
        model_folder: Folder that a tokenizer, image processor or feature extractor is looked for in.
        sizes: Sizes of open dimensions, for random values.
        seed: Of what is drawn.
    """
    return Calibration(options, model_folder, sizes, seed) if options.needs_samples else None


def refuse_missing_data(calibration: Calibration) -> None:
    """Refuse data that cannot be read, before a model is.

    Raises:
        UsageError: there is none, it has a form that is not read, or there are fewer samples than asked for.
        InputError: a file is damaged.
    """
    refuse_missing_files(calibration.options)
    if not calibration.count:
        raise UsageError(f"{OPTION} {calibration.options.calibration_data}: holds no sample", hint=FORMATS)


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


Ranges = Mapping[str, tuple[float, float]]
"""Name of a value → its smallest and largest value."""

SampleReader = Callable[[Sequence[GraphInput]], Iterable[Arrays]]
"""Yields one array per input of a graph for each sample."""

GROUP_BYTES = 256_000_000
"""Activations that are in memory at a time, for methods that look at them. Chosen: those of a layer of a large model
fit; smaller groups only cost more runs."""
BINS: Mapping[CalibrationMethod, int] = {"entropy": 1024, "percentile": 2048}
"""Bins between the largest absolute value and its opposite. Chosen for percentile: ONNX Runtime's default. Chosen for
entropy: the smallest range it can find is an eighth of the largest; its time grows with the square of the bins."""
QUANTIZED_BINS = 128
"""Specified: steps that the entropy method distinguishes, as in TensorRT and ONNX Runtime."""
PERCENTILE = 99.999
"""Share of the values inside of the range, in percent. Specified: ONNX Runtime's default."""

_MARK = "/calibration/"
OBSERVED_NAME = "calibrated.onnx"
"""Temporary file of the graph that tells of its values; messages of ONNX Runtime name it."""
"""Between the name of a value and that of what is computed of it."""
_REDUCTIONS = {"min": "ReduceMin", "max": "ReduceMax", "sum": "ReduceSum"}
"""The sum is there for NaN, which comparisons may pass over."""


def measure_ranges(
    model: ir.Model, names: Sequence[str], read_samples: SampleReader, method: CalibrationMethod
) -> Ranges:
    """Return the ranges of values over samples.

    Args:
        model: The model; it stays as it is.
        names: Values of the main graph, float32 tensors.
        read_samples: Yields at least one sample for the inputs of the graph; they are held one at a time.
        method: ``minmax``, or how much of the rare values is given up.

    Raises:
        StageError: ONNX Runtime cannot load or run the graph.
        QuantizeError: a value is NaN or infinite; names the module that makes it.
        WriteError: the temporary file cannot be written.
    """
    with temporary_folder() as folder:
        observed = _ObservedFile(model, names, folder / OBSERVED_NAME, with_sizes=method != "minmax")
        extremes = _Extremes(names, with_sizes=method != "minmax")
        session = observed.reductions()
        inputs = graph_inputs(session)
        for number, sample in enumerate(read_samples(inputs), start=1):
            if suspect := extremes.add(session.run(sample, extremes.outputs)):
                _refuse_not_finite(model, observed.values(suspect), sample, suspect, number)
        _refuse_missing_ranges(model, extremes.ranges)
        if method == "minmax":
            return extremes.ranges
        del session
        histograms = _Histograms(extremes.ranges, method)
        for group in _groups(extremes.size_bytes):
            session = observed.values(group)
            for sample in read_samples(inputs):
                histograms.add(session.run(sample, group))
        return histograms.ranges()


class _ObservedFile:
    """A file of a graph that tells of values: what reductions make of them, or themselves."""

    def __init__(self, model: ir.Model, names: Sequence[str], path: Path, *, with_sizes: bool) -> None:
        """Write it.

        Args:
            model: The model; it stays as it is.
            names: Values that are told of.
            path: The file.
            with_sizes: Tell of the sizes of values too.
        """
        self._path = path
        write_model(_observed(model, names, with_sizes=with_sizes), path, external=True)

    def reductions(self) -> Session:
        """Return a session whose outputs are the reductions; no activation outlives its readers in it."""
        return Session(self._path, optimize=False, prepack=False, in_written_order=True)

    def values(self, names: Sequence[str]) -> Session:
        """Return a session whose outputs are the named values, which are all in memory when it ran."""
        graph_file = onnx.ModelProto.FromString(self._path.read_bytes())  # its weights are in another file
        retained = [node for node in graph_file.graph.node if _MARK not in node.name]
        del graph_file.graph.node[:], graph_file.graph.output[:]
        graph_file.graph.node.extend(retained)
        graph_file.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
        return Session(
            graph_file.SerializeToString(),
            optimize=False,
            prepack=False,
            in_written_order=True,
            data_folder=self._path.parent,
            name=self._path.name,
        )


def _observed(model: ir.Model, names: Sequence[str], *, with_sizes: bool) -> ir.Model:
    """Return the model with reductions of values as its outputs, each right behind what makes the value."""
    observed = model.clone()
    graph = observed.graph
    graph.outputs.clear()
    values = {value.name: value for value in graph.inputs}
    values |= {value.name: value for node in graph for value in node.outputs}
    for name in names:
        value, reductions = values[name], []
        for kind, operator in {**_REDUCTIONS, **({"size": "Size"} if with_sizes else {})}.items():
            attributes = [] if kind == "size" else [ir.AttrInt64("keepdims", 0)]
            # ONNX Runtime infers the type.
            output = ir.Value(name=_output(name, kind))
            reductions.append(ir.Node("", operator, [value], attributes, outputs=[output], name=output.name))
            graph.outputs.append(output)
        maker = value.producer()
        if maker is not None:
            graph.insert_after(maker, reductions)
        else:
            graph.insert_before(graph[0], reductions)
    return observed


def _output(name: str, kind: str) -> str:
    return f"{name}{_MARK}{kind}"


class _Extremes:
    """Smallest and largest value of each, and how large it is."""

    def __init__(self, names: Sequence[str], *, with_sizes: bool) -> None:
        self.outputs = [_output(name, kind) for name in names for kind in (*_REDUCTIONS, *(["size"] * with_sizes))]
        """What a run has to return."""
        self.ranges: dict[str, tuple[float, float]] = dict.fromkeys(names, (math.inf, -math.inf))
        self.size_bytes = dict.fromkeys(names, 0)
        """The largest that was seen."""

    def add(self, found: Arrays) -> list[str]:
        """Take what a run returned; return the values that may not be finite."""
        suspect = []
        for name, (lowest, highest) in self.ranges.items():
            low, high, total = (float(found[_output(name, kind)]) for kind in _REDUCTIONS)
            if not (math.isfinite(low) and math.isfinite(high)) or math.isnan(total):
                suspect.append(name)
            self.ranges[name] = min(lowest, low), max(highest, high)
            size = int(found.get(_output(name, "size"), 0)) * np.dtype(np.float32).itemsize
            self.size_bytes[name] = max(self.size_bytes[name], size)
        return suspect


class _Histograms:
    """The distribution of each value, and the range that a method makes of it.

    The bins are settled by the extremes before: those of ONNX Runtime's collector grow in number with each larger
    value, and the time of its methods with them.
    """

    def __init__(self, extremes: Ranges, method: CalibrationMethod) -> None:
        self._extremes = extremes
        self._method = method
        self._counts = {name: np.zeros(BINS[method], np.int64) for name in extremes}

    def add(self, values: Arrays) -> None:
        """Count values."""
        for name, array in values.items():
            counted, _ = np.histogram(array, BINS[self._method], range=self._span(name))
            self._counts[name] += counted

    def ranges(self) -> Ranges:
        """Return the ranges of all that was counted, by ONNX Runtime's methods."""
        from onnxruntime.quantization.calibrate import HistogramCollector

        collector = HistogramCollector(self._method, False, BINS[self._method], QUANTIZED_BINS, PERCENTILE, "same")
        for name, (low, high) in self._extremes.items():
            edges = np.linspace(*self._span(name), BINS[self._method] + 1, dtype=np.float32)
            collector.histogram_dict[name] = (self._counts[name], edges, np.float32(low), np.float32(high), edges[-1])
        # The collector prints what it does.
        with contextlib.redirect_stdout(io.StringIO()):
            found = collector.compute_collection_result()
        return {name: (float(found[name][0]), float(found[name][1])) for name in self._extremes}

    def _span(self, name: str) -> tuple[float, float]:
        """Return the ends of the bins: zero is in the middle, as the methods want it."""
        bound = max(map(abs, self._extremes[name])) or 1.0
        return -bound, bound


def _groups(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yield the values in groups of at most ``GROUP_BYTES``; a larger one is alone."""
    group: list[str] = []
    total = 0
    for name, size in sizes.items():
        if group and total + size > GROUP_BYTES:
            yield group
            group, total = [], 0
        group.append(name)
        total += size
    if group:
        yield group


def _refuse_not_finite(model: ir.Model, session: Session, sample: Arrays, suspect: Sequence[str], number: int) -> None:
    """Look at values whose reductions are not finite; the sum alone may have overflowed.

    Raises:
        QuantizeError: one is NaN or infinite; the first in the order of the graph.
    """
    for name in suspect:
        values = session.run(sample, [name])[name]
        if (count := int(values.size - np.isfinite(values).sum())) == 0:
            continue
        what = "NaN" if np.isnan(values).any() else "infinite"
        raise QuantizeError(
            f"value {name} of {_maker_words(model, name)} is {what} at {count} of {values.size} places "
            f"(sample {number} of the calibration data), so it has no range",
            hint="Give data the model takes with --calibration-data, or --exclude the module.",
        )


def _refuse_missing_ranges(model: ir.Model, ranges: Ranges) -> None:
    """Refuse values of which no sample had one.

    Raises:
        QuantizeError: names the first in the order of the graph.
    """
    for name, (low, high) in ranges.items():
        if low > high:
            raise QuantizeError(
                f"no value of {name} of {_maker_words(model, name)} was seen: its arrays are empty in every sample of "
                "the calibration data",
                hint="Give arrays with at least one element in every dimension with --calibration-data.",
            )


def _maker_words(model: ir.Model, name: str) -> str:
    for node in model.graph:
        if any(value.name == name for value in node.outputs):
            tag = read_tag(node)
            return f"module {tag.tag}" if tag is not None else f"node {node.name}"
    return "the graph's inputs"
