"""Prints which modules pay for fewer bits in a terminal: the ranking, the exclude list, and what it costs."""

from __future__ import annotations

from rich.console import Console

from winml.modelkit.compare.words import nearness_words
from winml.modelkit.report.terminal import TextTable, print_rows
from winml.modelkit.results.quantization_sensitivity import (
    ExcludeList,
    MeasuredForm,
    ModuleSensitivity,
    QuantizationSensitivity,
    TimedForm,
)
from winml.modelkit.words import count_words, size_words

__all__ = ["form_words", "latency_words", "print_sensitivity"]

SHOWN_MODULES = 20
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
    shown = result.modules if verbose else result.modules[:SHOWN_MODULES]
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
