"""Which values make an answer one that a wrong graph might give as well? Zeros, NaN and infinities, in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from winml.modelkit.compare.thresholds import MINIMUM_SCALE

__all__ = ["silent_kinds", "silent_words"]

_ZEROS, _FADED, _NAN, _INFINITIES = "zeros", f"values below {MINIMUM_SCALE:g}", "NaN", "infinities"


def silent_kinds(arrays: Iterable[NDArray[Any]]) -> tuple[str, ...] | None:
    """Return what arrays hold where they hold nothing else; None where a value is another.

    Zeros, values so small that they are rounding, NaN, infinities. A text is another value.
    """
    found: set[str] = set()
    for array in arrays:
        if array.dtype.kind in "USO":
            return None
        values = np.asarray(array).astype(np.float64)
        places = {
            _ZEROS: values == 0,
            _FADED: (values != 0) & (np.abs(values) < MINIMUM_SCALE),
            _NAN: np.isnan(values),
            _INFINITIES: np.isinf(values),
        }
        if not np.any(list(places.values()), axis=0).all():
            return None
        found |= {kind for kind, is_there in places.items() if is_there.any()}
    return tuple(kind for kind in (_ZEROS, _FADED, _NAN, _INFINITIES) if kind in found)


def silent_words(kinds: Sequence[str]) -> str:
    """Return what is answered.

    >>> silent_words(("zeros", "NaN")), silent_words(())
    ('nothing but zeros and NaN', 'no value')
    """
    return f"nothing but {' and '.join(kinds)}" if kinds else "no value"
