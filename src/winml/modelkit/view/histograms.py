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
"""Chosen: a larger weight is sampled in equal steps, which changes no visible bin."""
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
    flat = values.reshape(-1)[:: max(1, values.size // _MOST_VALUES)].astype(np.float32)
    finite = flat[np.isfinite(flat)]
    if not finite.size:
        return None
    low, high = float(finite.min()), float(finite.max())
    counts, _ = np.histogram(finite, bins=_BINS, range=(low, high) if high > low else (low - 1, low + 1))
    heights = np.ceil(counts * (len(_DIGITS) - 1) / counts.max()).astype(int)
    return float(f"{low:.3g}"), float(f"{high:.3g}"), "".join(_DIGITS[height] for height in heights)
