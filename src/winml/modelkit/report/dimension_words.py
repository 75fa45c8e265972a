"""Describes an open dimension in words: its bounds, the traced size and the checked sizes."""

from __future__ import annotations

from collections.abc import Sequence

from winml.modelkit.graph.dimensions import DynamicDimension

__all__ = ["dimension_words"]


def dimension_words(dimension: DynamicDimension, checked: Sequence[int]) -> str:
    """Return the bounds of an open dimension, the size of the trace, and the sizes the file was checked at.

    >>> dimension_words(DynamicDimension(name="sequence", max=64, example=48), (1, 55))
    'sequence 1 to 64 (traced 48; checked 1, 55)'
    """
    bounds = f"{dimension.min} to {dimension.max}" if dimension.max is not None else f"from {dimension.min}"
    checked_words = f"; checked {', '.join(map(str, checked))}" if checked else "; not checked"
    return f"{dimension.name} {bounds} (traced {dimension.example}{checked_words})"
