"""Renders a comparison of two models: in a terminal, and as one HTML page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from winml.modelkit.compare.fidelity import OutputFidelity
from winml.modelkit.compare.words import decibel_words, nearness_words
from winml.modelkit.hierarchy import address
from winml.modelkit.report.module_page import (
    ModulePage,
    NumberInWords,
    Section,
    chart_html,
    chart_text,
    nearest_parent,
    render_page,
)
from winml.modelkit.report.terminal import TextTable, print_rows
from winml.modelkit.results.comparison import ComparedModule, ComparedOutput, ModelComparison
from winml.modelkit.version import __version__
from winml.modelkit.words import count_noun

__all__ = [
    "comparison_page",
    "first_words",
    "output_words",
    "print_comparison",
]


# --- Tells in a terminal how two models agree, and which module is the first to part.


SHOWN_MODULES = 12
"""Rows of the module table unless all are asked for. Chosen: the answer fits on a screen."""


def print_comparison(result: ModelComparison, console: Console, *, verbose: bool, depth: int | None = None) -> None:
    """Print the answer; of several parts what is farthest off in all of them first, then each part by itself.

    Args:
        result: The comparison.
        console: Where to.
        verbose: Whether to show every module, in the order they are computed.
        depth: Levels of the module tree to show; None: all.
    """
    print_rows(list(_rows(result)), console)
    for name, part in result.parts.items():
        console.print(f"\n{name}")
        print_comparison(part, console, verbose=verbose, depth=depth)
    if result.modules is None:
        return
    modules = result.modules_within(depth)
    known = [module for module in modules if module.fidelity is not None]
    wrong = [module for module in known if module.own_error or (module.fidelity and module.fidelity.problem)]
    worst = sorted(wrong, key=lambda module: -(module.own_error or 0.0))[:SHOWN_MODULES]
    first = result.first_divergence
    shown = list(modules) if verbose else [module for module in known if module in worst or module is first]
    if not shown:
        return
    console.print()
    table = TextTable(
        ("", "module", "own error", "error", "of inputs", "SQNR dB", "cosine", "nodes"),
        numbers=frozenset({2, 3, 4, 5, 6}),
    )
    for module in shown:
        mark = "first" if module is first else ""
        table.add(mark, module.identity.words, *_cells(module), "unchanged" if module.is_unchanged else "")
    table.print(console)
    if len(shown) < len(modules):
        console.print(f"the {len(shown)} with the largest own error of {len(modules)} (--verbose shows all)")


def _rows(result: ModelComparison) -> Iterator[tuple[str, str]]:
    yield "reference", result.reference
    yield "candidate", result.candidate
    yield "inputs", f"{result.input_source}, {result.draws} {'set' if result.draws == 1 else 'sets'}"
    if result.parts:
        yield "worst", output_words(result.worst)
    for output in result.outputs if not result.parts else ():
        yield "output", output_words(output)
    if result.threshold is not None:
        verdict = "within" if result.is_within else "beyond"
        yield "threshold", f"{verdict} a relative error of {result.threshold:g}"
    if result.modules is not None or result.first_divergence is not None:
        yield "first", first_words(result)
    if result.modules is not None:
        missing = [module for module in result.modules if module.fidelity is None]
        reasons = dict.fromkeys(module.reason for module in missing)
        yield from (
            ("not seen", f"{count_noun(sum(module.reason == reason for module in missing), 'module')}: {reason}")
            for reason in reasons
        )
    yield from (("note", note) for note in result.notes)


def output_words(output: ComparedOutput) -> str:
    """Return how near one output is."""
    fidelity = output.fidelity
    name = f"{fidelity.name} of {output.part}" if output.part else fidelity.name
    if fidelity.problem:
        return f"{name}: {fidelity.problem}"
    if fidelity.equal_share is not None:
        return f"{name}: {nearness_words(fidelity)}, largest difference {fidelity.max_abs_diff:g}"
    words = (
        f"{name}: relative error {fidelity.relative_error:.1e}, SQNR {fidelity.sqnr_db:.1f} dB, "
        f"cosine {fidelity.cosine:.6f}, largest difference {fidelity.max_abs_diff:.1e}"
    )
    if output.top1_agreement is None:
        return words
    return f"{words}, largest at the same place {100 * output.top1_agreement:.1f} %"


def first_words(result: ModelComparison) -> str:
    """Return which module is the first whose error is its own."""
    first = result.first_divergence
    if first is None or first.fidelity is None:
        return f"no module has an error of its own beyond rounding ({result.tolerance:g}) and what all of them have"
    problem = f": {first.fidelity.problem}" if first.fidelity.problem else ""
    return f"{first.identity.words} is the first whose error is its own{problem} ({first.identity.tag})"


def _cells(module: ComparedModule) -> tuple[str, str, str, str, str]:
    fidelity = module.fidelity
    if fidelity is None:
        return (module.reason, "", "", "", "")
    if fidelity.problem:
        return (fidelity.problem, "", _number(module.input_error), "", "")
    return (
        _number(module.own_error),
        _number(fidelity.relative_error),
        _number(module.input_error),
        decibel_words(fidelity.sqnr_db),
        f"{fidelity.cosine:.6f}",
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


# --- Renders where two models part as one HTML page: the module tree coloured by own error, and tables to sort.


MODULE_COLUMNS = (
    ("module", False), ("class", False), ("own error", True), ("error", True), ("error of inputs", True),
    ("SQNR dB", True), ("cosine", True), ("largest difference", True), ("remark", False),
)  # fmt: skip
MISSING_COLUMNS = (("module", False), ("class", False), ("reason", False))
OUTPUT_COLUMNS = (
    ("output", False), ("relative error", True), ("SQNR dB", True), ("cosine", True), ("largest difference", True),
    ("same top-1 %", True), ("remark", False),
)  # fmt: skip
"""Name of each column, and whether it holds numbers."""

COLOURS = "YlOrRd"
"""Chosen: the scale of the times by module; dark is much error, and can be read without colour."""
LEAST, MOST = 1e-8, 1.0
"""Chosen: ends of the scale, which is logarithmic: below rounding of float32, and an error as large as the value."""
POWERS = range(-8, 1, 2)
"""Powers of ten that the scale names."""
FIRST_OUTLINE = "#0b3d91"
"""Chosen: blue, which the scale does not have."""


def comparison_page(result: ModelComparison, depth: int | None = None) -> str:
    """Return the page of a comparison by module.

    Args:
        result: The comparison.
        depth: Levels of the module tree to show; None: all.
    """
    modules, first = result.modules_within(depth), result.first_divergence
    compared = [module for module in modules if module.fidelity is not None]
    missing = [(*_identity_cells(module), module.reason) for module in modules if module.fidelity is None]
    rows = [_module_row(module, is_first=module is first) for module in compared]
    sections = [
        Section("modules", "Modules, in the order they are computed", MODULE_COLUMNS, rows),
        Section("outputs", "Outputs", OUTPUT_COLUMNS, list(_output_rows(result))),
    ]
    if missing:
        sections.append(Section("missing", "Modules that are not compared", MISSING_COLUMNS, missing))
    outline = "" if first is None else ", and ▶ with a blue outline is the first module to part"
    return render_page(
        ModulePage(
            title=f"{Path(result.candidate).name} beside {Path(result.reference).name}",
            subject="where two models part",
            introduction="Both were run on the same values. The own error of a module is the part of its relative "
            "error that it was not fed.",
            facts=list(_facts(result)),
            chart_heading=f"Where errors arise: colour is own error{outline}",
            chart=_icicle_chart(modules, first),
            sections=sections,
        )
    )


def _facts(result: ModelComparison) -> Iterator[tuple[str, str]]:
    yield "reference", result.reference
    yield "candidate", result.candidate
    yield "first", first_words(result)
    for output in result.outputs:
        yield "output", output_words(output)
    if result.threshold is not None:
        yield "threshold", f"{'within' if result.is_within else 'beyond'} a relative error of {result.threshold:g}"
    yield "inputs", f"{result.input_source}, {result.draws} {'set' if result.draws == 1 else 'sets'}"
    yield "made by", f"winml {__version__}"
    for note in result.notes:
        yield "note", note


def _identity_cells(module: ComparedModule) -> tuple[str, str]:
    return module.identity.words, module.identity.class_name


def _module_row(module: ComparedModule, *, is_first: bool) -> tuple[Any, ...]:
    fidelity = module.fidelity
    is_number = fidelity is not None and not fidelity.problem
    numbers = (
        (module.own_error, fidelity.relative_error, module.input_error, _decibels(fidelity), fidelity.cosine,
         fidelity.max_abs_diff)
        if fidelity is not None and is_number
        else (None, None, module.input_error, None, None, None)
    )  # fmt: skip
    shown = (number if number is None or math.isfinite(number) else None for number in numbers)
    return (*_identity_cells(module), *shown, _remark(module, is_first=is_first))


def _decibels(fidelity: OutputFidelity) -> NumberInWords:
    return NumberInWords(fidelity.sqnr_db, decibel_words(fidelity.sqnr_db))


def _remark(module: ComparedModule, *, is_first: bool) -> str:
    problem = module.fidelity.problem if module.fidelity is not None else module.reason
    marks = ("first to part" if is_first else "", "unchanged" if module.is_unchanged else "", problem)
    return ", ".join(filter(None, marks))


def _output_rows(result: ModelComparison) -> Iterator[tuple[Any, ...]]:
    for output in result.outputs:
        fidelity = output.fidelity
        numbers = (fidelity.relative_error, _decibels(fidelity), fidelity.cosine, fidelity.max_abs_diff)
        shown = [None] * 4 if fidelity.problem else [value if math.isfinite(value) else None for value in numbers]
        agreement = None if output.top1_agreement is None else 100 * output.top1_agreement
        yield (fidelity.name, *shown, agreement, fidelity.problem)


def _icicle_chart(modules: Sequence[ComparedModule], first: ComparedModule | None) -> str:
    """Return the icicle chart: one box for each module, dark where its own error is large; calls share a box."""
    import plotly.graph_objects as charts

    worst: dict[str, ComparedModule] = {}
    for module in modules:
        known = worst.get(module.identity.tag)
        if known is None or module is first or (known is not first and _size(module) > _size(known)):
            worst[module.identity.tag] = module
    tags = sorted(worst, key=address.depth)
    shown = [_box_words(worst[tag]) for tag in tags]
    is_first = [first is not None and tag == first.identity.tag for tag in tags]
    names = [tag.rpartition(address.SEPARATOR)[2] for tag in tags]
    figure = charts.Figure(
        charts.Icicle(
            ids=tags,
            labels=[chart_text(f"▶ {name}" if marked else name) for name, marked in zip(names, is_first, strict=True)],
            parents=[nearest_parent(tag, set(tags)) for tag in tags],
            values=[1] * len(tags),
            branchvalues="remainder",
            text=[chart_text(words) for words in shown],
            textinfo="label+text",
            customdata=[
                [
                    chart_text(worst[tag].identity.words),
                    chart_text(words),
                    chart_text(_remark(worst[tag], is_first=mark)),
                ]
                for tag, words, mark in zip(tags, shown, is_first, strict=True)
            ],
            hovertemplate="%{customdata[0]}<br>own error %{customdata[1]}<br>%{customdata[2]}<extra></extra>",
            marker={
                "colors": [_colour(worst[tag]) for tag in tags],
                "cmin": math.log10(LEAST),
                "cmax": math.log10(MOST),
                "colorscale": COLOURS,
                "showscale": True,
                "colorbar": {
                    "title": {"text": "own error", "side": "right"},
                    "tickvals": list(POWERS),
                    "ticktext": [f"{10.0**power:.0e}" for power in POWERS],
                },
                "line": {
                    "color": [FIRST_OUTLINE if marked else "#ffffff" for marked in is_first],
                    "width": [4 if marked else 1 for marked in is_first],
                },
            },
            tiling={"orientation": "v"},
            sort=False,
        )
    )
    return chart_html(figure, levels=max(map(address.depth, tags), default=1))


def _size(module: ComparedModule) -> float:
    return -1.0 if module.own_error is None else module.own_error


def _box_words(module: ComparedModule) -> str:
    if module.fidelity is not None and module.fidelity.problem:
        return "not finite" if "finity" in module.fidelity.problem else module.fidelity.problem
    return "–" if module.own_error is None else f"{module.own_error:.1e}"


def _colour(module: ComparedModule) -> float:
    """Return the own error on the scale; what is not compared is as light as what has none."""
    error = module.own_error if module.own_error is not None else 0.0
    return math.log10(min(max(error, LEAST), MOST))
