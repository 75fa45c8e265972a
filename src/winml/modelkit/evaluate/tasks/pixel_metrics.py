"""Metrics of class maps: mean intersection over union (scikit-learn's Jaccard score), and pixel accuracy.

A sample is stored as counts of (reference, prediction) pairs, so that no image is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from winml.modelkit.arrays import Array
from winml.modelkit.evaluate.metrics import Metric, SampleRows, ratio_of_sums, share

Pairs = Array
"""``[pairs, 3]``: class of reference, predicted class, pixels."""

IGNORED = 255
"""Specified: class of ignored pixels in segmentation datasets (ADE20K and Pascal VOC, reduced labels)."""

_MOST_PAIRS = 1_000_000
"""Maximum number of class pairs counted in a table; more pairs are sorted. Chosen: 8 MB."""


def count_pairs(predicted: Array, referred: Array) -> Pairs:
    """Count the pairs of classes in two maps of one size, excluding ignored pixels."""
    counted = referred != IGNORED
    truth, guess = referred[counted].astype(np.int64), predicted[counted].astype(np.int64)
    if not len(truth):
        return np.zeros((0, 3), np.int64)
    classes = int(guess.max()) + 1
    codes = truth * classes + guess
    if codes.min() >= 0 and codes.max() < _MOST_PAIRS:
        counts = np.bincount(codes)
        occurring = np.flatnonzero(counts)
        counts = counts[occurring]
    else:
        occurring, counts = np.unique(codes, return_counts=True)
    return np.stack([occurring // classes, occurring % classes, counts], axis=1)


def _mean_iou(predictions: Sequence[Pairs], _references: Sequence[object]) -> SampleRows:
    from sklearn.metrics import jaccard_score

    every = np.concatenate(list(predictions))
    if not len(every):
        return SampleRows(float("nan"), np.zeros((len(predictions), 2)), _mean_of_occurring)
    classes = np.unique(every[:, :2])
    rows = np.zeros((len(predictions), 2, len(classes)))
    for (intersections, unions), pairs in zip(rows, predictions, strict=True):
        referred, predicted = np.searchsorted(classes, pairs[:, :2]).T
        pixels = pairs[:, 2]
        np.add.at(unions, referred, pixels)
        np.add.at(unions, predicted, np.where(referred == predicted, 0, pixels))
        np.add.at(intersections, referred, np.where(referred == predicted, pixels, 0))
    value = jaccard_score(every[:, 0], every[:, 1], average="macro", sample_weight=every[:, 2])
    return SampleRows(float(value), rows.reshape(len(rows), -1), _mean_of_occurring)


def _mean_of_occurring(sums: Array) -> Array:
    """Mean over the classes that occur in either map."""
    intersections, unions = np.split(sums, 2, axis=1)
    mean: Array = share(intersections, unions).sum(axis=1) / (unions > 0).sum(axis=1)
    return mean


def _pixel_accuracy(predictions: Sequence[Pairs], _references: Sequence[object]) -> SampleRows:
    rows = np.asarray([(pairs[pairs[:, 0] == pairs[:, 1], 2].sum(), pairs[:, 2].sum()) for pairs in predictions])
    right, pixels = rows.sum(axis=0)
    return ratio_of_sums(right / pixels if pixels else float("nan"), rows)


MEAN_IOU = Metric("mean_iou", _mean_iou, "sklearn")
PIXEL_ACCURACY = Metric("accuracy", _pixel_accuracy)
