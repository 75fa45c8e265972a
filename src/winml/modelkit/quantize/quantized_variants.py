"""Makes quantized forms of one graph and measures how far their answers are from those of the float graph.

A form lives in memory as long as it is measured: float weights are mapped from where they lie, and only what was
quantized is its own. Writes no weight. Knows no engine: it asks :func:`~winml.modelkit.quantize.pipeline.quantize`.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.compare.fidelity import QualitySamples, measure_fidelity
from winml.modelkit.compare.quality_samples import SampleRequest, quality_values
from winml.modelkit.errors import QuantizeError, StageError, UsageError
from winml.modelkit.onnx.cutting import GraphModules
from winml.modelkit.onnx.files.output_files import recover, refuse_existing
from winml.modelkit.onnx.files.resumable_results import OtherRequest, ResumableResults
from winml.modelkit.ort.graph_sessions import GraphSessions
from winml.modelkit.ort.opened_model import Values, refusals_explained
from winml.modelkit.ort.sessions import Session
from winml.modelkit.profile.latency import LatencyOptions, measure_alternating
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.pipeline import QuantizeResult
from winml.modelkit.quantize.planning import constant_weight
from winml.modelkit.quantize.preparation import prepare
from winml.modelkit.quantize.sensitivity_records import (
    MeasuredVariant,
    MetricTarget,
    SensitivityCost,
    TimedVariant,
)
from winml.modelkit.quantize.shared_starts import SharedStarts, Start, feeds_of
from winml.modelkit.transform.graph_file import read_plain

Quantizer = Callable[[ir.Model, QuantizeOptions, GraphModules], QuantizeResult]
"""Quantizes a model, which is used up. What a mode needs beside the options, such as ranges, is bound to it."""


@dataclass(frozen=True)
class VariantEvaluator:
    """What judges forms by how well they do the task of the model."""

    target: MetricTarget
    scores: Callable[[Session], Mapping[str, float]]
    """Runs a session on the samples of a data set, and returns metrics by name."""
    request: Mapping[str, Any]
    """What its answers depend on, JSON-ready."""


@dataclass(frozen=True)
class FloatGraph:
    """A model in its plain form, at the opset that quantized operators need; its weights lie in files."""

    model: ir.Model
    modules: GraphModules
    notes: tuple[str, ...]
    sessions: GraphSessions
    """Opens it, and forms of it."""

    @classmethod
    def of(cls, model: ir.Model, modules: GraphModules, notes: Sequence[str] = ()) -> FloatGraph:
        """Refer to a model, which stays as it is."""
        return cls(model, modules, tuple(notes), GraphSessions(model))

    def session(self, threads: int | None = None, name: str = "the float graph") -> Session:
        """Return a session of it."""
        return self.sessions.open(self.model, threads=threads, name=name)

    def weights_of(self, nodes: Collection[str]) -> dict[str, ir.TensorProtocol]:
        """Return the weights of nodes by name, each once."""
        values = {constant_weight(node) for node in self.model.graph if node.name in nodes}
        return {
            value.name or "": value.const_value
            for value in values
            if value is not None and value.const_value is not None
        }

    def refuse_no_modules(self, source: str) -> None:
        """Refuse a graph whose nodes have no modules.

        Raises:
            UsageError: names the source.
        """
        if not self.modules.modules:
            raise UsageError(
                f"{source}: the nodes have no module information",
                hint="Export it with winml export, or transfer tags from its source file: winml retag.",
            )


@dataclass(frozen=True)
class Samples:
    """Sets of values, and what the float graph answers."""

    values: tuple[Values, ...]
    answers: tuple[Arrays, ...]
    """Outputs that are numbers, of which at least one is finite."""
    about: QualitySamples
    """Where the values come from."""
    left_out: tuple[str, ...] = ()
    """Outputs that are NaN or infinite everywhere, of which no damage can be told."""


def float_graph(source: Path, options: QuantizeOptions) -> FloatGraph:
    """Read a file as :func:`~winml.modelkit.transform.graph_file.transform_file` does; its weights stay where they lie.

    Raises:
        InputError: the file is no valid ONNX model, or its data is missing.
        NormalizeError, OptimizeError: the graph could not be normalized, or to the opset.
    """
    model, notes = read_plain(source)
    prepared = prepare(model, options, source.stem)
    return FloatGraph.of(prepared.model, prepared.modules, (*notes, *prepared.notes))


def take_samples(
    graph: FloatGraph,
    request: SampleRequest,
    threads: int | None,
    hint: str = "Pass inputs with meaningful outputs: --input-data file.npz.",
) -> Samples:
    """Run the float graph, as ONNX Runtime does by default, on the samples that the quality of a file is judged on.

    Raises:
        UsageError: sizes or values do not fit the inputs of the graph.
        StageError: it does not run, or answers with nothing a quantized graph could get wrong.
    """
    options = request.run
    session = graph.session(threads, options.shown)
    found = quality_values(session, request)
    values = found.values
    outputs = []
    for item in values:
        with refusals_explained(item):
            outputs.append(_numbers(session.run(item.feeds)))
    if not any(np.any(np.isfinite(array) & (array != 0)) for output in outputs for array in output.values()):
        raise StageError(
            f"{options.shown} returns only zeros, NaN or infinity on these inputs, so a loss of precision "
            "cannot be measured",
            hint=hint,
        )
    names = [name for name in outputs[0] if any(np.isfinite(output[name]).any() for output in outputs)]
    left_out = tuple(name for name in outputs[0] if name not in names and any(output[name].size for output in outputs))
    return Samples(values, tuple({name: output[name] for name in names} for output in outputs), found.about, left_out)


def _numbers(outputs: Arrays) -> dict[str, Array]:
    """Return the outputs that are numbers."""
    return {name: array for name, array in outputs.items() if array.dtype.kind not in "USO"}


def weight_bytes(model: ir.Model) -> int:
    """Return the size of all initializers of a model."""
    tensors = (value.const_value for graph in model.graphs() for value in graph.initializers.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class QuantizedVariants:
    """Makes forms of a graph, one for each thread that asks."""

    def __init__(
        self,
        graph: FloatGraph,
        samples: Samples,
        quantizer: Quantizer,
        threads: int | None,
        evaluator: VariantEvaluator | None = None,
        before_each: Callable[[], None] | None = None,
    ) -> None:
        """Hold what all forms share.

        Args:
            graph: The float graph.
            samples: What is run, and the answers it is compared with.
            quantizer: Makes a form.
            threads: Threads of one session. None: as many as ONNX Runtime chooses.
            evaluator: Says how well a form does the task of the model.
            before_each: Called before each measurement; what it raises ends the work.
        """
        self.evaluator = evaluator
        self._before_each = before_each
        self._graph = graph
        self._samples = samples
        self._quantizer = quantizer
        self._threads = threads
        # Quantizers replace functions of libraries while they work, so one works at a time; sessions run beside it.
        self._quantizing = threading.Lock()
        self._starts: SharedStarts | None = None
        self._counting = threading.Lock()
        self.cost = SensitivityCost()
        """Time taken so far."""

    def share_starts(self) -> None:
        """Compute once what forms share with the float graph before their first quantized node."""
        feeds = [item.feeds for item in self._samples.values]
        self._starts = SharedStarts(self._graph.model, self._graph.sessions, feeds, self._threads)

    @property
    def samples(self) -> int:
        """How many samples there are."""
        return len(self._samples.values)

    def measure(
        self, options: QuantizeOptions, *, is_judged: bool = False, count: int | None = None
    ) -> MeasuredVariant:
        """Make a form, run it, and compare; a form that cannot be made or run is told in the record.

        Args:
            options: How the modules of the form are quantized.
            is_judged: Whether the evaluator, where there is one, looks at it as well, which takes longer.
            count: How many samples it is run on, from the first; None: all.

        Raises:
            UsageError: the options name no module, or leave nothing to quantize.
        """
        if self._before_each is not None:
            self._before_each()
        try:
            result = self._quantized(options)
        except QuantizeError as error:
            return MeasuredVariant(None, 0, 0, error.message)
        created, size = time.perf_counter(), weight_bytes(result.model)
        try:
            needs_whole = self._starts is None or (is_judged and self.evaluator is not None)
            start = None if needs_whole or self._starts is None else self._starts.last_before(result.model)
            rest = None if start is None else SharedStarts.rest_of(result.model, start)
            session = self._session(rest or result.model)
            opened = time.perf_counter()
            outputs = list(itertools.islice(self._outputs(session, None if rest is None else start), count))
            scores = dict(self.evaluator.scores(session)) if is_judged and self.evaluator is not None else {}
        except StageError as error:
            return MeasuredVariant(None, result.quantized, size, f"cannot run: {error.message}")
        self._add_cost(measured=1, session_s=opened - created, runs_s=time.perf_counter() - opened)
        about = replace(self._samples.about, count=len(outputs))
        found = measure_fidelity(self._samples.answers[: len(outputs)], outputs, 0.0, about)
        by_output = {} if found.worst.problem else {item.name: item.sqnr_db for item in found.outputs}
        return MeasuredVariant(
            found.worst, result.quantized, size, found.worst.problem, scores, len(outputs), by_output
        )

    def _outputs(self, session: Session, start: Start | None) -> Iterator[dict[str, Array]]:
        """Yield the outputs of a form for each sample; those that come before its start are of the float graph."""
        for number, (item, answers) in enumerate(zip(self._samples.values, self._samples.answers, strict=True)):
            if start is None:
                yield _numbers(session.run(item.feeds))
            else:
                yield {**answers, **_numbers(session.run(feeds_of(session, start, number, item.feeds)))}

    def float_scores(self) -> dict[str, float]:
        """Return how well the float graph does the task; nothing without a judge."""
        if self.evaluator is None:
            return {}
        return dict(self.evaluator.scores(self._graph.session(self._threads)))

    def timed(self, options: QuantizeOptions, timing: LatencyOptions) -> TimedVariant:
        """Time a form in alternation with the float graph, on the first set of values.

        Raises:
            QuantizeError: it cannot be made.
            StageError: it does not run.
        """
        feeds = self._samples.values[0].feeds
        session, reference = self._session(self._quantized(options).model), self._graph.session(self._threads)
        compared = measure_alternating(session.prepare(feeds), reference.prepare(feeds), timing)
        return TimedVariant(compared.model.summary.p50, compared.baseline.summary.p50, compared.ratio)

    def _quantized(self, options: QuantizeOptions) -> QuantizeResult:
        with self._quantizing:
            started = time.perf_counter()
            result = self._quantizer(self._graph.model.clone(), options, self._graph.modules)
            self._add_cost(quantization_s=time.perf_counter() - started)
        return result

    def _session(self, model: ir.Model) -> Session:
        return self._graph.sessions.open(model, threads=self._threads, name="the quantized variant")

    def _add_cost(self, **added: float) -> None:
        with self._counting:
            self.cost = replace(self.cost, **{name: getattr(self.cost, name) + more for name, more in added.items()})


_HINT = "Repeat these options to resume, or restart with --overwrite."


def form_key(nodes: Iterable[str]) -> str:
    """Return the key of the form of a graph in which these nodes are quantized and no others."""
    return hashlib.sha256("\n".join(sorted(nodes)).encode()).hexdigest()


class MeasuredVariants:
    """Measurements by key; kept in a file, where one is given, before the next measurement begins."""

    def __init__(self, path: Path | None, request: Mapping[str, Any], *, overwrite: bool) -> None:
        """Read what an interrupted run measured.

        Args:
            path: The file. None: nothing is kept.
            request: What the measurements depend on, JSON-ready.
            overwrite: Start anew where the file belongs to another request, rather than refuse it.

        Raises:
            UsageError: it belongs to another request; names what differs.
            WriteError: it cannot be written where it is.
        """
        self._file = None if path is None else ResumableResults(path, request)
        self._lock = threading.Lock()
        self._forms: dict[str, MeasuredVariant] = {}
        if self._file is not None:
            refuse_existing([self._file.path], overwrite=True)
            recover([self._file.path])
            self._forms = self._read(self._file, overwrite=overwrite)
        self.resumed = len(self._forms)
        """Number of measurements that were there already."""

    def __len__(self) -> int:
        """Return the number of measurements."""
        return len(self._forms)

    def get(self, key: str) -> MeasuredVariant | None:
        """Return a measurement; None where there is none yet."""
        return self._forms.get(key)

    def put(self, key: str, form: MeasuredVariant) -> None:
        """Add a measurement; it is on disk when this returns.

        Raises:
            WriteError: it cannot be written.
        """
        with self._lock:
            self._forms[key] = form
            if self._file is not None:
                self._file.write({"measured": {name: asdict(item) for name, item in self._forms.items()}})

    def _read(self, file: ResumableResults, *, overwrite: bool) -> dict[str, MeasuredVariant]:
        earlier = file.read(
            lambda record: {key: MeasuredVariant.from_fields(item) for key, item in record["measured"].items()}
        )
        if not isinstance(earlier, OtherRequest):
            return earlier or {}
        if overwrite:
            return {}
        if not earlier.changed:
            raise UsageError(
                f"{file.path} exists and is not a readable file of measurements",
                hint="Remove it, or restart with --overwrite.",
            )
        words = ", ".join(f"{key} was {then!r}, now {now!r}" for key, (then, now) in earlier.changed.items())
        raise UsageError(f"{file.path} has measurements of a run with different options: {words}", hint=_HINT)
