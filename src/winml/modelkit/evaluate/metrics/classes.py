"""Metrics of one class a sample: by scikit-learn.

Predictions and references are class numbers; the averages over classes are those of scikit-learn's ``macro``: over
every class that is predicted or referred to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from winml.modelkit.arrays import Array
from winml.modelkit.evaluate.metrics.metric import Metric, Resamples, SampleRows

__all__ = [
    "ACCURACY",
    "CLASS_METRICS",
    "PEARSON",
    "SPEARMAN",
]


def _accuracy(predictions: Sequence[int], references: Sequence[int]) -> SampleRows:
    from sklearn.metrics import accuracy_score

    right = np.asarray(predictions) == np.asarray(references)
    rows = np.stack([right, np.ones_like(right)], axis=1).astype(np.float64)
    return SampleRows(float(accuracy_score(references, predictions)), rows, lambda sums: sums[:, 0] / sums[:, 1])


def _of_class_counts(
    value: Callable[[Sequence[int], Sequence[int]], float], finish: Callable[[Array, Array, Array], Array]
) -> Callable[[Sequence[int], Sequence[int]], SampleRows]:
    """Return a metric of how often each class is predicted rightly, predicted, and referred to."""

    def measure(predictions: Sequence[int], references: Sequence[int]) -> SampleRows:
        from scipy.sparse import csr_array

        known, numbers = np.unique(np.concatenate([predictions, references]), return_inverse=True)
        classes, samples = len(known), len(references)
        predicted, referred = numbers[:samples], numbers[samples:]
        right = predicted == referred
        places = np.concatenate([predicted[right], predicted + classes, referred + 2 * classes])
        owners = np.concatenate([np.flatnonzero(right), np.arange(samples), np.arange(samples)])
        rows = csr_array((np.ones(len(places)), (owners, places)), shape=(samples, 3 * classes))
        return SampleRows(value(references, predictions), rows, lambda sums: finish(*np.split(sums, 3, axis=1)))

    return measure


def _macro(numerator: Array, denominator: Array, occurring: Array) -> Array:
    """Return the mean over the classes that occur, 0 for one whose share is not defined: as scikit-learn."""
    shares = np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 0)
    mean: Array = (shares * occurring).sum(axis=1) / occurring.sum(axis=1)
    return mean


def _library(name: str) -> Callable[[Sequence[int], Sequence[int]], float]:
    def value(references: Sequence[int], predictions: Sequence[int]) -> float:
        import sklearn.metrics

        return float(getattr(sklearn.metrics, name)(references, predictions, average="macro", zero_division=0))

    return value


def _matthews_value(references: Sequence[int], predictions: Sequence[int]) -> float:
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(references, predictions))


def _matthews(right: Array, predicted: Array, referred: Array) -> Array:
    samples = referred.sum(axis=1)
    covariance = right.sum(axis=1) * samples - (predicted * referred).sum(axis=1)
    spread = (samples**2 - (predicted**2).sum(axis=1)) * (samples**2 - (referred**2).sum(axis=1))
    # A model, or a resample, of one class only has no correlation; scikit-learn says 0.
    values: Array = np.divide(covariance, np.sqrt(spread), out=np.zeros_like(covariance), where=spread > 0)
    return values


ACCURACY = Metric("accuracy", _accuracy, "sklearn")

CLASS_METRICS = (
    ACCURACY,
    Metric("f1", _of_class_counts(_library("f1_score"), lambda r, p, t: _macro(2 * r, p + t, (p + t) > 0)), "sklearn"),
    Metric(
        "precision", _of_class_counts(_library("precision_score"), lambda r, p, t: _macro(r, p, (p + t) > 0)), "sklearn"
    ),
    Metric("recall", _of_class_counts(_library("recall_score"), lambda r, p, t: _macro(r, t, (p + t) > 0)), "sklearn"),
    Metric("matthews", _of_class_counts(_matthews_value, _matthews), "sklearn"),
)
"""Macro averages, where there is one for each class."""


# --- Metrics of one score a sample, against a score of reference: by scipy.


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
