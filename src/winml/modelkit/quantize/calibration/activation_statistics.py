"""Measurement of activations over calibration samples: extremes, distributions and channel maxima.

Statistics belong to a value of the graph, not to a placement of QuantizeLinear: a second placement, method or precision
of the same model and data reads the file and runs nothing. The selection of the values is not part of this module.
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
    """Bits of the quantized integers."""
    change: str = ""
    """Graph change that affects this value; empty if unchanged, so that its statistics serve all other placements."""


Ranges = Mapping[str, tuple[float, float]]
"""Name of a value → its smallest and largest value."""

SampleReader = Callable[[Sequence[InputTensorSpec]], Iterable[Arrays]]
"""Yields each sample: input name → array."""

GROUP_BYTES = 256_000_000
"""Maximum bytes of activations in memory, for methods that read the values. Chosen: the activations of a layer of a
large model fit; smaller groups only cost more runs."""
BINS = 2048
"""Bins between the largest absolute value and its opposite. Chosen: ONNX Runtime's default for percentile."""
ENTROPY_BINS = 1024
"""Bins of the entropy method. Chosen: the smallest range it can select is an eighth of the largest; its time grows with
the square of the bins."""
QUANTIZED_BINS = 128
"""Specified: number of steps of the entropy method, as in TensorRT and ONNX Runtime."""
PERCENTILE = 99.999
"""Share of the values inside the range, in percent. Specified: ONNX Runtime's default."""
_SHRINKINGS = np.linspace(1.0, 0.2, 81)
"""Shares of the full range that the MSE method compares. Chosen: steps of 1 %; activations clipped to a fifth lose more
than rounding gains at 8 bits."""

_MARGIN = 1.25
"""Factor of a range of 16 bits: other data exceeds the range of the samples. Chosen: it costs 1.9 dB of the rounding of
16 bits. Measured: a decoder of random weights in w8a16 has 42.8 instead of 31.2 dB on other texts than its samples."""
_FEW_BITS = 8
"""Largest number of bits for which a wider range would cost more than it gains."""

_MARK = "/calibration/"
"""Separator between the name of a value and the kind of reduction."""
OBSERVED_NAME = "calibrated.onnx"
"""Name of the observed graph in messages of ONNX Runtime."""
_REDUCTIONS = {"min": "ReduceMin", "max": "ReduceMax", "sum": "ReduceSum"}
"""The sum detects NaN, which comparisons may ignore."""


@dataclass(frozen=True)
class ValueStatistics:
    """Statistics of one activation over all samples."""

    minimum: float
    maximum: float
    counts: Array | None = None
    """Histogram, int64 [:data:`BINS`], between the largest absolute value and its opposite; ``None``: not measured."""

    @property
    def bound(self) -> float:
        """Upper end of the histogram, which is symmetric about zero as the methods require."""
        return max(abs(self.minimum), abs(self.maximum)) or 1.0

    def as_record(self) -> dict[str, Any]:
        """Return a JSON object; empty bins are omitted."""
        record: dict[str, Any] = {"min": self.minimum, "max": self.maximum}
        if self.counts is not None:
            filled = np.flatnonzero(self.counts)
            record["bins"] = {"of": BINS, "index": filled.tolist(), "count": self.counts[filled].tolist()}
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> ValueStatistics:
        """Parse a record of :meth:`as_record`; raises ValueError, TypeError or LookupError if it is invalid."""
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
    """Compute the range of a method for integers of so many bits.

    Clipping of outliers gains a smaller step of the integers. At 16 bits the step is so small that clipping only loses:
    with every method, the range is wider than that of the samples by a margin.

    Raises:
        ValueError: the method needs a histogram, which is missing.
    """
    full = (statistics.minimum, statistics.maximum)
    if bits > _FEW_BITS:
        return full[0] * _MARGIN, full[1] * _MARGIN
    if method == "minmax":
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
    # The collector prints its progress.
    with contextlib.redirect_stdout(io.StringIO()):
        value_range = collector.compute_collection_result()["value"]
    return float(value_range[0]), float(value_range[1])


def _least_squares_range(statistics: ValueStatistics, bits: int) -> tuple[float, float]:
    """Compute the range, both ends shrunk alike, with the smallest squared error of clipping and rounding.

    The rounding error of a step ``d`` is ``d ** 2 / 12`` (uniform within a step).
    """
    assert statistics.counts is not None  # checked by the caller
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
    """Measure the statistics of values over samples.

    Args:
        model: The model; it is not changed.
        names: Values of the main graph, float32 tensors.
        read_samples: Yields at least one sample for the inputs of the graph; one sample is in memory at a time.
        with_histograms: Also measure histograms, which runs every sample once more for each group of values.

    Raises:
        StageError: ONNX Runtime cannot load or run the graph.
        QuantizeError: a value is NaN or infinite; names the module that produces it.
    """
    observed = _Observer(model, names, with_sizes=with_histograms)
    extremes = _Extremes(names, with_sizes=with_histograms)
    session = observed.reductions()
    inputs = graph_inputs(session)
    for number, sample in enumerate(read_samples(inputs), start=1):
        if suspect := extremes.add(session.run(sample, extremes.outputs)):
            _refuse_not_finite(model, observed.values(suspect), sample, suspect, number)
    _refuse_empty_values(model, extremes.ranges)
    statistics = {name: ValueStatistics(low, high) for name, (low, high) in extremes.ranges.items()}
    if not with_histograms:
        return statistics
    del session
    for group in _group_values(extremes.size_bytes):
        session = observed.values(group)
        counts = {name: np.zeros(BINS, np.int64) for name in group}
        for sample in read_samples(inputs):
            for name, array in session.run(sample, group).items():
                bound = statistics[name].bound
                counts[name] += np.histogram(array, BINS, range=(-bound, bound))[0]
        statistics |= {name: replace(statistics[name], counts=counts[name]) for name in group}
    return statistics


ROWS = 256
"""Number of activation rows for the estimated error of a layer. Chosen: room for outliers and other rows."""


def _select_rows(array: Array, samples: int) -> Array:
    """Select rows of one sample: those with the largest values, and evenly ranked others."""
    half = -(-ROWS // (2 * samples))
    rows = array.reshape(-1, array.shape[-1])
    largest = np.argsort(-np.abs(rows).max(axis=1, initial=0))
    spaced = largest[half :: max(len(rows) // half, 1)][:half]
    return rows[[*largest[:half], *spaced]]


@dataclass(frozen=True)
class ChannelStatistics:
    """Channel statistics of values: value name → arrays."""

    maxima: Mapping[str, Array]
    """Maximum absolute value per channel: one array [channels]."""
    rows: Mapping[str, Array]
    """About :data:`ROWS` rows of values whose channel axis is the last: per sample the rows with the largest values,
    which determine the range, and as many others."""


def measure_channels(model: ir.Model, axes: Mapping[str, int], read_samples: SampleReader) -> ChannelStatistics:
    """Measure the maximum absolute value of each channel over samples, and collect sample rows.

    Args:
        model: The model; it is not changed.
        axes: Name of a value of the main graph, float32 → axis of its channels, counted from the last: negative.
        read_samples: As in :func:`measure_statistics`.

    Raises:
        StageError: ONNX Runtime cannot load or run the graph.
    """
    maxima: dict[str, Array] = {}
    rows: dict[str, list[Array]] = {name: [] for name, axis in axes.items() if axis == -1}
    for name, array, count in _values_over_samples(model, tuple(axes), read_samples):
        other_axes = tuple(axis for axis in range(array.ndim) if axis != axes[name] % array.ndim)
        largest = np.abs(array).max(axis=other_axes, initial=0.0)
        maxima[name] = np.maximum(maxima[name], largest) if name in maxima else largest
        if name in rows:
            rows[name].append(_select_rows(array, count))
    return ChannelStatistics(maxima, {name: np.concatenate(parts) for name, parts in rows.items() if parts})


def measure_states(path: Path, names: Sequence[str], read_samples: SampleReader) -> dict[str, Array]:
    """Measure the maximum absolute values of a decoder's states over samples, by head and channel.

    Args:
        path: The file.
        names: Outputs: rows × heads × tokens × channels.
        read_samples: As in :func:`measure_statistics`.

    Returns:
        Name → array [heads, channels].

    Raises:
        StageError: ONNX Runtime cannot load or run the graph.
    """
    session = Session(path)
    inputs = graph_inputs(session)
    maxima: dict[str, Array] = {}
    for sample in read_samples(inputs):
        for name, array in session.run(sample, names).items():
            largest = np.abs(array.astype(np.float32)).max(axis=(0, 2), initial=0.0)
            maxima[name] = np.maximum(maxima[name], largest) if name in maxima else largest
    return maxima


def _values_over_samples(
    model: ir.Model, names: Sequence[str], read_samples: SampleReader
) -> Iterator[tuple[str, Array, int]]:
    """Yield (name, array, number of samples) for each value in each sample; few values are in memory at a time."""
    observed = _Observer(model, names, with_sizes=True)
    extremes = _Extremes(names, with_sizes=True)
    session = observed.reductions()
    inputs, count = graph_inputs(session), 0
    for sample in read_samples(inputs):
        extremes.add(session.run(sample, extremes.outputs))
        count += 1
    del session
    for group in _group_values(extremes.size_bytes):
        session = observed.values(group)
        for sample in read_samples(inputs):
            for name, array in session.run(sample, group).items():
                yield name, array, count


class _Observer:
    """Opens a graph with reductions of values, or with the values, as outputs."""

    def __init__(self, model: ir.Model, names: Sequence[str], *, with_sizes: bool) -> None:
        """Store the reference to a model, which is not changed.

        Args:
            model: The model.
            names: Values to observe.
            with_sizes: Return the sizes of values too.
        """
        self._model, self._names, self._with_sizes = model, names, with_sizes
        self._sessions = GraphSessions(model)

    def reductions(self) -> Session:
        """Open a session whose outputs are the reductions; activations are freed after their last reader."""
        return self._open_session(_add_reductions(self._model, self._names, with_sizes=self._with_sizes))

    def values(self, names: Sequence[str]) -> Session:
        """Open a session whose outputs are the named values, all in memory after a run."""
        tapped = self._model.clone()
        values = _values_by_name(tapped.graph)
        tapped.graph.outputs[:] = [values[name] for name in names]
        return self._open_session(tapped)

    def _open_session(self, model: ir.Model) -> Session:
        """Open a session without graph optimizations, in node order."""
        return self._sessions.open(model, name=OBSERVED_NAME, optimize=False, prepack=False, in_written_order=True)


def _values_by_name(graph: ir.Graph) -> dict[str | None, ir.Value]:
    """Name → value, for inputs and node outputs of a graph."""
    return {value.name: value for value in (*graph.inputs, *(value for node in graph for value in node.outputs))}


def _add_reductions(model: ir.Model, names: Sequence[str], *, with_sizes: bool) -> ir.Model:
    """Return a copy of the model whose outputs are reductions, each inserted after the producer of its value."""
    observed = model.clone()
    graph = observed.graph
    graph.outputs.clear()
    values = _values_by_name(graph)
    for name in names:
        value, reductions = values[name], []
        for kind, operator in {**_REDUCTIONS, **({"size": "Size"} if with_sizes else {})}.items():
            attributes = [] if kind == "size" else [ir.AttrInt64("keepdims", 0)]
            # ONNX Runtime infers the type.
            output = ir.Value(name=_output_name(name, kind))
            reductions.append(ir.Node("", operator, [value], attributes, outputs=[output], name=output.name))
            graph.outputs.append(output)
        maker = value.producer()
        if maker is not None:
            graph.insert_after(maker, reductions)
        else:
            graph.insert_before(graph[0], reductions)
    return observed


def _output_name(name: str, kind: str) -> str:
    """Return the name of an added output: value and statistic."""
    return f"{name}{_MARK}{kind}"


class _Extremes:
    """Accumulated range and size of each value."""

    def __init__(self, names: Sequence[str], *, with_sizes: bool) -> None:
        self.outputs = [_output_name(name, kind) for name in names for kind in (*_REDUCTIONS, *(["size"] * with_sizes))]
        """Names of the required outputs of a run."""
        self.ranges: dict[str, tuple[float, float]] = dict.fromkeys(names, (math.inf, -math.inf))
        self.size_bytes = dict.fromkeys(names, 0)
        """Largest observed size in bytes."""

    def add(self, outputs: Arrays) -> list[str]:
        """Add the outputs of a run; return the values that may be non-finite."""
        suspect = []
        for name, (lowest, highest) in self.ranges.items():
            low, high, total = (float(outputs[_output_name(name, kind)]) for kind in _REDUCTIONS)
            if not (math.isfinite(low) and math.isfinite(high)) or math.isnan(total):
                suspect.append(name)
            self.ranges[name] = min(lowest, low), max(highest, high)
            size = int(outputs.get(_output_name(name, "size"), 0)) * np.dtype(np.float32).itemsize
            self.size_bytes[name] = max(self.size_bytes[name], size)
        return suspect


def _group_values(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yield the values in groups of at most ``GROUP_BYTES``; a larger value forms a group alone."""
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
    """Check values whose reductions are not finite; the sum alone may have overflowed.

    Raises:
        QuantizeError: a value is NaN or infinite; names the first in graph order.
    """
    for name in suspect:
        values = session.run(sample, [name])[name]
        if (count := int(values.size - np.isfinite(values).sum())) == 0:
            continue
        problem = "NaN" if np.isnan(values).any() else "infinite"
        raise QuantizeError(
            f"value {name} of {_describe_maker(model, name)} is {problem} at {count} of {values.size} positions "
            f"(sample {number} of the calibration data), so it has no range",
            hint=f"Pass suitable data with {opt.calibration_data}, or {opt.exclude} the module.",
        )


def _refuse_empty_values(model: ir.Model, ranges: Ranges) -> None:
    """Refuse values whose range was never set, since they are empty in every sample.

    Raises:
        QuantizeError: names the first in graph order.
    """
    for name, (low, high) in ranges.items():
        if low > high:
            raise QuantizeError(
                f"no value of {name} of {_describe_maker(model, name)} was recorded: its arrays are empty in every "
                "calibration sample",
                hint=f"Pass {opt.calibration_data} in which every dimension has at least one element.",
            )


def _describe_maker(model: ir.Model, name: str) -> str:
    """Name the module or node that produces a value, for messages."""
    for node in model.graph:
        if any(value.name == name for value in node.outputs):
            tag = read_tag(node)
            return f"module {tag.tag}" if tag is not None else f"node {node.name}"
    return "the graph's inputs"
