"""How does the name of a model become a measurement of it? Finds the file, opens it, gives it values, and measures.

Exports first where there is no file yet (once: the result is kept). Imports PyTorch only for an export or a baseline
that needs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from winml.modelkit import __version__
from winml.modelkit.build.model_files import files_of_model, onnx_file
from winml.modelkit.errors import InputError, MeasureError, StageError, UsageError
from winml.modelkit.load.source import ModelRequest
from winml.modelkit.measure.latency import (
    LatencyOptions,
    LatencyResult,
    Run,
    measure_alternating,
    measure_latency,
)
from winml.modelkit.report.perf_result import BaselineResult, MemoryUse, PerfResult
from winml.modelkit.runtime.devices import ChosenProvider, choose_provider
from winml.modelkit.runtime.execution_providers import Device
from winml.modelkit.runtime.graph_inputs import (
    GraphInput,
    array_words,
    batch_of,
    draw_feeds,
    graph_inputs,
    load_feeds,
    settle_sizes,
)
from winml.modelkit.runtime.memory import peak_bytes, resident_bytes
from winml.modelkit.runtime.sessions import PreparedRun, Session, onnxruntime_version

if TYPE_CHECKING:
    from winml.modelkit.build.steps import StepEvent

__all__ = [
    "OpenedModel",
    "PerfRequest",
    "Values",
    "files_read",
    "measure_model",
    "model_path",
    "open_model",
    "perf_result",
    "refusals_explained",
    "refuse_dynamic_inputs",
    "values_for",
]

PYTORCH = "pytorch"


@dataclass(frozen=True)
class PerfRequest:
    """What the user asked to measure."""

    model: Path | ModelRequest
    """An ONNX file, or a model that is exported first."""
    shown: str
    """The model as the user wrote it."""
    options: LatencyOptions = field(default_factory=LatencyOptions)
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the open dimensions of an ONNX file, by name."""
    batch_size: int | None = None
    """Of an ONNX file."""
    input_data: Path | None = None
    """Values in place of random ones."""
    seed: int = 0
    ep: str | None = None
    device: Device | None = None
    ep_options: Mapping[str, str] = field(default_factory=dict)
    threads: int | None = None
    baseline: str | None = None
    """``pytorch``, or an ONNX file."""


@dataclass(frozen=True)
class OpenedModel:
    """A model ready to run, and what that cost."""

    session: Session
    provider: ChosenProvider
    creation_ms: float
    session_bytes: int


@dataclass(frozen=True)
class Values:
    """What a model is fed."""

    inputs: tuple[GraphInput, ...]
    feeds: Mapping[str, NDArray[Any]]
    notes: tuple[str, ...] = ()
    file: Path | None = None
    """Where the values come from; None where they are random."""

    @property
    def words(self) -> str:
        """The types and shapes, for people."""
        return (
            ", ".join(f"{name} {array.dtype}[{', '.join(map(str, array.shape))}]" for name, array in self.feeds.items())
            or "nothing"
        )


def measure_model(
    request: PerfRequest,
    *,
    on_step: Callable[[StepEvent], None] | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> PerfResult:
    """Measure a whole model.

    Args:
        request: What to measure.
        on_step: Called when a step of an export starts and when it ends.
        progress: Called between runs with the number of counted ones and the share that is done.

    Raises:
        UsageError: the request does not fit the model, or the execution provider is not there.
        InputError: the file is damaged.
        StageError: ONNX Runtime cannot load or run the model; or the export of it failed.
    """
    provider = choose_provider(request.ep, request.device, request.ep_options)
    baseline_file = _baseline_file(request.baseline)
    path = model_path(request, on_step)
    opened = open_model(path, request, provider)
    values = values_for(opened.session, request)
    refuse_dynamic_inputs(provider, values.inputs, request)
    with refusals_explained(values):
        run = opened.session.prepare(values.feeds)
        before = resident_bytes()
        if request.baseline is None:
            latency, baseline = measure_latency(run, request.options, progress), None
        else:
            with _baseline_run(request, baseline_file, opened, values) as (kind, other):
                compared = measure_alternating(run, other, request.options, progress)
            latency = compared.model
            baseline = BaselineResult(request.baseline, kind, compared.baseline, compared.ratio, compared.block)
        after = resident_bytes()
    memory = MemoryUse(opened.session_bytes, max(after - before, 0), after, max(peak_bytes(), after))
    return perf_result(request, path, opened, values, run, latency, memory, baseline)


def perf_result(
    request: PerfRequest,
    path: Path,
    opened: OpenedModel,
    values: Values,
    run: PreparedRun,
    latency: LatencyResult,
    memory: MemoryUse,
    baseline: BaselineResult | None = None,
) -> PerfResult:
    """Put together what is known when the last run is done."""
    outputs = run.outputs()
    batch_size, batch_source = batch_of(values.inputs, values.feeds, outputs)
    return PerfResult(
        model=request.shown,
        model_bytes=path.stat().st_size,
        tool_version=__version__,
        onnxruntime_version=onnxruntime_version(),
        provider=opened.provider,
        threads=request.threads,
        seed=request.seed,
        input_source="random" if request.input_data is None else "file",
        options=request.options,
        inputs=values.inputs,
        measured_shapes={name: array.shape for name, array in values.feeds.items()},
        output_shapes={name: None if array is None else array.shape for name, array in outputs.items()},
        batch_size=batch_size,
        batch_source=batch_source,
        session_creation_ms=opened.creation_ms,
        latency=latency,
        memory=memory,
        baseline=baseline,
        notes=(
            *values.notes,
            *_output_notes(outputs),
            *_run_notes(run, request),
            *_spread_notes(latency, baseline),
        ),
    )


def model_path(request: PerfRequest, on_step: Callable[[StepEvent], None] | None = None) -> Path:
    """Return the file to measure, exporting the model if nobody has.

    Raises:
        WinMLError: whatever the export raises.
    """
    if isinstance(request.model, Path):
        return request.model
    from winml.modelkit.build.cached_export import exported_model
    from winml.modelkit.export.config import WinMLExportConfig

    return exported_model(request.model, WinMLExportConfig(), on_step)


def files_read(request: PerfRequest) -> tuple[Path, ...]:
    """Return what a measurement reads, and what belongs to it; nothing of this may be replaced by what it writes.

    Raises:
        WinMLError: the model names nothing that can be used.
    """
    given = () if request.input_data is None else (request.input_data,)
    if isinstance(request.model, Path):
        return (*files_of_model(request.model), *given)
    from winml.modelkit.load.source import resolve_source

    return (*resolve_source(request.model).files, *given)


def open_model(path: Path, request: PerfRequest, provider: ChosenProvider, **session_options: Any) -> OpenedModel:
    """Open a file as the request wants it.

    Args:
        path: The file.
        request: What the user asked for.
        provider: Where it runs.
        session_options: Further arguments of the session.

    Raises:
        InputError: the file, or a data file it names, is damaged or missing.
        StageError: ONNX Runtime cannot load it.
    """
    before, started = resident_bytes(), time.perf_counter()
    try:
        session = Session(
            path,
            providers=provider.names,
            provider_options=provider.options,
            threads=request.threads,
            **session_options,
        )
    except StageError as error:
        _say_what_is_wrong(path)
        hint = (
            error.hint or f"winml inspect {path} shows its operators and opsets; winml sys which ONNX Runtime this is."
        )
        raise MeasureError(error.message, hint=hint) from error
    creation_ms = (time.perf_counter() - started) * 1000
    return OpenedModel(session, provider, creation_ms, max(resident_bytes() - before, 0))


def _say_what_is_wrong(path: Path) -> None:
    """Look at a file ONNX Runtime refused.

    Raises:
        InputError: it is no ONNX file, or data it names is missing or too short.
    """
    from winml.modelkit.graph.reading import read_structure
    from winml.modelkit.inspect.data_files import find_data_files
    from winml.modelkit.inspect.onnx_contents import read_contents

    _, problems = find_data_files(path, read_contents(read_structure(path)).weights)
    if problems:
        raise InputError(f"{path}: {problems[0]}", hint="Put the data files beside the model, or export it again.")


def values_for(session: Session, request: PerfRequest) -> Values:
    """Return the values the model is run on: those of the user's file, or random ones.

    Raises:
        UsageError: sizes or values do not fit the inputs of the graph.
        InputError: the user's file is damaged.
    """
    inputs = graph_inputs(session)
    if request.input_data is None:
        sizes = settle_sizes(inputs, request.sizes, batch_size=request.batch_size)
        return Values(inputs, draw_feeds(inputs, sizes.by_name, request.seed), sizes.notes)
    if request.sizes or request.batch_size is not None:
        option = "--shape-config" if request.sizes else "--batch-size"
        raise UsageError(
            f"{option}: --input-data {request.input_data} has values, and their sizes", hint="Give one of the two."
        )
    return Values(inputs, load_feeds(request.input_data, inputs), file=request.input_data)


def refuse_dynamic_inputs(provider: ChosenProvider, inputs: tuple[GraphInput, ...], request: PerfRequest) -> None:
    """Refuse a graph with open dimensions on a provider that needs fixed sizes.

    Raises:
        UsageError: it does.
    """
    is_dynamic = any(not isinstance(size, int) for item in inputs for size in item.shape)
    if is_dynamic and not provider.provider.takes_dynamic:
        raise UsageError(
            f"--ep {request.ep}: {provider.provider.name} needs fixed sizes, and {request.shown} leaves some open",
            hint=f"Fix them first: winml export -m {request.shown} -o fixed.onnx --shape-config JSON",
        )


def _baseline_file(name: str | None) -> Path | None:
    """Return the file of a baseline; None for PyTorch, or where none is asked for.

    Raises:
        UsageError: there is no such baseline.
    """
    if name is None or name == PYTORCH:
        return None
    path = onnx_file(name)
    if path is None:
        raise UsageError(
            f"--baseline {name}: neither {PYTORCH} nor an ONNX file", hint=f"Give --baseline {PYTORCH}, or a file."
        )
    return path


@contextmanager
def _baseline_run(
    request: PerfRequest, path: Path | None, opened: OpenedModel, values: Values
) -> Iterator[tuple[Any, Run]]:
    """Return the kind of the baseline and a run of it on the same values, inside the block.

    Raises:
        UsageError: it takes other inputs, types or sizes, or the model does not say what it was exported from.
        StageError: it cannot be loaded or does not run.
    """
    if path is None:
        from winml.modelkit.build.pytorch_baseline import origin_of, pytorch_run

        origin = (
            request.model
            if isinstance(request.model, ModelRequest)
            else origin_of(opened.session.metadata, request.shown)
        )
        with pytorch_run(origin, values.feeds, threads=request.threads) as run:
            yield "pytorch", run
        return
    other = open_model(path, replace(request, model=path), opened.provider).session
    if set(other.inputs) != set(values.feeds):
        raise UsageError(
            f"--baseline {path} takes {', '.join(other.inputs) or 'no inputs'}, the model "
            f"{', '.join(values.feeds) or 'none'}",
            hint="Compare models that take the same inputs.",
        )
    for item in graph_inputs(other):
        if not item.takes(values.feeds[item.name]):
            raise UsageError(
                f"--baseline {path}: its input {item.name} takes {item.words}, the model is fed "
                f"{array_words(values.feeds[item.name])}",
                hint="Compare models that take the same values; --shape-config sets the sizes that are open in MODEL.",
            )
    yield "onnx", other.prepare(values.feeds)


@contextmanager
def refusals_explained(values: Values) -> Iterator[None]:
    """Say what was fed where a run is refused.

    Raises:
        MeasureError: in place of what ONNX Runtime said, with its reason.
    """
    try:
        yield
    except MeasureError:
        raise
    except StageError as error:
        hint = "Give sizes it takes with --shape-config, or values with --input-data."
        if values.file is not None:
            hint = f"Give values it takes in {values.file}."
        raise MeasureError(f"{error.message} (fed {values.words})", hint=hint) from error


def _output_notes(outputs: Mapping[str, NDArray[Any] | None]) -> Iterator[str]:
    for name, array in outputs.items():
        if array is None:
            yield f"output {name} is no tensor of numbers: it was made in every run, and not looked at"
        elif array.dtype.kind not in "iub" and not np.isfinite(array.astype(np.float64)).all():
            yield f"output {name} holds NaN or infinite values; some processors take longer over those"


def _spread_notes(latency: LatencyResult, baseline: BaselineResult | None) -> Iterator[str]:
    measured = {"the model": latency} if baseline is None else {"the model": latency, baseline.name: baseline.latency}
    for name, result in measured.items():
        summary = result.summary
        if summary.is_disturbed:
            yield (
                f"the median run of {name} took {summary.p50 / summary.min:.1f} times as long as the fastest: the "
                "machine seems busy, and a comparison made now says little"
            )


def _run_notes(run: PreparedRun, request: PerfRequest) -> Iterator[str]:
    if not run.is_bound:
        yield "an input holds text, which ONNX Runtime copies in every run: the times include it"
    if isinstance(request.model, ModelRequest):
        yield "the peak of memory includes loading and, if this was its first time, the export"
