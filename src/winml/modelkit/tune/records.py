"""Record of ``winml tune``: the fastest variant on one machine within a quality limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from winml.modelkit.compare.quality_minimum import PREDICTIONS
from winml.modelkit.progress import StepTiming
from winml.modelkit.records import Record, entry, json_value, recorded
from winml.modelkit.report.result import Result
from winml.modelkit.verdicts import Verdict

if TYPE_CHECKING:
    from winml.modelkit.profile.statistics import Ratio

SCHEMA_VERSION = 1
"""Version of the JSON format, specified in docs/reference/formats.md."""

TuneTarget = Literal["latency", "size", "throughput"]
CandidateKind = Literal[
    "plain", "level", "dynamic", "qdq", "weight-only", "float", "provider", "placement", "threads", "fixed", "compile"
]  # fmt: skip
KINDS: tuple[CandidateKind, ...] = tuple(kind for kind in get_args(CandidateKind) if kind != "plain")
CandidateStatus = Literal["won", "right", "slower", "wrong", "failed", "not needed", "not tried"]


class Candidate(Record):
    """One variant of the model, with the settings to run it."""

    name: str
    kind: CandidateKind
    words: str
    """Description of the candidate."""
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Sections of the build config that builds it, as JSON values."""
    part_of: str = field(default="", metadata=entry(before="sections", null_if_empty=True))
    """Name of the fully quantized candidate of which some modules stay in float; empty if none do."""
    ep: str | None = field(default=None, metadata=entry(within="run"))
    """Execution provider that runs it; None: CPUExecutionProvider."""
    ep_options: Mapping[str, str] = field(default_factory=dict, metadata=entry(within="run"))
    """Options of the provider."""
    threads: int | None = field(default=None, metadata=entry(within="run"))
    """Threads per operator (intra-op); None: the default of ONNX Runtime."""
    callers: int = field(default=1, metadata=entry(within="run"))
    """Number of parallel runs."""
    fixed_sizes: Mapping[str, int] = field(default_factory=dict, metadata=entry(before="ep"))
    """Dynamic dimensions that its file fixes, by name; empty: none."""


class CandidateFacts(Record):
    """Measurements that are taken once per candidate, in a separate process."""

    size_bytes: int
    """Size of the model file and its data files."""
    session_creation_ms: float
    session_bytes: int
    """Growth of resident memory while the session was created."""
    run_bytes: int
    """Growth during the first runs."""
    peak_bytes: int
    """Largest resident memory of the process."""
    first_run_ms: float
    sqnr_db: float | None
    """SQNR of the worst output relative to the plain export; None if they cannot be compared."""
    output: str = ""
    """Name of the worst output."""
    lower_sqnr_db: float | None = None
    """Lower end of the interval of the SQNR over the samples; compared with the limit."""
    problem: str = ""
    """Why the outputs cannot be compared."""
    quality: Mapping[str, Any] = field(default_factory=dict)
    """Quality relative to the plain export."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Metric → its value on the dataset."""
    is_higher_better: Mapping[str, bool] = field(default_factory=dict)
    """Metric → True if higher is better."""
    drops: Mapping[str, float] = field(default_factory=dict)
    """Metric → its drop from the plain export, on the same samples."""
    least_drops: Mapping[str, float] = field(default_factory=dict)
    """Metric → smallest drop that the samples resolve; without metrics of which each sample has a part."""

    @property
    def prediction_agreement(self) -> float | None:
        """Share of equal predictions of the worst output; None for an output without scores of classes or tokens."""
        outputs = self.quality.get("outputs", {})
        value: float | None = outputs.get(self.output, {}).get("top1_agreement")
        return value if self.output == PREDICTIONS else None

    @property
    def memory_bytes(self) -> int:
        """Memory of the session and its runs."""
        return self.session_bytes + self.run_bytes


class MeasuredLatency(Record, digits=6):
    """Latency of one run: the median over the turns of a race, with its interval."""

    p50_ms: float = field(metadata=entry("p50"))
    low_ms: float | None = field(metadata=entry("low"))
    """None if there are too few turns for an interval."""
    high_ms: float | None = field(metadata=entry("high"))
    ratio: Ratio | None = field(metadata=entry("ratio_to_plain"))
    """Ratio to the latency of the plain export, from the same turns; None for the plain export itself."""
    turns: int
    race: str
    """The race in which it was measured: ``forms``, ``right`` or ``variations``."""


@dataclass(frozen=True)
class TunedCandidate:
    """One candidate with its measurements and outcome."""

    candidate: Candidate
    status: CandidateStatus
    reason: str = ""
    """Why it did not win."""
    facts: CandidateFacts | None = None
    """None if it was not built."""
    latency: MeasuredLatency | None = None
    """None if it was not timed."""
    samples_per_s: float | None = None
    is_on_front: bool = False
    """True if Pareto-optimal in latency, size and SQNR among the candidates that run."""
    ratio_to_winner: Ratio | None = None
    """Ratio to the latency of the winner, from the race that decided between them; None if none did."""

    def as_record(self) -> dict[str, object]:
        """Return its entry of ``candidates``."""
        candidate = self.candidate.as_record()
        facts: dict[str, Any] = {} if self.facts is None else self.facts.as_record()
        memory = {key: facts[key] for key in ("session_bytes", "run_bytes", "peak_bytes")} if facts else None
        return {
            **{key: candidate[key] for key in ("name", "kind", "words", "run")},
            "status": self.status,
            "reason": self.reason or None,
            "is_on_front": self.is_on_front,
            "latency_ms": json_value(self.latency),
            "ratio_to_winner": json_value(self.ratio_to_winner),
            "samples_per_s": json_value(self.samples_per_s, 3),
            "size_bytes": facts.get("size_bytes"),
            "sqnr_db": json_value(facts.get("sqnr_db"), 3),
            "output": facts.get("output") or None,
            "quality": facts.get("quality") or None,
            "scores": facts.get("scores", {}),
            "drops": facts.get("drops", {}),
            "session_creation_ms": json_value(facts.get("session_creation_ms"), 3),
            "memory": memory,
        }


class Winner(Record):
    """The winner: its folder, the config that builds it again, and the settings to run it."""

    name: str
    folder: str
    """Its build folder."""
    config: str
    """Its config, for ``winml build -c``."""
    words: str
    """Why it won."""
    build_command: str
    perf_command: str | None
    """None for parallel runs, which ``winml perf`` does not support."""
    is_within_noise: bool
    """True if another candidate was faster within the noise, so that the simpler candidate won."""
    ratio_to_plain: Ratio | None = None
    """Ratio to the latency of the plain export; None if the plain export won, or nothing was timed."""
    sqnr_db: float | None = field(default=None, metadata=entry(digits=3))
    """SQNR of its worst output relative to the plain export."""
    size_bytes: int | None = None
    """Size of the model file and its data files."""
    fastest: str | None = None
    """The candidate that was faster (or smaller) within the noise; None if the winner is the best."""
    fastest_to_winner: Ratio | None = None
    """Ratio of its latency to that of the winner."""
    view_command: str = field(default="", metadata=entry(before="is_within_noise"))
    """Shows the winner beside the plain file."""


class TuneResult(
    Result, Record, schema_version=SCHEMA_VERSION, document="tune.table:tuning_document", rows="candidates"
):
    """The result of a tuning."""

    model: str
    """The model, as passed by the user."""
    tool_version: str
    onnxruntime_version: str
    target: TuneTarget
    limits: Mapping[str, Any]
    """Limits: ``min_sqnr_db``, ``max_drop``, ``dataset`` and ``max_peak_bytes``."""
    machine: Mapping[str, Any]
    """Cores, instruction sets, providers and versions that the plan depends on."""
    measured_shapes: Mapping[str, Sequence[int]]
    """Input → its shape in all runs."""
    batch_size: int
    block: int
    """Consecutive runs of a candidate in one turn."""
    verdict: Verdict
    """Whether a candidate within the quality limit is better than the plain file; undecided: no candidate won."""
    winner: Winner
    """The best candidate so far if the verdict is undecided."""
    candidates: tuple[TunedCandidate, ...]
    """All candidates, in the order of the plan."""
    resumed: int
    """Number of candidates with measurements from an interrupted run."""
    steps: tuple[StepTiming, ...] = ()
    notes: tuple[str, ...] = ()

    def candidate(self, name: str) -> TunedCandidate:
        """Return the candidate with this name."""
        return next(tuned for tuned in self.candidates if tuned.candidate.name == name)

    @property
    def won(self) -> TunedCandidate:
        """The winner."""
        return self.candidate(self.winner.name)

    @recorded(entry(before="resumed"))
    def plan(self) -> tuple[Candidate, ...]:
        """Return the candidates in the order of the plan."""
        return tuple(tuned.candidate for tuned in self.candidates)


def on_front(rows: Sequence[tuple[float, float, float]]) -> list[bool]:
    """Return True for each Pareto-optimal row: no other row is at least as good everywhere and better somewhere.

    Args:
        rows: Latency (less is better), size (less is better), SQNR (more is better).

    >>> on_front([(2.0, 4.0, 200.0), (1.0, 1.0, 30.0), (1.5, 2.0, 20.0)])
    [True, True, False]
    """

    def is_beaten(row: tuple[float, float, float]) -> bool:
        return any(rival != row and rival[0] <= row[0] and rival[1] <= row[1] and rival[2] >= row[2] for rival in rows)

    return [not is_beaten(row) for row in rows]
