"""How two models agree and which module diverges first; how well a model does its task; what it generated."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from winml.modelkit.compare.words import interval_words, nearness_words, samples_words
from winml.modelkit.hierarchy import address
from winml.modelkit.report import document as doc
from winml.modelkit.results.comparison import (
    ChangedModule,
    ComparedFile,
    ComparedModule,
    ComparedOutput,
    ModelComparison,
    StructureDiff,
)
from winml.modelkit.results.evaluation import EvaluatedSide, Evaluation, Limit, MetricResult, number_words
from winml.modelkit.results.generated_text import GeneratedText, ReferenceText
from winml.modelkit.version import __version__
from winml.modelkit.words import count_noun, count_words, decibel_words, size_words, time_words

DISPLAYED_BARS = 10
"""Modules in a chart of bars. Chosen: it fits on a screen beside the numbers above it."""
DISPLAYED_MODULES = 12
"""Rows of the module table unless all are asked for. Chosen: the answer fits on a screen."""
LEAST, MOST = 1e-8, 1.0
"""Chosen: ends of the colour scale: below rounding of float32, and an error as large as the value."""

_ERRORS = (
    doc.Column("error", "error"),
    doc.Column("SQNR dB", "decibels"),
    doc.Column("cosine", "cosine"),
    doc.Column("largest difference", "error", doc.Detail.PAGE),
)


def comparison_document(result: ModelComparison, *, depth: int | None = None) -> doc.Document:
    """Describe a comparison; of several parts what is farthest off in all of them first, then each part by itself.

    Args:
        result: The comparison.
        depth: Levels of the module tree. None: all.
    """
    parts = [doc.Section(name, comparison_document(part, depth=depth).blocks) for name, part in result.parts.items()]
    return doc.Document(
        [
            doc.Fields(list(_fields(result))),
            *parts,
            *(_module_blocks(result, depth) if result.modules is not None else ()),
            doc.Table(
                doc.columns(("output", "name"), *_ERRORS, ("same top-1", "share"), "remark"),
                list(map(_output_row, result.outputs)),
                name="outputs",
                heading="Outputs",
                detail=doc.Detail.PAGE,
            ),
        ],
        title=f"{Path(result.candidate).name} compared with {Path(result.reference).name}",
        subject="error by module",
        introduction="Both models were run on the same inputs. The own error of a module is the part of its relative "
        "error that does not come from its inputs.",
        figures=list(_figures(result)),
    )


def _figures(result: ModelComparison) -> Iterator[doc.Figure]:
    worst = result.worst
    fidelity, first = worst.fidelity, result.first_divergence
    of_part = f" of {worst.part}" if worst.part else ""
    where = f"{'output' if len(result.outputs) == 1 else 'worst output,'} {fidelity.name}{of_part}"
    if fidelity.problem:
        value = "not finite" if "finity" in fidelity.problem else "not comparable"
        yield doc.Figure("outputs", value, f"{where}: {fidelity.problem}", "bad")
    else:
        meaning = f"{where}: power of the signal over that of the error; 20 dB more is a tenth of the error"
        yield doc.Figure("SQNR", f"{decibel_words(fidelity.sqnr_db)} dB".replace("equal dB", "equal"), meaning)
        meaning = "size of the error over the size of the reference"
        if result.threshold is not None:
            meaning += f"; {'within' if result.is_within else 'above'} the threshold of {result.threshold:g}"
        tone: doc.Tone = "" if result.threshold is None else "good" if result.is_within else "bad"
        yield doc.Figure("relative error", f"{fidelity.relative_error:.1e}", meaning, tone)
    if worst.top1_agreement is not None:
        meaning = "of the positions have their largest value at the same index"
        yield doc.Figure("top-1 agreement", _percent(worst.top1_agreement), meaning)
    if first is not None:
        own = first.own_error
        error = f"{own:.1e}" if own is not None and math.isfinite(own) else "not finite"
        meaning = f"own error of the first module that diverges: {first.identity.words}"
        yield doc.Figure("first divergence", error, meaning, "bad")
    elif result.modules is not None:
        yield doc.Figure("first divergence", "none", _first_words(result))
    if result.modules is not None:
        compared = sum(module.fidelity is not None for module in result.modules)
        is_all = compared == len(result.modules)
        meaning = "every module" if is_all else "the others are fused, or have no value that both models compute"
        yield doc.Figure("modules compared", f"{compared} of {len(result.modules)}", meaning)


def _fields(result: ModelComparison) -> Iterator[doc.Field]:
    yield "reference", result.reference
    yield "candidate", result.candidate
    yield "inputs", samples_words(result.samples)
    if result.parts:
        yield "worst", output_words(result.worst)
    for output in result.outputs if not result.parts else ():
        yield "output", output_words(output)
    if result.threshold is not None:
        yield "threshold", _threshold_words(result, result.threshold)
    if result.modules is not None or result.first_divergence is not None:
        yield "first", _first_words(result)
    if result.modules is not None:
        reasons = [module.reason for module in result.modules if module.fidelity is None]
        for reason in dict.fromkeys(reasons):
            yield "not compared", f"{count_noun(reasons.count(reason), 'module')}: {reason}"
    yield "made by", f"winml {__version__}", doc.Detail.PAGE
    yield from doc.note_fields(result.notes)


def _threshold_words(result: ModelComparison, threshold: float) -> str:
    """Return whether the relative error of every output is within the threshold, and how large the largest is."""
    largest = max(result.outputs, key=lambda output: math.inf if output.fidelity.problem else _error_of(output))
    problem, name = largest.fidelity.problem, largest.fidelity.name
    error = problem or f"relative error {_error_of(largest):.1e}"
    relation = "within" if result.is_within else "not within" if problem else "above"
    verdict = "met" if result.is_within else "exceeded"
    return f"{verdict}: {error} of {name} is {relation} {threshold:g}"


def _error_of(output: ComparedOutput) -> float:
    return output.fidelity.relative_error


def output_words(output: ComparedOutput) -> str:
    """Return how near one output is."""
    fidelity = output.fidelity
    name = f"{fidelity.name} of {output.part}" if output.part else fidelity.name
    if fidelity.problem:
        return f"{name}: {fidelity.problem}"
    if fidelity.equal_share is not None:
        return f"{name}: {nearness_words(fidelity)}, largest difference {fidelity.max_abs_diff:g}"
    words = (
        f"{name}: relative error {fidelity.relative_error:.1e}, SQNR {fidelity.sqnr_db:.1f} dB"
        f"{interval_words(fidelity)}, cosine {fidelity.cosine:.6f}, largest difference {fidelity.max_abs_diff:.1e}"
    )
    if output.top1_agreement is None:
        return words
    return f"{words}, top-1 agreement {100 * output.top1_agreement:.1f} %"


def _first_words(result: ModelComparison) -> str:
    """Return which module diverges first; where none does, how large the errors are that add up."""
    first = result.first_divergence
    if first is None or first.fidelity is None:
        modules = result.modules or ()
        largest = max(modules, key=lambda module: module.own_error or 0.0, default=None)
        if largest is None or (largest.own_error or 0.0) <= result.tolerance:
            return f"no module has an own error above the tolerance of {result.tolerance:g}"
        words = f"{largest.own_error:.1e} in {largest.identity.words}"
        return f"no single module diverges: the error builds up; largest own error {words}"
    problem = f": {first.fidelity.problem}" if first.fidelity.problem else ""
    return f"{first.identity.words} diverges first{problem} ({first.identity.tag})"


def _module_blocks(result: ModelComparison, depth: int | None) -> Iterator[doc.Block]:
    modules, first = result.modules_within(depth), result.first_divergence
    compared = [module for module in modules if module.fidelity is not None]
    wrong = [module for module in compared if module.own_error or (module.fidelity and module.fidelity.problem)]
    worst = sorted(wrong, key=lambda module: -(module.own_error or 0.0))[:DISPLAYED_MODULES]
    places = {id(module): number for number, module in enumerate(compared)}
    brief = list(dict.fromkeys(places[id(module)] for module in (*worst, first) if id(module) in places))
    outline = "" if first is None else "; ▶ and an outline mark the first module that diverges"
    yield doc.Boxes(
        list(_boxes(modules, first)),
        heading=f"Own error by module{outline}",
        size_title="number of modules",
        size_unit="modules",
        shades=doc.Shades("own error", LEAST, MOST, is_logarithmic=True),
    )
    erring = sorted(
        (module for module in compared if module.own_error is not None and math.isfinite(module.own_error)),
        key=lambda module: -(module.own_error or 0.0),
    )
    yield doc.Bars(
        [
            doc.Bar(
                module.identity.words,
                module.own_error or 0.0,
                f"{module.own_error:.1e}",
                f"{module.identity.class_name}{', first to diverge' if module is first else ''}",
            )
            for module in erring[:DISPLAYED_BARS]
            if module.own_error
        ],
        heading="Modules with the largest own error",
        caption="part of the relative error that the inputs do not explain",
    )
    names = (doc.Column("module", "name"), doc.Column("class", detail=doc.Detail.PAGE))
    error, *others = _ERRORS
    numbers = (doc.Column("own error", "error"), error, doc.Column("input error", "error"), *others)
    yield doc.Table(
        doc.columns(*names, *numbers, "remark"),
        [_module_row(module, is_first=module is first) for module in compared],
        name="modules",
        heading="Modules, in the order they are computed",
        brief=brief,
        rest=f"{len(brief)} of {len(modules)} modules are listed, those with the largest own error; --verbose lists "
        "all, in the order they are computed, and why others are not compared",
        is_searched=True,
    )
    yield doc.Table(
        doc.columns(*names, "reason"),
        [
            (module.identity.words, module.identity.class_name, module.reason)
            for module in modules
            if module.fidelity is None
        ],
        name="missing",
        heading="Modules that are not compared",
        detail=doc.Detail.VERBOSE,
    )


def _module_row(module: ComparedModule, *, is_first: bool) -> list[doc.Cell]:
    fidelity = module.fidelity
    names = (module.identity.words, module.identity.class_name)
    if fidelity is None or fidelity.problem:
        numbers: tuple[float | None, ...] = (None, None, module.input_error, None, None, None)
    else:
        numbers = (
            module.own_error,
            fidelity.relative_error,
            module.input_error,
            fidelity.sqnr_db,
            fidelity.cosine,
            fidelity.max_abs_diff,
        )
    return [*names, *numbers, _remark(module, is_first=is_first)]


def _remark(module: ComparedModule, *, is_first: bool) -> str:
    problem = module.fidelity.problem if module.fidelity is not None else module.reason
    marks = ("first to diverge" if is_first else "", "own nodes unchanged" if module.is_unchanged else "", problem)
    return ", ".join(filter(None, marks))


def _output_row(output: ComparedOutput) -> list[doc.Cell]:
    fidelity = output.fidelity
    numbers = (fidelity.relative_error, fidelity.sqnr_db, fidelity.cosine, fidelity.max_abs_diff)
    measured = [None] * 4 if fidelity.problem else numbers
    return [fidelity.name, *measured, output.top1_agreement, fidelity.problem]


def _boxes(modules: Sequence[ComparedModule], first: ComparedModule | None) -> Iterator[doc.Box]:
    """Yield a box for each module, dark where its own error is large; calls share a box."""

    def size(module: ComparedModule) -> float:
        return -1.0 if module.own_error is None else module.own_error

    worst: dict[str, ComparedModule] = {}
    for module in modules:
        known = worst.get(module.identity.tag)
        if known is None or module is first or (known is not first and size(module) > size(known)):
            worst[module.identity.tag] = module
    for tag in sorted(worst, key=address.depth):
        module = worst[tag]
        is_first = first is not None and tag == first.identity.tag
        words = _box_words(module)
        yield doc.Box(
            key=tag,
            parent=address.nearest_ancestor(tag, worst),
            label=tag.rpartition(address.SEPARATOR)[2],
            size=1,
            shade=math.nan if module.own_error is None else module.own_error,
            words=words,
            lines=(module.identity.words, f"own error {words}", _remark(module, is_first=is_first)),
            is_marked=is_first,
            kind=module.identity.class_name,
        )


def _box_words(module: ComparedModule) -> str:
    if module.fidelity is not None and module.fidelity.problem:
        return "not finite" if "finity" in module.fidelity.problem else module.fidelity.problem
    return "–" if module.own_error is None else f"{module.own_error:.1e}"


def evaluation_document(result: Evaluation) -> doc.Document:
    """Describe what was run, each metric with its interval, and whether limits are met."""
    return doc.Document(
        [doc.Fields(list(_side_fields(result))), _metric_chart(result), _metric_table(result)],
        doc.Fields(list(_summary_fields(result))),
        title=Path(result.model.name).name or result.model.name,
        subject=f"{result.task} on {result.data.name}",
        introduction=f"{result.data.words} of split {result.data.split}. An interval holds the value in 95 of 100 "
        "draws of as many samples.",
        figures=list(_evaluation_figures(result)),
    )


def _evaluation_figures(result: Evaluation) -> Iterator[doc.Figure]:
    first, better = result.metrics[0], "higher" if result.metrics[0].is_higher_better else "lower"
    yield doc.Figure(first.name, number_words(first.value), f"{better} is better")
    if first.baseline is not None and result.baseline is not None:
        ends = _ends(first.difference_interval, signed=True)
        words = f"{first.name} of the model minus {number_words(first.baseline)} of {result.baseline.name}"
        meaning = f"{words}; 95 % interval {ends}" if ends else words
        yield doc.Figure("difference", _signed(first.value - first.baseline) or "not defined", meaning)
    if result.agreement is not None:
        yield doc.Figure("agreement", _percent(result.agreement), f"of the samples: {result.agreement_words}")
    if result.has_times:
        times = f"; baseline {time_words(result.baseline.latency_ms.p50)} ms" if result.baseline is not None else ""
        yield doc.Figure("time of a sample", f"{time_words(result.model.latency_ms.p50)} ms", f"median{times}")
    if result.limits:
        met = sum(limit.is_met for limit in result.limits)
        missed = ", ".join(limit.metric for limit in result.limits if not limit.is_met)
        meaning = f"not met: {missed}" if missed else "every limit is met"
        yield doc.Figure("limits", f"{met} of {len(result.limits)} met", meaning, "bad" if missed else "good")


def _metric_chart(result: Evaluation) -> doc.Dots:
    """Return each metric with its interval: beside a baseline that of the difference, so that metrics share a scale."""
    missed = {limit.metric for limit in result.limits if not limit.is_met}
    compares = result.baseline is not None
    dots = []
    for metric in result.metrics:
        value = metric.value - metric.baseline if metric.baseline is not None else metric.value
        interval = metric.difference_interval if compares else metric.interval
        if not math.isfinite(value):
            continue
        low, high = interval if interval is not None and all(map(math.isfinite, interval)) else (None, None)
        words = f"{number_words(metric.value)}{f' ({_signed(value)})' if compares else ''}"
        name = f"{metric.name}, {'higher' if metric.is_higher_better else 'lower'} is better"
        grade: doc.Grade = "bad" if metric.name in missed else "good"
        dots.append(doc.Dot(name, grade, value, low, high, 0.0, 0.0, "", words, lines=(name, words)))
    return doc.Dots(
        dots,
        heading=f"{'Difference to the baseline' if compares else 'Metrics'}, with 95 % intervals",
        value_title="model minus baseline" if compares else "value",
        bar_title="",
        value_line=0.0 if compares else None,
        bar_line=None,
    )


def _side_fields(result: Evaluation) -> Iterator[doc.Field]:
    yield "model", _side_words(result.model)
    yield "task", f"{result.task} ({result.task_rule})"
    data = result.data
    columns = ", ".join(f"{role} is {column}" if role != column else role for role, column in data.columns.items())
    yield "data", f"{data.name}, split {data.split}: {data.words}, {result.batch_size} in a run ({columns})"
    if result.baseline is not None:
        yield "baseline", _side_words(result.baseline)


def _side_words(side: EvaluatedSide) -> str:
    return f"{side.name} ({side.provider})" if side.provider is not None else side.name


def _metric_table(result: Evaluation) -> doc.Table:
    columns = [doc.Column("metric"), doc.Column("value", "score"), doc.Column("95 % interval", "score")]
    if result.baseline is not None:
        columns += [
            doc.Column("baseline", "score"),
            doc.Column("difference", "difference"),
            doc.Column("95 % interval", "difference"),
        ]
    rows: list[list[doc.Cell]] = []
    for metric in result.metrics:
        row: list[doc.Cell] = [metric.name, number_words(metric.value), _ends(metric.interval)]
        if metric.baseline is not None:
            difference = metric.value - metric.baseline
            row += [
                number_words(metric.baseline),
                difference if math.isfinite(difference) else "",
                _ends(metric.difference_interval, signed=True),
            ]
        rows.append(row)
    return doc.Table(columns, [*rows, *_time_rows(result)], name="metrics", heading="Metrics")


def _time_rows(result: Evaluation) -> Iterator[list[doc.Cell]]:
    """Yield the median time of a sample on each side, where there are enough for one."""
    if result.has_times:
        row: list[doc.Cell] = ["ms per sample", time_words(result.model.latency_ms.p50), ""]
        yield row if result.baseline is None else [*row, time_words(result.baseline.latency_ms.p50), "", ""]


def _summary_fields(result: Evaluation) -> Iterator[doc.Field]:
    if result.agreement is not None:
        differing = f"; {len(result.differing)} of {result.data.samples} samples differ" if result.differing else ""
        yield "agreement", f"{_percent(result.agreement)} ({result.agreement_words}{differing})"
    metrics = {metric.name: metric for metric in result.metrics}
    for limit in result.limits:
        # The agreement, which a limit may name, has no interval.
        metric = metrics.get(limit.metric)
        yield "limit", f"{_limit_words(limit)}{_resolution_words(limit, metric) if metric is not None else ''}"
    yield from doc.note_fields(result.notes)


def _limit_words(limit: Limit) -> str:
    verdict = "met" if limit.is_met else "not met"
    words = {"min": "at least", "max": "at most", "max_drop": "no more than"}[limit.kind]
    if limit.kind != "max_drop":
        return f"{verdict}: {limit.metric} {words} {limit.limit:g}, it is {number_words(limit.value)}"
    return (
        f"{verdict}: {limit.metric} {words} {limit.limit:g} worse than the baseline, it is {_drop_words(limit.value)}"
    )


def _resolution_words(limit: Limit, metric: MetricResult) -> str:
    """Return the interval of a metric or its drop if the limit lies inside it; empty if the samples resolve it."""
    ends = metric.interval
    if limit.kind == "max_drop":
        difference = metric.difference_interval
        ends = difference
        if difference is not None and metric.is_higher_better:
            ends = (-difference[1], -difference[0])
    if ends is None or not ends[0] <= limit.limit <= ends[1] or ends[0] == ends[1]:
        return ""
    return f"; too few samples to be sure (95 % interval {_ends(ends)})"


def _drop_words(drop: float) -> str:
    """Return by how much a model is worse.

    >>> _drop_words(0.5), _drop_words(-0.5), _drop_words(0.0), _drop_words(math.nan)
    ('0.5000 worse', '0.5000 better', 'equal', 'not defined')
    """
    if not drop or math.isnan(drop):
        return "not defined" if drop else "equal"
    return f"{number_words(abs(drop))} {'worse' if drop > 0 else 'better'}"


def _signed(value: float) -> str:
    return f"{value:+.4f}" if math.isfinite(value) else ""


def _ends(ends: tuple[float, float] | None, *, signed: bool = False) -> str:
    if ends is None:
        return ""
    words = _signed if signed else number_words
    return f"{words(ends[0])} to {words(ends[1])}"


def _percent(share: float) -> str:
    """Return a share in percent; one that is not whole is never shown as such.

    >>> _percent(1.0), _percent(0.99999)
    ('100 %', '99.99 %')
    """
    return "100 %" if share == 1 else f"{math.floor(share * 10_000) / 100:.2f} %"


_ENDS = {
    "eos": "ended by the model",
    "stop": "ended by {}",
    "length": "at the maximum",
}


def generated_lines(result: GeneratedText, number: int | None = None) -> Iterator[str]:
    """Yield a line for times and memory, one for each note, and what PyTorch wrote.

    Args:
        result: The text.
        number: Of the prompt, where there are several of one model.
    """
    rate = result.tokens_per_second
    count = len(result.prompt_tokens)
    names = {"stop_strings": "a stop string", "max_time": "max_time"}
    ended_by = " or ".join(words for name, words in names.items() if name in result.settings)
    words = [
        *([f"prompt {number}"] if number is not None else []),
        f"{len(result.tokens)} new tokens ({_ENDS[result.end].format(ended_by)}) after {count} of the prompt",
        *([f"session {result.session_ms / 1000:.2f} s"] if number in {None, 1} else []),
        f"first token {result.first_token_ms:.0f} ms",
        *([f"{rate:.1f} tokens/s"] if rate is not None else []),
        *([f"cache {size_words(result.cache_bytes)}"] if result.cache_bytes is not None else []),
        *(["transformers' loop"] if result.loop == "transformers" else []),
    ]
    yield ", ".join(words)
    yield from (f"note: {note}" for note in result.notes)
    if result.reference is not None:
        yield from _reference_lines(result.reference, len(result.tokens))


def _reference_lines(reference: ReferenceText, count: int) -> Iterator[str]:
    difference = reference.difference
    if difference is None:
        yield f"PyTorch ({reference.model}) writes the same {count} tokens"
        return
    margin = difference.reference_margin
    scored = "" if margin is None else f"; PyTorch scores them {margin:.2e} apart"
    quantized = " (the model is quantized)" if reference.is_of_quantized else ""
    yield (
        f"PyTorch ({reference.model}) differs at token {difference.index + 1}: "
        f"{_token_words(difference.reference_token, difference.reference_text)} instead of "
        f"{_token_words(difference.token, difference.text)}{scored}; {reference.equal_tokens} of "
        f"{max(count, len(reference.tokens))} tokens are equal{quantized}"
    )


def _token_words(token: int | None, text: str) -> str:
    return "its end" if token is None else f"{token} ({text!r})"


DISPLAYED_ROWS = 20
"""Rows unless all are asked for. Chosen: a table that fits on a screen and in a comment."""
DISPLAYED_OPERATORS = 8
"""Operators named in a line. Chosen: they fit on it."""
_NUMBER = re.compile(r"\.\d+(?=/|$)")
"""The number of a module among its siblings, in a tag."""


def diff_document(diff: StructureDiff, *, folds: bool = True, by_change: bool = False) -> doc.Document:
    """Describe what changed.

    Args:
        diff: The changes.
        folds: Whether modules of equal layers that changed alike share a row.
        by_change: Put the modules that changed most first, as for a comment that shows only these; else in the order
            of the file.
    """
    modules = sorted(diff.modules, key=_weight_of_change, reverse=True) if by_change else diff.modules
    rows = _folded(modules) if folds else list(map(_Row.of, modules))
    hidden = sum(row.modules for row in rows[DISPLAYED_ROWS:])
    weights = [
        (
            f"{weight.renamed_from} → {weight.name}" if weight.renamed_from else weight.name,
            weight.status,
            weight.before,
            weight.after,
        )
        for module in modules
        for weight in module.weights
    ]
    return doc.Document(
        [
            doc.Fields(list(_diff_fields(diff))),
            *_diff_bars(diff),
            doc.Table(
                doc.columns(
                    "change", ("module", "name"), ("nodes", "count"), "operators", "weights", ("size", "bytes")
                ),
                [row.cells for row in rows],
                name="modules",
                heading="Modules that differ",
                is_searched=True,
                brief=range(DISPLAYED_ROWS),
                rest=f"{hidden} more modules changed less."
                if by_change
                else f"… and {hidden} more modules (--verbose shows all)",
            ),
            doc.Table(
                doc.columns(("weight", "name"), "change", "before", "after"),
                weights,
                name="weights",
                heading="Weights that differ",
                detail=doc.Detail.VERBOSE,
            ),
        ],
        title=f"{diff.before.path.name} → {diff.after.path.name}",
        subject="structure and weights",
        introduction="Neither file was run: nodes, attributes and the content of weights were compared, module by "
        "module.",
        figures=list(_diff_figures(diff)),
    )


def _diff_figures(diff: StructureDiff) -> Iterator[doc.Figure]:
    before, after = diff.before, diff.after
    if diff.is_same:
        yield doc.Figure("files", "equal", f"every node and weight of {diff.same_modules} modules", "good")
    else:
        statuses = [module.status for module in diff.modules]
        words = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
        meaning = f"{words}; {diff.same_modules} are equal" if words else f"{diff.same_modules} are equal"
        yield doc.Figure("modules that differ", str(len(diff.modules)), meaning)
    yield doc.Figure("nodes", f"{after.nodes - before.nodes:+,}", f"{before.nodes:,} before, {after.nodes:,} after")
    change = after.size_bytes - before.size_bytes
    sizes = f"{size_words(before.size_bytes)} before, {size_words(after.size_bytes)} after, weights included"
    yield doc.Figure("size", f"{'-' if change < 0 else '+'}{size_words(abs(change))}", sizes)
    weights = sum(len(module.weights) for module in diff.modules)
    yield doc.Figure("weights that differ", str(weights), "by content, name, type or shape")


def _diff_bars(diff: StructureDiff) -> Iterator[doc.Block]:
    changes = sorted(diff.operators.items(), key=lambda item: -abs(item[1][1] - item[1][0]))[:DISPLAYED_BARS]
    yield doc.Bars(
        [
            doc.Bar(name, after - before, f"{after - before:+d}", f"{before} → {after}")
            for name, (before, after) in changes
        ],
        heading="Operators: nodes after minus nodes before",
    )
    sizes: dict[str, list[int]] = {}
    for module in diff.modules:
        for kind, (before, after) in module.dtypes.items():
            pair = sizes.setdefault(kind, [0, 0])
            pair[0] += before
            pair[1] += after
    yield doc.Bars(
        [
            doc.Bar(
                kind,
                after - before,
                f"{'-' if after < before else '+'}{size_words(abs(after - before))}",
                f"{size_words(before)} → {size_words(after)}",
            )
            for kind, (before, after) in sorted(sizes.items(), key=lambda item: -abs(item[1][1] - item[1][0]))
        ],
        heading="Weights of modules that differ, by type",
    )


@dataclass(frozen=True)
class _Row:
    """One line of the table: a module, or several that changed alike and differ in their numbers only."""

    status: str
    name: str
    rest: tuple[doc.Cell, ...]
    modules: int = 1

    @classmethod
    def of(cls, module: ChangedModule) -> _Row:
        return cls(module.status, _module_name(module), _cells(module))

    @property
    def cells(self) -> tuple[doc.Cell, ...]:
        name = f"{self.name} × {self.modules}" if self.modules > 1 else self.name
        return (self.status, name, *self.rest)


def _folded(modules: Iterable[ChangedModule]) -> list[_Row]:
    """Return a row for each kind of change; modules of equal layers that changed alike share one."""
    groups: dict[tuple[str, str, tuple[doc.Cell, ...]], list[_Row]] = {}
    for row in map(_Row.of, modules):
        groups.setdefault((row.status, _NUMBER.sub(".*", row.name), row.rest), []).append(row)
    return [
        rows[0] if len(rows) == 1 else _Row(status, name, rest, len(rows))
        for (status, name, rest), rows in groups.items()
    ]


def _diff_fields(diff: StructureDiff) -> Iterator[doc.Field]:
    yield "before", _file_words(diff.before)
    yield "after", _file_words(diff.after)
    if diff.is_same:
        yield "same", f"every node and every weight of {diff.same_modules} modules"
        return
    counts = dict.fromkeys(("changed", "added", "removed", "renamed"), 0)
    for module in diff.modules:
        counts[module.status] += 1
    counted = [f"{count} {status}" for status, count in counts.items() if count]
    yield "modules", ", ".join([*counted, f"{diff.same_modules} the same"])
    if diff.operators:
        yield "operators", _operator_words(diff.operators)
    yield from (("interface", change) for change in diff.interface)
    if diff.is_rewired:
        yield "wiring", "nodes and weights of every module are as before, and read each other otherwise"
    yield from doc.note_fields(diff.notes)


def _file_words(file: ComparedFile) -> str:
    return (
        f"{file.path} · {file.nodes} nodes, {count_words(file.parameters)} parameters, "
        f"{size_words(file.size_bytes)}, opset {file.opset}"
    )


def _module_name(module: ChangedModule) -> str:
    name = module.tag or module.class_name
    return f"{module.renamed_from} → {name}" if module.renamed_from else name


def _cells(module: ChangedModule) -> tuple[doc.Cell, ...]:
    attributes = f"attributes of {module.attributes_changed}" if module.attributes_changed else ""
    operators = ", ".join(filter(None, [_operator_words(module.operators), attributes]))
    nodes, sizes = module.nodes, module.size_bytes
    size = doc.Number(sizes[1] - sizes[0], _arrow_of_sizes(module)) if sizes[0] != sizes[1] else ""
    return doc.Number(nodes[1], _arrow(nodes)), operators, _weight_words(module), size


def _operator_words(operators: Mapping[str, tuple[int, int]]) -> str:
    words = [f"{name} {after - before:+d}" for name, (before, after) in operators.items()]
    more = len(words) - DISPLAYED_OPERATORS
    return ", ".join(words[:DISPLAYED_OPERATORS]) + (f" and {more} others" if more > 0 else "")


def _weight_words(module: ChangedModule) -> str:
    counts: dict[str, int] = {}
    for weight in module.weights:
        counts[weight.status] = counts.get(weight.status, 0) + 1
    return ", ".join(f"{count} {status}" for status, count in counts.items())


def _arrow(pair: tuple[int, int]) -> str:
    return str(pair[1]) if pair[0] == pair[1] else f"{pair[0]} → {pair[1]}"


def _arrow_of_sizes(module: ChangedModule) -> str:
    before, after = module.size_bytes
    return "" if before == after else f"{size_words(before)} → {size_words(after)}"


def _weight_of_change(module: ChangedModule) -> int:
    """Return how much changed, to put the largest change first: bytes of weights, then nodes."""
    bytes_changed = sum(abs(after - before) for before, after in module.dtypes.values())
    return bytes_changed + sum(abs(after - before) for before, after in module.operators.values()) + len(module.weights)
