"""Metrics of one class a pixel: mean intersection over union, by scikit-learn's Jaccard score, and accuracy.

A sample is its pairs of reference and prediction, counted, so that no image has to be kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from winml.modelkit.evaluate.metrics.metric import Metric, SampleRows

__all__ = ["IGNORED", "MEAN_IOU", "PIXEL_ACCURACY", "count_pairs"]

Array = NDArray[Any]
Pairs = Array
"""``[pairs, 3]``: class of reference, predicted class, pixels."""

IGNORED = 255
"""Specified: the class of pixels that data sets of segmentation leave out (ADE20K and Pascal VOC, reduced labels)."""


def count_pairs(predicted: Array, referred: Array) -> Pairs:
    """Return how often each pair of classes occurs in two maps of one size; pixels left out are not counted."""
    counted = referred != IGNORED
    stacked = np.stack([referred[counted], predicted[counted]], axis=1).astype(np.int64)
    pairs, counts = np.unique(stacked, axis=0, return_counts=True)
    return np.concatenate([pairs, counts[:, None]], axis=1)


def _mean_iou(predictions: Sequence[Pairs], _references: Sequence[Any]) -> SampleRows:
    from sklearn.metrics import jaccard_score

    every = np.concatenate(list(predictions))
    if not len(every):
        return SampleRows(float("nan"), np.zeros((len(predictions), 2)), _mean_of_occurring)
    classes = int(every[:, :2].max()) + 1
    rows = np.zeros((len(predictions), 2, classes))
    for (intersections, unions), pairs in zip(rows, predictions, strict=True):
        referred, predicted, pixels = pairs.T
        np.add.at(unions, referred, pixels)
        np.add.at(unions, predicted, np.where(referred == predicted, 0, pixels))
        np.add.at(intersections, referred, np.where(referred == predicted, pixels, 0))
    value = jaccard_score(every[:, 0], every[:, 1], average="macro", sample_weight=every[:, 2])
    return SampleRows(float(value), rows.reshape(len(rows), -1), _mean_of_occurring)


def _mean_of_occurring(sums: Array) -> Array:
    """Return the mean over the classes that occur on either side."""
    intersections, unions = np.split(sums, 2, axis=1)
    shares = np.divide(intersections, unions, out=np.zeros_like(unions), where=unions > 0)
    mean: Array = shares.sum(axis=1) / (unions > 0).sum(axis=1)
    return mean


def _pixel_accuracy(predictions: Sequence[Pairs], _references: Sequence[Any]) -> SampleRows:
    rows = np.asarray(
        [(pairs[pairs[:, 0] == pairs[:, 1], 2].sum(), pairs[:, 2].sum()) for pairs in predictions], np.float64
    )
    right, pixels = rows.sum(axis=0)
    return SampleRows(float(right / pixels) if pixels else float("nan"), rows, lambda sums: sums[:, 0] / sums[:, 1])


MEAN_IOU = Metric("mean_iou", _mean_iou, "sklearn")
PIXEL_ACCURACY = Metric("accuracy", _pixel_accuracy)
