"""Document of an evaluation: metrics, baseline and limits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from winml.modelkit.compare.words import share_interval_words
from winml.modelkit.errors import opt
from winml.modelkit.evaluate.records import Confusion, EvaluatedSide, Evaluation, number_words
from winml.modelkit.report import document as doc
from winml.modelkit.words import percent_words, rough_words

_MAX_MATRIX_COLUMNS = 6
"""Maximum number of classes of a confusion matrix in a terminal. Chosen: it fits beside names of ten letters."""
_MAX_BRIEF_ROWS = 5
"""Maximum number of changed samples and confusions in a terminal. Chosen: the metrics stay on the screen."""


def evaluation_document(result: Evaluation) -> doc.Document:
    """Build the document: models, metrics with intervals, and limits."""
    return doc.Document(
        [
            doc.Fields(list(_side_fields(result))),
            _metric_chart(result),
            _metric_table(result),
            *([] if result.confusion is None else _confusion_tables(result.confusion)),
            _changed_table(result),
        ],
        doc.Fields(list(_summary_fields(result))),
        title=Path(result.model.name).name or result.model.name,
        subject=f"{result.task} on {result.data.name}",
        answer=_answer_words(result),
        introduction=f"{result.data.words} of split {result.data.split}. A 95 % interval contains the value of 95 "
        "of 100 resamples of them.",
        figures=list(_evaluation_figures(result)),
    )


def _answer_words(result: Evaluation) -> str:
    """Answer in one sentence: the verdict on the limits, else the first metric beside the baseline's."""
    main = result.metrics[0]
    if result.verdict is not None:
        limits = f"Limit{'s' if len(result.limits) > 1 else ''} {result.verdict.limit_words}"
        return f"{limits}: {result.verdict.question}; measured: {result.verdict.reason}."
    beside = "" if main.baseline is None else f", {number_words(main.baseline)} of the baseline"
    return f"{main.name} {number_words(main.value)}{beside}."


def _evaluation_figures(result: Evaluation) -> Iterator[doc.Figure]:
    """Yield the figures: main metric, difference to the baseline, agreement, time and limits."""
    main, better = result.metrics[0], "higher" if result.metrics[0].is_higher_better else "lower"
    yield doc.Figure(main.name, number_words(main.value), f"{better} is better")
    if main.baseline is not None and result.baseline is not None:
        interval = _interval_words(main.difference_interval, signed=True)
        text = f"{main.name} of the model minus {number_words(main.baseline)} of {result.baseline.name}"
        meaning = f"{text}; 95 % interval {interval}" if interval else text
        yield doc.Figure("difference", _signed_words(main.value - main.baseline) or "not defined", meaning)
    if result.agreement is not None:
        yield doc.Figure("agreement", percent_words(result.agreement), f"of the samples: {result.agreement_words}")
    if result.limits:
        verdicts = {limit.metric: limit.verdict for limit in result.limits}
        groups = {
            "not met": [metric for metric, verdict in verdicts.items() if verdict.is_no],
            "undecided": [metric for metric, verdict in verdicts.items() if verdict.is_undecided],
        }
        meaning = "; ".join(f"{text}: {', '.join(names)}" for text, names in groups.items() if names)
        met = sum(limit.verdict.is_yes for limit in result.limits)
        tone: doc.Tone = "bad" if groups["not met"] else "" if groups["undecided"] else "good"
        yield doc.Figure("limits", f"{met} of {len(result.limits)} met", meaning or "every limit is met", tone)


def _metric_chart(result: Evaluation) -> doc.Dots:
    """Chart each metric with its interval; beside a baseline, the difference to it, so that metrics share a scale."""
    missed = {limit.metric for limit in result.limits if not limit.is_met}
    compares = result.baseline is not None
    dots = []
    for metric in result.metrics:
        value = metric.value - metric.baseline if metric.baseline is not None else metric.value
        interval = metric.difference_interval if compares else metric.interval
        if not math.isfinite(value):
            continue
        low, high = interval if interval is not None and all(map(math.isfinite, interval)) else (None, None)
        text = f"{number_words(metric.value)}{f' ({_signed_words(value)})' if compares else ''}"
        name = f"{metric.name}, {'higher' if metric.is_higher_better else 'lower'} is better"
        grade: doc.Grade = "bad" if metric.name in missed else "good"
        dots.append(doc.Dot(name, grade, value, low, high, value_words=text, lines=(name, text)))
    return doc.Dots(
        dots,
        heading=f"{'Difference to the baseline' if compares else 'Metrics'}, with 95 % intervals",
        value_title="model minus baseline" if compares else "value",
        value_line=0.0 if compares else None,
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
    simulation = f", simulated on the {side.simulated_on}" if side.simulated_on else ""
    return f"{side.name} ({side.provider}{simulation})" if side.provider is not None else side.name


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
        row: list[doc.Cell] = [metric.name, number_words(metric.value), _interval_words(metric.interval)]
        if metric.baseline is not None:
            difference = metric.value - metric.baseline
            row += [
                number_words(metric.baseline),
                difference if math.isfinite(difference) else "",
                _interval_words(metric.difference_interval, signed=True),
            ]
        rows.append(row)
    if result.has_times:
        baseline = [] if result.baseline is None else [f"about {rough_words(result.baseline.latency_ms.p50)}", "", ""]
        rows.append(["ms per sample", f"about {rough_words(result.model.latency_ms.p50)}", "", *baseline])
    return doc.Table(columns, rows, name="metrics", heading="Metrics")


def _confusion_tables(confusion: Confusion) -> Iterator[doc.Table]:
    """Yield the confusion matrix and the most frequent confusions; a terminal shows only the matrix of few classes."""
    is_small = len(confusion.names) <= _MAX_MATRIX_COLUMNS
    baseline = confusion.baseline or confusion.model
    rows: list[list[doc.Cell]] = []
    pairs: list[tuple[int, str, str, int]] = []
    for label, counts, before in zip(confusion.names, confusion.model, baseline, strict=True):
        rows.append([label, *(_count_cell(*pair, sum(counts)) for pair in zip(counts, before, strict=True))])
        pairs += [
            (count, label, predicted, earlier)
            for predicted, count, earlier in zip(confusion.names, counts, before, strict=True)
            if predicted != label and count
        ]
    changes = ", with the change from the baseline" if baseline != confusion.model else ""
    yield doc.Table(
        doc.columns("label ↓ predicted →", *((name, "count") for name in confusion.names)),
        rows,
        name="confusion",
        heading=f"Confusion matrix{changes}",
        detail=doc.Detail.ALWAYS if is_small else doc.Detail.PAGE,
    )
    if not is_small:
        of_baseline = [] if confusion.baseline is None else [doc.Column("baseline", "count")]
        pairs.sort(key=lambda pair: -pair[0])
        yield doc.Table(
            doc.columns("label", "predicted", ("samples", "count"), *of_baseline),
            [[label, predicted, count, *[before][: len(of_baseline)]] for count, label, predicted, before in pairs],
            name="confusions",
            heading="Most frequent confusions",
            brief=range(_MAX_BRIEF_ROWS),
            rest=f"… and {{}} more ({opt.report} lists all)",
        )


def _count_cell(count: int, baseline: int, samples: int) -> doc.Number:
    """Return the cell of a count, with the difference to the baseline's if there is one."""
    change = f" ({count - baseline:+d})" if count != baseline else ""
    return doc.Number(count, f"{count}{change}", share=count / samples if samples else None)


def _changed_table(result: Evaluation) -> doc.Table:
    """List the samples with different predictions; columns without values are omitted."""
    columns = doc.columns(("sample", "count"), "effect", "label", "baseline", "model", "text", "file")
    rows = [
        [entry.sample, entry.effect or "", entry.label or "", entry.baseline, entry.model, entry.text, entry.file]
        for entry in result.changed
    ]
    used = [0, *(place for place in range(1, len(columns)) if any(row[place] for row in rows))]
    first = f", the first {len(rows)} of {len(result.differing)}" if len(rows) < len(result.differing) else ""
    return doc.Table(
        [columns[place] for place in used],
        [[row[place] for place in used] for row in rows],
        name="changed",
        heading=f"Samples with a changed prediction{first}",
        brief=range(_MAX_BRIEF_ROWS),
        rest=f"… and {{}} more samples with a changed prediction ({opt.report} lists them)",
        is_searched=True,
    )


def _summary_fields(result: Evaluation) -> Iterator[doc.Field]:
    if result.agreement is not None:
        count = len(result.differing)
        differing = f"; {count} of {result.data.samples} samples differ{'s' if count == 1 else ''}" if count else ""
        interval = share_interval_words(result.agreement, result.data.samples)
        yield "agreement", f"{percent_words(result.agreement)}, {interval} ({result.agreement_words}{differing})"
    for limit in result.limits:
        yield "limit", limit.words
    yield from doc.note_fields(result.notes)


def _signed_words(value: float) -> str:
    """Format a difference with its sign; empty if not finite."""
    return f"{value:+.4f}" if math.isfinite(value) else ""


def _interval_words(ends: tuple[float, float] | None, *, signed: bool = False) -> str:
    """Describe the ends of an interval; empty without an interval, or for one value."""
    if ends is None or ends[0] == ends[1]:
        return ""
    describe = _signed_words if signed else number_words
    return f"{describe(ends[0])} to {describe(ends[1])}"
