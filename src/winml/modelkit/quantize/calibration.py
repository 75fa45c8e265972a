"""Finds the ranges of values of a graph by running it on samples, in bounded memory.

The graph lies in a temporary file while it runs, its weights mapped rather than read. For the smallest and largest
value, reductions are appended to the graph, so that no activation leaves it. Methods that look at the distribution get
activations in groups of limited size; their statistics are ONNX Runtime's. Does not decide which values are measured.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from winml.modelkit.errors import QuantizeError
from winml.modelkit.graph.files.temporary import temporary_folder
from winml.modelkit.graph.files.writing import write_model
from winml.modelkit.hierarchy.tagging import read_tag
from winml.modelkit.quantize.precisions import CalibrationMethod
from winml.modelkit.runtime.graph_inputs import GraphInput, graph_inputs
from winml.modelkit.runtime.sessions import Session

__all__ = ["Ranges", "SampleReader", "measure_ranges"]

Array = NDArray[Any]
Ranges = Mapping[str, tuple[float, float]]
"""Name of a value → its smallest and largest value."""

SampleReader = Callable[[Sequence[GraphInput]], Iterable[Mapping[str, Array]]]
"""Yields one array per input of a graph for each sample."""

GROUP_BYTES = 256_000_000
"""Activations that are in memory at a time, for methods that look at them. Chosen: those of a layer of a large model
fit; smaller groups only cost more runs."""
BINS: Mapping[CalibrationMethod, int] = {"entropy": 512, "percentile": 2048}
"""Bins of the first histogram of a value. Chosen for percentile: ONNX Runtime's default. Measured for entropy: its
default of 128 leaves one threshold to choose from, and beyond 512 the time grows with the square."""
QUANTIZED_BINS = 128
"""Specified: steps that the entropy method distinguishes, as in TensorRT and ONNX Runtime."""
PERCENTILE = 99.999
"""Share of the values inside of the range, in percent. Specified: ONNX Runtime's default."""

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
        path = folder / "calibrated.onnx"
        write_model(_observed(model, names, with_values=method != "minmax"), path, external=True)
        session = Session(path, optimize=False, prepack=False)
        observer = _Extremes(names) if method == "minmax" else _Histograms(names, method)
        for number, sample in enumerate(read_samples(graph_inputs(session)), start=1):
            found = session.run(sample, [_output(name, kind) for name in names for kind in observer.kinds])
            suspect = observer.add_reductions(found)
            if suspect:
                _refuse_not_finite(model, session, sample, suspect, number)
            observer.add_values(session, sample)
        return observer.ranges()


def _observed(model: ir.Model, names: Sequence[str], *, with_values: bool) -> ir.Model:
    """Return the model with what is asked of values as further outputs; the given one stays as it is."""
    observed = model.clone()
    graph = observed.graph
    values = {value.name: value for value in graph.inputs}
    values |= {value.name: value for node in graph for value in node.outputs}
    declared = {output.name for output in graph.outputs}
    for name in names:
        for kind, operator in {**_REDUCTIONS, **({"size": "Size"} if with_values else {})}.items():
            attributes = [] if kind == "size" else [ir.AttrInt64("keepdims", 0)]
            # ONNX Runtime infers the type.
            output = ir.Value(name=_output(name, kind))
            graph.append(ir.Node("", operator, [values[name]], attributes, outputs=[output], name=output.name))
            graph.outputs.append(output)
        if name not in declared:
            graph.outputs.append(values[name])
    return observed


def _output(name: str, kind: str) -> str:
    return f"{name}/calibration/{kind}"


class _Extremes:
    """Smallest and largest value."""

    kinds: tuple[str, ...] = ("min", "max", "sum")

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._low = dict.fromkeys(names, math.inf)
        self._high = dict.fromkeys(names, -math.inf)

    def add_reductions(self, found: Mapping[str, Array]) -> list[str]:
        """Take what a run reduced values to; return the values that may not be finite."""
        suspect = []
        for name in self._names:
            low, high = float(found[_output(name, "min")]), float(found[_output(name, "max")])
            if not (math.isfinite(low) and math.isfinite(high)) or math.isnan(found[_output(name, "sum")]):
                suspect.append(name)
            self._low[name], self._high[name] = min(self._low[name], low), max(self._high[name], high)
        return suspect

    def add_values(self, session: Session, sample: Mapping[str, Array]) -> None:
        """Take the values themselves: not needed."""

    def ranges(self) -> Ranges:
        """Return the ranges of all that was added."""
        return {name: (self._low[name], self._high[name]) for name in self._names}


class _Histograms(_Extremes):
    """The distribution, and the range that a method makes of it."""

    kinds = ("min", "max", "sum", "size")

    def __init__(self, names: Sequence[str], method: CalibrationMethod) -> None:
        from onnxruntime.quantization.calibrate import HistogramCollector

        super().__init__(names)
        self._collector = HistogramCollector(
            method=method,
            symmetric=False,
            num_bins=BINS[method],
            num_quantized_bins=QUANTIZED_BINS,
            percentile=PERCENTILE,
            scenario="same",
        )
        self._sizes: dict[str, int] = {}

    def add_reductions(self, found: Mapping[str, Array]) -> list[str]:
        self._sizes = {name: int(found[_output(name, "size")]) * np.dtype(np.float32).itemsize for name in self._names}
        return super().add_reductions(found)

    def add_values(self, session: Session, sample: Mapping[str, Array]) -> None:
        """Run once more for each group of values."""
        for group in _groups(self._sizes):
            self._collector.collect_value(session.run(sample, group))

    def ranges(self) -> Ranges:
        # The collector prints what it does.
        with contextlib.redirect_stdout(io.StringIO()):
            found = self._collector.compute_collection_result()
        return {name: (float(found[name][0]), float(found[name][1])) for name in self._names}


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


def _refuse_not_finite(
    model: ir.Model, session: Session, sample: Mapping[str, Array], suspect: Sequence[str], number: int
) -> None:
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


def _maker_words(model: ir.Model, name: str) -> str:
    for node in model.graph:
        if any(value.name == name for value in node.outputs):
            tag = read_tag(node)
            return f"module {tag.tag}" if tag is not None else f"node {node.name}"
    return "the graph's inputs"
