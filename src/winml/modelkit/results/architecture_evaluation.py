"""What is known of each model type, and how is it kept between runs?

Plain records in one JSON file, written anew after each export so that an interruption loses nothing finished. Imports
no library that is slow to import.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

__all__ = ["AUTO", "EXPORTERS", "Architecture", "Attempt", "Evaluation", "ExporterWish", "State", "count_states"]

ExporterWish = Literal["auto", "torchscript", "dynamo"]
AUTO: ExporterWish = "auto"
EXPORTERS: tuple[ExporterWish, ...] = get_args(ExporterWish)

State = Literal["exported", "failed", "not built", "not run"]
"""``not built``: no small config makes a model. ``not run``: none takes the inputs that were decided, in PyTorch."""


@dataclass(frozen=True)
class Attempt:
    """One export by one exporter."""

    is_verified: bool
    """Written, compared with PyTorch, and every tag in order."""
    exporter: str = ""
    """The exporter that made the graph; what ``auto`` chose."""
    problem: str = ""
    """First line of the reason it failed."""
    exit_code: int = 0
    """What ``winml export`` would have ended with; negative where the process was stopped."""
    module: str = ""
    operator: str = ""
    step: str = ""
    """Step of the export in which it failed."""
    note: str = ""
    """Why ``auto`` chose as it did."""
    nodes: int = 0
    coverage_percent: float = 0.0
    tags: tuple[str, ...] = ()
    """The set of tags in the file, sorted."""
    relative_diff: float = 0.0
    """Largest difference from PyTorch, relative to the size of that output."""
    seconds: float = 0.0
    peak_bytes: int = 0


@dataclass(frozen=True)
class Architecture:
    """Everything known of one model type."""

    model_type: str
    class_name: str = ""
    parameters: int = 0
    kept_large: tuple[str, ...] = ()
    """Aspects of the default config that could not be made small."""
    inputs: tuple[str, ...] = ()
    state_before: Literal["", "not built", "not run"] = ""
    """Why there was nothing to export; empty where PyTorch ran the model."""
    problem: str = ""
    """The reason of ``state_before``."""
    attempts: Mapping[str, Attempt] = field(default_factory=dict)
    """Exporter that was asked for → what came of it."""

    @property
    def is_attempted(self) -> bool:
        """Whether PyTorch ran the model, so that it counts."""
        return not self.state_before

    def state(self, exporter: str = AUTO) -> State | None:
        """Return what came of an exporter; None where it was not asked."""
        if self.state_before:
            return self.state_before
        attempt = self.attempts.get(exporter)
        if attempt is None:
            return None
        return "exported" if attempt.is_verified else "failed"

    def tags_differ(self) -> bool:
        """Whether exporters that both worked give different sets of tags."""
        return len({attempt.tags for attempt in self.attempts.values() if attempt.is_verified}) > 1

    def with_attempt(self, exporter: str, attempt: Attempt) -> Architecture:
        """Return the same with one more attempt."""
        return replace(self, attempts={**self.attempts, exporter: attempt})


@dataclass
class Evaluation:
    """All model types of one output folder, in the file that keeps them."""

    path: Path
    versions: Mapping[str, str] = field(default_factory=dict)
    """Library → version it was made with."""
    bounds: Mapping[str, float] = field(default_factory=dict)
    """``seconds`` and ``gigabytes`` one export may take."""
    architectures: dict[str, Architecture] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> Evaluation:
        """Read what earlier runs left, or begin."""
        if not path.is_file():
            return cls(path)
        content = json.loads(path.read_text(encoding="utf-8"))
        read = [_architecture(entry) for entry in content["architectures"]]
        return cls(path, content["versions"], content["bounds"], {item.model_type: item for item in read})

    def save(self) -> None:
        """Write everything, whole or not at all."""
        ordered = sorted(self.architectures.values(), key=lambda item: item.model_type)
        content = {
            "versions": dict(self.versions),
            "bounds": dict(self.bounds),
            "architectures": [asdict(item) for item in ordered],
        }
        waiting = self.path.with_name(f".{self.path.name}.part")
        waiting.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(waiting, self.path)  # noqa: PTH105 - Path.replace says the same, less plainly

    def missing(self, model_types: Sequence[str], exporter: str, *, retry_failed: bool) -> list[str]:
        """Return the model types an exporter has still to be asked for."""
        again: set[State | None] = {None, "failed", "not built", "not run"} if retry_failed else {None}
        known = self.architectures
        return [name for name in model_types if name not in known or known[name].state(exporter) in again]


def count_states(architectures: Sequence[Architecture], exporter: str = AUTO) -> Counter[str]:
    """Count what came of an exporter; a model type it was not asked for is not counted."""
    return Counter(state for item in architectures if (state := item.state(exporter)) is not None)


def _architecture(entry: dict[str, Any]) -> Architecture:
    attempts = {
        name: Attempt(**{**attempt, "tags": tuple(attempt["tags"])}) for name, attempt in entry["attempts"].items()
    }
    lists = {key: tuple(entry[key]) for key in ("kept_large", "inputs")}
    return Architecture(**{**entry, **lists, "attempts": attempts})
