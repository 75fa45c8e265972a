"""Records of ``winml run`` and ``winml generate``: inputs and outputs of a model, and generated texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

from winml.modelkit.onnx.specs import DynamicDimension
from winml.modelkit.records import Record, entry
from winml.modelkit.report.result import Result

AnswerKind = Literal[
    "labels", "entities", "spans", "boxes", "segments", "text", "similarity", "embedding", "depth", "image",
    "audio", "tensors"
]  # fmt: skip


class AnswerEntry(Record, digits=6):
    """One entry of a result; its fields depend on the kind of the result."""

    input: str | None = field(default=None, metadata=entry(omit_none=True))
    """The text or file of the entry, if the model was run once per input."""
    label: str | None = field(default=None, metadata=entry(omit_none=True))
    """Class, token, or name of a tensor."""
    score: float | None = field(default=None, metadata=entry(omit_none=True))
    """0 to 1; for a similarity, the cosine: -1 to 1."""
    text: str | None = field(default=None, metadata=entry(omit_none=True))
    start: int | None = field(default=None, metadata=entry(omit_none=True))
    """First character of the span."""
    end: int | None = field(default=None, metadata=entry(omit_none=True))
    """The character after the last of the span."""
    box: tuple[float, float, float, float] | None = field(default=None, metadata=entry(omit_none=True))
    """Left, top, right, bottom, in pixels of the image."""
    share: float | None = field(default=None, metadata=entry(omit_none=True))
    """Share of the pixels of the image."""
    shape: tuple[int, ...] | None = field(default=None, metadata=entry(omit_none=True))
    dtype: str | None = field(default=None, metadata=entry(omit_none=True))
    minimum: float | None = field(default=None, metadata=entry(omit_none=True))
    maximum: float | None = field(default=None, metadata=entry(omit_none=True))
    values: tuple[float, ...] | None = field(default=None, metadata=entry(omit_none=True))
    """All values of an embedding; the first values of a tensor."""
    rate_hz: int | None = field(default=None, metadata=entry(omit_none=True))
    """Sampling rate of audio."""


class ReferenceAnswer(Record):
    """PyTorch's result for the same inputs."""

    model: str
    entries: tuple[AnswerEntry, ...]
    is_same: bool
    """True if labels, texts and boxes are equal, and numbers differ by at most :attr:`tolerance`."""
    max_difference: float | None
    """Largest difference of scores; of arrays, relative to the largest value; of segments, a share of the pixels."""
    tolerance: float
    difference: str | None = None
    """Description of the first difference."""


class InferenceResult(Result, Record, schema_version=1, document="generate.table:inference_document", rows="entries"):
    """Result of a model for one set of inputs."""

    model: str
    task: str | None
    """None if tensors were passed by name."""
    task_rule: str
    """Rule that determined the task."""
    provider: str
    inputs: Mapping[str, Any]
    """Input → passed value: a text, a file, or type and shape of a tensor."""
    kind: AnswerKind
    entries: tuple[AnswerEntry, ...]
    session_ms: float
    """Time to open the model."""
    run_ms: float
    """Time of one run, including tokenizer or processor."""
    notes: tuple[str, ...] = ()
    saved: Path | None = None
    reference: ReferenceAnswer | None = None
    simulated_on: str = field(default="", metadata=entry(omit_empty=True, before="inputs"))
    """Kind of device on which the provider simulates its device; empty without simulation."""


class SchemaInput(Record):
    """A user input."""

    name: str
    kind: str
    option: str
    is_required: bool
    is_repeatable: bool
    meaning: str


class SchemaTensor(Record):
    """An input or output of a graph."""

    part: str
    name: str
    dtype: str
    shape: tuple[int | str | None, ...]


class RunSchema(Record, schema_version=1):
    """Inputs of a model."""

    model: str
    task: str | None
    inputs: tuple[SchemaInput, ...]
    """Inputs of the task; ``()`` if only the graph is known."""
    tensors: tuple[SchemaTensor, ...]
    outputs: tuple[SchemaTensor, ...]
    example: str
    """A command that runs it; empty if it takes other inputs than tensors."""
    dimensions: tuple[DynamicDimension, ...] = ()
    """Dynamic dimensions with bounds in the graphs."""


class TokenDifference(Record):
    """First position with different tokens in two texts."""

    index: int
    """Number of earlier tokens of the answer."""
    token: int | None
    """ONNX Runtime's token at this position; None if its text ended before."""
    text: str
    reference_token: int | None
    reference_text: str
    reference_margin: float | None
    """Score difference in PyTorch between its token and ``token``; small if both are about equally likely."""


class ReferenceText(Record):
    """PyTorch's text after the same prompt."""

    model: str
    tokens: tuple[int, ...]
    text: str
    difference: TokenDifference | None
    """None if all tokens are equal."""
    equal_tokens: int
    """Number of positions at which both texts have the same token."""
    equal_share: float = field(metadata=entry(digits=4))
    """Their share of the positions of the longer text."""
    is_of_quantized: bool
    """True if the graph was quantized by winml: different tokens are then expected."""


class GeneratedText(Record, schema_version=1):
    """Text generated after a prompt."""

    model: str
    prompt: str
    """The tokenized text: with ``--chat``, rendered by the chat template."""
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    end: Literal["eos", "stop", "length"]
    """Reason for the end: an end token, ``stop_strings`` or ``max_time`` of the files, or the maximum length."""
    loop: Literal["winml", "transformers"]
    """Generation loop that chose the tokens."""
    settings: Mapping[str, Any]
    session_ms: float
    """Time to open the model."""
    first_token_ms: float
    """Time from the prompt to the first token."""
    tokens_per_second: float | None
    """Rate of the tokens after the first; None without further tokens."""
    cache_bytes: int | None
    """Memory of the cache at the end; None without a cache."""
    notes: tuple[str, ...] = ()
    segments: tuple[Mapping[str, Any], ...] | None = None
    """Timestamped segments of a recording, if requested: ``start_s``, ``end_s``, ``text``."""
    reference: ReferenceText | None = None
    """None without a comparison with PyTorch."""
    provider: str = field(default="", metadata=entry(before="session_ms"))
    """Execution provider."""
    simulated_on: str = field(default="", metadata=entry(omit_empty=True, before="session_ms"))
    """Kind of device on which the provider simulates its device; empty without simulation."""
