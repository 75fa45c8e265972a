"""Replay of a proof: an ONNX file runs on the recorded inputs, and is compared with the recorded values of PyTorch.

Imports neither torch nor transformers.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.compare.by_module.boundaries import CallKey, ModuleBoundary
from winml.modelkit.compare.by_module.module_comparison import FINEST, compare_modules
from winml.modelkit.compare.by_module.onnx_side import OnnxSide
from winml.modelkit.compare.by_module.sides import NamesOfBoth, cast_feeds
from winml.modelkit.compare.by_module.value_matching import match_files
from winml.modelkit.compare.fidelity import FidelitySum, visible_positions
from winml.modelkit.compare.proof.excerpts import take_excerpt
from winml.modelkit.compare.proof.execution import MeasureExecution, RunTimes
from winml.modelkit.compare.proof.records import ProofPart
from winml.modelkit.compare.quality_minimum import QualityMinimum
from winml.modelkit.compare.records import ComparedOutput, ProofReplay
from winml.modelkit.errors import StageError, UsageError
from winml.modelkit.ort.devices import ChosenProvider, missing_option_hint
from winml.modelkit.ort.host import other_processor_seconds
from winml.modelkit.progress import counted

RECORDED_PYTORCH = "PyTorch, as recorded"
"""Name of the reference in messages."""
_NOTE_MS, _NOTE_RUNS = (0.0, 1000.0), 5
"""Shortest and longest time of the runs, and their number. Chosen: the median of five runs, or of those of a second, is
a note, no measurement."""
_MEASURED_MS, _MEASURED_RUNS = (500.0, 3000.0), 30
"""The same for a result that another environment is compared with. Chosen: the load of other programs is measured in
hundredths of a second."""
_PROFILED_RUNS = 100
"""Most runs with profiling. Chosen: a profile of some MB."""


@dataclass(frozen=True)
class _RecordedModel:
    """Part of a proof, as the reference of a comparison."""

    part: ProofPart
    arrays: Arrays
    """Key → stored numbers."""

    def sample(self, number: int) -> dict[str, Array]:
        """Return the inputs of one sample."""
        return {spec.name: self.arrays[self.part.key("inputs", spec.name, number)] for spec in self.part.inputs}

    @property
    def boundaries(self) -> dict[CallKey, ModuleBoundary]:
        """(tag, call number) → boundary of the module call, in the file that the proof was made with."""
        return {module.key: module.boundary for module in self.part.modules}

    @property
    def value_names(self) -> frozenset[str]:
        """Names of the recorded inner values."""
        start = self.part.key("values", "")
        return frozenset(key.removeprefix(start) for key in self.part.tensors if key.startswith(start))

    @property
    def output_names(self) -> list[str]:
        """Names of the recorded outputs."""
        start = self.part.key("outputs", "", 0)
        return [key.removeprefix(start) for key in self.part.tensors if key.startswith(start)]

    def paired(self, key: str, value: Array) -> tuple[Array, Array]:
        """Return the recorded excerpt of a value and that of a value of the file.

        Zeros of the recorded shape, and the whole value, if the shapes differ.
        """
        tensor, stored = self.part.tensors[key], self.arrays[key]
        if value.shape != tensor.shape:
            return np.broadcast_to(np.zeros((), stored.dtype), tensor.shape), value
        return stored, take_excerpt(value, tensor.excerpt, stored)

    def visible(self, key: str, name: str, value: Array, number: int) -> Array | None:
        """Return the positions in the excerpt of an output that are no padding of a sample; ``None`` for all."""
        tensor = self.part.tensors[key]
        if value.shape != tensor.shape or tensor.excerpt == "sketch":
            return None
        visible = visible_positions(name, value, self.sample(number))
        if visible is None or tensor.excerpt == "all":
            return visible
        is_by_token = visible.ndim == value.ndim
        rows = take_excerpt(visible if is_by_token else visible[..., np.newaxis], tensor.excerpt, self.arrays[key])
        rows = rows if is_by_token else rows[:, 0]
        return rows if rows.any() else None


@dataclass(frozen=True)
class _Replay:
    """A recorded model and a file, on the recorded samples."""

    model: _RecordedModel
    file: OnnxSide

    @property
    def is_rounded(self) -> bool:
        """True if PyTorch or the file computes with fewer bits than float32."""
        return self.model.part.is_rounded or self.file.is_rounded

    def feeds(self, sample: Arrays) -> dict[str, Array]:
        """Return a sample in the types of the file."""
        return cast_feeds(sample, self.file)

    def outputs(self, count: int) -> tuple[ComparedOutput, ...]:
        """Run the file on the first samples, and compare its outputs."""
        part, totals = self.model.part, {name: FidelitySum(name) for name in self.model.output_names}
        for number in counted(range(count), "sample"):
            outputs = self.file.outputs(self.feeds(self.model.sample(number)))
            for name, total in totals.items():
                key, value = part.key("outputs", name, number), outputs[name]
                # A file that must be equal is equal at padding, too.
                visible = self.model.visible(key, name, value, number) if self.is_rounded else None
                total.add_visible(*self.model.paired(key, value), visible)
        return tuple(ComparedOutput(total.of_output()) for total in totals.values())

    def run_times(self, runs: int, limits_ms: tuple[float, float]) -> RunTimes:
        """Time runs on the first sample; the file has run before.

        Args:
            runs: Number of runs that suffices.
            limits_ms: Shortest and longest time of all runs.
        """
        feeds, times = self.feeds(self.model.sample(0)), list[float]()
        begun, others = time.perf_counter(), other_processor_seconds()
        while sum(times) < limits_ms[0] or (len(times) < runs and sum(times) < limits_ms[1]):
            started = time.perf_counter()
            self.file.outputs(feeds)
            times.append(1000 * (time.perf_counter() - started))
        capacity = (time.perf_counter() - begun) * (os.cpu_count() or 1)
        return RunTimes(
            fastest_ms=min(times),
            median_ms=statistics.median(times),
            runs=len(times),
            other_load=round(max(other_processor_seconds() - others, 0.0) / capacity, 3),
        )

    def value_bytes(self, taps: Sequence[NamesOfBoth]) -> Sequence[int | None]:
        """Bytes of recording each value of the file; ``None`` if unknown."""
        return self.file.value_bytes([name for _, name in taps], self.feeds(self.model.sample(0)))

    def recorded(self, group: Sequence[NamesOfBoth]) -> Iterator[tuple[Arrays, Arrays, Arrays]]:
        """Run the file on the first sample, and yield the excerpts of both, of which all positions count."""
        names = list(dict.fromkeys(name for _, name in group))
        values = self.file.values(self.feeds(self.model.sample(0)), names)
        ours, theirs = dict[str, Array](), dict[str, Array]()
        for source, name in group:
            if source in self.model.value_names:
                ours[source], theirs[name] = self.model.paired(self.model.part.key("values", source), values[name])
        yield {}, ours, theirs


def replay_part(
    part: ProofPart,
    arrays: Arrays,
    path: Path,
    minimum: QualityMinimum,
    *,
    by_module: bool = False,
    provider: ChosenProvider | None = None,
    sha256: str = "",
    measure: MeasureExecution | None = None,
) -> ProofReplay:
    """Run a file on the inputs of a proof, and compare its outputs and modules with those of PyTorch.

    Modules are compared if requested, if an output is beyond its limit or worse than recorded, or if the execution is
    measured.

    Args:
        part: The record of the part.
        arrays: Key → stored numbers.
        path: The ONNX file.
        minimum: Minimum quality of every output.
        by_module: Compare all modules in any case.
        provider: Execution provider; ``None``: the CPU provider.
        sha256: SHA-256 of the file, if it may be the recorded one.
        measure: Measures the execution of the file, a note if that fails; ``None``: not measured.

    Raises:
        UsageError: the file has other inputs or outputs.
        InputError: the file is damaged.
        StageError: the file cannot be run.
    """
    recorded = _RecordedModel(part, arrays)
    file = OnnxSide(path, by_module=False, as_written=False, provider=provider)
    _refuse_other_interface(recorded, file)
    replay = _Replay(recorded, file)
    try:
        outputs = replay.outputs(part.samples.count)
    except StageError as error:
        error.hint = (provider and missing_option_hint(provider, error.message)) or error.hint
        raise
    timing = (_NOTE_RUNS, _NOTE_MS) if measure is None else (_MEASURED_RUNS, _MEASURED_MS)
    times = replay.run_times(*timing)
    result = ProofReplay(
        reference=RECORDED_PYTORCH,
        candidate=file.shown,
        samples=part.samples.about,
        outputs=outputs,
        threshold=None,
        tolerance=part.tolerance,
        provider=provider,
        minimum=minimum,
        recorded=part,
        run_times=times,
        sha256=sha256,
    )
    feeds = file.quantized_feeds(replay.feeds(recorded.sample(0)))
    del replay, file  # two sessions would hold the weights twice
    if by_module or measure is not None or not result.is_within or result.losses:
        result = _with_modules(result, recorded, path, is_requested=by_module)
    if measure is None:
        return result
    try:
        return replace(result, execution=measure(path, feeds, provider, min(times.runs, _PROFILED_RUNS)))
    except (UsageError, StageError) as error:
        return replace(result, notes=(*result.notes, f"Kernels were not recorded: {error.message}."))


def _refuse_other_interface(model: _RecordedModel, file: OnnxSide) -> None:
    """Refuse a file without the recorded inputs and outputs.

    Raises:
        UsageError: names them.
    """
    inputs = [spec.name for spec in model.part.inputs]
    missing = [name for name in model.output_names if name not in file.output_names]
    if set(inputs) != set(file.input_names) or missing:
        raise UsageError(
            f"{file.shown} takes {', '.join(file.input_names)} and returns {', '.join(file.output_names)}; the proof "
            f"is of a model that takes {', '.join(inputs)} and returns {', '.join(model.output_names)}",
            hint="Pass a file that was made from this model, or make a proof of this one.",
        )


def _with_modules(result: ProofReplay, model: _RecordedModel, path: Path, *, is_requested: bool) -> ProofReplay:
    """Add the comparison of all modules, or a note why they cannot be compared if they were not requested.

    Raises:
        UsageError: modules were requested, and the file has none.
        StageError: modules were requested, and the file does not run with their values as outputs.
    """
    try:
        file = OnnxSide(path, by_module=True, provider=result.provider)
        if not file.boundaries or not model.value_names:
            raise UsageError(
                f"{file.shown} has no module information for its nodes",
                hint="Transfer the tags of its source file with winml retag.",
            )
        matched = match_files(model, file)
        file.session([name for call in matched for _, name in call.taps])
        replay = _Replay(model, file)
        # The root is a module as well, and its errors are those of the same sample.
        first = replace(result, outputs=replay.outputs(1)).worst.fidelity
        compared = compare_modules(replay, matched, first, unchanged=None)
    except (UsageError, StageError) as error:
        if is_requested:
            raise
        return replace(result, notes=(*result.notes, f"Modules were not compared: {error.message}. {error.hint}"))
    tolerances = [result.tolerance] if result.is_within else [result.tolerance, result.tolerance * FINEST]
    divergences = (compared.divergence(tolerance) for tolerance in tolerances)
    return replace(
        result,
        modules=compared.modules,
        divergence=next((position for position in divergences if position is not None), None),
        graph_name=file.structure.graph.name,
        node_tags=file.node_tags(),
    )
