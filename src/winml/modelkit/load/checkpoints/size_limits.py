"""Refuses configs with sizes that no model has.

Configs are looked at before anything is built from them: a wrong number would otherwise make a library build layers
until the memory is full. Goes by the names of the keys; what a class itself refuses is found out when it is built.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from winml.modelkit.errors import CheckpointError

__all__ = ["refuse_absurd_sizes"]

_REPEATED = re.compile(r"^(n_?|num_)?(\w+_)?(layers?|blocks?|stages|depths?)$")
"""Keys that say how many modules are built one after another."""
_SIZES = re.compile(
    r"(_size|_dim|_heads|_positions|_embeddings|_channels|_labels|_experts)$|^(d_\w+|n_\w+|dim|num_\w+)$"
)
"""Keys that say how large a tensor is, or how many of something there are."""
_NEVER_NEGATIVE = re.compile(
    r"^((hidden|intermediate|vocab|patch)_size|(num_|encoder_|decoder_)?(hidden_)?layers|n_layers?|n_embd|d_model|dim"
    r"|(num_)?(attention_)?heads|n_heads?)$"
)
"""Keys without a use of -1; others have one, such as the layer whose output is taken."""

_LONGEST_STACK = 10_000
"""Chosen: a hundred times the layers of the deepest models known; even so many take seconds to build."""
_LARGEST_SIZE = 10**9
"""Chosen: a hundred times the longest context known, a thousand times the largest vocabulary."""
_MOST_LABELS = 10**6
"""Chosen: transformers makes a name for each of them."""


def refuse_absurd_sizes(content: Mapping[str, Any], path: Path) -> None:
    """Refuse a config that names sizes no model has.

    Args:
        content: The config, as read.
        path: Where it was read from, for messages.

    Raises:
        CheckpointError: names the key, its value and the limit.
    """
    for name, key, value in _named_numbers(content):
        limit = _largest_value(key)
        if value > limit:
            raise _size_error(path, name, value, f"expected at most {limit:_}")
        if value < 0 and _NEVER_NEGATIVE.match(key):
            raise _size_error(path, name, value, "expected no negative number")


def _largest_value(key: str) -> float:
    if _REPEATED.search(key):
        return _LONGEST_STACK
    if key == "num_labels":
        return _MOST_LABELS
    return _LARGEST_SIZE if _SIZES.search(key) else float("inf")


def _size_error(path: Path, name: str, value: int, expected: str) -> CheckpointError:
    shown = str(value) if abs(value) < 10**15 else f"{float(value):.0e}" if abs(value) < 10**300 else "far too large"
    return CheckpointError(f"{path}: {name} is {shown}, {expected}", hint="Mend the value, or fetch the config again.")


def _named_numbers(content: Mapping[str, Any]) -> Iterator[tuple[str, str, int]]:
    """Yield every integer with its dotted name and its key; a list counts as the sum of its numbers."""
    waiting: list[tuple[str, Mapping[str, Any]]] = [("", content)]
    while waiting:
        prefix, part = waiting.pop()
        for key, value in part.items():
            if isinstance(value, dict):
                waiting.append((f"{prefix}{key}.", value))
            elif isinstance(value, list) and value and all(_is_number(entry) for entry in value):
                yield f"{prefix}{key}", key, sum(value) if min(value) >= 0 else min(value)
            elif _is_number(value):
                yield f"{prefix}{key}", key, value


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
