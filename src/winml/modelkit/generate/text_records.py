"""The record of a generated text, and of its comparison with PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from winml.modelkit.records import Record


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
