"""Refusal of configs with absurd numbers, before a library builds anything from them.

A wrong number would otherwise make a library build layers, name labels or resize images until the memory is full.
Judges by the names of the keys; other values are refused by the class that is built.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from winml.modelkit.errors import CheckpointError, InputError
from winml.modelkit.options import JsonError, read_json_file

_REPEATED = re.compile(r"^(n_?|num_)?(\w+_)?(layers?|blocks?|stages|depths?)$")
"""Keys with the number of modules built in sequence."""
_SIZES = re.compile(
    r"(_size|_dim|_heads|_positions|_embeddings|_channels|_labels|_experts)$|^(d_\w+|n_\w+|dim|num_\w+)$"
)
"""Keys with the size of a tensor, or with a number of items."""
_NEVER_NEGATIVE = re.compile(
    r"^((hidden|intermediate|vocab|patch)_size|(num_|encoder_|decoder_)?(hidden_)?layers|n_layers?|n_embd|d_model|dim"
    r"|(num_)?(attention_)?heads|n_heads?)$"
)
"""Keys for which -1 has no meaning; it has for others, such as the layer whose output is used."""

_LONGEST_STACK = 10_000
"""Chosen: a hundred times the layers of the deepest models known; even so many take seconds to build."""
_LARGEST_SIZE = 10**9
"""Chosen: a hundred times the longest context known, a thousand times the largest vocabulary."""
_MOST_LABELS = 10**6
"""Chosen: transformers makes a name for each of them."""


def refuse_absurd_sizes(
    content: Mapping[str, object], path: Path, *, error: type[InputError] = CheckpointError
) -> None:
    """Refuse a config with absurd sizes.

    Args:
        content: The config, as read.
        path: The config file, for messages.
        error: Type of the error to raise.

    Raises:
        InputError: names the key, its value and the limit.
    """
    for name, key, value in _named_numbers(content):
        limit = _largest_value(key)
        if value > limit:
            raise _size_error(path, name, value, f"expected at most {limit:_}", error)
        if value < 0 and _NEVER_NEGATIVE.match(key):
            raise _size_error(path, name, value, "expected no negative number", error)


def _largest_value(key: str) -> float:
    """Return the limit of a number by its key; infinite for unknown keys."""
    if _REPEATED.search(key):
        return _LONGEST_STACK
    if key == "num_labels":
        return _MOST_LABELS
    return _LARGEST_SIZE if _SIZES.search(key) else float("inf")


def _size_error(path: Path, name: str, value: int, expected: str, error: type[InputError]) -> InputError:
    text = str(value) if abs(value) < 10**15 else f"{float(value):.0e}" if abs(value) < 10**300 else "far too large"
    return error(f"{path}: {name} is {text}, {expected}", hint="Correct the value, or download the config again.")


def _named_numbers(content: Mapping[str, object]) -> Iterator[tuple[str, str, int]]:
    """Yield dotted name, key and value of every integer; a list counts as the sum of its numbers."""
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


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_CONFIG_NAME = "config.json"
_PROCESSOR_NAMES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_EDGES = re.compile(r"(^|[._])(height|width|shortest_edge|longest_edge|size|crop_size|pad_size)$")
"""Keys of processors with the size of an image."""
_LONGEST_EDGE = 8192
"""Chosen: pixels; three times the largest of known processors."""
_MOST_PIXELS = 10**8
"""Chosen: Qwen2-VL and similar models state two numbers of pixels as the edges of ``size``, at most 17 million."""
_FILTERS = re.compile(r"^(feature_size|num_mel_bins|n_fft|fft_length|hop_length|num_mel_filters)$")
"""Keys of feature extractors with the size of a filter bank."""
_LARGEST_FILTER = 100_000
"""Chosen: a hundred times the largest known."""
_LONGEST_CHUNK = 10**4
"""Chosen: seconds of ``chunk_length``; Whisper has 30."""


def check_config_files(folder: Path, *, error: type[InputError] = InputError) -> None:
    """Refuse absurd numbers in the config and the processor files of a folder.

    Damaged files pass: the library that reads them reports the error.

    Raises:
        InputError: names the file, the key, its value and the limit.
    """
    for name in (_CONFIG_NAME, *_PROCESSOR_NAMES):
        path = folder / name
        try:
            content = read_json_file(path)
        except (OSError, JsonError):
            continue
        if not isinstance(content, dict):
            continue
        if name == _CONFIG_NAME:
            refuse_absurd_sizes(content, path, error=error)
        else:
            _refuse_absurd_processor(content, path, error)


def _refuse_absurd_processor(content: Mapping[str, object], path: Path, error: type[InputError]) -> None:
    """Refuse absurd sizes of images, filter banks or chunks.

    Raises:
        InputError: of the type ``error``.
    """
    numbers = list(_named_numbers(content))
    has_pixels = any(key == "longest_edge" and _LONGEST_EDGE < value <= _MOST_PIXELS for _, key, value in numbers)
    for name, key, value in numbers:
        limit = float("inf")
        if _EDGES.search(name):
            limit = _MOST_PIXELS if has_pixels and key in ("shortest_edge", "longest_edge") else _LONGEST_EDGE
        elif _FILTERS.match(key):
            limit = _LARGEST_FILTER
        elif key == "chunk_length":
            limit = _LONGEST_CHUNK
        if value > limit:
            raise _size_error(path, name, value, f"expected at most {limit:_}", error)
