"""Makes quantized forms of one graph and measures how far their answers are from those of the float graph.

A form lives in memory as long as it is measured: its float weights are read from one file that all forms share, and
only what was quantized is its own. Knows no engine: it asks :func:`~winml.modelkit.quantize.pipeline.quantize`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from winml.modelkit.compare.fidelity import measure_fidelity
from winml.modelkit.errors import QuantizeError, StageError
from winml.modelkit.flows.graph_file import read_plain
from winml.modelkit.flows.graph_modules import graph_modules
from winml.modelkit.flows.quantize.preparation import prepare
from winml.modelkit.graph.files.foreign_reading import load_foreign
from winml.modelkit.graph.files.temporary import temporary_folder
from winml.modelkit.graph.files.writing import write_model
from winml.modelkit.graph.module_parts import GraphModules
from winml.modelkit.measure.latency import LatencyOptions, measure_alternating
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.pipeline import QuantizeResult
from winml.modelkit.results.quantization_sensitivity import MeasuredForm, MetricTarget, SensitivityCost, TimedForm
from winml.modelkit.runtime.opened_model import RunOptions, Values, refusals_explained, values_for
from winml.modelkit.runtime.sessions import Session

__all__ = [
    "FloatGraph",
    "FormJudge",
    "QuantizedForms",
    "Quantizer",
    "Samples",
    "float_graph",
    "take_samples",
    "weight_bytes",
]

Array = NDArray[Any]
Quantizer = Callable[[ir.Model, QuantizeOptions, GraphModules], QuantizeResult]
"""Quantizes a model, which is used up. What a mode needs beside the options, such as ranges, is bound to it."""

SHARED_BYTES = 65_536
"""Tensors from this size on are written beside the float weights, and read by the session. Chosen: what is smaller is
no burden in the graph, which protobuf limits to 2 GB."""


@dataclass(frozen=True)
class FormJudge:
    """What judges forms by how well they do the task of the model."""

    target: MetricTarget
    scores: Callable[[Session], Mapping[str, float]]
    """Runs a session on the samples of a data set, and returns metrics by name."""
    request: Mapping[str, Any]
    """What its answers depend on, JSON-ready."""


@dataclass(frozen=True)
class FloatGraph:
    """A model in its plain form, at the opset that quantized operators need; its weights lie in a file."""

    model: ir.Model
    path: Path
    modules: GraphModules
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Samples:
    """Sets of values, and what the float graph answers."""

    values: tuple[Values, ...]
    answers: tuple[Mapping[str, Array], ...]
    """Outputs that are numbers, of which at least one is finite."""
    left_out: tuple[str, ...] = ()
    """Outputs that are NaN or infinite everywhere, of which no damage can be told."""


@contextlib.contextmanager
def float_graph(source: Path, options: QuantizeOptions) -> Iterator[FloatGraph]:
    """Read a file as :func:`~winml.modelkit.flows.graph_file.transform_file` does; its plain form lies in a temporary
    folder as long as the block lasts.

    Raises:
        InputError: the file is no valid ONNX model, or its data is missing.
        NormalizeError, OptimizeError: the graph could not be brought into its plain form, or to the opset.
    """
    with temporary_folder() as folder:
        path = folder / "float.onnx"
        notes = _write_prepared(source, options, path)
        model = load_foreign(path)
        yield FloatGraph(model, path, graph_modules(model, source.stem), notes)


def _write_prepared(source: Path, options: QuantizeOptions, path: Path) -> tuple[str, ...]:
    """Write the form that is quantized; nothing of it stays in memory. Returns what was done for it."""
    model, notes = read_plain(source)
    model, prepared = prepare(model, options)
    write_model(model, path, external=True)
    return (*notes, *prepared)


def take_samples(graph: FloatGraph, options: RunOptions, count: int, threads: int | None) -> Samples:
    """Run the float graph, as ONNX Runtime does by default, on values from a file or on sets of random ones.

    Raises:
        UsageError: sizes or values do not fit the inputs of the graph.
        StageError: it does not run, or answers with nothing a quantized graph could get wrong.
    """
    session = Session(graph.path, threads=threads, name=options.shown)
    count = 1 if options.input_data is not None else count
    values = tuple(values_for(session, replace(options, seed=options.seed + draw)) for draw in range(count))
    answers = []
    for item in values:
        with refusals_explained(item):
            answers.append(_numbers(session.run(item.feeds)))
    if not any(np.any(np.isfinite(array) & (array != 0)) for answer in answers for array in answer.values()):
        raise StageError(
            f"{options.shown} answers nothing but zeros, NaN or infinity on these values, so no damage would show",
            hint="Give values it has an answer to: --input-data file.npz.",
        )
    names = [name for name in answers[0] if any(np.isfinite(answer[name]).any() for answer in answers)]
    left_out = tuple(name for name in answers[0] if name not in names and any(answer[name].size for answer in answers))
    return Samples(values, tuple({name: answer[name] for name in names} for answer in answers), left_out)


def _numbers(answers: Mapping[str, Array]) -> dict[str, Array]:
    """Return the outputs that are numbers."""
    return {name: array for name, array in answers.items() if array.dtype.kind not in "USO"}


def weight_bytes(model: ir.Model) -> int:
    """Return the size of all initializers of a model."""
    tensors = (value.const_value for graph in model.graphs() for value in graph.initializers.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class QuantizedForms:
    """Makes forms of a graph, one for each thread that asks."""

    def __init__(
        self,
        graph: FloatGraph,
        samples: Samples,
        quantizer: Quantizer,
        threads: int | None,
        judge: FormJudge | None = None,
        before_each: Callable[[], None] | None = None,
    ) -> None:
        """Hold what all forms share.

        Args:
            graph: The float graph.
            samples: What is run, and the answers it is compared with.
            quantizer: Makes a form.
            threads: Threads of one session. None: as many as ONNX Runtime chooses.
            judge: Says how well a form does the task of the model.
            before_each: Called before each measurement; what it raises ends the work.
        """
        self.judge = judge
        self._before_each = before_each
        self._graph = graph
        self._samples = samples
        self._quantizer = quantizer
        self._threads = threads
        # Quantizers replace functions of libraries while they work, so one works at a time; sessions run beside it.
        self._quantizing = threading.Lock()
        self._counting = threading.Lock()
        self._numbers = itertools.count()
        self.cost = SensitivityCost()
        """Time taken so far."""

    def measure(self, options: QuantizeOptions, *, is_judged: bool = False) -> MeasuredForm:
        """Make a form, run it, and compare; a form that cannot be made or run is told in the record.

        Args:
            options: How the modules of the form are quantized.
            is_judged: Whether the judge, where there is one, looks at it as well, which takes longer.

        Raises:
            UsageError: the options name no module, or leave nothing to quantize.
        """
        if self._before_each is not None:
            self._before_each()
        try:
            result = self._quantized(options)
        except QuantizeError as error:
            return MeasuredForm(None, 0, 0, error.message)
        made, size = time.perf_counter(), weight_bytes(result.model)
        try:
            with self._session(result.model) as session:
                opened = time.perf_counter()
                answers = [_numbers(session.run(item.feeds)) for item in self._samples.values]
                scores = dict(self.judge.scores(session)) if is_judged and self.judge is not None else {}
        except StageError as error:
            return MeasuredForm(None, result.quantized, size, f"does not run: {error.message}")
        self._add_cost(measured=1, session_s=opened - made, runs_s=time.perf_counter() - opened)
        worst = measure_fidelity(self._samples.answers, answers, 0.0).worst
        return MeasuredForm(worst, result.quantized, size, worst.problem, scores)

    def float_scores(self) -> dict[str, float]:
        """Return how well the float graph does the task; nothing without a judge."""
        if self.judge is None:
            return {}
        return dict(self.judge.scores(Session(self._graph.path, threads=self._threads, name="the float graph")))

    def timed(self, options: QuantizeOptions, timing: LatencyOptions) -> TimedForm:
        """Time a form in alternation with the float graph, on the first set of values.

        Raises:
            QuantizeError: it cannot be made.
            StageError: it does not run.
        """
        feeds = self._samples.values[0].feeds
        with self._session(self._quantized(options).model) as session:
            reference = Session(self._graph.path, threads=self._threads, name="the float graph")
            compared = measure_alternating(session.prepare(feeds), reference.prepare(feeds), timing)
        return TimedForm(compared.model.summary.p50, compared.baseline.summary.p50, compared.ratio)

    def _quantized(self, options: QuantizeOptions) -> QuantizeResult:
        with self._quantizing:
            started = time.perf_counter()
            result = self._quantizer(self._graph.model.clone(), options, self._graph.modules)
            self._add_cost(quantization_s=time.perf_counter() - started)
        return result

    @contextlib.contextmanager
    def _session(self, model: ir.Model) -> Iterator[Session]:
        folder = self._graph.path.parent
        data = folder / f"form{next(self._numbers)}.data"
        try:
            _write_new_tensors(model, data)
            content = ir.serde.serialize_model(model).SerializeToString()
            yield Session(content, threads=self._threads, data_folder=folder, name="the quantized form")
        finally:
            with contextlib.suppress(OSError):  # Windows keeps it while it is mapped; it goes with the folder
                data.unlink(missing_ok=True)

    def _add_cost(self, **added: float) -> None:
        with self._counting:
            self.cost = replace(self.cost, **{name: getattr(self.cost, name) + more for name, more in added.items()})


def _write_new_tensors(model: ir.Model, data: Path) -> None:
    """Write the large tensors that lie in no file yet beside the float weights, and refer to them; in place."""
    values = [
        value
        for value in model.graph.initializers.values()
        if (tensor := value.const_value) is not None
        and not isinstance(tensor, ir.ExternalTensor)
        and tensor.dtype != ir.DataType.STRING
        and tensor.nbytes >= SHARED_BYTES
    ]
    tensors = [value.const_value for value in values if value.const_value is not None]
    written = ir.external_data.convert_tensors_to_external(tensors, os.fspath(data.parent), data.name)
    for value, tensor in zip(values, written, strict=True):
        value.const_value = tensor
