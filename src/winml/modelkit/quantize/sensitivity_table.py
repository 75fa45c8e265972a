"""Document of a sensitivity measurement: ranking, exclude list and cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from winml.modelkit.compare.words import nearness_words, samples_words
from winml.modelkit.errors import opt
from winml.modelkit.quantize import sensitivity_records
from winml.modelkit.report import document as doc
from winml.modelkit.tags import address
from winml.modelkit.words import percent_words, size_words, sqnr_words

_MAX_RANKED_ROWS = 20
"""Default number of rows of the ranking. Chosen: the whole output fits on a screen."""
_BEST_DB = 60.0
"""Chosen: the lightest colour; above it, the noise is a millionth of the signal power."""

_NEARNESS = (
    doc.Column("SQNR dB", "decibels"),
    doc.Column("lower end", "decibels"),
    doc.Column("cosine", "cosine"),
    doc.Column("relative error", "error", doc.Detail.PAGE),
)


def sensitivity_document(result: sensitivity_records.QuantizationSensitivity) -> doc.Document:
    """Build the document of the ranking, in descending order of sensitivity, and of the exclude list."""
    modules, limit = result.modules, result.limit_db
    with_parameters = [module for module in modules if module.part == "module" and module.parameters]
    return doc.Document(
        [
            doc.Fields(list(_sensitivity_fields(result))),
            doc.Boxes(
                list(_make_boxes(with_parameters)),
                heading="SQNR by module, each quantized alone",
                size_title="number of parameters",
                size_unit="parameters",
                shades=doc.Shades(
                    "SQNR in dB",
                    high=_BEST_DB,
                    is_dark_low=True,
                    folded="min",
                    limit=limit,
                    limit_words="" if limit is None else f"limit {limit:.4g} dB",
                ),
            ),
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
                brief=range(_MAX_RANKED_ROWS),
                rest=f"… and {{}} more modules ({opt.verbose} shows all)",
                is_searched=True,
            ),
            *(_exclude_list_blocks(result.exclude_list) if result.exclude_list is not None else ()),
        ],
        doc.Fields([("conclusion", conclusion)] if (conclusion := _conclusion_words(result)) else []),
        title=Path(result.model).name,
        subject="sensitivity to quantization",
        answer=_answer_words(result),
        introduction="Each module was quantized alone, the others stayed in float. SQNR is the signal-to-quantization-"
        "noise ratio of the worst output: the lower it is, the more sensitive is the module.",
        figures=list(_sensitivity_figures(result)),
    )


def _answer_words(result: sensitivity_records.QuantizationSensitivity) -> str:
    """Answer in one sentence if the whole model reaches the limit, or which modules have to stay in float."""
    listed, whole, limit = result.exclude_list, result.whole.worst, result.limit_db
    if listed is not None:
        return f"Target {listed.verdict.limit_words}: {listed.verdict.question}."
    if whole is None or result.whole.problem or limit is None:
        return f"{result.precision} of all modules: {result.whole.problem or 'not comparable'}."
    lower, sqnr = sqnr_words(whole.lower_db), sqnr_words(whole.sqnr_db)
    ends = "" if lower == sqnr else f" ({lower} at the lower end of its interval)"
    side = "above" if whole.lower_db >= limit else "below"
    return f"With all modules in {result.precision}, the SQNR is {sqnr}{ends}, {side} the limit of {limit:.4g} dB."


_SHARE = 0.8
"""Chosen: modules with this share of the error power explain it."""
_MOST_CAUSES = 3
"""Chosen: more modules than these are no cause, but the whole model."""


def _conclusion_words(result: sensitivity_records.QuantizationSensitivity) -> str:
    """Describe the modules with most of the error power, each quantized alone; empty without an error."""
    if failing := _failing_modules(result.modules):
        names = ", ".join(_name(module) for module in failing[:_MOST_CAUSES])
        more = f" and {len(failing) - _MOST_CAUSES} more" if len(failing) > _MOST_CAUSES else ""
        return f"{names}{more}: in {result.precision} alone, {failing[0].problem}"
    errors = [
        (module.form.measures().get("relative_error"), module) for module in _innermost(result.modules) if module.form
    ]
    powers = [(error**2, module) for error, module in errors if error is not None and math.isfinite(error)]
    total, parameters = sum(power for power, _ in powers), sum(module.parameters for _, module in powers)
    if not total or len(powers) < 2:
        return ""
    ranked = sorted(powers, key=lambda entry: -entry[0])
    shares = list(itertools.accumulate(power / total for power, _ in ranked))
    count = next((number for number, share in enumerate(shares, 1) if share >= _SHARE), len(ranked))
    has_causes = count <= _MOST_CAUSES
    causes = [module for _, module in ranked[: count if has_causes else 1]]
    names = " and ".join(module.path or module.tag for module in causes)
    weights = sum(module.parameters for module in causes)
    of_weights = f", with {percent_words(weights / parameters)} of their parameters" if parameters else ""
    part = f"{percent_words(shares[len(causes) - 1])} of the error of the innermost modules{of_weights}"
    if has_causes:
        return f"{names} cause{'s' if len(causes) == 1 else ''} {part}"
    return f"no single module causes the error: {names}, the most sensitive, has {part}"


def _failing_modules(
    modules: Sequence[sensitivity_records.ModuleSensitivity],
) -> list[sensitivity_records.ModuleSensitivity]:
    """Return the innermost modules whose outputs cannot be compared, such as NaN."""
    failing = [module for module in modules if module.form is not None and module.form.worst and module.problem]
    inside = {tag for module in failing for tag in address.lineage(module.tag) if tag != module.tag}
    inside.update(module.tag for module in failing if module.part != "module")
    return [module for module in failing if module.tag not in inside or module.part != "module"]


def _name(module: sensitivity_records.ModuleSensitivity) -> str:
    """Name of a module, and whether only its own nodes are meant."""
    return f"{module.path or module.tag}{' (own nodes)' if module.part == 'own nodes' else ''}"


def _sensitivity_figures(result: sensitivity_records.QuantizationSensitivity) -> Iterator[doc.Figure]:
    """Yield the figures: SQNR of the whole model, most sensitive module, size and target."""
    whole = result.whole.measures()
    sqnr = whole.get("sqnr_db")
    if sqnr is not None and not result.whole.problem:
        yield doc.Figure("all modules quantized", sqnr_words(sqnr), f"SQNR of the worst output at {result.precision}")
    ranked = [module for module in _innermost(result.modules) if module.sqnr_db is not None]
    if failing := _failing_modules(result.modules):
        meaning = f"of the worst output with {_name(failing[0])} alone quantized: {failing[0].problem}"
        yield doc.Figure("most sensitive", "not comparable", meaning, "bad")
    elif ranked:
        worst = min(ranked, key=lambda module: module.sqnr_db or 0.0)
        meaning = f"SQNR with {worst.path or worst.tag} alone quantized, the most sensitive of {len(ranked)} modules"
        yield doc.Figure("most sensitive", sqnr_words(worst.sqnr_db or 0.0), meaning)
    small = result.whole.weight_bytes
    if small:
        meaning = f"of the weights with all modules quantized, {size_words(result.float_bytes)} before"
        yield doc.Figure("size", size_words(small), meaning)
    listed = result.exclude_list
    if listed is not None:
        meaning = f"{listed.target.words}, with {len(listed.excluded)} modules in float"
        tone: doc.Tone = "" if listed.verdict.is_undecided else "good" if listed.is_met else "bad"
        yield doc.Figure("target", listed.verdict.limit_words, meaning, tone)


def _innermost(modules: Sequence[sensitivity_records.ModuleSensitivity]) -> list[sensitivity_records.ModuleSensitivity]:
    """Modules that contain no other measured module: their parents have the errors of several modules."""
    tags = {module.tag for module in modules}
    around = {ancestor for tag in tags if (ancestor := address.nearest_ancestor(tag, tags))}
    return [module for module in modules if module.tag not in around or module.part != "module"]


def _sensitivity_fields(result: sensitivity_records.QuantizationSensitivity) -> Iterator[doc.Field]:
    """Yield the fields of the summary: precision, quality, size, latency, samples, cost and notes."""
    yield "precision", f"{result.precision} ({', '.join(result.modes)})"
    yield "all modules", _similarity_words(result.whole)
    yield "weights", f"{size_words(result.float_bytes)} → {size_words(result.whole.weight_bytes)}"
    if result.latency:
        yield "latency", _latency_words(result.latency)
    inputs = ", ".join(f"{name} {list(shape)}" for name, shape in result.input_shapes.items()) or "no inputs"
    if result.calibration is not None:
        yield "calibrated", result.calibration
    yield "samples", f"{samples_words(result.quality_samples)}; the first: {inputs}"
    cost = result.cost
    resumed = f", {cost.resumed} resumed" if cost.resumed else ""
    spent = f"{cost.quantization_s:.1f} s quantizing, {cost.session_s:.1f} s opening, {cost.runs_s:.1f} s running"
    yield "cost", f"{cost.measured} variants measured{resumed}: {spent}"
    yield "modules from", result.tree_source, doc.Detail.PAGE
    yield "made by", f"winml {result.tool_version}, ONNX Runtime {result.onnxruntime_version}", doc.Detail.PAGE
    yield from doc.note_fields(result.notes)


def _exclude_list_blocks(listed: sensitivity_records.ExcludeList) -> Iterator[doc.Block]:
    verdict = {"yes": "met", "no": "not met; this is the best that was reached"}.get(
        listed.verdict.answer, listed.verdict.words
    )
    fields: list[doc.Field] = [
        ("target", f"{listed.target.words}: {verdict}"),
        ("reached", _similarity_words(listed.form)),
        ("weights", size_words(listed.form.weight_bytes)),
        ("latency", _latency_words(listed.latency) if listed.latency else None),
        *(("in float", selector) for selector in listed.float_selectors),
        *(
            (f"in {name}", selector)
            for selector, name in listed.rules.items()
            if selector not in listed.float_selectors
        ),
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


def _similarity_words(variant: sensitivity_records.MeasuredVariant) -> str:
    """Describe the similarity of a variant's worst output."""
    if variant.worst is None or variant.problem:
        return variant.problem
    scores = "".join(f", {name} {value:.4f}" for name, value in variant.scores.items())
    return f"{nearness_words(variant.worst)} for {variant.worst.name}{scores}"


def _latency_words(timed: sensitivity_records.TimedVariant) -> str:
    """Describe the latency of a variant and of the float graph."""
    ratio = timed.ratio
    ends = f" (95 % interval {ratio.low:.2f} to {ratio.high:.2f})" if ratio.low and ratio.high else ""
    disturbed = ", other load on the machine" if ratio.is_disturbed else ""
    return f"{timed.p50_ms:.2f} ms, float {timed.float_p50_ms:.2f} ms: {ratio.value:.2f} of its time{ends}{disturbed}"


def _module_row(module: sensitivity_records.ModuleSensitivity) -> list[doc.Cell]:
    """Create the table row of a module."""
    return [
        _name(module),
        module.class_name,
        *_nearness_cells(module.form),
        module.parameters,
        module.size_bytes_saved,
        module.form.nodes if module.form is not None else 0,
        module.precision,
        module.basis_words,
        module.problem,
    ]


def _nearness_cells(variant: sensitivity_records.MeasuredVariant | None) -> Iterator[doc.Cell]:
    """Yield SQNR, its lower end that limits apply to, cosine and relative error; ``None`` if not measured."""
    numbers = variant.measures() if variant is not None else {}
    yield from (numbers.get(name) for name in ("sqnr_db", "lower_sqnr_db", "cosine", "relative_error"))


def _make_boxes(modules: Sequence[sensitivity_records.ModuleSensitivity]) -> Iterator[doc.Box]:
    """Yield a box for each module with parameters, dark for a large error."""
    # In tree order, not in ranking order: parents before children, and the second layer before the tenth.
    modules = sorted(modules, key=lambda module: address.sort_key(module.tag))
    tags = {module.tag for module in modules}
    parents = {module.tag: address.nearest_ancestor(module.tag, tags) for module in modules}
    own_parameters = {module.tag: module.parameters for module in modules}
    for module in modules:
        if parents[module.tag]:
            own_parameters[parents[module.tag]] -= module.parameters
    for module in modules:
        ratio = sqnr_words(module.sqnr_db) if module.sqnr_db is not None else doc.MISSING
        yield doc.Box(
            key=module.tag,
            parent=parents[module.tag],
            label=address.last_segment(module.tag),
            # A weight shared by two modules counts for both, and once for their parent.
            size=max(own_parameters[module.tag], 0),
            shade=_BEST_DB if module.sqnr_db is None else module.sqnr_db,
            words=ratio,
            lines=(module.path or module.tag, f"SQNR {ratio}", f"{module.parameters:,} parameters", module.problem),
            kind=module.class_name,
        )
