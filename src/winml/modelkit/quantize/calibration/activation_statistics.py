"""Measures activations over calibration samples: extremes, distributions and channel maxima, and stores them in a file.

What is measured belongs to a value of the graph, not to a placement of QuantizeLinear: a second placement, method or
precision of the same model and data reads the file and runs nothing. Which values are needed is decided elsewhere.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.errors import QuantizeError, opt
from winml.modelkit.onnx.specs import InputTensorSpec
from winml.modelkit.ort.graph_inputs import graph_inputs
from winml.modelkit.ort.graph_sessions import GraphSessions
from winml.modelkit.ort.sessions import Session
from winml.modelkit.quantize.precisions import CalibrationMethod
from winml.modelkit.tags.tagging import read_tag


@dataclass(frozen=True)
class MeasuredValue:
    """An activation whose statistics are needed."""

    name: str
    bits: int = 8
    """Of the integers it becomes."""
    form: str = ""
    """What was done to the graph that changes the numbers of this value; empty: nothing, so that its statistics serve
    every other placement."""


Ranges = Mapping[str, tuple[float, float]]
"""Name of a value → its smallest and largest value."""

SampleReader = Callable[[Sequence[InputTensorSpec]], Iterable[Arrays]]
"""Yields one array per input of a graph for each sample."""

GROUP_BYTES = 256_000_000
"""Activations that are in memory at a time, for methods that look at them. Chosen: those of a layer of a large model
fit; smaller groups only cost more runs."""
BINS = 2048
"""Bins between the largest absolute value and its opposite. Chosen: ONNX Runtime's default for percentile."""
ENTROPY_BINS = 1024
"""Bins that the entropy method looks at. Chosen: the smallest range it can find is an eighth of the largest; its time
grows with the square of the bins."""
QUANTIZED_BINS = 128
"""Specified: steps that the entropy method distinguishes, as in TensorRT and ONNX Runtime."""
PERCENTILE = 99.999
"""Share of the values inside of the range, in percent. Specified: ONNX Runtime's default."""
_SHRINKINGS = np.linspace(1.0, 0.2, 81)
"""Shares of the full range that the MSE method compares. Chosen: steps of 1 %; activations clipped to a fifth lose more
than rounding gains at 8 bits."""

_MARK = "/calibration/"
"""Between the name of a value and that of what is computed of it."""
OBSERVED_NAME = "calibrated.onnx"
"""Name of the graph that returns its values, in messages of ONNX Runtime."""
_REDUCTIONS = {"min": "ReduceMin", "max": "ReduceMax", "sum": "ReduceSum"}
"""The sum is there for NaN, which comparisons may pass over."""


@dataclass(frozen=True)
class ValueStatistics:
    """The values of one activation over all samples."""

    minimum: float
    maximum: float
    counts: Array | None = None
    """Histogram, int64 [:data:`BINS`], between the largest absolute value and its opposite; None: not counted."""

    @property
    def bound(self) -> float:
        """The end of the histogram: zero is in its middle, as the methods want it."""
        return max(abs(self.minimum), abs(self.maximum)) or 1.0

    def as_record(self) -> dict[str, Any]:
        """Return a JSON object; runs of empty bins are left out."""
        record: dict[str, Any] = {"min": self.minimum, "max": self.maximum}
        if self.counts is not None:
            filled = np.flatnonzero(self.counts)
            record["bins"] = {"of": BINS, "index": filled.tolist(), "count": self.counts[filled].tolist()}
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> ValueStatistics:
        """Return what :meth:`as_record` wrote; raises ValueError, TypeError or LookupError where it did not."""
        counts = None
        if (bins := record.get("bins")) is not None:
            if bins["of"] != BINS:
                raise ValueError(f"{bins['of']} bins")
            counts = np.zeros(BINS, np.int64)
            counts[np.array(bins["index"], np.int64)] = bins["count"]
        low, high = float(record["min"]), float(record["max"])
        if not (math.isfinite(low) and math.isfinite(high) and low <= high):
            raise ValueError(f"a range of {low} to {high}")
        return cls(low, high, counts)


def range_of(statistics: ValueStatistics, method: CalibrationMethod, bits: int) -> tuple[float, float]:
    """Return the range that a method finds for integers of so many bits.

    Entropy and MSE weigh what is cut off against the step of the integers. At 16 bits the step is so small that nothing
    is gained: the range is the full one.

    Raises:
        ValueError: the method needs a histogram, and there is none.
    """
    full = (statistics.minimum, statistics.maximum)
    if method == "minmax" or (method in ("entropy", "mse") and bits > 8):
        return full
    if statistics.counts is None:
        raise ValueError(f"{method} needs a histogram")
    if method == "mse":
        return _least_squares_range(statistics, bits)
    from onnxruntime.quantization.calibrate import HistogramCollector

    counts, bound = statistics.counts, statistics.bound
    if method == "entropy":
        counts = counts.reshape(ENTROPY_BINS, -1).sum(axis=1)
    collector = HistogramCollector(method, False, len(counts), QUANTIZED_BINS, PERCENTILE, "same")
    edges = np.linspace(-bound, bound, len(counts) + 1, dtype=np.float32)
    collector.histogram_dict["value"] = (counts, edges, np.float32(full[0]), np.float32(full[1]), edges[-1])
    # The collector prints what it does.
    with contextlib.redirect_stdout(io.StringIO()):
        found = collector.compute_collection_result()["value"]
    return float(found[0]), float(found[1])


def _least_squares_range(statistics: ValueStatistics, bits: int) -> tuple[float, float]:
    """Return the range, both ends shrunk alike, with the smallest squared error: of clipping, and of rounding inside.

    The rounding error of a step ``d`` is ``d ** 2 / 12`` (uniform within a step).
    """
    assert statistics.counts is not None  # asked before
    bound = statistics.bound
    centers = (np.arange(BINS) + 0.5) * (2 * bound / BINS) - bound
    low, high = min(statistics.minimum, 0.0), max(statistics.maximum, 0.0)
    weights = statistics.counts.astype(np.float64)
    errors = []
    for share in _SHRINKINGS:
        clipped = np.clip(centers, low * share, high * share)
        step = (high - low) * share / (2**bits - 1)
        is_inside = clipped == centers
        errors.append(weights @ (centers - clipped) ** 2 + weights[is_inside].sum() * step**2 / 12)
    share = float(_SHRINKINGS[int(np.argmin(errors))])
    return low * share, high * share


def measure_statistics(
    model: ir.Model, names: Sequence[str], read_samples: SampleReader, *, with_histograms: bool
) -> dict[str, ValueStatistics]:
    """Return the statistics of values over samples.

    Args:
        model: The model; it stays as it is.
        names: Values of the main graph, float32 tensors.
        read_samples: Yields at least one sample for the inputs of the graph; they are held one at a time.
        with_histograms: Count values as well, which runs every sample once more for each group of values.

    Raises:
        StageError: ONNX Runtime cannot load or run the graph.
        QuantizeError: a value is NaN or infinite; names the module that makes it.
    """
    observed = _Observer(model, names, with_sizes=with_histograms)
    extremes = _Extremes(names, with_sizes=with_histograms)
    session = observed.reductions()
    inputs = graph_inputs(session)
    for number, sample in enumerate(read_samples(inputs), start=1):
        if suspect := extremes.add(session.run(sample, extremes.outputs)):
            _refuse_not_finite(model, observed.values(suspect), sample, suspect, number)
    _refuse_missing_ranges(model, extremes.ranges)
    found = {name: ValueStatistics(low, high) for name, (low, high) in extremes.ranges.items()}
    if not with_histograms:
        return found
    del session
    for group in _groups(extremes.size_bytes):
        session = observed.values(group)
        counts = {name: np.zeros(BINS, np.int64) for name in group}
        for sample in read_samples(inputs):
            for name, array in session.run(sample, group).items():
                bound = found[name].bound
                counts[name] += np.histogram(array, BINS, range=(-bound, bound))[0]
        found |= {name: replace(found[name], counts=counts[name]) for name in group}
    return found


ROWS = 256
"""Rows of an activation by which the error of a layer is estimated. Chosen: room for outliers and for others."""


def _rows_of(array: Array, samples: int) -> Array:
    """Return the rows of one of several samples."""
    half = -(-ROWS // (2 * samples))
    rows = array.reshape(-1, array.shape[-1])
    largest = np.argsort(-np.abs(rows).max(axis=1, initial=0))
    others = largest[half :: max(len(rows) // half, 1)][:half]
    return rows[[*largest[:half], *others]]


@dataclass(frozen=True)
class ChannelStatistics:
    """What was measured of the channels of values, by name."""

    maxima: Mapping[str, Array]
    """The largest absolute value of each channel: one array [channels]."""
    rows: Mapping[str, Array]
    """About :data:`ROWS` rows of values whose channels lie along the last axis: of each sample those with the largest
    values, which decide the range, and as many others."""


def measure_channels(model: ir.Model, axes: Mapping[str, int], read_samples: SampleReader) -> ChannelStatistics:
    """Return the largest absolute value of each channel of values over samples, and some rows, in one walk.

    Args:
        model: The model; it stays as it is.
        axes: Name of a value of the main graph, float32 → axis of its channels, counted from the last: negative.
        read_samples: As of :func:`measure_statistics`.

    Raises:
        StageError: ONNX Runtime cannot load or run the graph.
    """
    maxima: dict[str, Array] = {}
    rows: dict[str, list[Array]] = {name: [] for name, axis in axes.items() if axis == -1}
    for name, array, count in _values_over_samples(model, tuple(axes), read_samples):
        others = tuple(axis for axis in range(array.ndim) if axis != axes[name] % array.ndim)
        largest = np.abs(array).max(axis=others, initial=0.0)
        maxima[name] = np.maximum(maxima[name], largest) if name in maxima else largest
        if name in rows:
            rows[name].append(_rows_of(array, count))
    return ChannelStatistics(maxima, {name: np.concatenate(parts) for name, parts in rows.items() if parts})


def measure_states(path: Path, names: Sequence[str], read_samples: SampleReader) -> dict[str, Array]:
    """Return the largest absolute values of the states that a decoder answers to samples, by head and channel.

    Args:
        path: The file.
        names: Outputs of it: rows × heads × tokens × channels.
        read_samples: As of :func:`measure_statistics`.

    Returns:
        Name → array [heads, channels].

    Raises:
        StageError: ONNX Runtime cannot load or run the graph.
    """
    session = Session(path)
    inputs = graph_inputs(session)
    found: dict[str, Array] = {}
    for sample in read_samples(inputs):
        for name, array in session.run(sample, names).items():
            largest = np.abs(array.astype(np.float32)).max(axis=(0, 2), initial=0.0)
            found[name] = np.maximum(found[name], largest) if name in found else largest
    return found


def _values_over_samples(
    model: ir.Model, names: Sequence[str], read_samples: SampleReader
) -> Iterator[tuple[str, Array, int]]:
    """Yield name and array of each value in each sample, and how many samples there are; few values are in memory."""
    observed = _Observer(model, names, with_sizes=True)
    extremes = _Extremes(names, with_sizes=True)
    session = observed.reductions()
    inputs, count = graph_inputs(session), 0
    for sample in read_samples(inputs):
        extremes.add(session.run(sample, extremes.outputs))
        count += 1
    del session
    for group in _groups(extremes.size_bytes):
        session = observed.values(group)
        for sample in read_samples(inputs):
            for name, array in session.run(sample, group).items():
                yield name, array, count


class _Observer:
    """Opens a graph so that it returns reductions of values, or the values themselves."""

    def __init__(self, model: ir.Model, names: Sequence[str], *, with_sizes: bool) -> None:
        """Refer to a model, which stays as it is.

        Args:
            model: The model.
            names: Values that are observed.
            with_sizes: Return the sizes of values too.
        """
        self._model, self._names, self._with_sizes = model, names, with_sizes
        self._sessions = GraphSessions(model)

    def reductions(self) -> Session:
        """Return a session whose outputs are the reductions; no activation outlives its readers in it."""
        return self._open(_observed(self._model, self._names, with_sizes=self._with_sizes))

    def values(self, names: Sequence[str]) -> Session:
        """Return a session whose outputs are the named values, which are all in memory when it ran."""
        tapped = self._model.clone()
        values = _values_by_name(tapped.graph)
        tapped.graph.outputs[:] = [values[name] for name in names]
        return self._open(tapped)

    def _open(self, model: ir.Model) -> Session:
        return self._sessions.open(model, name=OBSERVED_NAME, optimize=False, prepack=False, in_written_order=True)


def _values_by_name(graph: ir.Graph) -> dict[str | None, ir.Value]:
    return {value.name: value for value in (*graph.inputs, *(value for node in graph for value in node.outputs))}


def _observed(model: ir.Model, names: Sequence[str], *, with_sizes: bool) -> ir.Model:
    """Return the model with reductions of values as its outputs, each right behind what makes the value."""
    observed = model.clone()
    graph = observed.graph
    graph.outputs.clear()
    values = _values_by_name(graph)
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
            f"value {name} of {_maker_words(model, name)} is {what} at {count} of {values.size} positions "
            f"(sample {number} of the calibration data), so it has no range",
            hint=f"Pass suitable data with {opt.calibration_data}, or {opt.exclude} the module.",
        )


def _refuse_missing_ranges(model: ir.Model, ranges: Ranges) -> None:
    """Refuse values of which no sample had one.

    Raises:
        QuantizeError: names the first in the order of the graph.
    """
    for name, (low, high) in ranges.items():
        if low > high:
            raise QuantizeError(
                f"no value of {name} of {_maker_words(model, name)} was recorded: its arrays are empty in every "
                "calibration sample",
                hint=f"Pass {opt.calibration_data} in which every dimension has at least one element.",
            )


def _maker_words(model: ir.Model, name: str) -> str:
    for node in model.graph:
        if any(value.name == name for value in node.outputs):
            tag = read_tag(node)
            return f"module {tag.tag}" if tag is not None else f"node {node.name}"
    return "the graph's inputs"
