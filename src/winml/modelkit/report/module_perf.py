"""Prints the latencies of modules that were measured on their own in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from winml.modelkit.report.perf import COLUMNS, time_words
from winml.modelkit.report.terminal import TextTable, print_rows
from winml.modelkit.results.module_perf_result import MeasuredModule, ModulePerfResult

__all__ = ["print_module_perf"]


def print_module_perf(result: ModulePerfResult, console: Console) -> None:
    """Print a table of instances, a table of classes, and the instances that failed."""
    provider = f"{result.provider.provider.name} on {result.provider.device_words}"
    threads = f", {result.threads} thread{'' if result.threads == 1 else 's'}" if result.threads else ""
    input_words = "the values of the file" if result.input_source == "file" else "random values"
    runs = (
        f"{result.options.iterations} counted"
        if result.options.duration_s is None
        else f"{result.options.duration_s:g} s of them"
    )
    rows = [
        ("model", result.model),
        ("modules", f"{result.selector} · {len(result.instances)} instances"),
        ("runs on", f"{provider}{threads} (ONNX Runtime {result.onnxruntime_version})"),
        ("inputs", f"recorded at the boundary of each, in one run of the whole model on {input_words}"),
        ("runs", f"{runs} for each, after {result.options.warmup} to warm up"),
        *(("no nodes", f"{item.words}: nothing of it is left in the graph") for item in result.without_nodes),
        *(("failed", f"{item.identity.words}: {item.error}") for item in result.failed),
        *(("note", note) for note in result.notes),
    ]
    print_rows(rows, console, width=8)
    if measured := [item for item in result.instances if item.latency is not None]:
        console.print()
        _instance_table(measured).print(console)
        console.print()
        _class_table(result).print(console)


def _instance_table(instances: Sequence[MeasuredModule]) -> TextTable:
    table = TextTable(("latency in ms", "class", *COLUMNS), numbers=frozenset(range(2, 2 + len(COLUMNS))))
    for item in instances:
        assert item.latency is not None  # only measured ones are given
        summary = item.latency.summary
        cells = (time_words(getattr(summary, column)) for column in COLUMNS)
        table.add(item.identity.words, item.identity.class_name, *cells)
    return table


def _class_table(result: ModulePerfResult) -> TextTable:
    table = TextTable(("class", "instances", "mean", "fastest", "slowest", "sum"), numbers=frozenset(range(1, 6)))
    for entry in result.classes():
        times = (entry.mean_ms, entry.min_ms, entry.max_ms, entry.total_ms)
        table.add(entry.class_name, str(entry.instances), *map(time_words, times))
    return table
