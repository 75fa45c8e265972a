"""Reads numbers out of a transformers config by the names of its attributes, never by the name of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["edge_pair", "first_edge", "first_int", "first_int_anywhere", "sub_config"]


def sub_config(config: Any, *names: str) -> Any:
    """Return the first sub-config of one of these names, else the config itself."""
    return next(_sub_configs(config, names), config)


def _sub_configs(config: Any, names: tuple[str, ...]) -> Iterator[Any]:
    for name in names:
        value = getattr(config, name, None)
        if hasattr(value, "model_type"):
            yield value


def first_int(config: Any, names: tuple[str, ...]) -> int | None:
    """Return the first positive number under these names."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def first_int_anywhere(config: Any, names: tuple[str, ...]) -> int | None:
    """Return the number under the first of these names that the config or any config in it has."""
    configs = [config]
    for current in configs:
        configs += [value for value in vars(current).values() if hasattr(value, "model_type")]
    return next((value for name in names for current in configs if (value := first_int(current, (name,)))), None)


def first_edge(config: Any, names: tuple[str, ...]) -> int | None:
    """Return the first number, or the first of a pair of numbers, under these names."""
    pairs = (edge_pair(getattr(config, name, None)) for name in names)
    return next((pair[0] for pair in pairs if pair), None)


def edge_pair(value: Any) -> tuple[int, int] | None:
    """Return height and width of a config's size: one number, a pair, or an object with both."""
    if isinstance(value, Mapping):
        value = (value.get("height"), value.get("width"))
    elif isinstance(value, int):
        value = (value, value)
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(edge, int) for edge in value):
        return value[0], value[1]
    return None
