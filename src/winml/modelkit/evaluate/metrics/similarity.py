"""Metrics of one score a sample, against a score of reference: by scipy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from winml.modelkit.evaluate.metrics.metric import Metric, Resamples

__all__ = ["PEARSON", "SPEARMAN"]

Array = NDArray[Any]


@dataclass(frozen=True)
class _Correlation:
    """The correlation of two scores of each sample."""

    value: float
    predictions: Array
    references: Array
    is_of_ranks: bool

    def resampled(self, resamples: Resamples) -> Array:
        """Return the correlation on each resample."""
        from scipy.stats import rankdata

        drawn = [side[resamples.indices] for side in (self.predictions, self.references)]
        left, right = (rankdata(side, axis=1) for side in drawn) if self.is_of_ranks else drawn
        left, right = (side - side.mean(axis=1, keepdims=True) for side in (left, right))
        spread = np.sqrt((left**2).sum(axis=1) * (right**2).sum(axis=1))
        products = (left * right).sum(axis=1)
        values: Array = np.divide(products, spread, out=np.full_like(products, np.nan), where=spread > 0)
        return values


def _correlation(name: str) -> Callable[[Sequence[float], Sequence[float]], _Correlation]:
    def measure(predictions: Sequence[float], references: Sequence[float]) -> _Correlation:
        import scipy.stats

        left, right = np.asarray(predictions, np.float64), np.asarray(references, np.float64)
        # Of a side without any spread scipy warns, and says NaN.
        is_defined = len(left) > 1 and np.ptp(left) > 0 and np.ptp(right) > 0
        value = float(getattr(scipy.stats, name)(left, right).statistic) if is_defined else float("nan")
        return _Correlation(value, left, right, is_of_ranks=name == "spearmanr")

    return measure


SPEARMAN = Metric("spearman", _correlation("spearmanr"), "scipy")
PEARSON = Metric("pearson", _correlation("pearsonr"), "scipy")
