"""Excerpts of arrays: the numbers of a value that a proof stores.

A small value is stored whole. Of a large output of the ranks of scores, evenly spaced rows are stored. Of another large
value, a count sketch is stored: each number is added, with a sign, to one of a few sums. The sketch is linear, so that
the relative error of two sketches estimates the relative error of the values, over all their numbers.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from winml.modelkit.arrays import Array

ExcerptKind = Literal["all", "rows", "sketch"]
"""Stored numbers of a value: all, evenly spaced rows, or a count sketch."""

_BLOCK = 1 << 20
"""Numbers that are added to a sketch at a time. Chosen: 8 MB for their hashes."""


def choose_excerpt(array: Array, most_numbers: int, *, by_rows: bool) -> tuple[ExcerptKind, Array]:
    """Return the excerpt of an array of at most so many numbers, and its kind.

    Args:
        array: The value.
        most_numbers: Maximum count of numbers; at least 1.
        by_rows: Store rows of a large value if one row fits; else a sketch.
    """
    if array.size <= most_numbers:
        return "all", _storable(array)
    length = array.shape[-1]
    if by_rows and length <= most_numbers:
        return "rows", _storable(_take_rows(array, most_numbers // length))
    return "sketch", _sketch(array, most_numbers)


def take_excerpt(array: Array, kind: ExcerptKind, stored: Array) -> Array:
    """Return the numbers of an array that correspond to a stored excerpt of an array of the same shape.

    Args:
        array: The value of another run.
        kind: Kind of the excerpt.
        stored: The excerpt, whose shape determines the rows or the size of the sketch.
    """
    if kind == "all":
        return array
    return _take_rows(array, stored.shape[0]) if kind == "rows" else _sketch(array, stored.size)


def _storable(array: Array) -> Array:
    """Convert types that numpy does not define, such as bfloat16, to float32."""
    array = np.ascontiguousarray(array).reshape(array.shape)
    return array if array.dtype.kind in "fiub" else array.astype(np.float32)


def _take_rows(array: Array, count: int) -> Array:
    """Return evenly spaced rows along the last axis, the first and the last included."""
    rows = array.reshape(-1, array.shape[-1])
    positions = np.arange(count) * (len(rows) - 1) // max(count - 1, 1)
    return np.ascontiguousarray(rows[positions])


def _sketch(array: Array, width: int) -> NDArray[np.float32]:
    """Add the numbers of an array, each with its sign, to ``width`` sums: a count sketch.

    >>> _sketch(np.ones(1000, np.float32), 4).shape
    (4,)
    """
    sums = np.zeros(width)
    flat = array.reshape(-1)
    # Infinities of a mask may add up to NaN, equally in every run.
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, flat.size, _BLOCK):
            block = flat[start : start + _BLOCK].astype(np.float64)
            hashes = _hash_positions(np.arange(start, start + block.size, dtype=np.uint64))
            signed = np.where(hashes >> np.uint64(63), -block, block)
            sums += np.bincount((hashes % np.uint64(width)).astype(np.int64), weights=signed, minlength=width)
        return sums.astype(np.float32)


def _hash_positions(positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash positions by SplitMix64.

    >>> [hex(value) for value in _hash_positions(np.arange(2, dtype=np.uint64))]
    ['0xe220a8397b1dcdaf', '0x6e789e6aa1b965f4']
    """
    with np.errstate(over="ignore"):
        mixed = (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))
