"""Prints the latencies of modules that were measured on their own in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from winml.modelkit.report.perf import COLUMNS, time_words
from winml.modelkit.results.module_perf_result import MeasuredModule, ModulePerfResult

__all__ = ["print_module_perf"]


def print_module_perf(result: ModulePerfResult, console: Console) -> None:
    """Print a table of instances, a table of classes, and the instances that failed."""
    provider = f"{result.provider.provider.name} on {result.provider.device}"
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
    for name, value in rows:
        console.print(f"[bold]{name:<8}[/bold]  {escape(value)}", highlight=False, soft_wrap=True)
    if measured := [item for item in result.instances if item.latency is not None]:
        console.print()
        console.print(_instance_table(measured))
        console.print()
        console.print(_class_table(result))


def _instance_table(instances: Sequence[MeasuredModule]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("latency in ms")
    table.add_column("class")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for item in instances:
        assert item.latency is not None  # only measured ones are given
        summary = item.latency.summary
        cells = (time_words(getattr(summary, column)) for column in COLUMNS)
        table.add_row(escape(item.identity.words), escape(item.identity.class_name), *cells)
    return table


def _class_table(result: ModulePerfResult) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("class")
    for name in ("instances", "mean", "fastest", "slowest", "sum"):
        table.add_column(name, justify="right")
    for entry in result.classes():
        times = (entry.mean_ms, entry.min_ms, entry.max_ms, entry.total_ms)
        table.add_row(escape(entry.class_name), str(entry.instances), *map(time_words, times))
    return table
