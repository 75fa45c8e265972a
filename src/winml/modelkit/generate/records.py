"""The records of ``winml run``: inputs and outputs of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from winml.modelkit.onnx.specs import DynamicDimension
from winml.modelkit.records import Record, entry

AnswerKind = Literal[
    "labels", "entities", "spans", "boxes", "segments", "text", "similarity", "embedding", "depth", "tensors"
]


@dataclass(frozen=True)
class AnswerEntry(Record, digits=6):
    """One line of an answer; which fields it has follows from the kind of the answer."""

    input: str | None = field(default=None, metadata=entry(omit_none=True))
    """The text or file it answers, where the model was run once for each of several."""
    label: str | None = field(default=None, metadata=entry(omit_none=True))
    """Class, token, or name of a tensor."""
    score: float | None = field(default=None, metadata=entry(omit_none=True))
    """0 to 1; of a similarity, the cosine: -1 to 1."""
    text: str | None = field(default=None, metadata=entry(omit_none=True))
    start: int | None = field(default=None, metadata=entry(omit_none=True))
    """First character of the span."""
    end: int | None = field(default=None, metadata=entry(omit_none=True))
    """The character after its last."""
    box: tuple[float, float, float, float] | None = field(default=None, metadata=entry(omit_none=True))
    """Left, top, right, bottom, in pixels of the image."""
    share: float | None = field(default=None, metadata=entry(omit_none=True))
    """Share of the pixels of the image."""
    shape: tuple[int, ...] | None = field(default=None, metadata=entry(omit_none=True))
    dtype: str | None = field(default=None, metadata=entry(omit_none=True))
    minimum: float | None = field(default=None, metadata=entry(omit_none=True))
    maximum: float | None = field(default=None, metadata=entry(omit_none=True))
    values: tuple[float, ...] | None = field(default=None, metadata=entry(omit_none=True))
    """Of an embedding all values; of a tensor the first ones."""


@dataclass(frozen=True)
class ReferenceAnswer(Record):
    """What PyTorch answers on the same inputs."""

    model: str
    entries: tuple[AnswerEntry, ...]
    is_same: bool
    """Whether labels, texts and boxes are equal, and numbers differ by at most :attr:`tolerance`."""
    max_difference: float | None
    """Largest difference of scores; of arrays, relative to the largest value; of segments, a share of the pixels."""
    tolerance: float
    difference: str | None = None
    """The first thing that differs, in words."""


@dataclass(frozen=True)
class InferenceResult(Record, schema_version=1):
    """The answer of a model to one set of inputs."""

    model: str
    task: str | None
    """None where tensors were passed by name."""
    task_rule: str
    """What decided the task."""
    provider: str
    inputs: Mapping[str, Any]
    """Input → what was passed: a text, a file, or type and shape of a tensor."""
    kind: AnswerKind
    entries: tuple[AnswerEntry, ...]
    session_ms: float
    """Time to open the model."""
    run_ms: float
    """Time of one answer, with tokenizer or processor."""
    notes: tuple[str, ...] = ()
    saved: Path | None = None
    reference: ReferenceAnswer | None = None


@dataclass(frozen=True)
class SchemaInput(Record):
    """An input that a user gives."""

    name: str
    kind: str
    option: str
    is_required: bool
    is_repeatable: bool
    meaning: str


@dataclass(frozen=True)
class SchemaTensor(Record):
    """An input or output of a graph."""

    part: str
    name: str
    dtype: str
    shape: tuple[int | str | None, ...]


@dataclass(frozen=True)
class RunSchema(Record, schema_version=1):
    """What a model takes."""

    model: str
    task: str | None
    inputs: tuple[SchemaInput, ...]
    """What the task takes; empty where there is only the graph."""
    tensors: tuple[SchemaTensor, ...]
    outputs: tuple[SchemaTensor, ...]
    example: str
    """A command that runs it."""
    dimensions: tuple[DynamicDimension, ...] = ()
    """Dynamic dimensions that the graphs take some sizes of only."""
