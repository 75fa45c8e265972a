"""How fast is each module on its own? Cut out, fed with what flowed in the whole model, and measured one by one.

A module that cannot be cut out or does not run is part of the answer, with its reason; the others are measured all the
same. The cut models live in a temporary folder, one at a time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from winml.modelkit import __version__
from winml.modelkit.build.module_cuts import (
    EXACT,
    CutCall,
    ModuleCuts,
    Recording,
    compare_with_whole,
    cut_modules,
    record,
    write_cut,
)
from winml.modelkit.build.perf_flow import PerfRequest, model_path, open_model, refuse_dynamic_inputs
from winml.modelkit.build.steps import StepClock, StepEvent
from winml.modelkit.errors import StageError, WriteError
from winml.modelkit.measure.latency import measure_latency
from winml.modelkit.report.module_perf_result import MeasuredModule, ModulePerfResult
from winml.modelkit.runtime.devices import ChosenProvider, choose_provider
from winml.modelkit.runtime.sessions import onnxruntime_version

__all__ = ["measure_modules"]

_STEPS = ("modules cut", "activations recorded", "modules measured")

Progress = Callable[[int, float], None]


def measure_modules(
    request: PerfRequest,
    selector: str,
    *,
    on_step: Callable[[StepEvent], None] | None = None,
    progress: Progress | None = None,
) -> ModulePerfResult:
    """Measure every module a selector names, each alone.

    Args:
        request: The model, what the whole of it is fed, and how to measure.
        selector: Which modules.
        on_step: Called when a step starts and when it ends.
        progress: Called between runs with the number of counted ones and the share of the work that is done.

    Raises:
        UsageError: the selector names nothing, the execution provider is not there, or values do not fit.
        InputError: the file is damaged or bears no tags.
        StageError: ONNX Runtime cannot run the whole model, or the export of it failed.
    """
    provider = choose_provider(request.ep, request.device, request.ep_options)
    path = model_path(request, on_step)
    clock = StepClock(_STEPS, on_step)
    with clock.step(_STEPS[0]) as step:
        cuts = cut_modules(path, selector)
        step.summary = f"{len(cuts.calls)} of {len(cuts.calls) + len(cuts.refused)}"
    refused = [MeasuredModule(item.identity, {}, 0, None, None, item.reason) for item in cuts.refused]
    measured: list[MeasuredModule] = []
    notes: tuple[str, ...] = ()
    if cuts.calls:
        with clock.step(_STEPS[1]) as step:
            recording = record(cuts, request)
            refuse_dynamic_inputs(provider, recording.whole.inputs, request)
            notes = recording.whole.notes
            step.summary = f"{len(recording.arrays)} values"
        with clock.step(_STEPS[2]) as step:
            for number, item in enumerate(cuts.calls):
                share = _share_of(progress, number, len(cuts.calls), len(measured) * request.options.iterations)
                measured.append(_measure(cuts, item, recording, request, provider, share))
            step.summary = f"{len(measured)} instances"
    return ModulePerfResult(
        model=request.shown,
        selector=selector,
        tool_version=__version__,
        onnxruntime_version=onnxruntime_version(),
        provider=provider,
        threads=request.threads,
        seed=request.seed,
        input_source="random" if request.input_data is None else "file",
        options=request.options,
        instances=(*measured, *refused),
        without_nodes=cuts.without_nodes,
        notes=notes,
    )


def _share_of(progress: Progress | None, number: int, count: int, runs_before: int) -> Progress | None:
    """Return what reports one module's progress as part of the whole."""
    if progress is None:
        return None
    return lambda runs, share: progress(runs_before + runs, (number + share) / count)


def _measure(
    cuts: ModuleCuts,
    item: CutCall,
    recording: Recording,
    request: PerfRequest,
    provider: ChosenProvider,
    progress: Progress | None,
) -> MeasuredModule:
    feeds = recording.of(item.cut.inputs)
    failed = MeasuredModule(
        identity=item.identity,
        inputs={name: (str(array.dtype), array.shape) for name, array in feeds.items()},
        nodes=len(item.cut.nodes),
        latency=None,
        session_creation_ms=None,
    )
    with tempfile.TemporaryDirectory(prefix="winml-module-", ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "module.onnx"
        try:
            write_cut(cuts, item, recording, path)
            worst = compare_with_whole(path, item, recording)
            if not worst.relative_diff <= EXACT:
                return replace(failed, error=f"alone, output {worst.name} is off by {worst.relative_diff:.1e} of scale")
            opened = open_model(path, request, provider)
            latency = measure_latency(opened.session.prepare(feeds), request.options, progress)
        except WriteError:
            raise
        except StageError as error:
            return replace(failed, error=error.message.replace(str(path), "the module"))
    return replace(failed, latency=latency, session_creation_ms=opened.creation_ms)
