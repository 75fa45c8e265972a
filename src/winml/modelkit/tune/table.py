"""Table of a tuning: the winner and the candidates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from winml.modelkit.file_names import TUNE_RESULT_NAME
from winml.modelkit.options import drop_words
from winml.modelkit.report import document as doc
from winml.modelkit.tune.records import CandidateStatus, MeasuredLatency, TunedCandidate, TuneResult
from winml.modelkit.words import count_noun, decibel_words, percent_words, size_words, sqnr_words, time_words

_STATUS_WORDS: Mapping[CandidateStatus, str] = {"right": "within the limit", "wrong": "outside the limit"}
"""Status → its text, if different."""
_GRADES: Mapping[str, doc.Grade] = {"won": "best", "right": "good", "slower": "fair"}
_MAX_BAR_DB = 80.0
"""Chosen: maximum bar length; above this SQNR, noise is rounding noise."""


def tuning_document(result: TuneResult) -> doc.Document:
    """Describe the winner beside the plain file, and every candidate in :func:`_table_order`."""
    metrics = tuple(result.limits["max_drop"])
    candidates = _table_order(result)
    return doc.Document(
        [
            doc.Fields(list(_list_fields(result))),
            doc.Dots(
                [_chart_dot(tuned) for tuned in candidates if tuned.latency is not None and tuned.facts is not None],
                heading="Latency and quality of each candidate; a larger mark is a larger file",
                value_title="latency, plain file = 1",
                bar_title="SQNR in dB",
                value_line=1,
                bar_line=result.limits["min_sqnr_db"],
            ),
            _winner_table(result, metrics),
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
                [_table_row(tuned, metrics, result) for tuned in candidates],
                name="candidates",
                heading="Candidates",
                is_searched=True,
            ),
        ],
        title=Path(result.model).name,
        subject="fastest variant within the quality limit",
        answer=f"{'Best so far' if result.verdict.is_undecided else 'Winner'}: {result.winner.name}, "
        f"{result.won.candidate.words}. {result.verdict.words.capitalize()}.",
        introduction="Every candidate was made from one export, run in a separate process, and timed in turns with the "
        "others. SQNR is the signal-to-quantization-noise ratio of the worst output, compared with the plain file.",
        figures=list(_list_figures(result)),
        links=[doc.Linked("– the results as JSON", TUNE_RESULT_NAME, TUNE_RESULT_NAME)],
    )


def _winner_table(result: TuneResult, metrics: Sequence[str]) -> doc.Table:
    """Set the plain file and the winner side by side; no rows if the plain file won or has no facts."""
    plain = next((tuned for tuned in result.candidates if tuned.candidate.kind == "plain"), None)
    sides = [] if plain is None or plain is result.won else [plain, result.won]
    facts = [tuned.facts for tuned in sides if tuned.facts is not None]
    rows: list[list[doc.Cell]] = []

    def add(name: str, kind: doc.Kind, values: Sequence[float | None]) -> None:
        if len(values) < 2 or any(value is None for value in values):
            return
        before, after = (value or 0.0 for value in values)
        rows.append([name, *map(doc.Column(name, kind).words, values), f"{after / before:.2f} ×" if before else ""])

    ratio = result.winner.ratio_to_plain
    if ratio is None or not ratio.is_slowed:
        add("latency, p50 ms", "latency", [None if side.latency is None else side.latency.p50_ms for side in sides])
    add("size", "bytes", [fact.size_bytes for fact in facts])
    add("memory", "bytes", [fact.memory_bytes for fact in facts])
    add("peak memory", "bytes", [fact.peak_bytes for fact in facts])
    add("session ms", "whole", [fact.session_creation_ms for fact in facts])
    for metric in metrics:
        add(metric, "score", [fact.scores.get(metric) for fact in facts])
    won = result.won.facts
    if rows and won is not None and won.sqnr_db is not None:
        rows.append(["SQNR dB", "reference", decibel_words(won.sqnr_db), ""])
    return doc.Table(
        doc.columns("measure", "plain file", result.winner.name, "ratio"),
        rows,
        name="winner",
        heading=f"Plain file and {result.winner.name}",
    )


def _list_figures(result: TuneResult) -> Iterator[doc.Figure]:
    winner, tuned = result.winner, result.won
    if result.verdict.is_undecided:
        yield doc.Figure("verdict", "undecided", result.verdict.words.removeprefix("undecided: "))
    else:
        yield doc.Figure("winner", winner.name, tuned.candidate.words)
    if tuned.latency is not None and not (winner.ratio_to_plain and winner.ratio_to_plain.is_slowed):
        ends = _time_text(tuned.latency).partition(" ")[2]
        interval = f"median, 95 % interval {ends}" if ends else "median"
        yield doc.Figure("latency", f"{time_words(tuned.latency.p50_ms)} ms", interval)
    if winner.ratio_to_plain is not None and not winner.ratio_to_plain.is_disturbed:
        ratio = winner.ratio_to_plain.value
        meaning = f"{ratio:.2f} of the latency of the plain file"
        yield doc.Figure("speedup", f"{1 / ratio:.2f} ×" if ratio > 0 else "–", meaning)
    if winner.size_bytes is not None:
        plain_facts = next((tuned.facts for tuned in result.candidates if tuned.candidate.kind == "plain"), None)
        plain_words = f"; the plain file: {size_words(plain_facts.size_bytes)}" if plain_facts is not None else ""
        yield doc.Figure("size", size_words(winner.size_bytes), f"model and data{plain_words}")
    if winner.sqnr_db is not None:
        minimum = result.limits["min_sqnr_db"]
        meaning = "of the worst output" if minimum is None else f"of the worst output; the minimum is {minimum:g} dB"
        yield doc.Figure("SQNR", sqnr_words(winner.sqnr_db), meaning)
    statuses = Counter(_status_words(tuned, result) for tuned in result.candidates)
    status_words = ", ".join(f"{count} {status}" for status, count in statuses.items())
    yield doc.Figure("candidates", str(len(result.candidates)), status_words)


def _list_fields(result: TuneResult) -> Iterator[doc.Field]:
    winner = result.winner
    question = f" ({result.verdict.question})" if result.verdict.is_no else ""
    yield "verdict", f"{result.verdict.words}{question}"
    yield "best so far" if result.verdict.is_undecided else "winner", f"{winner.name}: {result.won.candidate.words}"
    yield "folder", winner.folder
    yield "again", winner.build_command
    if winner.perf_command is not None:
        yield "measure", winner.perf_command
    yield "view", winner.view_command
    if result.target == "size" or any(tuned.latency is not None for tuned in result.candidates):
        yield "target", result.target
    yield "limit", _quality_limit_words(result)
    yield "inputs", ", ".join(f"{name} {list(shape)}" for name, shape in result.measured_shapes.items()) or "none"
    yield "machine", _machine_words(result)
    if result.resumed:
        yield "resumed", f"{result.resumed} candidates had been measured before"
    yield from doc.note_fields(result.notes)


def _quality_limit_words(result: TuneResult) -> str:
    minimum, drops = result.limits["min_sqnr_db"], result.limits["max_drop"]
    limits = [] if minimum is None else [f"an SQNR of at least {minimum:g} dB relative to the plain file"]
    agreement = result.limits["min_agreement"]
    if agreement is not None:
        on_samples = "" if result.limits["dataset"] is None else f" on {result.limits['dataset']}"
        share = percent_words(agreement)
        limits.append(
            f"top-1 agreement of at least {share}{on_samples}; for outputs without scores, the minimum SQNR of the "
            "precision"
        )
    limits += [
        f"{name} drops by at most {drop_words(drop)} on {result.limits['dataset']}" for name, drop in drops.items()
    ]
    if result.limits["max_peak_bytes"] is not None:
        limits.append(f"a peak memory of at most {size_words(result.limits['max_peak_bytes'])}")
    return " and ".join(limits)


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
        key=lambda tuned: (tuned.status != "won", not tuned.is_on_front, tuned.latency is None, _latency_ratio(tuned)),
    )


def _table_row(tuned: TunedCandidate, metrics: Sequence[str], result: TuneResult) -> list[doc.Cell]:
    """Return the cells of a candidate, in the order of the columns; ``metrics``: names of the last score columns."""
    facts, latency = tuned.facts, tuned.latency
    return [
        tuned.candidate.name,
        *(
            (None, None)
            if latency is None
            else (
                doc.Number(latency.p50_ms, _time_text(latency)),
                doc.Number(_latency_ratio(tuned), _ratio_words(tuned)),
            )
        ),
        *(
            (None,) * 4
            if facts is None
            else (facts.size_bytes, facts.memory_bytes, facts.session_creation_ms, facts.sqnr_db)
        ),
        *(None if facts is None else facts.scores.get(name) for name in metrics),
        "yes" if tuned.is_on_front else "",
        _outcome_words(tuned, result),
        tuned.candidate.words,
    ]


def _outcome_words(item: TunedCandidate, result: TuneResult) -> str:
    """Describe the outcome of a candidate."""
    status = _status_words(item, result)
    return f"{status}: {item.reason}" if item.reason and item.status != "won" else status


def _status_words(item: TunedCandidate, result: TuneResult) -> str:
    """Describe the status of a candidate; an undecided tuning has no winner."""
    if item.status == "won" and result.verdict.is_undecided:
        return "best so far"
    return _STATUS_WORDS.get(item.status, item.status)


def _time_text(latency: MeasuredLatency) -> str:
    """Format a latency in milliseconds, and its interval in brackets if known."""
    return _interval_text(latency.p50_ms, latency.low_ms, latency.high_ms, time_words)


def _interval_text(
    value: float, low: float | None, high: float | None, describe: Callable[[float], str] = "{:.2f}".format
) -> str:
    """Format a value, and its interval in brackets if known."""
    return describe(value) if low is None or high is None else f"{describe(value)} [{describe(low)}, {describe(high)}]"


def _latency_ratio(tuned: TunedCandidate) -> float:
    """Return the ratio of the latency to the plain file; 1 for the plain file and for candidates without a latency."""
    return 1.0 if tuned.latency is None or tuned.latency.ratio is None else tuned.latency.ratio.value


def _ratio_words(tuned: TunedCandidate) -> str:
    ratio = None if tuned.latency is None else tuned.latency.ratio
    return "1" if ratio is None else _interval_text(ratio.value, ratio.low, ratio.high)


def _chart_dot(tuned: TunedCandidate) -> doc.Dot:
    """Return the chart row of a timed candidate: no bar without an SQNR, and a limited bar length."""
    latency, facts = tuned.latency, tuned.facts
    assert latency is not None  # only timed candidates are drawn
    assert facts is not None
    milliseconds = _time_text(latency)
    return doc.Dot(
        tuned.candidate.name,
        _GRADES.get(tuned.status, "bad"),
        value=_latency_ratio(tuned),
        low=None if latency.ratio is None else latency.ratio.low,
        high=None if latency.ratio is None else latency.ratio.high,
        size=facts.size_bytes,
        bar=0.0 if facts.sqnr_db is None else min(facts.sqnr_db, _MAX_BAR_DB),
        value_words=_ratio_words(tuned),
        bar_words=doc.MISSING if facts.sqnr_db is None else decibel_words(facts.sqnr_db),
        lines=(
            tuned.candidate.words,
            f"{milliseconds} ms, {_latency_ratio(tuned):.2f} of the plain file",
            size_words(facts.size_bytes),
            _STATUS_WORDS.get(tuned.status, tuned.status),
        ),
    )
