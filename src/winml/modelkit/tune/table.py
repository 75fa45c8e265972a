"""Table of a tuning: the winner and the candidates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from winml.modelkit.file_names import TUNE_RESULT_NAME
from winml.modelkit.options import drop_words
from winml.modelkit.report import document as doc
from winml.modelkit.tune.records import TunedCandidate, TuneResult
from winml.modelkit.words import count_noun, decibel_words, percent_words, size_words, sqnr_words

_GRADES: Mapping[str, doc.Grade] = {"won": "best", "right": "good", "slower": "fair"}
_MOST_DISPLAYED_DB = 80.0
"""Chosen: maximum bar length; above this SQNR, noise is rounding noise."""


def tuning_document(result: TuneResult) -> doc.Document:
    """Describe the winner, and every candidate in :func:`_table_order`."""
    metrics = tuple(result.limits["max_drop"])
    candidates = _table_order(result)
    return doc.Document(
        [
            doc.Fields(list(_fields(result))),
            doc.Dots(
                [_dot(item) for item in candidates if item.latency is not None and item.facts is not None],
                heading="Latency and quality of each candidate; a larger mark is a larger file",
                value_title="latency, plain file = 1",
                bar_title="SQNR in dB",
                value_line=1,
                bar_line=result.limits["min_sqnr_db"],
            ),
            doc.Table(
                doc.columns(
                    ("candidate", "name"),
                    ("p50 ms [95 %]", "latency"),
                    ("relative to plain [95 %]", "latency"),
                    ("size", "bytes"),
                    ("memory", "bytes"),
                    ("session ms", "whole"),
                    ("SQNR dB", "decibels"),
                    *(doc.Column(name, "score") for name in metrics),
                    "Pareto",
                    "outcome",
                    doc.Column("what it is", detail=doc.Detail.PAGE),
                ),
                [_row(item, metrics, result) for item in candidates],
                name="candidates",
                heading="Candidates",
                is_searched=True,
            ),
        ],
        title=Path(result.model).name,
        subject="fastest variant within the quality limit",
        introduction="Every candidate was made from one export, run in a separate process, and timed in turns with the "
        "others. SQNR is the signal-to-quantization-noise ratio of the worst output, compared with the plain file.",
        figures=list(_figures(result)),
        links=[doc.Linked("– the results as JSON", TUNE_RESULT_NAME, TUNE_RESULT_NAME)],
    )


def _figures(result: TuneResult) -> Iterator[doc.Figure]:
    winner, tuned = result.winner, result.won
    if result.verdict.is_undecided:
        yield doc.Figure("verdict", "undecided", result.verdict.words.removeprefix("undecided: "))
    else:
        yield doc.Figure("winner", winner.name, tuned.candidate.words)
    if tuned.latency is not None:
        ends = _interval(tuned.latency.p50_ms, tuned.latency.low_ms, tuned.latency.high_ms).partition(" ")[2]
        interval = f"median, 95 % interval {ends}" if ends else "median"
        yield doc.Figure("latency", f"{tuned.latency.p50_ms:.2f} ms", interval)
    if winner.ratio_to_plain is not None:
        ratio = winner.ratio_to_plain.value
        meaning = f"{ratio:.2f} of the latency of the plain file"
        yield doc.Figure("speedup", f"{1 / ratio:.2f} ×" if ratio > 0 else "–", meaning)
    if winner.size_bytes is not None:
        plain = next((item.facts for item in result.candidates if item.candidate.kind == "plain"), None)
        plain_words = f"; the plain file: {size_words(plain.size_bytes)}" if plain is not None else ""
        yield doc.Figure("size", size_words(winner.size_bytes), f"model and data{plain_words}")
    if winner.sqnr_db is not None:
        minimum = result.limits["min_sqnr_db"]
        meaning = "of the worst output" if minimum is None else f"of the worst output; the minimum is {minimum:g} dB"
        yield doc.Figure("SQNR", sqnr_words(winner.sqnr_db), meaning)
    statuses = Counter(item.status for item in result.candidates)
    status_words = ", ".join(f"{count} {status}" for status, count in statuses.items())
    yield doc.Figure("candidates", str(len(result.candidates)), status_words)


def _fields(result: TuneResult) -> Iterator[doc.Field]:
    winner = result.winner
    question = f" ({result.verdict.question})" if result.verdict.is_no else ""
    yield "verdict", f"{result.verdict.words}{question}"
    yield "best so far" if result.verdict.is_undecided else "winner", f"{winner.name}: {result.won.candidate.words}"
    yield "folder", winner.folder
    yield "again", winner.build_command
    if winner.perf_command is not None:
        yield "measure", winner.perf_command
    yield "target", result.target
    yield "limit", _limit_words(result)
    yield "inputs", ", ".join(f"{name} {list(shape)}" for name, shape in result.measured_shapes.items()) or "none"
    yield "machine", _machine_words(result)
    if result.resumed:
        yield "resumed", f"{result.resumed} candidates had been measured before"
    yield from doc.note_fields(result.notes)


def _limit_words(result: TuneResult) -> str:
    minimum, drops = result.limits["min_sqnr_db"], result.limits["max_drop"]
    words = [] if minimum is None else [f"an SQNR of at least {minimum:g} dB relative to the plain file"]
    agreement = result.limits["min_agreement"]
    if agreement is not None:
        on_samples = "" if result.limits["dataset"] is None else f" on {result.limits['dataset']}"
        share = percent_words(agreement)
        words.append(
            f"top-1 agreement of at least {share}{on_samples}; for outputs without scores, the minimum SQNR of the "
            "precision"
        )
    words += [
        f"{name} drops by at most {drop_words(drop)} on {result.limits['dataset']}" for name, drop in drops.items()
    ]
    return " and ".join(words)


def _machine_words(result: TuneResult) -> str:
    machine = result.machine
    cores = count_noun(machine["cores"], "core")
    providers = ", ".join(machine["providers"])
    return f"{machine['processor']}, {cores}, ONNX Runtime {result.onnxruntime_version} with {providers}"


def _table_order(result: TuneResult) -> list[TunedCandidate]:
    """Return the winner, the other Pareto-optimal candidates, and the remaining candidates; each group by latency.

    Candidates without a latency are last in their group.
    """
    return sorted(
        result.candidates,
        key=lambda item: (item.status != "won", not item.is_on_front, item.latency is None, _ratio(item)),
    )


def _row(item: TunedCandidate, metrics: Sequence[str], result: TuneResult) -> list[doc.Cell]:
    facts, latency = item.facts, item.latency
    return [
        item.candidate.name,
        *(
            (None, None)
            if latency is None
            else (
                doc.Number(latency.p50_ms, _interval(latency.p50_ms, latency.low_ms, latency.high_ms)),
                doc.Number(_ratio(item), _ratio_words(item)),
            )
        ),
        *(
            (None,) * 4
            if facts is None
            else (facts.size_bytes, facts.memory_bytes, facts.session_creation_ms, facts.sqnr_db)
        ),
        *(None if facts is None else facts.scores.get(name) for name in metrics),
        "yes" if item.is_on_front else "",
        _outcome_words(item, result),
        item.candidate.words,
    ]


def _outcome_words(item: TunedCandidate, result: TuneResult) -> str:
    """Describe the outcome of a candidate; an undecided tuning has no winner."""
    if item.status == "won":
        return "best so far" if result.verdict.is_undecided else "won"
    return f"{item.status}: {item.reason}" if item.reason else item.status


def _interval(value: float, low: float | None, high: float | None) -> str:
    return f"{value:.2f}" if low is None or high is None else f"{value:.2f} [{low:.2f}, {high:.2f}]"


def _ratio(item: TunedCandidate) -> float:
    return 1.0 if item.latency is None or item.latency.ratio is None else item.latency.ratio.value


def _ratio_words(item: TunedCandidate) -> str:
    ratio = None if item.latency is None else item.latency.ratio
    return "1" if ratio is None else _interval(ratio.value, ratio.low, ratio.high)


def _dot(item: TunedCandidate) -> doc.Dot:
    """Return the chart row of a timed candidate: no bar without an SQNR, and a limited bar length."""
    latency, facts = item.latency, item.facts
    assert latency is not None  # only timed candidates are drawn
    assert facts is not None
    return doc.Dot(
        item.candidate.name,
        _GRADES.get(item.status, "bad"),
        value=_ratio(item),
        low=None if latency.ratio is None else latency.ratio.low,
        high=None if latency.ratio is None else latency.ratio.high,
        size=facts.size_bytes,
        bar=0.0 if facts.sqnr_db is None else min(facts.sqnr_db, _MOST_DISPLAYED_DB),
        value_words=_ratio_words(item),
        bar_words=doc.MISSING if facts.sqnr_db is None else decibel_words(facts.sqnr_db),
        lines=(
            item.candidate.words,
            f"{_interval(latency.p50_ms, latency.low_ms, latency.high_ms)} ms, {_ratio(item):.2f} of the plain file",
            size_words(facts.size_bytes),
            item.status,
        ),
    )
