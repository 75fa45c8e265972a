"""How does the text of an encoder-decoder begin and end? What the files beside it say of its first and last tokens.

Positions are counted from the first token, which is given. Reads JSON: no model library is needed for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from winml.modelkit.errors import InputError
from winml.modelkit.file_names import CHECKPOINT_CONFIG_NAME, GENERATION_CONFIG_NAME
from winml.modelkit.inference.generation.settings import GenerationSettings, read_record, read_settings

__all__ = ["TextBeginning", "read_beginning"]

_READ_HERE = {
    "forced_bos_token_id", "forced_eos_token_id", "forced_decoder_ids", "suppress_tokens", "begin_suppress_tokens",
    "lang_to_id", "task_to_id", "no_timestamps_token_id", "is_multilingual", "alignment_heads", "median_filter_width",
    "max_initial_timestamp_index", "prev_sot_token_id", "return_timestamps", "language", "task",
}  # fmt: skip
"""Keys of ``generation_config.json`` about the first and the last tokens, or about times, of which none are told."""


@dataclass(frozen=True)
class TextBeginning:
    """What is known of a text before any token is chosen."""

    start: int
    """The first token."""
    allowed: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Position → the only tokens that may stand there."""
    last: int | None = None
    """The token at the greatest length; None: any."""
    suppressed: tuple[int, ...] = ()
    """Tokens that stand nowhere."""
    first_suppressed: tuple[int, ...] = ()
    """Tokens that are not the first that is chosen freely."""

    def scores(self, logits: NDArray[Any], position: int, *, is_last: bool) -> NDArray[Any]:
        """Return the scores of one step without the tokens that may not stand there.

        Args:
            logits: Of every token of the vocabulary.
            position: Where the token will stand.
            is_last: Whether the text may not become longer.
        """
        if (allowed := self._only(position, is_last=is_last)) is not None:
            kept = np.full_like(logits, -np.inf)
            kept[list(allowed)] = logits[list(allowed)]
            return kept
        first_free = next((place for place in range(1, position + 1) if place not in self.allowed), position)
        out = [*self.suppressed, *(self.first_suppressed if position == first_free else ())]
        if not out:
            return logits
        kept = logits.copy()
        kept[out] = -np.inf
        return kept

    def _only(self, position: int, *, is_last: bool) -> tuple[int, ...] | None:
        if is_last and self.last is not None:
            return (self.last,)
        return self.allowed.get(position)


def read_beginning(folder: Path) -> tuple[TextBeginning, GenerationSettings]:
    """Return how a text begins, and how it goes on, as the files in the folder of a model say.

    Raises:
        InputError: they do not say what it begins with, or are damaged.
    """
    settings = read_settings(folder)
    given = {key: value for key, value in read_record(folder / GENERATION_CONFIG_NAME).items() if value is not None}
    config = read_record(folder / CHECKPOINT_CONFIG_NAME)
    keys = ("decoder_start_token_id", "bos_token_id")
    found = (record.get(key) for key in keys for record in (given, config, config.get("decoder") or {}))
    start = next((value for value in found if isinstance(value, int)), None)
    if start is None:
        raise InputError(
            f"{folder}: nothing says which token a text begins with (decoder_start_token_id)",
            hint=f"Add it to {GENERATION_CONFIG_NAME}, or build the model again with its files beside it.",
        )
    beginning = TextBeginning(
        start,
        allowed=_allowed(given),
        last=_number(given, "forced_eos_token_id"),
        suppressed=tuple(given.get("suppress_tokens") or ()),
        first_suppressed=tuple(given.get("begin_suppress_tokens") or ()),
    )
    others = {key: value for key, value in (settings.for_transformers or {}).items() if key not in _READ_HERE}
    return beginning, replace(settings, for_transformers=others or None)


def _allowed(given: Mapping[str, Any]) -> dict[int, tuple[int, ...]]:
    """Return the tokens of the first positions, one by one or, for a language that nobody named, any of them."""
    allowed: dict[int, tuple[int, ...]] = {}
    if (first := _number(given, "forced_bos_token_id")) is not None:
        allowed[1] = (first,)
    languages = tuple((given.get("lang_to_id") or {}).values())
    for position, token in given.get("forced_decoder_ids") or ():
        if token is not None or languages:
            allowed[int(position)] = languages if token is None else (int(token),)
    without_times = _number(given, "no_timestamps_token_id")
    if without_times is not None and not given.get("return_timestamps") and (without_times,) not in allowed.values():
        allowed[max(allowed, default=0) + 1] = (without_times,)
    return allowed


def _number(given: Mapping[str, Any], key: str) -> int | None:
    value = given.get(key)
    return value if isinstance(value, int) else None
