"""Prints the time of every module in a terminal: the module tree, or a table of modules or classes.

Renders a profile; computes no time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console

from winml.modelkit.hierarchy import address
from winml.modelkit.measure.module_profile import ClassTime, ModuleProfile, ModuleTime
from winml.modelkit.report.perf import COLUMNS, time_words
from winml.modelkit.report.terminal import TextTable, print_rows
from winml.modelkit.results.comparison import ModelComparison
from winml.modelkit.results.module_perf import MeasuredModule, ModulePerfResult, ProfiledDecoder, ProfiledModules
from winml.modelkit.runtime.kernel_times import KernelTime
from winml.modelkit.words import json_printable

__all__ = [
    "chrome_trace_json",
    "chrome_trace_record",
    "comparison_node_data",
    "fused_words",
    "node_data_json",
    "node_data_record",
    "operator_words",
    "print_module_perf",
    "print_module_times",
    "profile_node_data",
    "time_cells",
]


SHOWN_OPERATORS = 3
"""Operators shown per module. Chosen: they fit on one line."""
SHOWN_FUSED = 3
"""Modules shown beside the one that a kernel is charged to. Chosen: as for operators."""
SHOWN_UNATTRIBUTED = 5
"""Nodes without a module that are shown. Chosen: enough to see what they have in common."""


def print_module_times(
    profile: ModuleProfile,
    console: Console,
    *,
    depth: int | None = None,
    top: int | None = None,
    by_class: bool = False,
) -> None:
    """Print the times of modules or classes, then the sums.

    Args:
        profile: The measured times.
        console: Where to print.
        depth: Levels of the tree to show; the totals include deeper modules. None: all.
        top: Show a list of this many modules with the longest self time, instead of the tree.
        by_class: Show classes instead of modules; with ``top``, those with the longest self time.
    """
    if by_class:
        _class_table(profile, top).print(console)
    elif top is not None:
        rows = ((module, 0) for module in _longest_running(profile, top))
        _module_table(profile, rows, is_flat=True).print(console)
    else:
        _module_table(profile, _tree_rows(profile.roots, depth)).print(console)
    console.print()
    print_rows(_time_sum_rows(profile), console)


def _tree_rows(modules: Sequence[ModuleTime], depth: int | None, level: int = 0) -> Iterator[tuple[ModuleTime, int]]:
    if depth is not None and level >= depth:
        return
    for module in modules:
        yield module, level
        yield from _tree_rows(module.children, depth, level + 1)


def _longest_running(profile: ModuleProfile, count: int) -> list[ModuleTime]:
    return sorted(profile.modules(), key=lambda module: module.self_ms, reverse=True)[:count]


def _module_table(
    profile: ModuleProfile, rows: Iterator[tuple[ModuleTime, int]], *, is_flat: bool = False
) -> TextTable:
    table = _empty_table("module", "total ms", "share", "self ms", "kernels", "operators of its own")
    for module, level in rows:
        segment = module.path or module.tag if is_flat else module.tag.rpartition(address.SEPARATOR)[2]
        table.add(
            "  " * level + segment,
            *time_cells(module.total_ms, module.self_ms, profile.kernel_ms),
            f"{module.kernels:g}",
            operator_words(module.operators, module.self_ms) + fused_words(module),
        )
    return table


def fused_words(module: ModuleTime) -> str:
    """Return which other modules have nodes in its kernels: `` (with BatchNorm2d, ReLU)``."""
    names = [tag.rpartition(address.SEPARATOR)[2] for tag in module.fused_with]
    hidden_count = len(names) - SHOWN_FUSED
    shown = [*names[:SHOWN_FUSED], *([f"{hidden_count} others"] if hidden_count > 0 else [])]
    return f" (with {', '.join(shown)})" if shown else ""


def _class_table(profile: ModuleProfile, top: int | None) -> TextTable:
    table = _empty_table("class", "total ms", "share", "self ms", "kernels", "operators of its own", "instances")
    classes: Sequence[ClassTime] = profile.by_class()
    if top is not None:
        classes = sorted(classes, key=lambda entry: entry.self_ms, reverse=True)[:top]
    for entry in classes:
        table.add(
            entry.class_name,
            *time_cells(entry.total_ms, entry.self_ms, profile.kernel_ms),
            f"{entry.kernels:g}",
            operator_words(entry.operators, entry.self_ms),
            str(entry.instances),
        )
    return table


def _empty_table(*columns: str) -> TextTable:
    texts = ("module", "class", "operators of its own")
    return TextTable(columns, numbers=frozenset(index for index, name in enumerate(columns) if name not in texts))


def time_cells(total_ms: float, self_ms: float, kernel_ms: float) -> tuple[str, str, str]:
    """Return total time, share of the kernel time and own time, as shown."""
    share = total_ms / kernel_ms if kernel_ms else 0.0
    return f"{total_ms:.3f}", f"{share:.1%}", f"{self_ms:.3f}"


def operator_words(operators: Mapping[str, float], self_ms: float) -> str:
    """Return the operators that take the most time, with their shares: ``MatMul 85%, Mul 15%``."""
    operator_shares = [
        f"{name} {milliseconds / self_ms:.0%}" for name, milliseconds in operators.items() if self_ms and milliseconds
    ]
    hidden_count = len(operator_shares) - SHOWN_OPERATORS
    more = [f"and {hidden_count} others"] if hidden_count > 0 else []
    return ", ".join([*operator_shares[:SHOWN_OPERATORS], *more])


def _time_sum_rows(profile: ModuleProfile) -> Iterator[tuple[str, str]]:
    mean_ms = sum(profile.run_ms) / len(profile.run_ms)
    yield "kernels", f"{profile.kernel_ms:.3f} ms of {mean_ms:.3f} ms per run, with profiling on"
    yield "outside", f"{profile.outside_ms:.3f} ms in which no kernel ran"
    share = f"{profile.unattributed_share:.2%} of kernel time"
    yield "unattributed", f"{profile.unattributed_ms:.3f} ms ({share})"
    for name, milliseconds in list(profile.unattributed.items())[:SHOWN_UNATTRIBUTED]:
        yield "", f"{name} {milliseconds:.3f} ms"


# --- Renders a profile as a Chrome trace, in which each kernel lies inside the frames of its modules.
#
# Format: the Trace Event Format of Chromium, complete events (``ph`` X) that nest by time. Perfetto,
# ``chrome://tracing`` and speedscope read it.


_PROCESS, _THREAD = 1, 1

Event = dict[str, Any]


def chrome_trace_json(profiled: ProfiledModules | ProfiledDecoder) -> str:
    """Return the trace of a profiled model as JSON text; prompt and step of a decoder are two processes in it."""
    if isinstance(profiled, ProfiledModules):
        record = chrome_trace_record(profiled.profile)
    else:
        events: list[Event] = []
        for process, (name, phase) in enumerate(profiled.phases.items(), _PROCESS):
            title = {"name": "process_name", "ph": "M", "pid": process, "tid": _THREAD, "args": {"name": name}}
            own = chrome_trace_record(phase.profile)["traceEvents"]
            events += [title, *({**event, "pid": process} for event in own)]
        record = {"traceEvents": events, "displayTimeUnit": "ms"}
    return json_printable(json.dumps(record, ensure_ascii=False))


def chrome_trace_record(profile: ModuleProfile) -> dict[str, Any]:
    """Return the trace: every kernel of every run, in microseconds, inside the frames of its modules.

    A module has one frame for each uninterrupted sequence of kernels of its own and of its children.
    """
    return {
        "traceEvents": [*_module_frames(profile), *map(_kernel_event, _tagged_kernels(profile))],
        "displayTimeUnit": "ms",
    }


def _tagged_kernels(profile: ModuleProfile) -> Iterator[tuple[KernelTime, str]]:
    for kernel in profile.profile.kernels:
        yield kernel, profile.tags.get(kernel.node, "")


def _kernel_event(entry: tuple[KernelTime, str]) -> Event:
    kernel, tag = entry
    details = {"node": kernel.node, "tag": tag, "run": kernel.run, "provider": kernel.provider}
    return _trace_event(kernel.op_type or kernel.node, "kernel", kernel.start_us, kernel.duration_us, details)


def _module_frames(profile: ModuleProfile) -> Iterator[Event]:
    """Yield the module frames. A frame ends with its last kernel before a kernel outside of the module."""
    open_frames: list[tuple[str, float]] = []
    run, end_us = -1, 0.0
    for kernel, tag in _tagged_kernels(profile):
        segments = address.parse_tag(tag) if tag else ()
        depth = 0
        if kernel.run == run:
            depth = _shared_depth([name for name, _ in open_frames], segments)
        yield from _close_frames(open_frames, depth, end_us)
        open_frames += [(segment, kernel.start_us) for segment in segments[depth:]]
        run, end_us = kernel.run, max(end_us, kernel.start_us + kernel.duration_us)
    yield from _close_frames(open_frames, 0, end_us)


def _shared_depth(open_segments: list[str], segments: tuple[str, ...]) -> int:
    """Return the number of leading segments that are equal."""
    depth = 0
    for open_segment, segment in zip(open_segments, segments, strict=False):
        if open_segment != segment:
            break
        depth += 1
    return depth


def _close_frames(open_frames: list[tuple[str, float]], depth: int, end_us: float) -> Iterator[Event]:
    """Close the frames deeper than ``depth``, the innermost first."""
    while len(open_frames) > depth:
        segment, start_us = open_frames.pop()
        yield _trace_event(segment, "module", start_us, end_us - start_us, {})


def _trace_event(name: str, category: str, start_us: float, duration_us: float, details: dict[str, Any]) -> Event:
    thread = {"pid": _PROCESS, "tid": _THREAD}
    return {"name": name, "cat": category, "ph": "X", "ts": start_us, "dur": duration_us, **thread, "args": details}


# --- Renders a number for each node as custom node data for Model Explorer: a heat map over the graph of a file.
#
# Format: Model Explorer's guide to custom node data. Node ids are those of its ONNX adapter: the names of the nodes.


GRADIENT = ({"stop": 0, "bgColor": "#ffffff"}, {"stop": 0.5, "bgColor": "#fdd49e"}, {"stop": 1, "bgColor": "#d7301f"})
"""Chosen: white to red, which is readable without distinguishing red from green."""
UNNAMED_GRAPH = "<main>"
"""Specified: the ONNX adapter's name of a graph without a name."""


def profile_node_data(profiled: ProfiledModules | ProfiledDecoder) -> str:
    """Return the node data of a profiled model as JSON text: milliseconds; of a decoder those of a step."""
    shown = profiled if isinstance(profiled, ProfiledModules) else profiled.step
    return node_data_json(shown.graph_name, shown.node_ms)


def comparison_node_data(result: ModelComparison) -> str:
    """Return the node data of a comparison as JSON text: the error that arises in the module each node belongs to.

    Nodes of modules that were not compared, or whose error is no number, are left out.
    """
    errors = result.arising_errors()
    return node_data_json(
        result.graph_name, {node: errors[tag] for node, tag in result.node_tags.items() if tag in errors}
    )


def node_data_json(graph_name: str, numbers: Mapping[str, float]) -> str:
    """Return :func:`node_data_record` as JSON text."""
    return json_printable(json.dumps(node_data_record(graph_name, numbers), ensure_ascii=False))


def node_data_record(graph_name: str, numbers: Mapping[str, float]) -> dict[str, Any]:
    """Return the object that Model Explorer loads beside a model.

    Args:
        graph_name: Name of the graph in the file.
        numbers: What is shown of each node of the file, by its name.
    """
    return {
        graph_name or UNNAMED_GRAPH: {
            "results": {name: {"value": value} for name, value in numbers.items()},
            "gradient": list(GRADIENT),
        }
    }


# --- Prints the latencies of modules that were measured on their own in a terminal.


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
        _class_latency_table(result).print(console)


def _instance_table(instances: Sequence[MeasuredModule]) -> TextTable:
    table = TextTable(("latency in ms", "class", *COLUMNS), numbers=frozenset(range(2, 2 + len(COLUMNS))))
    for item in instances:
        assert item.latency is not None  # only measured ones are given
        summary = item.latency.summary
        cells = (time_words(getattr(summary, column)) for column in COLUMNS)
        table.add(item.identity.words, item.identity.class_name, *cells)
    return table


def _class_latency_table(result: ModulePerfResult) -> TextTable:
    table = TextTable(("class", "instances", "mean", "fastest", "slowest", "sum"), numbers=frozenset(range(1, 6)))
    for entry in result.classes():
        times = (entry.mean_ms, entry.min_ms, entry.max_ms, entry.total_ms)
        table.add(entry.class_name, str(entry.instances), *map(time_words, times))
    return table
