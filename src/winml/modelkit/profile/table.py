"""Documents of a latency measurement and of the steps of a decoder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from winml.modelkit.profile.latency import LatencyResult
from winml.modelkit.profile.records import GenerationPerf, PerfResult
from winml.modelkit.profile.statistics import Ratio
from winml.modelkit.report import document as doc
from winml.modelkit.words import count_noun, size_change_words, size_words, time_words

if TYPE_CHECKING:
    from winml.modelkit.profile.module_records import ModulePerfResult

SUMMARY = ("mean", "std", "min", "p50", "p90", "p95", "p99", "max")
_DISTORTED = ("mean", "std")
"""Measures that a few interrupted runs distort; they are left out if runs were interrupted."""
LATENCIES = tuple(doc.Column(name, "latency") for name in SUMMARY)


def perf_document(result: PerfResult) -> doc.Document:
    """Build the document of a model's latency, and of its comparison with a baseline."""
    return doc.Document(
        perf_blocks(result),
        title=Path(result.model).name or result.model,
        subject="latency" if result.baseline is None else f"latency beside {result.baseline.name}",
        answer=_answer_words(result),
        figures=list(latency_figures(result)),
    )


def _answer_words(result: PerfResult) -> str:
    """Answer in one sentence: the verdict beside a baseline, else the median latency unless other load slowed it."""
    if result.baseline is not None:
        words = ratio_words(result.baseline.ratio, result.model, result.baseline.name)
        return f"{words[0].upper()}{words[1:]}." if words.startswith(("no ", "undecided")) else f"{words}."
    summary = result.latency.summary
    return "" if summary.is_disturbed else f"A run takes {time_words(summary.p50)} ms (median)."


def latency_figures(result: PerfResult) -> Iterator[doc.Figure]:
    """Yield the figures of a model and its baseline: latency, ratio, memory; none of a time that other load slowed."""
    sides = {"latency": result.latency}
    if result.baseline is not None:
        baseline, model = side_names(result)
        sides = {f"latency of {model}": result.latency, f"latency of {baseline}": result.baseline.latency}
    # The latency of one side alone would be taken for that of the result.
    if not any(latency.summary.is_disturbed for latency in sides.values()):
        for name, latency in sides.items():
            longest = f"99 % take at most {time_words(latency.summary.p99)} ms"
            meaning = f"median of {len(latency.samples_ms)} runs; {longest}"
            yield doc.Figure(name, f"{time_words(latency.summary.p50)} ms", meaning)
    if result.baseline is not None and not (ratio := result.baseline.ratio).is_disturbed:
        tones: Mapping[str, doc.Tone] = {"faster": "good", "slower": "bad"}
        ends = (
            "too few runs for an interval"
            if ratio.low is None
            else f"95 % interval {ratio.low:.2f} to {ratio.high:.2f}"
        )
        meaning = f"of the time of {result.baseline.name}; {ends}"
        yield doc.Figure("ratio", f"{ratio.value:.2f}", meaning, tones.get(ratio.verdict, ""))
    added = f"opening the session added {size_words(result.memory.session_bytes)}"
    yield doc.Figure("peak memory", size_words(result.memory.peak_bytes), f"of the process; {added}")


def side_names(result: PerfResult) -> tuple[str, str]:
    """Return short names of baseline and model that differ."""
    assert result.baseline is not None
    names = Path(result.baseline.name).name, Path(result.model).name
    return names if names[0] != names[1] else ("baseline", "model")


def perf_blocks(result: PerfResult) -> list[doc.Block]:
    """Build the blocks: summary, latencies and result of the comparison."""
    sides = {"model" if result.baseline is None else result.model: result.latency}
    blocks: list[doc.Block] = [doc.Fields(list(_summary_fields(result)))]
    if result.baseline is None:
        return [*blocks, latency_table(sides)]
    sides[result.baseline.name] = result.baseline.latency
    verdict = ratio_words(result.baseline.ratio, result.model, result.baseline.name)
    return [*blocks, latency_table(sides), doc.Paragraph(verdict)]


def _summary_fields(result: PerfResult) -> Iterator[doc.Field]:
    yield "model", result.model
    baseline = result.baseline
    if baseline is not None and baseline.model_bytes is not None:
        change = size_change_words(baseline.model_bytes, result.model_bytes)
        sizes = f"{size_words(result.model_bytes)}, {baseline.name} {size_words(baseline.model_bytes)}"
        yield "size", f"{sizes} ({change})"
    yield "runs on", provider_words(result)
    dtypes = {spec.name: spec.dtype for spec in result.inputs}
    shapes = ", ".join(
        f"{name} {dtypes[name]}[{', '.join(map(str, shape))}]" for name, shape in result.measured_shapes.items()
    )
    yield "inputs", f"{shapes or 'none'} ({'from the file' if result.input_source == 'file' else 'random values'})"
    yield "runs", runs_words(result)
    if not result.io_binding:
        yield "values", "arrays are passed in and out in every run, which the times include"
    elif result.output_memory != ("cpu",):
        yield "values", f"bound once, outputs stay in the memory of {' and '.join(result.output_memory)}"
    if result.decoding is not None:
        yield "decodes", result.decoding.words
    yield "batch", f"{result.batch_size} ({result.batch_source})"
    yield "session", _opening_words(result.session_creation_ms, result.latency)
    if baseline is not None and baseline.session_creation_ms is not None:
        yield "", f"{baseline.name}: {_opening_words(baseline.session_creation_ms, baseline.latency)}"
    yield "throughput", throughput_words(result)
    memory = result.memory
    added = f"opening the session added {size_words(memory.session_bytes)}, the runs {size_words(memory.run_bytes)}"
    yield "memory", f"process {size_words(memory.process_bytes)}, peak {size_words(memory.peak_bytes)}; {added}"
    yield from doc.note_fields(result.notes)


def _opening_words(milliseconds: float, latency: LatencyResult) -> str:
    """Describe the time until the first result."""
    return f"{milliseconds:.0f} ms to open · first run {time_words(latency.first_run_ms)} ms"


def runs_words(result: PerfResult) -> str:
    """Describe the number of measured runs."""
    return f"{len(result.latency.samples_ms)} counted, after {result.options.warmup} warm-up runs"


def throughput_words(result: PerfResult) -> str:
    """Describe the throughput: in tokens for a decoder, in samples for other models; no number if load distorts it."""
    if result.latency.summary.is_interrupted or result.latency.summary.is_disturbed:
        return "not stated, since other load slowed the runs"
    rate, unit = result.samples_per_sec, "samples"
    if result.tokens_per_sec is not None:
        rate, unit = result.tokens_per_sec, "tokens"
    return f"{f'{rate:.0f}' if rate >= 100 else f'{rate:.3g}'} {unit}/s"


def provider_words(result: PerfResult | ModulePerfResult) -> str:
    """Describe provider, device and threads of the runs."""
    provider = f"{result.provider.provider.name} on {result.provider.device_words}"
    threads = f", {count_noun(result.threads, 'thread')}" if result.threads else ""
    return f"{provider}{threads} (ONNX Runtime {result.onnxruntime_version})"


def latency_table(sides: Mapping[str, LatencyResult]) -> doc.Table:
    """Build a table of mean, spread and percentiles of each side, in milliseconds.

    Args:
        sides: Name of the measured model → its runs.
    """
    rows: list[list[doc.Cell]] = []
    for name, result in sides.items():
        left_out = _DISTORTED if result.summary.is_interrupted else ()
        rows.append([name, *(None if key in left_out else getattr(result.summary, key) for key in SUMMARY)])
    return doc.Table(doc.columns("latency in ms", *LATENCIES), rows)


def ratio_words(ratio: Ratio, model: str, baseline: str) -> str:
    """Describe the result of a comparison in one sentence.

    >>> ratio_words(Ratio(0.5, 0.45, 0.55, 0.95, 30), "a.onnx", "pytorch")
    'a.onnx is faster than pytorch: ratio 0.50 (0.45–0.55), so 2.00 times as fast'
    """
    verdict = ratio.answer(f"{model} is faster than {baseline}")
    if verdict.is_yes:
        return f"{verdict.question}: {verdict.reason}"
    if ratio.verdict == "slower":
        return f"{model} is slower than {baseline}: {verdict.reason}"
    return verdict.words if verdict.is_undecided else f"no difference found: {verdict.reason}"


def generation_perf_document(result: GenerationPerf) -> doc.Document:
    """Build the document of a decoder: its session, and a line for each measured length of prompt or cache."""
    return doc.Document(
        [
            doc.Fields(
                [
                    ("model", f"{result.model} on {result.provider}, {result.iterations} runs of each"),
                    ("session", f"{result.session_ms / 1000:.2f} s"),
                    *(
                        (
                            f"prompt of {prompt.tokens}",
                            f"first token after {prompt.first_token_ms:.1f} ms, cache {size_words(prompt.cache_bytes)}",
                        )
                        for prompt in result.prompts
                    ),
                    *(
                        (
                            f"step after {step.cached_tokens}",
                            f"{step.step_ms:.2f} ms, {step.tokens_per_second:.1f} tokens/s",
                        )
                        for step in result.steps
                    ),
                    ("cache", f"{size_words(round(result.cache_bytes_per_token))} for each token"),
                    *doc.note_fields(result.notes),
                ]
            )
        ]
    )
