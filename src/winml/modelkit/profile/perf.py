"""Measurement of a whole model, optionally in alternation with a baseline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from winml.modelkit.arrays import Arrays
from winml.modelkit.errors import UsageError, opt
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.ort import opened_model
from winml.modelkit.ort.decoding.inputs import decoder_run, inputs_of_file
from winml.modelkit.ort.graph_inputs import array_words, graph_inputs, takes_array
from winml.modelkit.ort.host import resident_bytes
from winml.modelkit.profile.latency import LatencyOptions, Run, measure_alternating, measure_latency
from winml.modelkit.profile.records import BaselineResult, MemoryUse, PerfResult, perf_result
from winml.modelkit.progress import Progress, Tell

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class PyTorchRun:
    """Call of a PyTorch model on fixed values."""

    model: nn.Module
    tensors: Sequence[torch.Tensor]

    def __call__(self) -> object:
        """Run once."""
        return self.model(*self.tensors)


@contextmanager
def pytorch_run(
    request: ModelRequest, feeds: Arrays, *, threads: int | None, tell: Tell | None = None
) -> Iterator[PyTorchRun]:
    """Yield a call of the PyTorch model on these values.

    Args:
        request: The model.
        feeds: Input name → values.
        threads: Threads within one operator; ``None``: PyTorch's default.
        tell: Called with messages on the preparation of the model.

    Raises:
        UsageError: the model has different inputs.
        MeasureError: the model refuses the values.
    """
    import torch

    from winml.modelkit.compare.verification.reference_run import prepared_part, run_on_arrays
    from winml.modelkit.models.model import load_model
    from winml.modelkit.models.tensors import to_torch

    model = load_model(request, tell)
    loaded = model.only_part if len(model.parts) == 1 else model.part_taking(feeds)
    if loaded is None:
        raise UsageError(
            f"{opt.baseline} pytorch: no part of {request.model} has the inputs {', '.join(feeds)}",
            hint="Export the file again from this model.",
        )
    names = [spec.name for spec in loaded.inputs]
    if missing := [name for name in names if name not in feeds]:
        raise UsageError(
            f"{opt.baseline} pytorch: {request.model} takes {', '.join(names)}, the ONNX file has no input "
            f"{missing[0]!r}",
            hint="Export the file again from this model.",
        )
    if threads is not None:
        torch.set_num_threads(threads)
    with prepared_part(loaded, plain_attention=False) as prepared, torch.inference_mode():
        arrays = {name: feeds[name] for name in names}
        hint = f"Set supported sizes with {opt.shape_config}."
        run_on_arrays(prepared, arrays, f"{opt.baseline} pytorch: the model", hint)
        yield PyTorchRun(loaded.model, list(map(to_torch, arrays.values())))


@dataclass(frozen=True)
class Baseline:
    """Baseline of a model: an ONNX file, or the PyTorch model it was exported from."""

    name: str
    """Name or path as passed by the user."""
    path: Path | None = None
    """The ONNX file; ``None`` for PyTorch."""
    request: ModelRequest | None = None
    """The PyTorch model if named by the user; ``None``: as stated in the measured file."""


@dataclass(frozen=True)
class PerfOptions:
    """Options of the measurement of a whole model."""

    run: opened_model.RunOptions
    latency: LatencyOptions = field(default_factory=LatencyOptions)
    baseline: Baseline | None = None


def measure_model(
    path: Path, options: PerfOptions, *, progress: Progress | None = None, tell: Tell | None = None
) -> PerfResult:
    """Measure a whole model.

    Args:
        path: The ONNX file.
        options: Run options and number of runs.
        progress: Called between runs with the number and the share of finished runs.
        tell: Called with messages on the preparation of a PyTorch baseline.

    Raises:
        UsageError: the options do not fit the model, or the execution provider is missing.
        InputError: the file is damaged.
        StageError: ONNX Runtime cannot load or run the model.
    """
    run = options.run
    if run.input_data is None and run.decoding is None:
        run = replace(run, decoding=decoder_run(inputs_of_file(path), run.sizes))
    result = opened_model.run_at_fitting_sizes(
        path, run, lambda fitting: _measure_once(path, replace(options, run=fitting), progress, tell)
    )
    if result.decoding is None or options.run.sizes:
        return result
    text = f"a decoder with a KV cache: one run is {result.decoding.words}. {opt.generation} measures prompts and steps"
    return replace(result, notes=(*result.notes, f"{text} of several lengths; {opt.by_module} shows both by module"))


def _measure_once(path: Path, options: PerfOptions, progress: Progress | None, tell: Tell | None) -> PerfResult:
    """Measure a model at fixed sizes, in alternation with the baseline if there is one."""
    with measured_model(path, options, progress, tell) as (result, _):
        return result


@contextmanager
def measured_model(
    path: Path, options: PerfOptions, progress: Progress | None, tell: Tell | None
) -> Iterator[tuple[PerfResult, Run | None]]:
    """Measure a model at fixed sizes, and yield the result with the run of the baseline, which ends with the block."""
    provider = options.run.choose_provider()
    with ExitStack() as opened:
        prepared = opened.enter_context(opened_model.prepared_model(path, options.run, provider))
        before = resident_bytes()
        baseline_run: Run | None = None
        if options.baseline is None:
            latency, baseline = measure_latency(prepared.run, options.latency, progress), None
        else:
            baseline_run, creation_ms = opened.enter_context(_baseline_run(options.baseline, prepared, tell))
            compared = measure_alternating(prepared.run, baseline_run, options.latency, progress)
            latency, file = compared.model, options.baseline.path
            baseline = BaselineResult(
                options.baseline.name,
                "pytorch" if file is None else "onnx",
                compared.baseline,
                compared.ratio,
                compared.block,
                model_bytes=None if file is None else file.stat().st_size,
                session_creation_ms=creation_ms,
            )
        memory = MemoryUse.after_runs(prepared.opened.session_bytes, before)
        yield perf_result(prepared, options.latency, latency, memory, baseline), baseline_run


@contextmanager
def _baseline_run(
    baseline: Baseline, prepared: opened_model.PreparedModel, tell: Tell | None
) -> Iterator[tuple[Run, float | None]]:
    """Yield a run of the baseline on the same values, and the time to open its session; ``None`` for PyTorch.

    Args:
        baseline: The baseline: a file or a PyTorch model.
        prepared: The measured model, with its values.
        tell: Listener to notes on loading.

    Raises:
        UsageError: the baseline has other inputs, types or sizes, or the model does not state its origin.
        StageError: the baseline cannot be loaded or run.
    """
    opened, options, feeds = prepared.opened, prepared.options, prepared.values.feeds
    if baseline.path is None:
        from winml.modelkit.models.request import exported_from

        request = baseline.request or exported_from(opened.session.metadata, options.shown)
        with pytorch_run(request, feeds, threads=options.threads, tell=tell) as run:
            yield run, None
        return
    baseline_model = opened_model.open_model(baseline.path, options, opened.provider)
    session = baseline_model.session
    if set(session.inputs) != set(feeds):
        raise UsageError(
            f"{opt.baseline} {baseline.path} takes {', '.join(session.inputs) or 'no inputs'}, the model "
            f"{', '.join(feeds) or 'none'}",
            hint="Compare models with the same inputs.",
        )
    for spec in graph_inputs(session):
        if not takes_array(spec, feeds[spec.name]):
            raise UsageError(
                f"{opt.baseline} {baseline.path}: its input {spec.name} takes {spec.words}, the model receives "
                f"{array_words(feeds[spec.name])}",
                hint=f"Compare models with the same input types and sizes; {opt.shape_config} sets dynamic dimensions "
                "of MODEL.",
            )
    yield session.prepare(feeds, io_binding=options.io_binding), baseline_model.creation_ms
