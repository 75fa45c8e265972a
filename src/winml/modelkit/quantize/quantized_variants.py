"""Quantized variants of one graph, and measurement of their output error relative to the float graph.

A variant lives in memory while it is measured: float weights are mapped from their files, and only quantized weights
are separate. A variant with one quantized module equals the float graph up to this module. The remaining graph is cut
off and run on stored values of the float graph, at a few positions crossed by few values. Writes no weight and is
independent of the engines.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.compare.fidelity import QualitySamples, measure_fidelity
from winml.modelkit.compare.quality_samples import SampleRequest, quality_values
from winml.modelkit.errors import QuantizeError, StageError, UsageError, opt
from winml.modelkit.onnx.cutting import Cutter, GraphModules, cut_model
from winml.modelkit.onnx.files.output_files import recover, refuse_existing
from winml.modelkit.onnx.files.resumable_results import OtherRequest, ResumableResults
from winml.modelkit.onnx.weights import file_bytes, weight_bytes
from winml.modelkit.ort.graph_sessions import GraphSessions
from winml.modelkit.ort.opened_model import Values, refusals_explained
from winml.modelkit.ort.sessions import Session
from winml.modelkit.profile.latency import LatencyOptions, measure_alternating
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.quantize.pipeline import QuantizeResult
from winml.modelkit.quantize.preparation import PreparedGraph
from winml.modelkit.quantize.sensitivity_records import (
    MeasuredVariant,
    MetricTarget,
    SensitivityCost,
    TimedVariant,
)
from winml.modelkit.tags.carry.original_graph import RANDOM_OPERATORS
from winml.modelkit.tags.tagging import all_nodes

Quantizer = Callable[[ir.Model, QuantizeOptions, GraphModules], QuantizeResult]
"""Quantizes a model, which is consumed. Inputs of a mode other than the options, such as ranges, are bound
arguments."""


@dataclass(frozen=True)
class VariantEvaluator:
    """Evaluation of variants by the task of the model."""

    target: MetricTarget
    scores: Callable[[Session], Mapping[str, float]]
    """Runs a session on the samples of a dataset: metric → score."""
    request: Mapping[str, Any]
    """Identity of the evaluation, JSON-ready."""


@dataclass(frozen=True)
class Samples:
    """Input samples, and the reference outputs of the float graph."""

    values: tuple[Values, ...]
    answers: tuple[Arrays, ...]
    """Numeric outputs with at least one finite value."""
    about: QualitySamples
    """Origin of the samples."""
    left_out: tuple[str, ...] = ()
    """Outputs that are NaN or infinite everywhere and cannot be compared."""


def take_samples(
    graph: PreparedGraph,
    request: SampleRequest,
    threads: int | None,
    hint: str = "",
) -> Samples:
    """Run the float graph with ONNX Runtime's defaults on the samples that the quality is judged on.

    Raises:
        UsageError: sizes or values do not fit the inputs of the graph.
        StageError: the graph does not run, or returns only zeros and non-finite values.
    """
    options = request.run
    session = graph.session(threads, options.shown)
    quality_samples = quality_values(session, request)
    values = quality_samples.values
    outputs = []
    for sample in values:
        with refusals_explained(sample):
            outputs.append(_numeric_outputs(session.run(sample.feeds)))
    if not any(np.any(np.isfinite(array) & (array != 0)) for output in outputs for array in output.values()):
        raise StageError(
            f"{options.shown} returns only zeros, NaN or infinity on these inputs, so a loss of precision "
            "cannot be measured",
            hint=hint or f"Pass inputs with meaningful outputs: {opt.input_data} file.npz.",
        )
    names = [name for name in outputs[0] if any(np.isfinite(output[name]).any() for output in outputs)]
    left_out = tuple(name for name in outputs[0] if name not in names and any(output[name].size for output in outputs))
    return Samples(
        values, tuple({name: output[name] for name in names} for output in outputs), quality_samples.about, left_out
    )


def _numeric_outputs(outputs: Arrays) -> dict[str, Array]:
    """Select the outputs that are numbers, not text or objects."""
    return {name: array for name, array in outputs.items() if array.dtype.kind not in "USO"}


class QuantizedVariants:
    """Creates and measures variants of a graph; each measurement is made once and stored."""

    def __init__(
        self,
        graph: PreparedGraph,
        samples: Samples,
        quantizer: Quantizer,
        stored: MeasuredVariants,
        threads: int | None = None,
        evaluator: VariantEvaluator | None = None,
        before_each: Callable[[], None] | None = None,
    ) -> None:
        """Store the resources shared by all variants.

        Args:
            graph: The float graph.
            samples: Inputs, and the outputs of the float graph.
            quantizer: Creates a variant.
            stored: Measurements of an interrupted run or of other samples; new measurements are added.
            threads: Threads of one session; ``None``: ONNX Runtime's default.
            evaluator: Evaluates variants on the task of the model.
            before_each: Called before each measurement; an exception stops the work.
        """
        self.evaluator, self.stored = evaluator, stored
        self._before_each = before_each
        self._graph, self._samples, self._quantizer, self._threads = graph, samples, quantizer, threads
        # Quantizers patch library functions while they run, so only one runs at a time, in parallel with sessions.
        self._quantizing = threading.Lock()
        self._starts: SharedStarts | None = None
        self._counting = threading.Lock()
        self.cost = SensitivityCost()
        """Accumulated time."""

    def share_starts(self) -> None:
        """Compute the values that variants share with the float graph before their first quantized node."""
        if self._starts is None:
            feeds = [sample.feeds for sample in self._samples.values]
            self._starts = SharedStarts(self._graph.model, self._graph.sessions, feeds, self._threads)

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self._samples.values)

    def has_measured(self, key: str, *, is_judged: bool = False, count: int | None = None) -> bool:
        """Return True if a stored measurement has as many samples as requested, and scores if required."""
        variant = self.stored.get(key)
        if variant is None or not variant.runs:
            return variant is not None
        needs_scores = is_judged and self.evaluator is not None and not variant.scores
        return variant.samples >= (self.samples if count is None else count) and not needs_scores

    def measure(
        self, key: str, options: QuantizeOptions, *, is_judged: bool = False, count: int | None = None
    ) -> MeasuredVariant:
        """Create a variant, run it, compare it and store the result, unless already stored.

        Args:
            key: Key of the measurement.
            options: Options of the variant.
            is_judged: Also run the evaluator, if any, which takes longer.
            count: Number of samples, from the first; ``None``: all.

        Raises:
            UsageError: the options name no module, or leave nothing to quantize.
        """
        if not self.has_measured(key, is_judged=is_judged, count=count):
            self.stored.put(key, self._run_variant(options, is_judged=is_judged, count=count))
        return self.stored[key]

    def _run_variant(self, options: QuantizeOptions, *, is_judged: bool, count: int | None) -> MeasuredVariant:
        """Create a variant, run it, and compare; a failure is recorded as its problem."""
        if self._before_each is not None:
            self._before_each()
        try:
            result = self._quantize_copy(options)
        except QuantizeError as error:
            return MeasuredVariant(None, 0, 0, error.message)
        size, whole_size = weight_bytes(result.model), file_bytes(result.model)
        created = time.perf_counter()
        try:
            needs_whole = self._starts is None or (is_judged and self.evaluator is not None)
            start = None if needs_whole or self._starts is None else self._starts.last_before(result.model)
            tail = None if start is None else SharedStarts.cut_remaining(result.model, start)
            session = self._session(tail or result.model, as_device=True)
            opened = time.perf_counter()
            outputs = list(itertools.islice(self._run_samples(session, None if tail is None else start), count))
            scores = dict(self.evaluator.scores(session)) if is_judged and self.evaluator is not None else {}
        except StageError as error:
            problem = f"cannot run: {error.message}"
            return MeasuredVariant(None, result.changed_nodes, size, problem, file_bytes=whole_size)
        self._add_cost(measured=1, session_s=opened - created, runs_s=time.perf_counter() - opened)
        quality_samples = replace(self._samples.about, count=len(outputs))
        feeds = [sample.feeds for sample in self._samples.values[: len(outputs)]]
        answers = self._samples.answers[: len(outputs)]
        fidelity = measure_fidelity(answers, outputs, 0.0, quality_samples, inputs=feeds)
        by_output = {} if fidelity.worst.problem else {output.name: output.sqnr_db for output in fidelity.outputs}
        return MeasuredVariant(
            fidelity.worst,
            result.changed_nodes,
            size,
            fidelity.worst.problem,
            scores,
            len(outputs),
            by_output,
            whole_size,
        )

    def _run_samples(self, session: Session, start: Start | None) -> Iterator[dict[str, Array]]:
        """Yield the outputs of a variant for each sample; outputs before its start come from the float graph."""
        for number, (sample, answers) in enumerate(zip(self._samples.values, self._samples.answers, strict=True)):
            if start is None:
                yield _numeric_outputs(session.run(sample.feeds))
            else:
                yield {**answers, **_numeric_outputs(session.run(feeds_of(session, start, number, sample.feeds)))}

    def float_scores(self) -> dict[str, float]:
        """Metric → score of the float graph; ``{}`` without an evaluator."""
        return {} if self.evaluator is None else dict(self.evaluator.scores(self._graph.session(self._threads)))

    def timed(self, options: QuantizeOptions, timing: LatencyOptions) -> TimedVariant:
        """Time a variant in alternation with the float graph, on the first sample.

        Raises:
            QuantizeError: the variant cannot be created.
            StageError: the variant does not run.
        """
        feeds = self._samples.values[0].feeds
        session, reference = (
            self._session(self._quantize_copy(options).model, as_device=False),
            self._graph.session(self._threads),
        )
        compared = measure_alternating(session.prepare(feeds), reference.prepare(feeds), timing)
        return TimedVariant(compared.model.summary.p50, compared.baseline.summary.p50, compared.ratio)

    def _quantize_copy(self, options: QuantizeOptions) -> QuantizeResult:
        """Quantize a copy of the graph, one variant at a time; add the time to the cost."""
        with self._quantizing:
            started = time.perf_counter()
            result = self._quantizer(self._graph.model.clone(), options, self._graph.modules)
            self._add_cost(quantization_s=time.perf_counter() - started)
        return result

    def _session(self, model: ir.Model, *, as_device: bool) -> Session:
        """Open a session of a variant that computes as on a device, or as in an application on the CPU."""
        if as_device:
            from winml.modelkit.ort.half_rounding import round_half_values  # needed only by a measurement

            round_half_values(model)
        return self._graph.sessions.open(
            model, threads=self._threads, name="the quantized variant", as_device=as_device
        )

    def _add_cost(self, **added: float) -> None:
        """Add amounts to fields of the cost, from any thread."""
        with self._counting:
            self.cost = replace(self.cost, **{name: getattr(self.cost, name) + value for name, value in added.items()})


def variant_key(nodes: Iterable[str]) -> str:
    """Key of the variant in which exactly these nodes are quantized."""
    return hashlib.sha256("\n".join(sorted(nodes)).encode()).hexdigest()


class MeasuredVariants:
    """Key → measurement; with a file, each measurement is on disk before the next begins."""

    def __init__(self, path: Path | None, request: Mapping[str, Any], *, overwrite: bool) -> None:
        """Read the measurements of an interrupted run.

        Args:
            path: The file. ``None``: nothing is stored.
            request: Identity of the measurements, JSON-ready.
            overwrite: Start anew if the file belongs to another request, instead of raising.

        Raises:
            UsageError: the file belongs to another request; names the differences.
            WriteError: the file cannot be written.
        """
        self._file = None if path is None else ResumableResults(path, request)
        self._lock = threading.Lock()
        self._measured: dict[str, MeasuredVariant] = {}
        if self._file is not None:
            refuse_existing([self._file.path], overwrite=True)
            recover([self._file.path])
            self._measured = self._read_measurements(self._file, overwrite=overwrite)
        self._earlier = frozenset(self._measured)
        self._used: set[str] = set()

    @property
    def resumed(self) -> int:
        """Number of measurements of an interrupted run."""
        return len(self._earlier)

    @property
    def reused(self) -> int:
        """Number of resumed measurements that were used."""
        return len(self._earlier & self._used)

    def __len__(self) -> int:
        """Number of measurements."""
        return len(self._measured)

    def __getitem__(self, key: str) -> MeasuredVariant:
        """Return an existing measurement."""
        return self._measured[key]

    def get(self, key: str) -> MeasuredVariant | None:
        """Return a measurement; ``None`` if missing."""
        self._used.add(key)
        return self._measured.get(key)

    def put(self, key: str, variant: MeasuredVariant) -> None:
        """Add a measurement and write it to disk.

        Raises:
            WriteError: the file cannot be written.
        """
        with self._lock:
            self._measured[key] = variant
            if self._file is not None:
                self._file.write({"measured": {name: asdict(measured) for name, measured in self._measured.items()}})

    def _read_measurements(self, file: ResumableResults, *, overwrite: bool) -> dict[str, MeasuredVariant]:
        """Read the measurements of an interrupted run; ``{}`` without measurements for this request.

        Raises:
            UsageError: the file belongs to another request, and must not be overwritten.
        """
        earlier = file.read(
            lambda record: {key: MeasuredVariant.from_fields(fields) for key, fields in record["measured"].items()}
        )
        if not isinstance(earlier, OtherRequest):
            return earlier or {}
        if overwrite:
            return {}
        if not earlier.changed:
            raise UsageError(
                f"{file.path} exists and is not a readable file of measurements",
                hint=f"Remove it, or restart with {opt.overwrite}.",
            )
        differences = ", ".join(f"{key} was {then!r}, now {now!r}" for key, (then, now) in earlier.changed.items())
        raise UsageError(
            f"{file.path} has measurements of a run with different options: {differences}",
            hint=f"Repeat these options to resume, or restart with {opt.overwrite}.",
        )


_PLACES = 16
"""Chosen: a variant then repeats at most a sixteenth of the nodes before its module."""
_STORED_BYTES = 256_000_000
"""Maximum bytes of stored values, over all samples. Chosen: small relative to a model with long runs; fewer positions
are used if the limit is too low."""


@dataclass(frozen=True)
class Start:
    """A position in the float graph, and the values that cross it."""

    names: frozenset[str]
    """Names of the nodes before the position."""
    values: tuple[Arrays, ...]
    """Per sample: name → value computed before the position and read after it."""


class SharedStarts:
    """Positions in one graph from which variants may be run."""

    def __init__(self, model: ir.Model, sessions: GraphSessions, feeds: Sequence[Arrays], threads: int | None) -> None:
        """Run the float graph once on each sample.

        Args:
            model: The float graph; it is not changed.
            sessions: Opens graphs derived from the model.
            feeds: The samples.
            threads: Threads of the session; ``None``: ONNX Runtime's default.
        """
        self._nodes = tuple(model.graph)
        self._starts: list[Start] = []
        is_random = any(node.op_type in RANDOM_OPERATORS for node in all_nodes(model))
        places = {} if is_random or not feeds else _find_positions(model)
        if not places:
            return
        names = list(dict.fromkeys(name for crossing in places.values() for name in crossing))
        tapped = model.clone()
        values_by_name = {value.name: value for node in tapped.graph for value in node.outputs}
        tapped.graph.outputs[:] = [values_by_name[name] for name in names]
        try:
            session = sessions.open(tapped, threads=threads, name="the float graph")
            samples = [session.run(feeds[0])]
            places = _fit_positions(places, samples[0], _STORED_BYTES // len(feeds))
            crossing_names = list(dict.fromkeys(name for crossing in places.values() for name in crossing))
            samples += (
                [session.run(sample_feeds, crossing_names) for sample_feeds in feeds[1:]] if crossing_names else []
            )
        except StageError:  # variants are run from the inputs
            return
        for count, crossing in places.items():
            values = tuple({name: sample[name] for name in crossing} for sample in samples)
            before = frozenset(node.name or "" for node in self._nodes[:count])
            self._starts.append(Start(before, values))

    def last_before(self, variant: ir.Model) -> Start | None:
        """Last position before which a variant equals the float graph; ``None`` for its beginning."""
        same = _count_unchanged(self._nodes, variant)
        fitting = (start for start in self._starts if len(start.names) <= same)
        return max(fitting, key=lambda start: len(start.names), default=None)

    @staticmethod
    def cut_remaining(variant: ir.Model, start: Start) -> ir.Model | None:
        """Cut off the nodes of a variant after a position, as a model; ``None`` if the nodes read values not stored."""
        cut = Cutter(variant).cut_exactly(node for node in variant.graph if node.name not in start.names)
        input_names = {value.name for value in variant.graph.inputs}
        computed = start.values[0]
        if not cut.outputs or any(value.name not in computed and value.name not in input_names for value in cut.inputs):
            return None
        remaining = cut_model(variant, cut, keeps_sizes=True)
        for value in remaining.graph.inputs:
            if (array := computed.get(value.name or "")) is not None:
                value.dtype = ir.DataType.from_numpy(array.dtype)
                value.shape = ir.Shape([None] * array.ndim)
        return remaining


def feeds_of(session: Session, start: Start, sample: int, feeds: Arrays) -> dict[str, Array]:
    """Inputs of the remaining nodes of a variant for one sample."""
    values = {**feeds, **start.values[sample]}
    return {name: values[name] for name in session.inputs}


def _find_positions(model: ir.Model) -> dict[int, tuple[str, ...]]:
    """Number of nodes before a position → names of the values that cross it, for positions with few crossing values."""
    nodes = list(model.graph)
    cutter = Cutter(model)
    crossing = cutter.crossing()
    step = max(1, len(nodes) // _PLACES)
    positions = {}
    for begin in range(0, len(nodes) - 1, step):
        position = min(range(begin, min(begin + step, len(nodes) - 1)), key=lambda index: (crossing[index], -index))
        cut = cutter.cut_exactly(nodes[position + 1 :])
        values = [value for value in cut.inputs if value.producer() is not None]
        if values and all(value.type is None or isinstance(value.type, ir.TensorType) for value in values):
            positions[position + 1] = tuple(value.name or "" for value in values)
    return positions


def _fit_positions(places: Mapping[int, tuple[str, ...]], sample: Arrays, limit: int) -> dict[int, tuple[str, ...]]:
    """Evenly spaced subset of the positions whose values fit the limit in bytes."""
    for every in (1, 2, 4, 8):
        chosen = dict(list(places.items())[every - 1 :: every])
        names = {name for crossing in chosen.values() for name in crossing}
        if sum(sample[name].nbytes for name in names) <= limit:
            return chosen
    return {}


def _count_unchanged(nodes: Sequence[ir.Node], variant: ir.Model) -> int:
    """Number of initial nodes that a variant shares with the float graph, weights included."""
    variant_nodes = {node.name: node for node in variant.graph}
    for count, node in enumerate(nodes):
        counterpart = variant_nodes.get(node.name)
        if counterpart is None or not _is_same_node(node, counterpart):
            return count
    return len(nodes)


def _is_same_node(node: ir.Node, counterpart: ir.Node) -> bool:
    """Return True if two nodes have the same operator, value names and weights; attributes are not compared."""
    if node.op_identifier() != counterpart.op_identifier() or len(node.inputs) != len(counterpart.inputs):
        return False
    if [value.name for value in node.outputs] != [value.name for value in counterpart.outputs]:
        return False
    pairs = list(zip(node.inputs, counterpart.inputs, strict=True))
    if any((old and old.name) != (new and new.name) for old, new in pairs):
        return False
    return all(old is None or new is None or _is_same_weight(old, new) for old, new in pairs)


def _is_same_weight(old: ir.Value, new: ir.Value) -> bool:
    """Return True if two values are the same stored tensor, or both have no constant."""
    tensor, other_tensor = old.const_value, new.const_value
    if tensor is other_tensor or tensor is None or other_tensor is None:
        return tensor is other_tensor
    if isinstance(tensor, ir.ExternalTensor) and isinstance(other_tensor, ir.ExternalTensor):
        locations = ((os.fspath(file.path), file.offset, file.length) for file in (tensor, other_tensor))
        return len(set(locations)) == 1
    same = tensor.dtype == other_tensor.dtype and tensor.shape == other_tensor.shape
    return same and tensor.dtype != ir.DataType.STRING and np.array_equal(tensor.numpy(), other_tensor.numpy())
