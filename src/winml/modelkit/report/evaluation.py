"""How well a model does its task, beside its baseline."""

from __future__ import annotations

import math
from collections.abc import Iterator

from winml.modelkit.report import document as doc
from winml.modelkit.results.evaluation import EvaluatedSide, Evaluation, Limit, number_words
from winml.modelkit.words import time_words

__all__ = ["evaluation_document"]


def evaluation_document(result: Evaluation) -> doc.Document:
    """Describe what was run, each metric with its interval, and whether limits are met."""
    return doc.Document(
        [doc.Fields(list(_side_fields(result))), _metric_table(result)], doc.Fields(list(_summary_fields(result)))
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
    return doc.Table(columns, [*rows, _time_row(result)])


def _time_row(result: Evaluation) -> list[doc.Cell]:
    """Return the median time of a sample on each side."""
    row: list[doc.Cell] = ["ms per sample", time_words(result.model.latency_ms.p50), ""]
    return row if result.baseline is None else [*row, time_words(result.baseline.latency_ms.p50), "", ""]


def _summary_fields(result: Evaluation) -> Iterator[doc.Field]:
    if result.agreement is not None:
        differing = f"; {len(result.differing)} of {result.data.samples} samples differ" if result.differing else ""
        yield "agreement", f"{_percent(result.agreement)} ({result.agreement_words}{differing})"
    for limit in result.limits:
        yield "limit", _limit_words(limit)
    yield from doc.note_fields(result.notes)


def _limit_words(limit: Limit) -> str:
    verdict = "met" if limit.is_met else "not met"
    words = {"min": "at least", "max": "at most", "max_drop": "no more than"}[limit.kind]
    if limit.kind != "max_drop":
        return f"{verdict}: {limit.metric} {words} {limit.limit:g}, it is {number_words(limit.value)}"
    return (
        f"{verdict}: {limit.metric} {words} {limit.limit:g} worse than the baseline, it is {_drop_words(limit.value)}"
    )


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
