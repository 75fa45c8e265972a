"""Distribution of the values of each weight of a file, read one weight at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from winml.modelkit.arrays import Array
from winml.modelkit.onnx.files.graph_reading import load_by_reference
from winml.modelkit.onnx.weights import read_once

Histogram = tuple[float, float, str]
"""Smallest and largest value, and a character for each bin: its height in base 36, relative to the highest bin."""
_BINS = 32
"""Chosen: a chart as wide as a column of a table."""
_FEWEST_VALUES = 64
"""Chosen: the page states the number of values; fewer values have no visible distribution."""
_MOST_VALUES = 1 << 20
"""Chosen: a larger weight is sampled in equal steps, which changes no visible bin. Its ends are those of all values."""
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def weight_histograms(path: Path) -> dict[str, Histogram]:
    """Return name → histogram of the weights of a file with numbers; small weights and other types are omitted.

    Raises:
        InputError: a data file is missing or cut off.
    """
    graph = load_by_reference(path).graph
    histograms: dict[str, Histogram] = {}
    for name, value in graph.initializers.items():
        tensor = value.const_value
        if (
            tensor is None
            or tensor.size < _FEWEST_VALUES
            or not (tensor.dtype.is_floating_point() or tensor.dtype.is_integer())
        ):
            continue
        if (histogram := _histogram(read_once(tensor))) is not None:
            histograms[name] = histogram
    return histograms


def _histogram(values: Array) -> Histogram | None:
    """Return the histogram of an array; None without finite values."""
    flat = values.reshape(-1)
    ends = [
        (piece.min(), piece.max())
        for start in range(0, flat.size, _MOST_VALUES)
        if (piece := _finite_values(flat[start : start + _MOST_VALUES])).size
    ]
    if not ends:
        return None
    low, high = min(end[0] for end in ends), max(end[1] for end in ends)
    sample = _finite_values(flat[:: -(-flat.size // _MOST_VALUES)])
    places = ((sample - low) * (_BINS / (high - low)) if high > low else np.full(sample.shape, _BINS / 2)).astype(int)
    counts = np.bincount(np.minimum(places, _BINS - 1), minlength=_BINS)
    heights = np.ceil(counts * (len(_DIGITS) - 1) / max(1, counts.max())).astype(int)
    return float(f"{low:.3g}"), float(f"{high:.3g}"), "".join(_DIGITS[height] for height in heights)


def _finite_values(values: Array) -> Array:
    """Return the finite values of an array, in float64: differences of float32 values may exceed float32."""
    numbers = values.astype(np.float64)
    return numbers[np.isfinite(numbers)]
