"""Prints the latency of a model in a terminal, and its comparison with a baseline."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import Console

from winml.modelkit.measure.latency import LatencyResult
from winml.modelkit.measure.statistics import Ratio
from winml.modelkit.report.terminal import TextTable, label, print_rows
from winml.modelkit.results.perf import PerfResult
from winml.modelkit.words import size_words

__all__ = ["COLUMNS", "print_perf", "provider_words", "ratio_words", "time_words"]

COLUMNS = ("mean", "std", "min", "p50", "p90", "p95", "p99", "max")


def print_perf(result: PerfResult, console: Console) -> None:
    """Print the summary, the latency table and the comparison."""
    print_rows(_summary_rows(result), console)
    console.print()
    _latency_table(result).print(console)
    if result.baseline is not None:
        console.print()
        console.print(label(ratio_words(result.baseline.ratio, result.model, result.baseline.name)), soft_wrap=True)


def _summary_rows(result: PerfResult) -> Iterator[tuple[str, str]]:
    yield "model", result.model
    yield "runs on", provider_words(result)
    dtypes = {item.name: item.dtype for item in result.inputs}
    shapes = ", ".join(
        f"{name} {dtypes[name]}[{', '.join(map(str, shape))}]" for name, shape in result.measured_shapes.items()
    )
    yield "inputs", f"{shapes or 'none'} ({'from the file' if result.input_source == 'file' else 'random values'})"
    yield "runs", f"{len(result.latency.samples_ms)} counted, after {result.options.warmup} to warm up"
    if not result.io_binding:
        yield "values", "arrays are passed in and out in every run, which the times include"
    elif result.output_memory != ("cpu",):
        yield "values", f"bound once, outputs stay in the memory of {' and '.join(result.output_memory)}"
    if result.decoding is not None:
        yield "decodes", result.decoding.words
    yield "batch", f"{result.batch_size}, says {result.batch_source}"
    yield (
        "session",
        f"{result.session_creation_ms:.0f} ms to open · first run {time_words(result.latency.first_run_ms)} ms",
    )
    yield "throughput", f"{_format_rate(result.samples_per_sec)} samples/s"
    memory = result.memory
    memory_sizes = {
        "session": memory.session_bytes,
        "runs": memory.run_bytes,
        "process": memory.process_bytes,
        "at most": memory.peak_bytes,
    }
    yield "memory", ", ".join(f"{name} {size_words(size)}" for name, size in memory_sizes.items())
    yield from (("note", note) for note in result.notes)


def provider_words(result: PerfResult) -> str:
    """Return where a model ran."""
    provider = f"{result.provider.provider.name} on {result.provider.device_words}"
    threads = f", {result.threads} thread{'' if result.threads == 1 else 's'}" if result.threads else ""
    return f"{provider}{threads} (ONNX Runtime {result.onnxruntime_version})"


def _latency_table(result: PerfResult) -> TextTable:
    table = TextTable(("latency in ms", *COLUMNS), numbers=frozenset(range(1, 1 + len(COLUMNS))))
    table.add(*_latency_cells("model" if result.baseline is None else result.model, result.latency))
    if result.baseline is not None:
        table.add(*_latency_cells(result.baseline.name, result.baseline.latency))
    return table


def _latency_cells(name: str, latency: LatencyResult) -> list[str]:
    summary = latency.summary
    return [name, *(time_words(getattr(summary, column)) for column in COLUMNS)]


def time_words(milliseconds: float) -> str:
    """Return a time in milliseconds, without the unit.

    >>> time_words(1.23456), time_words(123.456)
    ('1.235', '123.5')
    """
    return f"{milliseconds:.3f}" if milliseconds < 100 else f"{milliseconds:.1f}"


def _format_rate(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _ratio_digits(ratio: float) -> str:
    """Return a ratio with two decimals, or with two significant digits where it is smaller than 0.1."""
    return f"{ratio:.{max(2, 1 - math.floor(math.log10(ratio)))}f}"


def ratio_words(ratio: Ratio, model: str, baseline: str) -> str:
    """Return the outcome of a comparison in one sentence.

    >>> ratio_words(Ratio(0.5, 0.45, 0.55, 0.95, 30), "a.onnx", "pytorch")
    'a.onnx is faster than pytorch: ratio 0.50 (0.45–0.55), so 2.00 times as fast'
    """
    value = _ratio_digits(ratio.value)
    if ratio.verdict == "undecided":
        return f"no verdict, since the machine seems busy: ratio {value}; measure again when it is quiet"
    if ratio.low is None or ratio.high is None:
        return (
            f"no difference found: ratio {value} from {ratio.pairs} pair{'' if ratio.pairs == 1 else 's'}, "
            "too few for an interval (--iterations)"
        )
    words = f"ratio {value} ({_ratio_digits(ratio.low)}–{_ratio_digits(ratio.high)})"
    if ratio.verdict == "faster":
        return f"{model} is faster than {baseline}: {words}, so {1 / ratio.value:.2f} times as fast"
    if ratio.verdict == "slower":
        return f"{model} is slower than {baseline}: {words}"
    return f"no difference found: {words}"
