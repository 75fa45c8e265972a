"""Options of a tuning, declared once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from winml.modelkit.errors import UsageError, opt
from winml.modelkit.evaluate.declared_options import DataSetFields, declare_limits
from winml.modelkit.fields import CALIBRATION, DATASET, DEVICE, INPUTS, LIMITS, declare
from winml.modelkit.options import Drop
from winml.modelkit.ort.execution_providers import parse_ep_options
from winml.modelkit.tune.records import KINDS, CandidateKind, TuneTarget

_SEARCH = "Search"


def parse_kinds(texts: tuple[str, ...]) -> tuple[CandidateKind, ...]:
    """Parse kinds of candidates, separated by commas in each text.

    Raises:
        UsageError: there is no such kind.

    >>> parse_kinds(("dynamic,qdq", "level"))
    ('dynamic', 'qdq', 'level')
    """
    from winml.modelkit.options import nearest

    kinds: dict[CandidateKind, None] = {}
    for kind_name in (part.strip() for text in texts for part in text.split(",")):
        kind = next((kind for kind in KINDS if kind == kind_name), None)
        if kind is None:
            guess = nearest(kind_name, KINDS)
            raise UsageError(
                f"{opt.only} {kind_name!r}: no such kind of candidate",
                hint=f"{f'Did you mean {guess}? ' if guess else ''}Kinds: {', '.join(KINDS)}.",
            )
        kinds[kind] = None
    return tuple(kinds)


@dataclass(frozen=True, kw_only=True)
class TuneFields(DataSetFields):
    """The options of a tuning."""

    target: TuneTarget = declare("latency", _SEARCH, is_common=True)
    """What to optimize for. `latency` of one run, `size` of the file, or `throughput`: samples per second with parallel
    runs."""
    min_sqnr_db: float | None = declare(
        None,
        LIMITS,
        spelling="--min-sqnr",
        metavar="DB",
        default_words="that of `winml quantize`: top-1 agreement of 85 %, else by precision; none with `max_drop`",
        is_common=True,
    )
    """Minimum SQNR (dB) of every output. SQNR: signal-to-quantization-noise ratio to the unoptimized model."""
    max_drop: dict[str, Drop] = declare_limits("max_drop", is_common=True)
    """Maximum drop of a task metric on `dataset` from the unoptimized model, such as accuracy=0.01 (absolute) or
    accuracy=1% (relative)."""
    max_peak: str | None = declare(None, LIMITS, metavar="SIZE", min_length=1, default_words="unlimited")
    """Maximum peak memory of a process that opens the file and runs it, such as 500MB. A candidate above it cannot
    win."""
    dataset: str | None = declare(None, DATASET, metavar="PATH|NAME", min_length=1, is_common=True)
    """Dataset to evaluate candidates on: their outputs, or with `max_drop` a task metric. A file, a folder, or a
    name on the Hub."""
    ep: str | None = declare(
        None, DEVICE, metavar="NAME", min_length=1, default_words="all installed ones", is_common=True
    )
    """Execution provider to tune for. Candidates are made for it and run on it. Modules that quantization slows down
    there remain float."""
    ep_options: dict[str, str] = declare({}, DEVICE, metavar="KEY=VALUE", is_repeatable=True, read=parse_ep_options)
    """Option of the execution provider `ep`."""
    budget_minutes: float | None = declare(
        None, _SEARCH, spelling="--budget", above=0, metavar="MINUTES", default_words="unlimited", is_common=True
    )
    """Start no new candidate after this many minutes."""
    only: tuple[CandidateKind, ...] = declare(
        (),
        _SEARCH,
        text=f"Kinds of candidates to try. Separated by commas: {', '.join(KINDS)}.",
        metavar="KIND",
        read=parse_kinds,
        default_words="all",
        is_common=True,
    )
    calibration_data: str | None = declare(
        None, CALIBRATION, metavar="PATH|NAME", min_length=1, default_words="random values"
    )
    """Calibration samples for the activation ranges of `qdq`: arrays or a dataset."""
    input_data: Path | None = declare(None, INPUTS, metavar="FILE", default_words="random values")
    """Inputs to run on: an .npz file with one array per input."""
