"""Prints what a tuning found in a terminal: the winner, and the table of all candidates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console

from winml.modelkit.compare.words import decibel_words
from winml.modelkit.report.terminal import TextTable, print_rows
from winml.modelkit.results.tuning import Candidate, TunedCandidate, TuneResult
from winml.modelkit.words import size_words

__all__ = [
    "latency_cell",
    "limited_metrics",
    "print_tuning",
    "print_tuning_plan",
    "ratio_cell",
    "table_order",
    "tuning_facts",
]

NUMBERS = ("latency ms", "of plain", "size", "memory", "session ms", "SQNR dB")
"""Columns of every answer that hold numbers; behind them stand the metrics that are limited."""


def print_tuning(result: TuneResult, console: Console) -> None:
    """Print the winner, and every candidate, in :func:`table_order`."""
    print_rows(tuning_facts(result), console)
    metrics = limited_metrics(result)
    columns = ("candidate", *NUMBERS, *metrics, "Pareto", "outcome")
    table = TextTable(columns, numbers=frozenset(range(1, len(columns) - 2)))
    for item in table_order(result):
        table.add(*_cells(item, metrics))
    console.print()
    table.print(console)


def print_tuning_plan(plan: Sequence[Candidate], console: Console) -> None:
    """Print what a tuning will try, in the order of preference."""
    table = TextTable(("candidate", "kind", "what it is"))
    for candidate in plan:
        table.add(candidate.name, candidate.kind, candidate.words)
    table.print(console)
    console.print(
        "Then, of the winner: levels below its precision, numbers of threads, fixed sizes, and a compiled file."
    )


def tuning_facts(result: TuneResult) -> Iterator[tuple[str, str]]:
    """Yield what is told of the winner and of the whole, a heading and a text each."""
    winner = result.winner
    yield "winner", f"{winner.name}: {result.won.candidate.words}"
    yield "why", winner.words
    yield "folder", winner.folder
    yield "again", winner.build_command
    if winner.perf_command is not None:
        yield "measure", winner.perf_command
    yield "target", f"{result.target}, right means {_limit_words(result)}"
    yield "inputs", ", ".join(f"{name} {list(shape)}" for name, shape in result.measured_shapes.items()) or "none"
    yield "machine", _machine_words(result)
    if result.resumed:
        yield "resumed", f"{result.resumed} candidates had been measured before"
    for note in result.notes:
        yield "note", note


def table_order(result: TuneResult) -> list[TunedCandidate]:
    """Return the candidates: the winner, then those that no other beats, then the others; each group by latency.

    Those that were not timed are last.
    """

    def place(item: TunedCandidate) -> tuple[bool, bool, bool, float]:
        ratio = item.latency.ratio.value if item.latency is not None and item.latency.ratio is not None else 1.0
        return item.status != "won", not item.is_on_front, item.latency is None, ratio

    return sorted(result.candidates, key=place)


def limited_metrics(result: TuneResult) -> tuple[str, ...]:
    """Return the metrics of the task that a candidate is judged by."""
    return tuple(result.limits["max_drop"])


def ratio_cell(item: TunedCandidate) -> str:
    """Return the time over that of the plain file, with its interval."""
    latency = item.latency
    if latency is None:
        return "–"
    ratio = latency.ratio
    if ratio is None:
        return "1"
    ends = f" [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio.low is not None and ratio.high is not None else ""
    return f"{ratio.value:.2f}{ends}"


def latency_cell(item: TunedCandidate) -> str:
    """Return the latency, with its interval."""
    latency = item.latency
    if latency is None:
        return "–"
    ends = ""
    if latency.low_ms is not None and latency.high_ms is not None:
        ends = f" [{latency.low_ms:.2f}, {latency.high_ms:.2f}]"
    return f"{latency.p50_ms:.2f}{ends}"


def _cells(item: TunedCandidate, metrics: Sequence[str]) -> tuple[str, ...]:
    facts = item.facts
    measured = ("–",) * 4
    if facts is not None:
        measured = (
            size_words(facts.size_bytes),
            size_words(facts.memory_bytes),
            f"{facts.session_creation_ms:.0f}",
            "–" if facts.sqnr_db is None else decibel_words(facts.sqnr_db),
        )
    scores = {} if facts is None else facts.scores
    reached = tuple(f"{scores[name]:.4f}" if name in scores else "–" for name in metrics)
    outcome = item.status if item.status == "won" or not item.reason else f"{item.status}: {item.reason}"
    front = "yes" if item.is_on_front else ""
    return (item.candidate.name, latency_cell(item), ratio_cell(item), *measured, *reached, front, outcome)


def _limit_words(result: TuneResult) -> str:
    least, drops = result.limits["min_sqnr_db"], result.limits["max_drop"]
    words = [] if least is None else [f"an SQNR of {least:g} dB beside the plain file"]
    words += [f"{name} drops by at most {most:g} on {result.limits['dataset']}" for name, most in drops.items()]
    return " and ".join(words)


def _machine_words(result: TuneResult) -> str:
    machine = result.machine
    cores = f"{machine['cores']} {'core' if machine['cores'] == 1 else 'cores'}"
    providers = ", ".join(machine["providers"])
    return f"{machine['processor']}, {cores}, ONNX Runtime {result.onnxruntime_version} with {providers}"
