"""What a quantization did, and which modules pay for fewer bits."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from winml.modelkit.compare.fidelity import QualitySamples
from winml.modelkit.compare.words import fidelity_words, nearness_words, samples_words
from winml.modelkit.hierarchy import address
from winml.modelkit.report import document as doc
from winml.modelkit.results.quantization_budget import BudgetSearch
from winml.modelkit.results.quantization_sensitivity import (
    ExcludeList,
    MeasuredVariant,
    ModuleSensitivity,
    QuantizationSensitivity,
    TimedVariant,
)
from winml.modelkit.results.transformed_file import QuantizedFile
from winml.modelkit.results.words import coverage_words
from winml.modelkit.words import size_words

# --- A quantization: precision by module, what was left and why, sizes, and what it costs.


DISPLAYED_MODULES = 12
"""Rows of the module table unless all are asked for, modules that keep bits first. Chosen: the summary fits on a
screen."""


def quantization_document(result: QuantizedFile) -> doc.Document:
    """Describe what was quantized."""
    before, after = result.before, result.after
    left = sum(result.left.values())
    ratio = before.size_bytes / max(after.size_bytes, 1)
    fields: list[doc.Field] = [
        *([("precision", f"{result.precision} ({', '.join(result.modes)})")] if result.modes else []),
        *([("KV cache", f"{result.kv_cache}, a scale for each channel")] if result.kv_cache is not None else []),
        *([("samples", result.calibration.words)] if result.calibration is not None else []),
        *([("budget", _budget_words(result.budget))] if result.budget is not None else []),
        *(
            [
                (
                    "quantized",
                    f"{result.quantized} of {result.quantized + left} nodes with weights{_mixture_words(result)}",
                )
            ]
            if result.modes
            else []
        ),
        *(("left", f"{count} {reason}") for reason, count in result.left.items()),
        ("nodes", f"{before.nodes} → {after.nodes}"),
        ("size", f"{size_words(before.size_bytes)} → {size_words(after.size_bytes)} (÷ {ratio:.1f})"),
        *([("opset", f"{before.opset} → {after.opset}")] if before.opset != after.opset else []),
        ("hierarchy", coverage_words(result.coverage, is_tagged=result.is_tagged)),
        (
            "verified",
            "skipped: the files were not compared" if result.fidelity is None else fidelity_words(result.fidelity),
        ),
        *(("wrote", f"{file.path} ({size_words(file.size_bytes)})") for file in result.files),
        *doc.note_fields(result.notes),
    ]
    # Those that keep bits first: they are what the user did not get.
    modules = sorted(result.modules, key=lambda module: (not module.left, module.quantized > 0 and bool(module.left)))
    return doc.Document(
        [
            doc.Fields(fields),
            *(_budget_blocks(result.budget) if result.budget is not None else ()),
            doc.Table(
                doc.columns(("module", "name"), "requested", "actual", ("quantized", "count"), "left"),
                [
                    [
                        module.tag or "?",
                        module.requested,
                        module.actual,
                        module.quantized,
                        ", ".join(f"{count} {reason}" for reason, count in module.left.items()),
                    ]
                    for module in modules
                ],
                name="modules",
                heading="Precision by module",
                brief=range(DISPLAYED_MODULES),
                rest=f"… and {len(modules) - DISPLAYED_MODULES} more modules (--verbose shows all)",
            ),
        ]
    )


def budget_document(result: QuantizedFile) -> doc.Document:
    """Describe on a page which bits were chosen, and what other sizes give."""
    document = quantization_document(result)
    return replace(
        document,
        title=result.model_path.name,
        subject="bits by module",
        introduction="Each module was quantized alone in each format; the formats were chosen so that the model is "
        "within the limit and its outputs change least. SQNR is the signal-to-quantization-noise ratio of the worst "
        "output.",
        figures=[*_budget_figures(result.budget), *_file_figures(result)] if result.budget is not None else (),
    )


def _budget_figures(search: BudgetSearch) -> Iterator[doc.Figure]:
    yield doc.Figure(
        "mean bits", f"{search.mean_bits:.2f} bits", f"for each parameter, scales included; limit: {search.limit}"
    )
    chosen = next((trial for trial in search.frontier if trial.is_chosen), None)
    if chosen is not None and chosen.sqnr_db is not None:
        meaning = f"of the worst output on {search.samples} samples that the formats were chosen by; higher is better"
        yield doc.Figure("SQNR", f"{chosen.sqnr_db:.1f} dB", meaning)
    if search.perplexity is not None and search.float_perplexity is not None:
        meaning = f"on held-out samples, {search.float_perplexity:.4g} before; lower is better"
        yield doc.Figure("perplexity", f"{search.perplexity:.4g}", meaning)


def _file_figures(result: QuantizedFile) -> Iterator[doc.Figure]:
    before, after = result.before.size_bytes, result.after.size_bytes
    meaning = f"of the file, {size_words(before)} before: {before / max(after, 1):.1f} times smaller"
    yield doc.Figure("size", size_words(after), meaning)
    left = sum(result.left.values())
    meaning = "nodes with weights" if not left else f"nodes with weights; the table lists why {left} are not"
    yield doc.Figure("quantized", f"{result.quantized} of {result.quantized + left}", meaning)


def _budget_words(search: BudgetSearch) -> str:
    return (
        f"{search.limit}: {search.form}, {search.mean_bits:.2f} bits per parameter; {search.measured} variants "
        f"measured on {search.samples} samples{_perplexity_words(search)}"
    )


def _perplexity_words(search: BudgetSearch) -> str:
    if search.perplexity is None or search.float_perplexity is None:
        return ""
    return f"; perplexity {search.perplexity:.4g} on held-out samples, {search.float_perplexity:.4g} before"


def _budget_blocks(search: BudgetSearch) -> Iterator[doc.Block]:
    perplexity = [doc.Column("perplexity", "score")] if search.float_perplexity is not None else []
    forms = list(dict.fromkeys(name for module in search.modules for name in module.alone_db))
    yield doc.Dots(
        [
            doc.Dot(
                name=f"{trial.form}, {trial.mean_bits:.2f} bits",
                grade="best" if trial.is_chosen else "fair" if trial.form != "mixed" else "good",
                value=trial.sqnr_db,
                low=None,
                high=None,
                size=3.0 if trial.is_chosen else 1.0,
                bar=float(trial.size_bytes),
                bar_words=size_words(trial.size_bytes),
                value_words=f"{trial.sqnr_db:.1f} dB",
            )
            for trial in search.frontier
            if trial.sqnr_db is not None
        ],
        heading="Size against quality: formats of the whole model, ★ is the chosen one",
        value_title="SQNR in dB, more is better",
        bar_title="size of the weights",
        value_line=None,
        bar_line=None,
    )
    yield doc.Boxes(
        list(_bit_boxes(search)),
        heading="Bits by module",
        size_title="number of parameters",
        size_unit="parameters",
        shades=doc.Shades("bits of a weight", low=0.0),
        is_by_class=True,
        kind_title="format",
    )
    yield doc.Table(
        doc.columns(
            "format", ("mean bits", "bits"), ("weights", "bytes"), ("SQNR dB", "decibels"), *perplexity, "chosen"
        ),
        [
            [
                trial.form,
                trial.mean_bits,
                trial.size_bytes,
                trial.sqnr_db,
                *([trial.perplexity] if perplexity else []),
                "chosen" if trial.is_chosen else "",
            ]
            for trial in search.frontier
        ],
        name="frontier",
        heading="Formats of the whole model",
        detail=doc.Detail.VERBOSE,
    )
    yield doc.Table(
        [
            *doc.columns(("module", "name"), "format", ("parameters", "parameters"), ("size", "bytes")),
            *(doc.Column(f"{name} dB", "decibels") for name in forms),
        ],
        [
            [
                module.tag,
                module.form,
                module.parameters,
                module.size_bytes,
                *(module.alone_db.get(name) for name in forms),
            ]
            for module in search.modules
        ],
        name="bits",
        heading="Format of each module; dB is the SQNR with this module alone in a format",
        is_searched=True,
        detail=doc.Detail.VERBOSE,
    )
    yield from _algorithm_table(search)


def _algorithm_table(search: BudgetSearch) -> Iterator[doc.Block]:
    """Yield what each algorithm leaves of the outputs of a module, where algorithms were compared."""
    names = list(dict.fromkeys(name for module in search.modules for name in module.own_db))
    if names:
        yield doc.Table(
            [
                *doc.columns(("module", "name"), "format"),
                *(doc.Column(f"{name} dB", "decibels") for name in names),
            ],
            [
                [module.tag, module.form, *(module.own_db.get(name) for name in names)]
                for module in search.modules
                if module.own_db
            ],
            name="algorithms",
            heading="Algorithms by module; dB of the outputs of its own products",
            detail=doc.Detail.VERBOSE,
        )


def _bit_boxes(search: BudgetSearch) -> Iterator[doc.Box]:
    """Yield a box for each module that could be quantized, and for those around them."""
    chosen = {module.tag: module for module in search.modules}
    tags = dict.fromkeys(
        address.format_tag(segments[:count])
        for segments in map(address.parse_tag, chosen)
        for count in range(1, len(segments) + 1)
    )
    for tag in sorted(tags, key=lambda tag: (address.depth(tag), _numbered(tag))):
        module, name = chosen.get(tag), tag.rpartition(address.SEPARATOR)[2]
        bits = 8 * module.size_bytes / max(module.parameters, 1) if module is not None else math.nan
        yield doc.Box(
            key=tag,
            parent=address.nearest_ancestor(tag, tags),
            label=name,
            size=0 if module is None else module.parameters,
            shade=bits,
            words="" if module is None else f"{module.form}, {bits:.1f} bits",
            lines=(tag,)
            if module is None
            else (tag, module.form, f"{bits:.2f} bits of a weight", f"{module.parameters:,} parameters", module.why),
            kind="" if module is None else module.form,
        )


def _mixture_words(result: QuantizedFile) -> str:
    """Return how many nodes have which precision, where there are several."""
    counts: dict[str, int] = {}
    for module in result.modules:
        if module.quantized:
            counts[module.requested] = counts.get(module.requested, 0) + module.quantized
    if len(counts) < 2:
        return ""
    return f" ({', '.join(f'{precision} {count}' for precision, count in counts.items())})"


# --- Which modules pay for fewer bits: the ranking, the exclude list, and what it costs.


DISPLAYED_BARS = 10
"""Modules in a chart of bars. Chosen: it fits on a screen beside the numbers above it."""
_DISPLAYED_RANKED = 20
"""Rows of the ranking unless all are asked for. Chosen: the whole answer fits on a screen."""
_BEST_DB = 60.0
"""Chosen: the lightest colour; above it, the noise is a millionth of the signal's power."""

_NEARNESS = (
    doc.Column("SQNR dB", "decibels"),
    doc.Column("cosine", "cosine"),
    doc.Column("relative error", "error", doc.Detail.PAGE),
)


def sensitivity_document(result: QuantizationSensitivity) -> doc.Document:
    """Describe the ranking, most sensitive first, and the list of modules that stay in float."""
    modules = result.modules
    with_parameters = [module for module in modules if module.part == "module" and module.parameters]
    return doc.Document(
        [
            doc.Fields(list(_sensitivity_fields(result))),
            doc.Boxes(
                list(_boxes(with_parameters)),
                heading="SQNR by module, each quantized alone",
                size_title="number of parameters",
                size_unit="parameters",
                shades=doc.Shades("SQNR in dB", high=_BEST_DB, is_dark_low=True, folded="min"),
            ),
            _error_bars(modules),
            doc.Table(
                doc.columns(
                    ("module", "name"),
                    "class",
                    *_NEARNESS,
                    ("parameters", "parameters"),
                    ("saves", "bytes"),
                    ("nodes", "count"),
                    doc.Column("precision", detail=doc.Detail.PAGE),
                    "basis",
                    "remark",
                ),
                list(map(_module_row, modules)),
                name="modules",
                heading="Modules, each quantized alone",
                brief=range(_DISPLAYED_RANKED),
                rest=f"… and {len(modules) - _DISPLAYED_RANKED} more modules (--verbose shows all)",
                is_searched=True,
            ),
            *(_exclude_list_blocks(result.exclude_list) if result.exclude_list is not None else ()),
        ],
        title=Path(result.model).name,
        subject="sensitivity to quantization",
        introduction="Each module was quantized alone, the others stayed in float. SQNR is the signal-to-quantization-"
        "noise ratio of the worst output: the lower it is, the more sensitive is the module.",
        figures=list(_sensitivity_figures(result)),
    )


def _sensitivity_figures(result: QuantizationSensitivity) -> Iterator[doc.Figure]:
    whole = result.whole.measures()
    sqnr = whole.get("sqnr_db")
    if sqnr is not None and not result.whole.problem:
        yield doc.Figure("all modules quantized", f"{sqnr:.1f} dB", f"SQNR of the worst output at {result.precision}")
    ranked = [module for module in _innermost(result.modules) if module.sqnr_db is not None]
    if ranked:
        worst = min(ranked, key=lambda module: module.sqnr_db or 0.0)
        meaning = f"SQNR with {worst.path or worst.tag} alone quantized, the most sensitive of {len(ranked)} modules"
        yield doc.Figure("most sensitive", f"{worst.sqnr_db:.1f} dB", meaning)
    small = result.whole.weight_bytes
    if small:
        meaning = f"of the weights with all modules quantized, {size_words(result.float_bytes)} before"
        yield doc.Figure("size", size_words(small), meaning)
    listed = result.exclude_list
    if listed is not None:
        verdict = "met" if listed.is_met else "not met"
        meaning = f"{listed.target.words}, with {len(listed.excluded)} modules in float"
        yield doc.Figure("target", verdict, meaning, "good" if listed.is_met else "bad")


def _innermost(modules: Sequence[ModuleSensitivity]) -> list[ModuleSensitivity]:
    """Return the modules that hold no other measured one: those around them have the errors of several."""
    tags = {module.tag for module in modules}
    around = {ancestor for tag in tags if (ancestor := address.nearest_ancestor(tag, tags))}
    return [module for module in modules if module.tag not in around or module.part != "module"]


def _error_bars(modules: Sequence[ModuleSensitivity]) -> doc.Bars:
    errors = [
        (module, module.form.measures().get("relative_error"))
        for module in _innermost(modules)
        if module.form is not None
    ]
    measured = [(module, error) for module, error in errors if error is not None and math.isfinite(error)]
    return doc.Bars(
        [
            doc.Bar(
                module.path or module.tag,
                error,
                f"{error:.1e}",
                f"{module.class_name}, {module.sqnr_db:.1f} dB" if module.sqnr_db is not None else module.class_name,
            )
            for module, error in sorted(measured, key=lambda entry: -entry[1])[:DISPLAYED_BARS]
        ],
        heading="Most sensitive modules",
        caption="relative error of the worst output with this module alone quantized; innermost measured modules",
    )


def _sensitivity_fields(result: QuantizationSensitivity) -> Iterator[doc.Field]:
    yield "precision", f"{result.precision} ({', '.join(result.modes)})"
    yield "all modules", _form_words(result.whole)
    yield "weights", f"{size_words(result.float_bytes)} → {size_words(result.whole.weight_bytes)}"
    if result.latency:
        yield "latency", _latency_words(result.latency)
    inputs = ", ".join(f"{name} {list(shape)}" for name, shape in result.input_shapes.items()) or "no inputs"
    about = QualitySamples(result.input_source, result.samples, result.seed)
    yield "samples", f"{samples_words(about)}; the first: {inputs}"
    cost = result.cost
    resumed = f", {cost.resumed} resumed" if cost.resumed else ""
    spent = f"{cost.quantization_s:.1f} s quantizing, {cost.session_s:.1f} s opening, {cost.runs_s:.1f} s running"
    yield "cost", f"{cost.measured} variants measured{resumed}: {spent}"
    yield "modules from", result.tree_source, doc.Detail.PAGE
    yield "made by", f"winml {result.tool_version}, ONNX Runtime {result.onnxruntime_version}", doc.Detail.PAGE
    yield from doc.note_fields(result.notes)


def _exclude_list_blocks(listed: ExcludeList) -> Iterator[doc.Block]:
    verdict = "met" if listed.is_met else "not met; this is the best that was reached"
    fields: list[doc.Field] = [
        ("target", f"{listed.target.words}: {verdict}"),
        ("reached", _form_words(listed.form)),
        ("weights", size_words(listed.form.weight_bytes)),
        *([("latency", _latency_words(listed.latency))] if listed.latency else []),
        *(("in float", tag) for tag in listed.excluded),
    ]
    yield doc.Fields(fields)
    yield doc.Table(
        doc.columns(("selector", "name"), "precision"),
        [*listed.rules.items()],
        name="rules",
        heading=f"What stays in float for {listed.target.words}",
        detail=doc.Detail.PAGE,
    )
    names = tuple(listed.form.scores)
    scores = [doc.Column(name, "score") for name in names]
    yield doc.Table(
        doc.columns(("measured", "name"), ("in float", "count"), *_NEARNESS, *scores, "target"),
        [
            [
                trial.changed,
                trial.excluded,
                *_nearness_cells(trial.form),
                *(trial.form.scores.get(name) for name in names),
                "met" if trial.is_met else "not met",
            ]
            for trial in listed.trials
        ],
        name="trials",
        heading="Every measurement on the way",
    )


def _form_words(form: MeasuredVariant) -> str:
    """Return how near the answers of a form are, at the worst output."""
    if form.worst is None or form.problem:
        return form.problem
    scores = "".join(f", {name} {value:.4f}" for name, value in form.scores.items())
    return f"{nearness_words(form.worst)} for {form.worst.name}{scores}"


def _latency_words(timed: TimedVariant) -> str:
    """Return the latency of a form beside that of the float graph."""
    ratio = timed.ratio
    ends = f" (95 % interval {ratio.low:.2f} to {ratio.high:.2f})" if ratio.low and ratio.high else ""
    disturbed = ", other load on the machine" if ratio.is_disturbed else ""
    return f"{timed.p50_ms:.2f} ms, float {timed.float_p50_ms:.2f} ms: {ratio.value:.2f} of its time{ends}{disturbed}"


def _module_row(module: ModuleSensitivity) -> list[doc.Cell]:
    return [
        f"{module.path or module.tag}{' (own nodes)' if module.part == 'own nodes' else ''}",
        module.class_name,
        *_nearness_cells(module.form),
        module.parameters,
        module.size_bytes_saved,
        module.form.nodes if module.form is not None else 0,
        module.precision,
        module.basis_words,
        module.problem,
    ]


def _nearness_cells(form: MeasuredVariant | None) -> Iterator[doc.Cell]:
    numbers = form.measures() if form is not None else {}
    yield from (numbers.get(name) for name in ("sqnr_db", "cosine", "relative_error"))


def _numbered(tag: str) -> list[tuple[str, int]]:
    """Return what sorts tags by name and number.

    >>> _numbered("/Layer.10") > _numbered("/Layer.9")
    True
    """
    return [(name, int(number or 0)) for name, number in re.findall(r"(\D+)(\d*)", tag)]


def _boxes(modules: Sequence[ModuleSensitivity]) -> Iterator[doc.Box]:
    """Yield a box for each module that has parameters, dark where the damage is large."""
    # The tree, not the ranking: a parent before its children, and the second layer before the tenth.
    modules = sorted(modules, key=lambda module: (address.depth(module.tag), _numbered(module.tag)))
    tags = {module.tag for module in modules}
    parents = {module.tag: address.nearest_ancestor(module.tag, tags) for module in modules}
    own = {module.tag: module.parameters for module in modules}
    for module in modules:
        if parents[module.tag]:
            own[parents[module.tag]] -= module.parameters
    for module in modules:
        words = f"{module.sqnr_db:.1f} dB" if module.sqnr_db is not None else doc.MISSING
        yield doc.Box(
            key=module.tag,
            parent=parents[module.tag],
            label=module.tag.rpartition(address.SEPARATOR)[2],
            # A weight that two modules share counts for both, and for their parent once.
            size=max(own[module.tag], 0),
            shade=_BEST_DB if module.sqnr_db is None else module.sqnr_db,
            words=words,
            lines=(module.path or module.tag, f"SQNR {words}", f"{module.parameters:,} parameters", module.problem),
            kind=module.class_name,
        )
