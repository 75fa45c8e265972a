"""Records of ``winml sweep``: one row per cell, and the exports of many model types."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from winml.modelkit.records import Record, entry, recorded

SCHEMA_VERSION = 1
"""Version of the JSON format, specified in docs/reference/formats.md."""

CellState = Literal["done", "failed", "stopped"]
"""``stopped``: failed for a reason other than the model, such as a full disk. The cell runs again."""
Measure = float | int | str | bool | None


@dataclass(frozen=True)
class CellResult(Record):
    """One model in one configuration."""

    cell_id: str
    model: str
    """Model as named in the list."""
    settings: Mapping[str, Any]
    """Key of the config → value, for keys that differ between cells."""
    state: CellState
    measures: Mapping[str, Measure] = field(default_factory=dict)
    step: str = ""
    """Step that failed."""
    problem: str = ""
    """Reason, in one sentence."""
    exit_code: int = 0
    """Exit code of the verb of this step; negative if the process was killed."""
    seconds: float = field(default=0.0, metadata=entry(digits=3))
    peak_bytes: int = 0
    """Largest resident memory of the process and its child processes."""
    tries: int = 1
    """Number of tries; above 1 if a worker of a cluster was lost."""
    node: str = ""
    """Machine of a cluster that ran the cell."""
    artifacts: str = ""
    """Folder or URL of the built files and the log; empty if the files are not kept."""
    notes: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    """Further results of the steps."""


@dataclass(frozen=True)
class Attempt(Record):
    """One export by one exporter."""

    is_verified: bool
    """Whether the file was written, equals PyTorch, and has a valid tag on every node."""
    exporter: str = ""
    """The exporter that made the graph; for ``auto`` the one it chose."""
    problem: str = ""
    """First line of the reason of a failure."""
    exit_code: int = 0
    """Exit code of the same ``winml export``; negative where the process was stopped."""
    module: str = ""
    operator: str = ""
    step: str = ""
    """Step in which the export failed."""
    note: str = ""
    """Why ``auto`` chose this exporter."""
    nodes: int = 0
    coverage_percent: float = 0.0
    tags: tuple[str, ...] = ()
    """The set of tags in the file, sorted."""
    relative_diff: float = 0.0
    """Largest difference from PyTorch, relative to the size of that output."""
    cache: tuple[str, ...] = ()
    """Kinds of states the graph takes and returns, such as ``key`` and ``value``; empty without a cache."""
    generated_tokens: int = 0
    """Tokens of a text that PyTorch's ``generate()`` and the graph agree on."""
    remarks: tuple[str, ...] = ()
    """What the export said of the graph, one sentence each."""
    seconds: float = 0.0
    peak_bytes: int = 0


@dataclass(frozen=True)
class Architecture(Record):
    """One model type: its small model, and one attempt per requested exporter."""

    model_type: str
    class_name: str = ""
    parameters: int = 0
    retained_large: tuple[str, ...] = ()
    """Aspects of the default config that could not be made small."""
    inputs: tuple[str, ...] = ()
    keeps_cache: bool = False
    """Whether the graph is to take a cache."""
    state_before: Literal["", "not built", "not run"] = ""
    """Why nothing was exported; empty where PyTorch ran the model."""
    problem: str = ""
    """The reason of ``state_before``."""
    attempts: Mapping[str, Attempt] = field(default_factory=dict)
    """Requested exporter → its attempt."""

    @property
    def is_attempted(self) -> bool:
        """Whether PyTorch ran the model, so that its exports count."""
        return not self.state_before


@dataclass(frozen=True)
class SweepLimit(Record):
    """A limit of a measure in every cell, and the cells that miss it."""

    kind: Literal["min", "max"]
    measure: str
    limit: float
    missed: tuple[str, ...]
    """Ids of the cells beyond the limit, and of completed cells without the measure."""

    @property
    @recorded()
    def is_met(self) -> bool:
        """True if no cell misses the limit."""
        return not self.missed

    @classmethod
    def of(cls, kind: Literal["min", "max"], measure: str, limit: float, cells: Iterable[CellResult]) -> SweepLimit:
        """Check the measure of every completed cell against a limit."""
        return cls(kind, measure, limit, tuple(cell.cell_id for cell in cells if _misses(cell, kind, measure, limit)))


def _misses(cell: CellResult, kind: str, measure: str, limit: float) -> bool:
    if cell.state != "done":
        return False
    value = cell.measures.get(measure)
    if isinstance(value, str) or value is None or not math.isfinite(value):
        return True
    return value < limit if kind == "min" else value > limit


@dataclass(frozen=True)
class SweepResult(Record, schema_version=SCHEMA_VERSION):
    """Result of a sweep."""

    folder: str
    plan: Mapping[str, Any]
    """The plan, as JSON values."""
    cells: tuple[CellResult, ...] = field(metadata=entry(last=True))
    """Finished cells, in the order of the plan."""
    total: int = field(metadata=entry(skip=True))
    """Number of cells of the plan."""
    limits: tuple[SweepLimit, ...] = field(default=(), metadata=entry(before="cells"))
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    """Machine that wrote this table; cells of a cluster name their machine."""
    jobs: int = 1
    """Number of parallel processes; 0: the number of CPUs of the cluster."""
    bounds: Mapping[str, float] = field(default_factory=dict)
    """Limits ``seconds`` and ``memory_bytes`` of one cell."""
    reused: int = field(default=0, metadata=entry(skip=True))
    """Number of cells finished by an earlier run."""
    notes: tuple[str, ...] = field(default=(), metadata=entry(last=True))
    against: SweepResult | None = field(default=None, metadata=entry(skip=True))
    """An earlier sweep to compare with."""

    @property
    def failures(self) -> tuple[CellResult, ...]:
        """Failed cells, in the order of the plan."""
        return tuple(cell for cell in self.cells if cell.state == "failed")

    @property
    @recorded(entry(before="cells"))
    def is_good_enough(self) -> bool:
        """True if every limit is met."""
        return all(limit.is_met for limit in self.limits)

    @recorded(entry(before="limits"))
    def counts(self) -> dict[str, int]:
        """Return the number of cells of the plan, of cells finished by an earlier run, and of cells in each state."""
        states = Counter[str](cell.state for cell in self.cells)
        return {"total": self.total, "reused": self.reused, "done": 0, "failed": 0, **states}

    @recorded(entry(before="limits", keys=("cell_id", "step", "problem")))
    def first_failure(self) -> CellResult | None:
        """Return the first cell of the plan that failed."""
        return next(iter(self.failures), None)

    @recorded(entry("against", before="notes"))
    def changes(self) -> dict[str, object] | None:
        """Return the differences from the earlier sweep; None without an earlier sweep."""
        return None if self.against is None else {"folder": self.against.folder, "changes": self._changes()}

    def earlier(self, cell: CellResult) -> CellResult | None:
        """Return the cell of the same model and configuration in the earlier sweep; None if there is no such cell."""
        return self._earlier_by_id().get(cell.cell_id)

    def _earlier_by_id(self) -> dict[str, CellResult]:
        # The id is derived from the model and its whole configuration, including settings common to all cells.
        return {} if self.against is None else {cell.cell_id: cell for cell in self.against.cells}

    def _changes(self) -> list[dict[str, object]]:
        """Return the cells with changes of state or measures since the earlier sweep."""
        earlier = self._earlier_by_id()
        changes: list[dict[str, object]] = []
        for cell in self.cells:
            before = earlier.get(cell.cell_id)
            if before is None:
                continue
            measures = {
                name: {"before": before.measures.get(name), "after": value}
                for name, value in cell.measures.items()
                if before.measures.get(name) != value
            }
            if measures or before.state != cell.state:
                states = {"before": before.state, "after": cell.state}
                changes.append({"cell_id": cell.cell_id, "state": states, "measures": measures})
        return changes


def measure_names(cells: Iterable[CellResult]) -> tuple[str, ...]:
    """Return the names of all measures, in the order of their first cell."""
    return tuple(dict.fromkeys(name for cell in cells for name in cell.measures))


def settings_words(settings: Mapping[str, Any]) -> str:
    """Format a configuration on one line.

    >>> settings_words({"optim.level": "full", "export.opset_version": 17})
    'optim.level=full export.opset_version=17'
    """
    return " ".join(f"{key}={value}" for key, value in settings.items())


def sweep_summary(result: SweepResult) -> Iterator[tuple[str, str]]:
    """Yield the summary of a sweep as pairs of label and text."""
    done = sum(cell.state == "done" for cell in result.cells)
    reused = f", {result.reused} of them by an earlier run" if result.reused else ""
    yield "cells", f"{done} done, {len(result.failures)} failed, of {result.total}{reused}"
    for cell in result.failures[:1]:
        yield "first failure", f"{_cell_words(cell)}: {cell.step or 'start'}: {cell.problem}"
    by_id = {cell.cell_id: cell for cell in result.cells}
    for limit in result.limits:
        yield f"{limit.kind} {limit.measure}", _limit_words(limit, [by_id[cell_id] for cell_id in limit.missed])
    yield from (("note", note) for note in result.notes)


def _cell_words(cell: CellResult) -> str:
    return f"{cell.model} {settings_words(cell.settings)}".strip()


def _limit_words(limit: SweepLimit, missed: Sequence[CellResult]) -> str:
    if not missed:
        return f"{limit.limit:g} is met by all completed cells"
    value = missed[0].measures.get(limit.measure)
    displayed = f"{value:.6g}" if isinstance(value, (int, float)) else "not measured"
    return f"{limit.limit:g} is missed by {len(missed)}, first {_cell_words(missed[0])}: {displayed}"
