"""Metrics of texts: word and character errors by jiwer, answers to questions by torchmetrics' SQuAD, perplexity."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from winml.modelkit.evaluate.metrics.metric import Metric, SampleRows

__all__ = ["CHARACTER_ERROR_RATE", "EXACT_MATCH", "OVERLAP_F1", "PERPLEXITY", "WORD_ERROR_RATE"]

Array = NDArray[Any]


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
        for predicted, answers in zip(predictions, references, strict=True):
            # A question without an answer is answered rightly by none.
            texts = list(answers) or [""]
            target: dict[str, Any] = {"answers": {"text": texts, "answer_start": [0] * len(texts)}, "id": "0"}
            rows.append((float(squad([{"prediction_text": predicted, "id": "0"}], [target])[name]) / 100, 1.0))
        table = np.asarray(rows, np.float64)
        return SampleRows(float(table[:, 0].mean()), table, _ratio)

    return measure


def _perplexity(predictions: Sequence[tuple[float, int]], _references: Sequence[Any]) -> SampleRows:
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
