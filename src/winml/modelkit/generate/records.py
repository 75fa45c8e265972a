"""The records of ``winml run`` and ``winml generate``: inputs and outputs of a model, and generated texts."""

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


@dataclass(frozen=True)
class TokenDifference(Record):
    """The first place at which two texts have different tokens."""

    index: int
    """Tokens of the answer before it."""
    token: int | None
    """What ONNX Runtime's answer has there; None where it ended before."""
    text: str
    reference_token: int | None
    reference_text: str
    reference_margin: float | None
    """How much lower PyTorch scores ``token`` than its own; small where the two are about equally likely."""


@dataclass(frozen=True)
class ReferenceText(Record):
    """What PyTorch writes after the same prompt."""

    model: str
    tokens: tuple[int, ...]
    text: str
    difference: TokenDifference | None
    """None where all tokens are equal."""
    equal_tokens: int
    """Number of positions at which both texts have the same token."""
    is_of_quantized: bool
    """True if winml quantized the graph: different tokens are then expected."""


@dataclass(frozen=True)
class GeneratedText(Record, schema_version=1):
    """What a model wrote after a prompt."""

    model: str
    prompt: str
    """As it was encoded: with ``--chat``, what the chat template made of it."""
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    end: Literal["eos", "stop", "length"]
    """Why it ended: with an end token, by ``stop_strings`` or ``max_time`` of the files, or at its greatest length."""
    loop: Literal["winml", "transformers"]
    """Whose generation loop chose the tokens."""
    settings: Mapping[str, Any]
    session_ms: float
    """Time to open the model."""
    first_token_ms: float
    """Time from the prompt to the first token."""
    tokens_per_second: float | None
    """Of the tokens after the first; None where there are none."""
    cache_bytes: int | None
    """Memory the cache takes at the end; None without one."""
    notes: tuple[str, ...] = ()
    segments: tuple[Mapping[str, Any], ...] | None = None
    """What was said when in a recording, where that was asked for: ``start_s``, ``end_s``, ``text``."""
    reference: ReferenceText | None = None
    """None where PyTorch was not asked."""
