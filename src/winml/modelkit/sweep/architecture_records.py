"""The records of the exports of many model types. Imports no library that is slow to import."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from winml.modelkit.records import Record

ExporterWish = Literal["auto", "torchscript", "dynamo"]
AUTO: ExporterWish = "auto"
EXPORTERS: tuple[ExporterWish, ...] = get_args(ExporterWish)

State = Literal["exported", "failed", "not built", "not run"]
"""``not built``: no small config makes a model. ``not run``: PyTorch cannot run the model on the resolved inputs."""


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

    @property
    def generates(self) -> bool:
        """Whether a text was generated with the cache of the graph, and is that of PyTorch."""
        return self.is_verified and bool(self.cache) and self.generated_tokens > 0


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

    def state(self, exporter: str = AUTO) -> State | None:
        """Return the state for a requested exporter; None where it was not requested."""
        if self.state_before:
            return self.state_before
        attempt = self.attempts.get(exporter)
        if attempt is None:
            return None
        return "exported" if attempt.is_verified else "failed"

    def tags_differ(self) -> bool:
        """Whether two successful exporters give different sets of tags."""
        return len({attempt.tags for attempt in self.attempts.values() if attempt.is_verified}) > 1

    def with_attempt(self, exporter: str, attempt: Attempt) -> Architecture:
        """Return a copy with one more attempt."""
        return replace(self, attempts={**self.attempts, exporter: attempt})


@dataclass(frozen=True)
class Evaluation:
    """All model types of one sweep."""

    versions: Mapping[str, str] = field(default_factory=dict)
    """Library → its version."""
    bounds: Mapping[str, float] = field(default_factory=dict)
    """``seconds`` and ``gigabytes`` that bound one export."""
    architectures: Mapping[str, Architecture] = field(default_factory=dict)


def count_states(architectures: Sequence[Architecture], exporter: str = AUTO) -> Counter[str]:
    """Count the states for an exporter; a model type it was not requested for is not counted."""
    return Counter(state for item in architectures if (state := item.state(exporter)) is not None)
