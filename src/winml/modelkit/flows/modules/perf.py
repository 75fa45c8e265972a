"""What does ``winml perf --module`` do? Measures each module alone, on the values that flow in the whole model.

A module that cannot be cut out or does not run is part of the result, with its reason; the others are measured all the
same. The cut models are written to a temporary folder, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from winml.modelkit.compare.outputs import CUT_MODULE_THRESHOLD
from winml.modelkit.errors import StageError, WriteError
from winml.modelkit.flows.modules.cuts import (
    CutCall,
    ModuleCuts,
    Recording,
    compare_with_recording,
    cut_modules,
    record_boundaries,
    write_cut,
)
from winml.modelkit.graph.files.recovery import temporary_folder
from winml.modelkit.measure.latency import LatencyOptions, measure_latency
from winml.modelkit.progress import StepClock, StepEvent
from winml.modelkit.results.module_perf import MeasuredModule, ModulePerfResult
from winml.modelkit.runtime.devices import ChosenProvider
from winml.modelkit.runtime.opened_model import RunOptions, open_model, refuse_dynamic_inputs
from winml.modelkit.runtime.sessions import onnxruntime_version
from winml.modelkit.version import __version__

__all__ = ["measure_modules"]

_STEPS = ("modules cut", "activations recorded", "modules measured")

Progress = Callable[[int, float], None]


def measure_modules(
    path: Path,
    selector: str,
    options: RunOptions,
    latency: LatencyOptions,
    *,
    on_step: Callable[[StepEvent], None] | None = None,
    progress: Progress | None = None,
) -> ModulePerfResult:
    """Measure every module a selector names, each alone.

    Args:
        path: The ONNX file.
        selector: Which modules.
        options: How it is run, and what the whole of it is fed.
        latency: How often each module is run.
        on_step: Called when a step starts and when it ends.
        progress: Called between runs with the number of counted ones and the share of the work that is done.

    Raises:
        UsageError: the selector names nothing, the execution provider is not there, or values do not fit.
        InputError: the file is damaged or bears no tags.
        StageError: ONNX Runtime cannot run the whole model.
    """
    provider = options.choose_provider()
    clock = StepClock(_STEPS, on_step)
    with clock.step(_STEPS[0]) as step:
        cuts = cut_modules(path, selector)
        step.summary = f"{len(cuts.calls)} of {len(cuts.calls) + len(cuts.refused)}"
    refused = [MeasuredModule(item.identity, {}, 0, None, None, item.reason) for item in cuts.refused]
    measured: list[MeasuredModule] = []
    notes: tuple[str, ...] = ()
    if cuts.calls:
        with clock.step(_STEPS[1]) as step:
            recording = record_boundaries(cuts, options)
            refuse_dynamic_inputs(provider, recording.fed.inputs, options)
            notes = recording.fed.notes
            step.summary = f"{len(recording.arrays)} values"
        with clock.step(_STEPS[2]) as step:
            measurement = _CutMeasurement(cuts, recording, options, provider, latency)
            for number, item in enumerate(cuts.calls):
                share = _share_of(progress, number, len(cuts.calls), len(measured) * latency.iterations)
                measured.append(measurement.measure(item, share))
            step.summary = f"{len(measured)} instances"
    return ModulePerfResult(
        model=options.shown,
        selector=selector,
        tool_version=__version__,
        onnxruntime_version=onnxruntime_version(),
        provider=provider,
        threads=options.threads,
        seed=options.seed,
        input_source="random" if options.input_data is None else "file",
        options=latency,
        instances=(*measured, *refused),
        without_nodes=cuts.without_nodes,
        notes=notes,
    )


def _share_of(progress: Progress | None, number: int, count: int, runs_before: int) -> Progress | None:
    """Return what reports one module's progress as part of the whole."""
    if progress is None:
        return None
    return lambda runs, share: progress(runs_before + runs, (number + share) / count)


@dataclass(frozen=True)
class _CutMeasurement:
    """How every cut module is measured."""

    cuts: ModuleCuts
    recording: Recording
    options: RunOptions
    provider: ChosenProvider
    latency: LatencyOptions

    def measure(self, item: CutCall, progress: Progress | None) -> MeasuredModule:
        """Measure one module; one that does not run alone, or answers otherwise there, has a reason in place of times.

        Raises:
            WriteError: the cut model cannot be written.
        """
        feeds = self.recording.of(item.cut.inputs)
        failed = MeasuredModule(
            identity=item.identity,
            inputs={name: (str(array.dtype), array.shape) for name, array in feeds.items()},
            nodes=len(item.cut.nodes),
            latency=None,
            session_creation_ms=None,
        )
        with temporary_folder() as folder:
            path = folder / "module.onnx"
            try:
                write_cut(self.cuts, item, self.recording, path)
                worst = compare_with_recording(path, item, self.recording)
                if not worst.relative_diff <= CUT_MODULE_THRESHOLD:
                    reason = f"alone, output {worst.name} is off by {worst.relative_diff:.1e} of scale"
                    return replace(failed, error=reason)
                opened = open_model(path, self.options, self.provider)
                run = opened.session.prepare(feeds, io_binding=self.options.io_binding)
                measured = measure_latency(run, self.latency, progress)
            except WriteError:
                raise
            except StageError as error:
                return replace(failed, error=error.message.replace(str(path), "the module"))
        return replace(failed, latency=measured, session_creation_ms=opened.creation_ms)
