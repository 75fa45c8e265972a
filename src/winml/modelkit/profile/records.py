"""Records of ``winml perf`` for models and decoders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, Literal

import numpy as np

from winml.modelkit.arrays import Array
from winml.modelkit.onnx.specs import InputTensorSpec
from winml.modelkit.ort.decoding.inputs import DecoderRun
from winml.modelkit.ort.devices import ChosenProvider
from winml.modelkit.ort.graph_inputs import batch_of
from winml.modelkit.ort.host import peak_bytes, resident_bytes
from winml.modelkit.ort.opened_model import PreparedModel
from winml.modelkit.ort.sessions import onnxruntime_version
from winml.modelkit.profile.latency import LatencyOptions, LatencyResult
from winml.modelkit.profile.statistics import Ratio
from winml.modelkit.records import Record, entry, recorded
from winml.modelkit.report.result import Result
from winml.modelkit.verdicts import Verdict
from winml.modelkit.version import __version__

SCHEMA_VERSION = 2
"""Version of the JSON format, specified in docs/reference/formats.md."""
INFO = "benchmark_info"
"""Entry with model, versions, options and circumstances of a measurement."""
_MODEL = "model_info"
_MAX_LISTED_RUNS = 3
"""Maximum number of models or modules in a note on their runs. Chosen: they fit on two lines."""


class MemoryUse(Record):
    """Resident memory of the process, in bytes."""

    session_bytes: int
    """Growth during session creation: weights, and ONNX Runtime's copies of weights."""
    run_bytes: int
    """Growth during the runs: activations."""
    process_bytes: int
    """Resident memory after the runs."""
    peak_bytes: int
    """Peak resident memory since process start, including libraries and an export."""

    @classmethod
    def after_runs(cls, session_bytes: int, bytes_before: int) -> MemoryUse:
        """Measure the memory of the process after the runs.

        Args:
            session_bytes: Growth during session creation.
            bytes_before: Resident memory before the first run.
        """
        now = resident_bytes()
        return cls(session_bytes, max(now - bytes_before, 0), now, max(peak_bytes(), now))


class BaselineResult(Record):
    """Latency of the baseline, and its ratio to the model."""

    name: str
    kind: Literal["pytorch", "onnx"]
    latency: LatencyResult = field(metadata=entry(inline=True))
    ratio: Ratio
    """Ratio of the model's time to the baseline's."""
    block: int
    """Number of consecutive runs of each."""
    model_bytes: int | None = field(default=None, metadata=entry("size_bytes"))
    """Size of the file, without its data files; ``None`` for PyTorch."""
    session_creation_ms: float | None = field(default=None, metadata=entry(digits=3))
    """Time to open the file; ``None`` for PyTorch."""

    def verdict(self, model: str) -> Verdict:
        """Answer whether a model is faster than the baseline.

        Args:
            model: Name of the model.
        """
        return self.ratio.answer(f"{model} is faster than {self.name}")


class Measurement(Record, schema_version=SCHEMA_VERSION):
    """Common fields of a measurement: model, versions, provider and options."""

    model: str = field(metadata=entry(within=INFO))
    """As passed by the user."""
    tool_version: str = field(metadata=entry(within=INFO))
    onnxruntime_version: str = field(metadata=entry(within=INFO))
    provider: ChosenProvider = field(metadata=entry(within=INFO, inline=True))
    threads: int | None = field(metadata=entry(within=INFO))
    """Requested number; ``None``: ONNX Runtime's default."""
    seed: int = field(metadata=entry(within=INFO))
    input_source: Literal["random", "file"] = field(metadata=entry(within=INFO))
    """Origin of the input values."""
    options: LatencyOptions = field(metadata=entry(within=INFO, inline=True, keys=("warmup", "duration_s")))


class PerfResult(Result, Measurement, document="profile.table:perf_document"):
    """Result of a measurement of a whole model."""

    model_bytes: int = field(metadata=entry("size_bytes", within=_MODEL))
    """Size of the model file, without its data files."""
    inputs: tuple[InputTensorSpec, ...] = field(metadata=entry(skip=True))
    measured_shapes: Mapping[str, tuple[int, ...]] = field(metadata=entry(within=_MODEL))
    """Input name → shape in the runs."""
    output_shapes: Mapping[str, tuple[int, ...] | None] = field(metadata=entry(within=_MODEL))
    """Output name → shape in the runs; ``None`` for non-numeric outputs."""
    batch_size: int = field(metadata=entry(within=INFO))
    batch_source: str = field(metadata=entry(within=INFO))
    """Origin of the batch size, in words."""
    session_creation_ms: float = field(metadata=entry(within=INFO, digits=3))
    latency: LatencyResult = field(metadata=entry(inline=True, keys=("latency_ms", "raw_samples_ms")))
    memory: MemoryUse
    baseline: BaselineResult | None = field(default=None, metadata=entry(omit_none=True))
    io_binding: bool = field(default=True, metadata=entry(within=INFO))
    """True if inputs were bound once and outputs stayed in device memory; False if arrays were passed in each run."""
    output_memory: tuple[str, ...] = field(default=("cpu",), metadata=entry(within=INFO))
    """Memory types of the outputs."""
    decoding: DecoderRun | None = field(default=None, metadata=entry(within=INFO))
    """Measured run of a decoder with a KV cache; ``None`` for other models, or if the user set all sizes."""
    notes: tuple[str, ...] = field(default=(), metadata=entry(within=INFO))
    fingerprint: str = field(default="", metadata=entry(skip=True))
    """Digest of the file's structure, by which ``winml view`` assigns a result by module; empty for other results."""
    extra: Mapping[str, Any] = field(default_factory=dict, metadata=entry(inline=True, last=True))
    """Additional top-level JSON entries, from other measurements of the same model."""

    @property
    @recorded(entry(within="baseline", omit_none=True))
    def verdict(self) -> Verdict | None:
        """Answer whether the model is faster than the baseline; ``None`` without a baseline."""
        return None if self.baseline is None else self.baseline.verdict(self.model)

    @property
    @recorded(entry(within="throughput", digits=3))
    def samples_per_sec(self) -> float:
        """Samples per second: runs per second times the batch size."""
        return self.batch_size * self.runs_per_sec

    @property
    @recorded(entry(within="throughput", digits=3))
    def runs_per_sec(self) -> float:
        """Runs per second."""
        return 1000 / self.latency.summary.mean

    @property
    @recorded(entry(within="throughput", digits=3, omit_none=True))
    def tokens_per_sec(self) -> float | None:
        """Tokens per second that a decoder reads in a prompt, or writes in a step; ``None`` for other models."""
        return None if self.decoding is None else self.samples_per_sec * self.decoding.tokens

    @recorded(entry(within=INFO, inline=True))
    def _run_info(self) -> dict[str, object]:
        return {"iterations": len(self.latency.samples_ms), "first_run_ms": round(self.latency.first_run_ms, 6)}

    @recorded(entry(within=_MODEL, inline=True))
    def _input_info(self) -> dict[str, object]:
        numbers = {spec.name: [size if isinstance(size, int) else None for size in spec.shape] for spec in self.inputs}
        names = {
            spec.name: [size if isinstance(size, str) else None for size in spec.named_shape] for spec in self.inputs
        }
        dtypes = {spec.name: spec.dtype for spec in self.inputs}
        return {"input_shapes": numbers, "input_dtypes": dtypes, "dimension_names": names}


def perf_result(
    prepared: PreparedModel,
    options: LatencyOptions,
    latency: LatencyResult,
    memory: MemoryUse,
    baseline: BaselineResult | None = None,
) -> PerfResult:
    """Create the record of a measurement after its last run."""
    opened, values, run_options = prepared.opened, prepared.values, prepared.options
    outputs = prepared.run.outputs()
    batch_size, batch_source = batch_of(values.inputs, values.feeds, outputs)
    return PerfResult(
        model=run_options.shown,
        model_bytes=prepared.path.stat().st_size,
        tool_version=__version__,
        onnxruntime_version=onnxruntime_version(),
        provider=opened.provider,
        threads=run_options.threads,
        seed=run_options.seed,
        input_source="random" if run_options.input_data is None else "file",
        options=options,
        inputs=values.inputs,
        measured_shapes={name: array.shape for name, array in values.feeds.items()},
        output_shapes={name: None if array is None else array.shape for name, array in outputs.items()},
        batch_size=batch_size,
        batch_source=batch_source,
        session_creation_ms=opened.creation_ms,
        latency=latency,
        memory=memory,
        baseline=baseline,
        io_binding=prepared.run.is_bound,
        output_memory=prepared.run.output_memory,
        decoding=run_options.decoding,
        notes=(
            *values.notes,
            *_output_notes(outputs),
            *([_TEXT_INPUT_NOTE] if run_options.io_binding and not prepared.run.is_bound else []),
            *([_EXPORT_NOTE] if run_options.is_exported else []),
            *spread_notes({"the model": latency} | ({} if baseline is None else {baseline.name: baseline.latency})),
        ),
    )


_TEXT_INPUT_NOTE = "an input contains text, which ONNX Runtime copies in every run: times include the copy"


_EXPORT_NOTE = "peak memory includes loading and, if the model was not cached, the export"


def _output_notes(outputs: Mapping[str, Array | None]) -> Iterator[str]:
    """Note outputs that are not numeric, and outputs with NaN or infinite values."""
    for name, array in outputs.items():
        if array is None:
            yield f"output {name} is not a numeric tensor: it was computed in every run, but not checked"
        elif array.dtype.kind not in "iub" and not np.isfinite(array.astype(np.float64)).all():
            yield f"output {name} contains NaN or infinite values, which slow some processors down"


def spread_notes(latencies: Mapping[str, LatencyResult]) -> Iterator[str]:
    """Note the runs slowed by other load: half of the runs, or a few runs that distort the mean.

    Args:
        latencies: Name of the measured model → its runs.
    """
    yield from busy_notes(latencies)
    interrupted = {name: run.summary for name, run in latencies.items() if run.summary.is_interrupted}
    times = [
        f"{name} (mean {summary.mean / summary.p50:.1f} times p50)"
        for name, summary in interrupted.items()
        if not summary.is_disturbed
    ]
    if times:
        yield (
            f"a few runs were interrupted, probably by other programs: {_join_times(times)}; mean, std and throughput "
            "are not shown"
        )


def busy_notes(latencies: Mapping[str, LatencyResult]) -> Iterator[str]:
    """Note the models of which other load slowed half of the runs.

    Args:
        latencies: Name of the measured model → its runs.
    """
    ratios = {name: run.summary for name, run in latencies.items() if run.summary.is_disturbed}
    times = [f"of {name} took {summary.p50 / summary.min:.1f} times" for name, summary in ratios.items()]
    if times:
        yield (
            f"the machine seems busy: the median run {_join_times(times)} as long as the fastest; measure again when "
            "it is idle"
        )


def _join_times(times: Sequence[str]) -> str:
    """Join the first times, and count the rest."""
    hidden = len(times) - _MAX_LISTED_RUNS
    return ", ".join([*times[:_MAX_LISTED_RUNS], *([f"{hidden} more"] if hidden > 0 else [])])


class PromptTime(Record):
    """Time to the first token of a prompt."""

    tokens: int
    first_token_ms: float
    """Median of the counted runs."""
    cache_bytes: int
    """Memory of the KV cache after the prompt."""


class StepTime(Record):
    """Time of one further token."""

    cached_tokens: int
    step_ms: float
    """Median of the counted runs."""
    tokens_per_second: float


class GenerationPerf(Result, Record, schema_version=1, document="profile.table:generation_perf_document", rows="steps"):
    """Measurement of a decoder with a KV cache."""

    model: str
    provider: str
    threads: int | None
    iterations: int
    session_ms: float
    prompts: tuple[PromptTime, ...]
    steps: tuple[StepTime, ...]
    cache_bytes_per_token: float
    """Growth of the KV cache per token of one row."""
    notes: tuple[str, ...] = ()
