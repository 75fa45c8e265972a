"""Renders which modules pay for fewer bits as one HTML page: the module tree in colours, and tables to sort."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from winml.modelkit.hierarchy import address
from winml.modelkit.report.module_page import ModulePage, Section, chart_html, chart_text, nearest_parent, render_page
from winml.modelkit.report.quantization_sensitivity import form_words, latency_words
from winml.modelkit.results.quantization_sensitivity import ExcludeList, ModuleSensitivity, QuantizationSensitivity
from winml.modelkit.words import size_words

__all__ = ["sensitivity_page"]

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
