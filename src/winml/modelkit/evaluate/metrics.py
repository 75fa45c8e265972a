"""Metrics, and their confidence intervals over the samples.

Values come from libraries, named at each metric; image metrics are in ``tasks/images.py``. The interval comes from
resampling the samples with replacement (bootstrap). A metric therefore keeps one row of numbers per sample, from which
its value on thousands of resamples is computed at once; a test compares the value on all samples with the library's.
The resamples are computed here instead of by ``scipy.stats.bootstrap``, whose interval a test compares: all metrics of
a model and its baseline share the resamples, and a resample without a defined value is ignored, while scipy's interval
would be NaN.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike

from winml.modelkit.arrays import Array

RowSums = Array
"""Sums of the rows of the samples: ``[resamples, values per row]``."""

RESAMPLES = 1000
"""Chosen: the ends of a 95 % interval then vary by less than a tenth of its width between seeds."""
CONFIDENCE = 0.95
_RULE_OF_THREE = 3.0
"""Specified (Hanley and Lippman-Hand, 1983): an event that none of n samples shows has at most the probability 3/n."""
_CHUNK = 2_000_000
"""Maximum number of resampled values in memory at a time. Chosen: 16 MB."""


@dataclass(frozen=True)
class Resamples:
    """Resamples with replacement, each with as many samples as the dataset."""

    indices: Array
    """``[resamples, samples]``."""

    @functools.cached_property
    def counts(self) -> Array:
        """Number of occurrences of each sample: ``[resamples, samples]``, float64."""
        rows, samples = self.indices.shape
        places = self.indices + np.arange(rows)[:, None] * samples
        return np.bincount(places.ravel(), minlength=rows * samples).reshape(rows, samples).astype(np.float64)


class Measured(Protocol):
    """One metric of one model on all samples."""

    @property
    def value(self) -> float:
        """Value on all samples, computed by the library; NaN if undefined."""

    def resampled(self, resamples: Resamples) -> Array:
        """Compute the value on each resample, or on the first resamples if slow; NaN if undefined."""


@dataclass(frozen=True)
class SampleRows:
    """A metric computed from sums over samples."""

    value: float
    rows: Any
    """``[samples, values per row]``: a dense or sparse array."""
    finish: Callable[[RowSums], Array]
    """Computes the value of each resample from its sums."""

    def resampled(self, resamples: Resamples) -> Array:
        """Compute the value on each resample."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return self.finish((self.rows.T @ resamples.counts.T).T)


def ratio_of_sums(value: float, rows: ArrayLike) -> SampleRows:
    """Create a metric that divides the sum of the first column by the sum of the second column."""
    return SampleRows(float(value), np.asarray(rows, np.float64), lambda sums: sums[:, 0] / sums[:, 1])


def share(numerator: Array, denominator: Array) -> Array:
    """Divide two arrays; 0 where the denominator is not positive."""
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 0)


Interval = tuple[float, float]
"""Low and high end of the 95 % confidence interval."""

Resolution = Literal["each", "equal", "none"]
"""Effect of one sample on a metric. ``each``: it is right or wrong, so that n samples resolve no difference below 3/n;
``equal``: it has a part of the value, so that this applies only if resamples do not vary; ``none``: it has no bound."""


@dataclass(frozen=True)
class Metric:
    """A metric of predictions against references."""

    name: str
    """Name in options and records, including the unit if any."""
    measure: Callable[[Sequence[Any], Sequence[Any]], Measured]
    """(predictions, references) of all samples → measured value."""
    library: str = ""
    """Import name of the library of its value; part of the extra ``eval``."""
    is_higher_better: bool = True
    prepare: Callable[[Sequence[Any], Sequence[Any]], Any] | None = None
    """Computation shared by several metrics and run once: ``measure`` receives its result instead of the
    predictions."""
    resamples: int = RESAMPLES
    """Number of resamples."""
    resolution: Resolution = "equal"

    def resolved(self, ends: Interval, value: float, samples: int, *, is_difference: bool = False) -> Interval:
        """Widen an interval to the resolution of the samples: an event may exist that none of them shows.

        Args:
            ends: Ends of the interval over resamples.
            value: The value, or the difference of two values.
            samples: Number of samples.
            is_difference: True for a difference of two values.

        >>> ACCURACY.resolved((1.0, 1.0), 1.0, 50)
        (0.94, 1.0)
        """
        low, high = ends
        is_narrow = math.isclose(low, high, abs_tol=1e-12)
        if self.resolution == "none" or (self.resolution == "equal" and not is_narrow):
            return ends
        least = least_difference(samples)
        if is_difference:
            return min(low, max(value - least, -1.0)), max(high, min(value + least, 1.0))
        low, high = min(low, value - least), max(high, value + least)
        return max(low, min(value, 0.0)), min(high, max(value, 1.0)) if self.is_higher_better else high

    def measured(
        self, predictions: Sequence[object], references: Sequence[Any], prepared: dict[object, Any] | None = None
    ) -> Measured:
        """Measure the predictions of all samples.

        Args:
            predictions: Prediction of each sample.
            references: Reference of each sample.
            prepared: Cache of shared computations, for one model on these samples.
        """
        if self.prepare is None:
            return self.measure(predictions, references)
        shared = {} if prepared is None else prepared
        if self.prepare not in shared:
            shared[self.prepare] = self.prepare(predictions, references)
        return self.measure(shared[self.prepare], references)


def least_difference(samples: int) -> float:
    """Return the smallest share that so many samples resolve.

    >>> least_difference(300), least_difference(2)
    (0.01, 1.0)
    """
    return min(_RULE_OF_THREE / samples, 1.0)


def needed_samples(difference: float) -> int:
    """Return the number of samples that resolve a share.

    >>> needed_samples(0.01)
    300
    """
    return math.ceil(_RULE_OF_THREE / difference)


def intervals(measured: Sequence[tuple[Measured, Measured | None]], samples: int, seed: int) -> list[list[Interval]]:
    """Compute confidence intervals of a model's metrics, a baseline's metrics, and their differences.

    All use the same resamples, so that the interval of a difference excludes common variation.

    Args:
        measured: Per metric: the value of the model and, with a baseline, of the baseline.
        samples: Number of samples.
        seed: Seed of the resamples.

    Returns:
        Per metric: the interval of the model and, with a baseline, of the baseline and of the difference, model minus
        baseline. Empty for a metric defined on too few resamples.
    """
    if samples < 2:
        return [[] for _ in measured]  # one sample gives no interval
    values: list[list[Array]] = [[] for _ in measured]
    for resamples in _resample(samples, seed):
        for resampled, (model, baseline) in zip(values, measured, strict=True):
            ours = model.resampled(resamples)
            if baseline is None:
                resampled.append(ours[None])
                continue
            theirs = baseline.resampled(resamples)
            resampled.append(np.stack([ours, theirs, ours - theirs]))
    return [_interval_ends(np.concatenate(resampled, axis=1)) for resampled in values]


def _resample(samples: int, seed: int) -> Iterator[Resamples]:
    """Yield the resamples in chunks of limited memory."""
    generator, remaining = np.random.default_rng(seed), RESAMPLES
    while remaining > 0:
        rows = min(remaining, max(1, _CHUNK // samples))
        yield Resamples(generator.integers(0, samples, (rows, samples)))
        remaining -= rows


def _interval_ends(values: Array) -> list[Interval]:
    """Return the ends of the 95 % interval of each row; ``[]`` if a row is defined on too few resamples."""
    tail = (1 - CONFIDENCE) / 2 * 100
    ends: list[Interval] = []
    for row in values:
        defined = row[np.isfinite(row)]
        if len(defined) < len(row) / 2:
            return []
        low, high = np.percentile(defined, [tail, 100 - tail])
        ends.append((float(low), float(high)))
    return ends


def _accuracy(predictions: Sequence[int], references: Sequence[int]) -> SampleRows:
    from sklearn.metrics import accuracy_score

    right = np.asarray(predictions) == np.asarray(references)
    return ratio_of_sums(accuracy_score(references, predictions), np.stack([right, np.ones_like(right)], axis=1))


def _count_metric(
    value: Callable[[Sequence[int], Sequence[int]], float], finish: Callable[[Array, Array, Array], Array]
) -> Callable[[Sequence[int], Sequence[int]], SampleRows]:
    """Create a metric of three counts per class: correct, predicted and referenced."""

    def measure(predictions: Sequence[int], references: Sequence[int]) -> SampleRows:
        """Return the metric of all samples, with the counts of each class by sample for resampling."""
        from scipy.sparse import csr_array

        labels, numbers = np.unique(np.concatenate([predictions, references]), return_inverse=True)
        classes, samples = len(labels), len(references)
        predicted, referred = numbers[:samples], numbers[samples:]
        right = predicted == referred
        places = np.concatenate([predicted[right], predicted + classes, referred + 2 * classes])
        owners = np.concatenate([np.flatnonzero(right), np.arange(samples), np.arange(samples)])
        rows = csr_array((np.ones(len(places)), (owners, places)), shape=(samples, 3 * classes))
        return SampleRows(value(references, predictions), rows, lambda sums: finish(*np.split(sums, 3, axis=1)))

    return measure


def _macro(numerator: Array, denominator: Array, occurring: Array) -> Array:
    """Mean over the occurring classes, 0 for an undefined class value, like scikit-learn."""
    mean: Array = (share(numerator, denominator) * occurring).sum(axis=1) / occurring.sum(axis=1)
    return mean


def _macro_avg(name: str) -> Callable[[Sequence[int], Sequence[int]], float]:
    """Return scikit-learn's macro average of a metric."""

    def value(references: Sequence[int], predictions: Sequence[int]) -> float:
        import sklearn.metrics

        return float(getattr(sklearn.metrics, name)(references, predictions, average="macro", zero_division=0))

    return value


def _matthews_value(references: Sequence[int], predictions: Sequence[int]) -> float:
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(references, predictions))


def _matthews(right: Array, predicted: Array, referred: Array) -> Array:
    """Compute the Matthews correlation of each resample from its counts per class."""
    samples = referred.sum(axis=1)
    covariance = right.sum(axis=1) * samples - (predicted * referred).sum(axis=1)
    spread = (samples**2 - (predicted**2).sum(axis=1)) * (samples**2 - (referred**2).sum(axis=1))
    # A model or resample with one class only has no correlation; scikit-learn returns 0.
    return share(covariance, np.sqrt(spread))


ACCURACY = Metric("accuracy", _accuracy, "sklearn", resolution="each")

CLASS_METRICS = (
    ACCURACY,
    *(
        Metric(name, measure, "sklearn", resolution="each")
        for name, measure in (
            ("f1", _count_metric(_macro_avg("f1_score"), lambda r, p, t: _macro(2 * r, p + t, (p + t) > 0))),
            ("precision", _count_metric(_macro_avg("precision_score"), lambda r, p, t: _macro(r, p, (p + t) > 0))),
            ("recall", _count_metric(_macro_avg("recall_score"), lambda r, p, t: _macro(r, t, (p + t) > 0))),
            ("matthews", _count_metric(_matthews_value, _matthews)),
        )
    ),
)
"""Macro averages, for metrics per class."""


@dataclass(frozen=True)
class _Correlation:
    """Correlation of two scores of each sample."""

    value: float
    predictions: Array
    references: Array
    is_of_ranks: bool

    def resampled(self, resamples: Resamples) -> Array:
        """Compute the correlation on each resample."""
        from scipy.stats import rankdata

        drawn = [array[resamples.indices] for array in (self.predictions, self.references)]
        x, y = (rankdata(array, axis=1) for array in drawn) if self.is_of_ranks else drawn
        x, y = (array - array.mean(axis=1, keepdims=True) for array in (x, y))
        spread = np.sqrt((x**2).sum(axis=1) * (y**2).sum(axis=1))
        products = (x * y).sum(axis=1)
        values: Array = np.divide(products, spread, out=np.full_like(products, np.nan), where=spread > 0)
        return values


def _correlation(name: str) -> Callable[[Sequence[float], Sequence[float]], _Correlation]:
    """Create a correlation of two scores, computed by a function of scipy.stats."""

    def measure(predictions: Sequence[float], references: Sequence[float]) -> _Correlation:
        import scipy.stats

        x, y = np.asarray(predictions, np.float64), np.asarray(references, np.float64)
        # scipy warns and returns NaN for constant scores.
        is_defined = len(x) > 1 and np.ptp(x) > 0 and np.ptp(y) > 0
        value = float(getattr(scipy.stats, name)(x, y).statistic) if is_defined else float("nan")
        return _Correlation(value, x, y, is_of_ranks=name == "spearmanr")

    return measure


SPEARMAN = Metric("spearman", _correlation("spearmanr"), "scipy")
PEARSON = Metric("pearson", _correlation("pearsonr"), "scipy")


def _error_rate(process: str, rate: str) -> Callable[[Sequence[str], Sequence[str]], SampleRows]:
    """Create an error rate from edit counts, computed by jiwer."""

    def measure(predictions: Sequence[str], references: Sequence[str]) -> SampleRows:
        import jiwer

        compare = getattr(jiwer, process)
        rows = []
        for predicted, referred in zip(predictions, references, strict=True):
            counts = compare(referred, predicted)
            errors = counts.substitutions + counts.deletions + counts.insertions
            rows.append((errors, counts.hits + counts.substitutions + counts.deletions))
        value = getattr(compare(list(references), list(predictions)), rate)
        return ratio_of_sums(value, rows)

    return measure


def _squad_metric(name: str) -> Callable[[Sequence[str], Sequence[Sequence[str]]], SampleRows]:
    """Create a SQuAD metric, computed by torchmetrics for each sample."""

    def measure(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> SampleRows:
        from torchmetrics.functional.text import squad

        rows = []
        for predicted, outputs in zip(predictions, references, strict=True):
            # A question without an answer has the reference "".
            texts = list(outputs) or [""]
            target: dict[str, Any] = {"answers": {"text": texts, "answer_start": [0] * len(texts)}, "id": "0"}
            rows.append((float(squad([{"prediction_text": predicted, "id": "0"}], [target])[name]) / 100, 1.0))
        return ratio_of_sums(float(np.mean([points for points, _ in rows])), rows)

    return measure


def _perplexity(predictions: Sequence[tuple[float, int]], _references: Sequence[object]) -> SampleRows:
    """Exponential of the mean negative log-likelihood of a token; each sample contributes its sum and count."""
    rows = np.asarray(predictions, np.float64)
    total, tokens = rows.sum(axis=0)
    mean = total / tokens if tokens else math.nan
    # Beyond the range of a float: the text is very unlikely.
    value = math.exp(mean) if mean < math.log(np.finfo(np.float64).max) else math.inf
    return SampleRows(value, rows, lambda sums: np.exp(sums[:, 0] / sums[:, 1]))


WORD_ERROR_RATE = Metric("wer", _error_rate("process_words", "wer"), "jiwer", is_higher_better=False)
CHARACTER_ERROR_RATE = Metric("cer", _error_rate("process_characters", "cer"), "jiwer", is_higher_better=False)
EXACT_MATCH = Metric("exact_match", _squad_metric("exact_match"), "torchmetrics", resolution="each")
OVERLAP_F1 = Metric("f1", _squad_metric("f1"), "torchmetrics")
PERPLEXITY = Metric("perplexity", _perplexity, is_higher_better=False, resolution="none")


Tags = Sequence[str]
OUTSIDE = "O"
_FIRST, _LAST = frozenset("BSU"), frozenset("ELSU")
"""Prefixes of the first and of the last position of a span. Specified by IOB2, IOBES and BILOU."""
_PREFIXES = _FIRST | _LAST | {"I"}


def spans_of(tags: Tags) -> set[tuple[int, int, str]]:
    """Parse the spans of a sequence of tags: (first position, position after the last, class).

    Tags are ``B-class`` at the first position of a span, ``I-class`` at its other positions, and ``O`` outside; an
    ``I-`` without a preceding span begins a span. The last position may be ``E-`` or ``L-``, and a span of one ``S-``
    or ``U-`` (IOBES, BILOU). Without prefixes, each run of equal tags is a span.

    >>> sorted(spans_of(["B-PER", "I-PER", "O", "B-LOC", "B-LOC"]))
    [(0, 2, 'PER'), (3, 4, 'LOC'), (4, 5, 'LOC')]
    >>> sorted(spans_of(["B-PER", "E-PER", "I-PER", "S-PER", "L-LOC"]))
    [(0, 2, 'PER'), (2, 3, 'PER'), (3, 4, 'PER'), (4, 5, 'LOC')]
    """
    return set(_parse_spans(tags))


def _parse_spans(tags: Tags) -> Iterator[tuple[int, int, str]]:
    start, current = 0, ""
    for position, tag in enumerate([*tags, OUTSIDE]):
        prefix, dash, name = tag.partition("-")
        is_prefixed = bool(dash) and prefix in _PREFIXES
        class_name = "" if tag == OUTSIDE else name if is_prefixed else tag
        if current and (class_name != current or (is_prefixed and prefix in _FIRST)):
            yield start, position, current
            current = ""
        if class_name and not current:
            start, current = position, class_name
        if current and is_prefixed and prefix in _LAST:
            yield start, position + 1, current
            current = ""


def _span_metric(name: str, finish: Callable[[Array], Array]) -> Callable[[Sequence[Tags], Sequence[Tags]], SampleRows]:
    """Create a metric of the correct, predicted and referenced spans of each sample."""

    def measure(predictions: Sequence[Tags], references: Sequence[Tags]) -> SampleRows:
        import sklearn.metrics

        rows, predicted_flags, referred_flags = [], [], []
        for predicted, referred in zip(map(spans_of, predictions), map(spans_of, references), strict=True):
            rows.append((len(predicted & referred), len(predicted), len(referred)))
            every = predicted | referred
            predicted_flags += [span in predicted for span in every]
            referred_flags += [span in referred for span in every]
        # Without any span the metric is undefined.
        value = (
            getattr(sklearn.metrics, name)(referred_flags, predicted_flags, zero_division=0)
            if any(map(any, rows))
            else float("nan")
        )
        return SampleRows(float(value), np.asarray(rows, np.float64), finish)

    return measure


def _tag_accuracy(predictions: Sequence[Tags], references: Sequence[Tags]) -> SampleRows:
    from sklearn.metrics import accuracy_score

    rows = [
        (sum(map(str.__eq__, predicted, referred)), len(referred))
        for predicted, referred in zip(predictions, references, strict=True)
    ]
    flat = [[tag for tags in samples for tag in tags] for samples in (references, predictions)]
    return SampleRows(
        float(accuracy_score(*flat)), np.asarray(rows, np.float64), lambda sums: share(sums[:, 0], sums[:, 1])
    )


SPAN_METRICS = (
    Metric("f1", _span_metric("f1_score", lambda s: share(2 * s[:, 0], s[:, 1] + s[:, 2])), "sklearn"),
    Metric("precision", _span_metric("precision_score", lambda s: share(s[:, 0], s[:, 1])), "sklearn"),
    Metric("recall", _span_metric("recall_score", lambda s: share(s[:, 0], s[:, 2])), "sklearn"),
)
TAG_ACCURACY = Metric("accuracy", _tag_accuracy, "sklearn")
