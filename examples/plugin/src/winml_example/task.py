"""An evaluation task: ``winml eval --task text-regression``, for models that rate a text with one number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from winml.modelkit.extend import Batch, Evaluator, EvaluatorContext, Metric, SampleRows, TaskDefinition, named_output


def _mean_absolute_error(predictions: Sequence[float], references: Sequence[float]) -> SampleRows:
    """Return the metric: its value, and for each sample the numbers whose sums give it on a resample."""
    errors = np.abs(np.asarray(predictions) - np.asarray(references))
    rows = np.stack([errors, np.ones_like(errors)], axis=1)
    return SampleRows(float(errors.mean()), rows, lambda sums: sums[:, 0] / sums[:, 1])


class _RatingEvaluator(Evaluator):
    """A prediction is the only number of the output."""

    def reference(self, sample: dict[str, object]) -> float:
        """Return the rating of the data set."""
        return float(sample["score"])

    def row_predictions(self, outputs: dict[str, np.ndarray], batch: Batch) -> list[float]:
        """Return one number for each row."""
        return batch.trimmed(named_output(outputs, "logits"))[:, 0].tolist()

    def agreement(self, ours: float, theirs: float) -> float:
        """Say whether two ratings are the same for a reader."""
        return float(abs(ours - theirs) < 0.05)


def _judge_ratings(context: EvaluatorContext) -> _RatingEvaluator:
    return _RatingEvaluator()


TEXT_REGRESSION = TaskDefinition(
    "text-regression",
    ("text", "score"),
    (Metric("mean_absolute_error", _mean_absolute_error, is_higher_better=False),),
    _judge_ratings,
    "ratings less than 0.05 apart",
)
