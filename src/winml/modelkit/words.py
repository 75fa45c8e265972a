"""How are sizes, counts and shapes put into words? Shared by messages and reports."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["count_words", "shape_words", "size_words"]


def size_words(size_bytes: int) -> str:
    """Return a size in the largest unit that leaves at least one.

    >>> size_words(999), size_words(90_868_376)
    ('999 B', '90.9 MB')
    """
    size = float(size_bytes)
    for unit in ("B", "kB", "MB"):
        if round(size, 1) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


def count_words(count: int) -> str:
    """Return a number of parameters.

    >>> count_words(950), count_words(22_713_216), count_words(7_240_000_000)
    ('950', '22.7 M', '7.24 B')
    """
    for scale, unit, digits in ((1e9, "B", 2), (1e6, "M", 1), (1e3, "k", 1)):
        if count >= scale:
            return f"{count / scale:.{digits}f} {unit}"
    return str(count)


def shape_words(dtype: str, shape: Sequence[int | str]) -> str:
    """Return a tensor type.

    >>> shape_words("int64", [1, "sequence"])
    'int64[1, sequence]'
    """
    return f"{dtype}[{', '.join(map(str, shape))}]"
