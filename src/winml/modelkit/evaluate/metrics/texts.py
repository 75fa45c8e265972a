"""Metrics of texts: word and character errors by jiwer, answers to questions by torchmetrics' SQuAD, perplexity."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from winml.modelkit.arrays import Array
from winml.modelkit.evaluate.metrics.metric import Metric, SampleRows

__all__ = [
    "CHARACTER_ERROR_RATE",
    "EXACT_MATCH",
    "OVERLAP_F1",
    "PERPLEXITY",
    "SPAN_METRICS",
    "TAG_ACCURACY",
    "WORD_ERROR_RATE",
    "spans_of",
]


def _ratio(sums: Array) -> Array:
    ratio: Array = sums[:, 0] / sums[:, 1]
    return ratio


def _error_rate(process: str, rate: str) -> Callable[[Sequence[str], Sequence[str]], SampleRows]:
    def measure(predictions: Sequence[str], references: Sequence[str]) -> SampleRows:
        import jiwer

        compare = getattr(jiwer, process)
        rows = []
        for predicted, referred in zip(predictions, references, strict=True):
            found = compare(referred, predicted)
            errors = found.substitutions + found.deletions + found.insertions
            rows.append((errors, found.hits + found.substitutions + found.deletions))
        value = getattr(compare(list(references), list(predictions)), rate)
        return SampleRows(float(value), np.asarray(rows, np.float64), _ratio)

    return measure


def _squad(name: str) -> Callable[[Sequence[str], Sequence[Sequence[str]]], SampleRows]:
    def measure(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> SampleRows:
        from torchmetrics.functional.text import squad

        rows = []
        for predicted, outputs in zip(predictions, references, strict=True):
            # A question without an answer is answered rightly by none.
            texts = list(outputs) or [""]
            target: dict[str, Any] = {"answers": {"text": texts, "answer_start": [0] * len(texts)}, "id": "0"}
            rows.append((float(squad([{"prediction_text": predicted, "id": "0"}], [target])[name]) / 100, 1.0))
        table = np.asarray(rows, np.float64)
        return SampleRows(float(table[:, 0].mean()), table, _ratio)

    return measure


def _perplexity(predictions: Sequence[tuple[float, int]], _references: Sequence[object]) -> SampleRows:
    """Measure the exponential of the mean negative log-likelihood of a token; each sample brings its sum and count."""
    rows = np.asarray(predictions, np.float64)
    total, tokens = rows.sum(axis=0)
    mean = total / tokens if tokens else math.nan
    # Larger than a float can say: nothing of the text was expected.
    value = math.exp(mean) if mean < math.log(np.finfo(np.float64).max) else math.inf
    return SampleRows(value, rows, lambda sums: np.exp(_ratio(sums)))


WORD_ERROR_RATE = Metric("wer", _error_rate("process_words", "wer"), "jiwer", is_higher_better=False)
CHARACTER_ERROR_RATE = Metric("cer", _error_rate("process_characters", "cer"), "jiwer", is_higher_better=False)
EXACT_MATCH = Metric("exact_match", _squad("exact_match"), "torchmetrics")
OVERLAP_F1 = Metric("f1", _squad("f1"), "torchmetrics")
PERPLEXITY = Metric("perplexity", _perplexity, is_higher_better=False)


# --- Metrics of spans in a sequence of tags, such as names in a text: by scikit-learn, a span counting where start,
# end and class are right.


Tags = Sequence[str]
OUTSIDE = "O"
_FIRST, _LAST = frozenset("BSU"), frozenset("ELSU")
"""Prefixes of the first and of the last position of a span. Specified by IOB2, IOBES and BILOU."""
_PREFIXES = _FIRST | _LAST | {"I"}


def spans_of(tags: Tags) -> set[tuple[int, int, str]]:
    """Return the spans of a sequence of tags: first position, position after the last, class.

    Tags are ``B-class`` at the first position of a span and ``I-class`` behind it, ``O`` outside of all; an ``I-`` that
    continues nothing begins a span. The last position may be ``E-`` or ``L-``, and a span of one ``S-`` or ``U-``
    (IOBES, BILOU). Tags without a prefix make a span of each run of equal ones.

    >>> sorted(spans_of(["B-PER", "I-PER", "O", "B-LOC", "B-LOC"]))
    [(0, 2, 'PER'), (3, 4, 'LOC'), (4, 5, 'LOC')]
    >>> sorted(spans_of(["B-PER", "E-PER", "I-PER", "S-PER", "L-LOC"]))
    [(0, 2, 'PER'), (2, 3, 'PER'), (3, 4, 'PER'), (4, 5, 'LOC')]
    """
    return set(_spans(tags))


def _spans(tags: Tags) -> Iterator[tuple[int, int, str]]:
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


def _of_spans(name: str, finish: Callable[[Array], Array]) -> Callable[[Sequence[Tags], Sequence[Tags]], SampleRows]:
    def measure(predictions: Sequence[Tags], references: Sequence[Tags]) -> SampleRows:
        import sklearn.metrics

        rows, predicted_flags, referred_flags = [], [], []
        for predicted, referred in zip(map(spans_of, predictions), map(spans_of, references), strict=True):
            rows.append((len(predicted & referred), len(predicted), len(referred)))
            every = predicted | referred
            predicted_flags += [span in predicted for span in every]
            referred_flags += [span in referred for span in every]
        # Where nobody sees a span there is nothing to be right about.
        value = (
            getattr(sklearn.metrics, name)(referred_flags, predicted_flags, zero_division=0)
            if any(map(any, rows))
            else float("nan")
        )
        return SampleRows(float(value), np.asarray(rows, np.float64), finish)

    return measure


def _share(numerator: Array, denominator: Array) -> Array:
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 0)


def _tag_accuracy(predictions: Sequence[Tags], references: Sequence[Tags]) -> SampleRows:
    from sklearn.metrics import accuracy_score

    rows = [
        (sum(map(str.__eq__, predicted, referred)), len(referred))
        for predicted, referred in zip(predictions, references, strict=True)
    ]
    flat = [[tag for tags in side for tag in tags] for side in (references, predictions)]
    return SampleRows(
        float(accuracy_score(*flat)), np.asarray(rows, np.float64), lambda sums: _share(sums[:, 0], sums[:, 1])
    )


SPAN_METRICS = (
    Metric("f1", _of_spans("f1_score", lambda s: _share(2 * s[:, 0], s[:, 1] + s[:, 2])), "sklearn"),
    Metric("precision", _of_spans("precision_score", lambda s: _share(s[:, 0], s[:, 1])), "sklearn"),
    Metric("recall", _of_spans("recall_score", lambda s: _share(s[:, 0], s[:, 2])), "sklearn"),
)
TAG_ACCURACY = Metric("accuracy", _tag_accuracy, "sklearn")
