"""Renders a quantization, and which modules pay for fewer bits: in a terminal, and as one HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from winml.modelkit.compare.words import fidelity_words, nearness_words
from winml.modelkit.hierarchy import address
from winml.modelkit.report.module_page import ModulePage, Section, chart_html, chart_text, nearest_parent, render_page
from winml.modelkit.report.terminal import TextTable, print_rows
from winml.modelkit.results.quantization_sensitivity import (
    ExcludeList,
    MeasuredForm,
    ModuleSensitivity,
    QuantizationSensitivity,
    TimedForm,
)
from winml.modelkit.results.quantized_model import QuantizedFile
from winml.modelkit.results.words import coverage_words
from winml.modelkit.words import count_words, size_words

__all__ = [
    "form_words",
    "latency_words",
    "print_quantization",
    "print_sensitivity",
    "sensitivity_page",
]


# --- Prints a quantization in a terminal: precision by module, what was left and why, sizes, and what it costs.


SHOWN_MODULES = 12
"""Rows of the module table unless ``verbose``, modules that keep bits first. Chosen: the summary fits on a screen."""


def print_quantization(result: QuantizedFile, console: Console, *, verbose: bool) -> None:
    """Print what was quantized; with ``verbose`` every module."""
    before, after = result.before, result.after
    left = sum(result.left.values())
    ratio = before.size_bytes / max(after.size_bytes, 1)
    rows = [
        ("precision", f"{result.precision} ({', '.join(result.modes)})"),
        *([("ranges", result.calibration.words)] if result.calibration is not None else []),
        ("quantized", f"{result.quantized} of {result.quantized + left} nodes with weights{_mixture_words(result)}"),
        *(("left", f"{count} {reason}") for reason, count in result.left.items()),
        ("nodes", f"{before.nodes} → {after.nodes}"),
        ("size", f"{size_words(before.size_bytes)} → {size_words(after.size_bytes)} (÷ {ratio:.1f})"),
        *([("opset", f"{before.opset} → {after.opset}")] if before.opset != after.opset else []),
        ("hierarchy", _coverage_words(result)),
        ("verified", "skipped: the files were not compared" if result.fidelity is None
                     else fidelity_words(result.fidelity)),
        *(("wrote", f"{file.path} ({size_words(file.size_bytes)})") for file in result.files),
        *(("note", note) for note in result.notes),
    ]  # fmt: skip
    print_rows(rows, console)
    # Those that keep bits first: they are what the user did not get.
    ordered = sorted(result.modules, key=lambda module: (not module.left, module.quantized > 0 and bool(module.left)))
    shown = ordered if verbose else ordered[:SHOWN_MODULES]
    table = TextTable(("module", "requested", "actual", "quantized", "left"), numbers=frozenset({3}))
    for module in shown:
        reasons = ", ".join(f"{count} {reason}" for reason, count in module.left.items())
        table.add(module.tag or "?", module.requested, module.actual, str(module.quantized), reasons)
    console.print()
    table.print(console)
    if len(shown) < len(result.modules):
        console.print(f"… and {len(result.modules) - len(shown)} more modules (--verbose shows all)")


def _mixture_words(result: QuantizedFile) -> str:
    """Return how many nodes have which precision, where there are several."""
    counts: dict[str, int] = {}
    for module in result.modules:
        if module.quantized:
            counts[module.requested] = counts.get(module.requested, 0) + module.quantized
    if len(counts) < 2:
        return ""
    return f" ({', '.join(f'{precision} {count}' for precision, count in counts.items())})"


def _coverage_words(result: QuantizedFile) -> str:
    if not result.is_tagged:
        return "unknown: the source does not say which module its nodes came from"
    return coverage_words(result.coverage)


# --- Prints which modules pay for fewer bits in a terminal: the ranking, the exclude list, and what it costs.


SHOWN_RANKED = 20
"""Rows of the ranking unless ``verbose``. Chosen: the whole answer fits on a screen."""


def print_sensitivity(result: QuantizationSensitivity, console: Console, *, verbose: bool) -> None:
    """Print the ranking, most sensitive first; with ``verbose`` every module and every measurement."""
    whole = result.whole
    rows = [
        ("precision", f"{result.precision} ({', '.join(result.modes)})"),
        ("all modules", form_words(whole)),
        ("weights", f"{size_words(result.float_bytes)} → {size_words(whole.weight_bytes)}"),
        *([("latency", latency_words(result.latency))] if result.latency else []),
        ("samples", f"{result.samples}, {result.input_source}: {_input_words(result)}"),
        ("cost", _cost_words(result)),
        *(("note", note) for note in result.notes),
    ]
    print_rows(rows, console)
    shown = result.modules if verbose else result.modules[:SHOWN_RANKED]
    columns = ("module", "class", "SQNR dB", "cosine", "parameters", "saves", "nodes", "remark")
    table = TextTable(columns, numbers=frozenset({2, 3, 4, 5, 6}))
    for module in shown:
        table.add(*_cells(module))
    console.print()
    table.print(console)
    if len(shown) < len(result.modules):
        console.print(f"… and {len(result.modules) - len(shown)} more modules (--verbose shows all)")
    if result.exclude_list is not None:
        console.print()
        _print_exclude_list(result.exclude_list, console)


def _print_exclude_list(listed: ExcludeList, console: Console) -> None:
    rows = [
        (
            "target",
            f"{listed.target.words}: {'met' if listed.is_met else 'not met; this is the best that was reached'}",
        ),
        ("reached", form_words(listed.form)),
        ("weights", size_words(listed.form.weight_bytes)),
        *([("latency", latency_words(listed.latency))] if listed.latency else []),
        *((("in float", tag)) for tag in listed.excluded),
    ]
    print_rows(rows, console)
    names = tuple(listed.form.scores)
    columns = ("measured", "in float", "SQNR dB", "cosine", *names, "target")
    table = TextTable(columns, numbers=frozenset(range(1, len(columns) - 1)))
    for trial in listed.trials:
        verdict = "met" if trial.is_met else "not met"
        scores = [f"{trial.form.scores[name]:.4f}" if name in trial.form.scores else "–" for name in names]
        table.add(trial.changed, str(trial.excluded), *_metric_cells(trial.form), *scores, verdict)
    console.print()
    table.print(console)


def form_words(form: MeasuredForm) -> str:
    """Return how near the answers of a form are, at the worst output."""
    if form.worst is None or form.problem:
        return form.problem
    scores = "".join(f", {name} {value:.4f}" for name, value in form.scores.items())
    return f"{nearness_words(form.worst)} for {form.worst.name}{scores}"


def latency_words(timed: TimedForm) -> str:
    """Return the latency of a form beside that of the float graph."""
    ratio = timed.ratio
    ends = f" (95 % interval {ratio.low:.2f} to {ratio.high:.2f})" if ratio.low and ratio.high else ""
    disturbed = ", other load on the machine" if ratio.is_disturbed else ""
    return (
        f"{timed.p50_ms:.2f} ms, float {timed.float_p50_ms:.2f} ms: "
        f"{ratio.value:.2f} of its time{ends}{disturbed}"
    )  # fmt: skip


def _input_words(result: QuantizationSensitivity) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in result.input_shapes.items()) or "no inputs"


def _cost_words(result: QuantizationSensitivity) -> str:
    cost = result.cost
    resumed = f", {cost.resumed} resumed" if cost.resumed else ""
    return (
        f"{cost.measured} forms measured{resumed}: {cost.quantization_s:.1f} s quantizing, {cost.session_s:.1f} s "
        f"opening, {cost.runs_s:.1f} s running"
    )


def _cells(module: ModuleSensitivity) -> tuple[str, ...]:
    return (
        f"{module.path or module.tag}{' (own nodes)' if module.part == 'own nodes' else ''}",
        module.class_name,
        *_metric_cells(module.form),
        count_words(module.parameters),
        size_words(module.size_bytes_saved) if module.size_bytes_saved > 0 else f"{module.size_bytes_saved} B",
        str(module.form.nodes if module.form is not None else 0),
        module.problem,
    )


def _metric_cells(form: MeasuredForm | None) -> tuple[str, str]:
    if form is None or form.worst is None or not form.runs:
        return "–", "–"
    return f"{form.worst.sqnr_db:.1f}", f"{form.worst.cosine:.5f}"


# --- Renders which modules pay for fewer bits as one HTML page: the module tree in colours, and tables to sort.


MODULE_COLUMNS = (
    ("module", False), ("class", False), ("SQNR dB", True), ("cosine", True), ("relative error", True),
    ("parameters", True), ("bytes saved", True), ("nodes", True), ("precision", False), ("remark", False),
)  # fmt: skip
TRIAL_COLUMNS = (
    ("measured", False), ("in float", True), ("SQNR dB", True), ("cosine", True), ("relative error", True),
    ("target", False),
)  # fmt: skip
"""Name of each column, and whether it holds numbers."""

COLOURS = "YlOrRd_r"
"""Chosen: the scale of the times by module, turned: dark is much damage, and can be read without colour."""
MOST_DB = 60.0
"""Chosen: the lightest colour; above it, the noise is a millionth of the signal's power."""


def sensitivity_page(result: QuantizationSensitivity) -> str:
    """Return the page."""
    sections = [Section("modules", "Modules, each quantized alone", MODULE_COLUMNS, list(map(_row, result.modules)))]
    if result.exclude_list is not None:
        listed = result.exclude_list
        rules = [(selector, precision) for selector, precision in listed.rules.items()]
        rule_columns = (("selector", False), ("precision", False))
        sections.append(Section("rules", f"What stays in float for {listed.target.words}", rule_columns, rules))
        judged = tuple((name, True) for name in listed.form.scores)
        measured = (*TRIAL_COLUMNS[:-1], *judged, TRIAL_COLUMNS[-1])
        sections.append(Section("trials", "Every measurement on the way", measured, list(_trials(listed))))
    return render_page(
        ModulePage(
            title=Path(result.model).name,
            subject="sensitivity to fewer bits",
            introduction="Each module was quantized alone, all else in float; the signal-to-quantization-noise ratio "
            "is that of the model's worst output. The lower, the more the module pays for its bits.",
            facts=list(_facts(result)),
            chart_heading="Where the damage comes from: width is parameters, colour is SQNR",
            chart=_icicle_chart([module for module in result.modules if module.part == "module" and module.parameters]),
            sections=sections,
        )
    )


def _facts(result: QuantizationSensitivity) -> Iterator[tuple[str, str]]:
    yield "precision", f"{result.precision} ({', '.join(result.modes)})"
    yield "all modules", form_words(result.whole)
    yield "size of weights", f"{size_words(result.float_bytes)} → {size_words(result.whole.weight_bytes)}"
    if result.latency is not None:
        yield "latency", latency_words(result.latency)
    if (listed := result.exclude_list) is not None:
        verdict = "met" if listed.is_met else "not met"
        yield (
            f"target {listed.target.words}",
            f"{verdict} with {len(listed.excluded)} in float: {form_words(listed.form)}",
        )
        yield "its size", size_words(listed.form.weight_bytes)
        if listed.latency is not None:
            yield "its latency", latency_words(listed.latency)
    yield "inputs", ", ".join(f"{name} {list(shape)}" for name, shape in result.input_shapes.items())
    yield "samples", f"{result.samples}, {result.input_source}"
    yield "modules from", result.tree_source
    yield "made by", f"winml {result.tool_version}, ONNX Runtime {result.onnxruntime_version}"
    for note in result.notes:
        yield "note", note


def _row(module: ModuleSensitivity) -> tuple[Any, ...]:
    numbers = module.form.numbers() if module.form is not None else {}
    return (
        f"{module.path or module.tag}{' (own nodes)' if module.part == 'own nodes' else ''}",
        module.class_name,
        numbers.get("sqnr_db"),
        numbers.get("cosine"),
        numbers.get("relative_error"),
        module.parameters,
        module.size_bytes_saved,
        module.form.nodes if module.form is not None else 0,
        module.precision,
        module.problem,
    )


def _trials(listed: ExcludeList) -> Iterator[tuple[Any, ...]]:
    for trial in listed.trials:
        numbers = trial.form.numbers()
        near = (numbers[name] for name in ("sqnr_db", "cosine", "relative_error"))
        scores = (trial.form.scores.get(name) for name in listed.form.scores)
        yield (trial.changed, trial.excluded, *near, *scores, "met" if trial.is_met else "not met")


def _icicle_chart(modules: Sequence[ModuleSensitivity]) -> str:
    """Return the icicle chart: one box for each module that has parameters, dark where the damage is large."""
    import plotly.graph_objects as charts

    # The tree, not the ranking: a parent before its children.
    modules = sorted(modules, key=lambda module: address.depth(module.tag))
    tags = {module.tag for module in modules}
    parents = {module.tag: nearest_parent(module.tag, tags) for module in modules}
    own = {module.tag: module.parameters for module in modules}
    for module in modules:
        if parents[module.tag]:
            own[parents[module.tag]] -= module.parameters
    shown = [f"{module.sqnr_db:.1f} dB" if module.sqnr_db is not None else "–" for module in modules]
    figure = charts.Figure(
        charts.Icicle(
            ids=[module.tag for module in modules],
            labels=[chart_text(module.tag.rpartition(address.SEPARATOR)[2]) for module in modules],
            parents=[parents[module.tag] for module in modules],
            # A weight that two modules share counts for both, and for their parent once.
            values=[max(own[module.tag], 0) for module in modules],
            branchvalues="remainder",
            text=shown,
            textinfo="label+text",
            customdata=[
                [chart_text(module.path or module.tag), words, module.parameters, chart_text(module.problem)]
                for module, words in zip(modules, shown, strict=True)
            ],
            hovertemplate="%{customdata[0]}<br>SQNR %{customdata[1]}<br>%{customdata[2]:,} parameters"
            "<br>%{customdata[3]}<extra></extra>",
            marker={
                "colors": [MOST_DB if module.sqnr_db is None else min(module.sqnr_db, MOST_DB) for module in modules],
                "colorscale": COLOURS,
                "showscale": True,
                "colorbar": {"title": {"text": "SQNR dB", "side": "right"}},
            },
            tiling={"orientation": "v"},
            sort=False,
        )
    )
    return chart_html(figure, levels=max((address.depth(tag) for tag in tags), default=1))
