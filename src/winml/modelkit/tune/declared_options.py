"""What does a tuning look for, among what, and how right has it to be? Each option is declared here, once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from winml.modelkit.errors import UsageError
from winml.modelkit.evaluate.declared_options import DATA_SET, DataSetFields, declare_limits
from winml.modelkit.fields import INPUT, PROVIDER, declare
from winml.modelkit.results.tuning import KINDS, CandidateKind, TuneTarget
from winml.modelkit.runtime.execution_providers import parse_ep_options

__all__ = ["TuneFields", "parse_kinds"]

_SEARCH = "Search"


def parse_kinds(texts: tuple[str, ...]) -> tuple[CandidateKind, ...]:
    """Read the kinds of candidates, several of them in one text or in several.

    Raises:
        UsageError: there is no such kind.

    >>> parse_kinds(("dynamic,qdq", "level"))
    ('dynamic', 'qdq', 'level')
    """
    from winml.modelkit.options import nearest

    found: dict[CandidateKind, None] = {}
    for word in (part.strip() for text in texts for part in text.split(",")):
        kind = next((kind for kind in KINDS if kind == word), None)
        if kind is None:
            guess = nearest(word, KINDS)
            raise UsageError(
                f"--only {word!r}: there is no such kind of candidates",
                hint=f"{f'Did you mean {guess}? ' if guess else ''}Kinds: {', '.join(KINDS)}.",
            )
        found[kind] = None
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class TuneFields(DataSetFields):
    """The options of a tuning."""

    target: TuneTarget = declare(
        "latency",
        "What is to be best: `latency` of one run, `size` of the file, or `throughput`: samples in a second, with runs "
        "at a time.",
        _SEARCH,
    )
    min_sqnr_db: float | None = declare(
        None,
        "Signal-to-quantization-noise ratio in decibels that every output has to reach beside the plain file. 30 where "
        "left out, or none with `max_drop`.",
        _SEARCH,
        spelling="--min-sqnr",
        metavar="DB",
    )
    max_drop: dict[str, float] = declare_limits(
        "--max-drop",
        "Most by which a metric of the task may be worse than that of the plain file, on `dataset`.",
        _SEARCH,
    )
    dataset: str | None = declare(
        None,
        "Samples that `max_drop` is judged by: a file, a folder, or a name at the Hub.",
        DATA_SET,
        metavar="PATH|NAME",
        min_length=1,
    )
    ep: str | None = declare(
        None,
        "Execution provider the model is tuned for: every candidate is made for it and runs on it, and modules whose "
        "quantization costs time there stay in float. All that are installed where left out.",
        PROVIDER,
        metavar="NAME",
        min_length=1,
    )
    ep_options: dict[str, str] = declare(
        {},
        "Option of the provider of `ep`; repeatable.",
        PROVIDER,
        metavar="KEY=VALUE",
        is_repeatable=True,
        read=parse_ep_options,
    )
    budget_minutes: float | None = declare(
        None,
        "When this time is over, nothing new is begun. The whole plan where left out.",
        _SEARCH,
        spelling="--budget",
        above=0,
        metavar="MINUTES",
    )
    only: tuple[CandidateKind, ...] = declare(
        (),
        f"Kinds of candidates to try, of {', '.join(KINDS)}. All where left out.",
        _SEARCH,
        metavar="KIND",
        read=parse_kinds,
    )
    calibration_data: str | None = declare(
        None,
        "Where the ranges of activations come from, for `qdq`. Random values where left out.",
        INPUT,
        metavar="PATH|NAME",
        min_length=1,
    )
    input_data: Path | None = declare(
        None, "An .npz file with an array for each input, in place of random values.", INPUT, metavar="FILE"
    )
