"""Metrics of bounding boxes: mean average precision by pycocotools, as defined by COCO."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from winml.modelkit.arrays import Array
from winml.modelkit.evaluate.metrics import RESAMPLES, Metric, Resamples

_MOST_DETECTIONS = 100
"""Specified by COCO: maximum number of detections per image, in descending order of score."""
_RECALLS = np.linspace(0, 1, 101)
"""Specified by COCO: recalls at which the precision is sampled."""
_RESAMPLED = 200
"""Number of resamples of the precision; each takes as long as a thousand of other metrics. Chosen."""


@dataclass(frozen=True)
class Boxes:
    """Objects of one image."""

    corners: Array
    """``[objects, 4]``: left, top, right, bottom, in pixels."""
    classes: Array
    """``[objects]``."""
    scores: Array | None = None
    """``[objects]``, for predictions."""


@dataclass(frozen=True)
class _ClassMatches:
    """Detections of one class, in descending order of score."""

    owners: Array
    """``[detections]``: index of the sample."""
    is_right: Array
    """``[thresholds, detections]``."""
    is_counted: Array
    """``[thresholds, detections]``: False for boxes without area."""
    objects: Array
    """``[samples]``: number of objects of the class."""


@dataclass(frozen=True)
class _MeanPrecision:
    """Mean average precision over classes and overlap thresholds."""

    value: float
    classes: Sequence[_ClassMatches]

    def resampled(self, resamples: Resamples) -> Array:
        """Compute the mean average precision on some of the resamples."""
        count = math.ceil(len(resamples.indices) * _RESAMPLED / RESAMPLES)
        return np.asarray([self._compute_mean(counts) for counts in resamples.counts[:count]])

    def _compute_mean(self, counts: Array) -> float:
        """Mean over the classes with objects; NaN without objects."""
        precisions = [_average_precision(matches, counts) for matches in self.classes]
        defined = [value for value in precisions if math.isfinite(value)]
        return float(np.mean(defined)) if defined else math.nan


def _average_precision(matches: _ClassMatches, counts: Array) -> float:
    """Average precision with a count per sample; NaN without objects."""
    objects = (matches.objects * counts).sum()
    if not objects:
        return float("nan")
    weights = counts[matches.owners] * matches.is_counted
    right = np.cumsum(matches.is_right * weights, axis=1)
    all_seen = np.cumsum(weights, axis=1)
    precision = right / (all_seen + np.spacing(1))
    precision = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    total = 0.0
    for recall, best in zip(right / objects, precision, strict=True):
        places = np.searchsorted(recall, _RECALLS, side="left")
        total += np.append(best, 0.0)[places].mean()
    return total / len(precision)


def _evaluate_boxes(predictions: Sequence[Boxes], references: Sequence[Boxes]) -> Any:
    """Evaluate all images with pycocotools; ``None`` without any object.

    The printed progress is discarded.
    """
    if not any(len(boxes.classes) for boxes in references):
        return None
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    images = [{"id": number} for number in range(len(references))]
    classes = sorted({int(name) for boxes in references for name in boxes.classes})
    frame = {"images": images, "categories": [{"id": name} for name in classes]}
    truth, detections = COCO(), COCO()
    with contextlib.redirect_stdout(io.StringIO()):
        for coco, sides in ((truth, references), (detections, predictions)):
            coco.dataset = {**frame, "annotations": list(_annotations(sides))}
            coco.createIndex()
        evaluation = COCOeval(truth, detections, "bbox")
        evaluation.params.areaRng, evaluation.params.areaRngLbl = evaluation.params.areaRng[:1], ["all"]
        evaluation.params.maxDets = [_MOST_DETECTIONS]
        evaluation.evaluate()
        evaluation.accumulate()
    return evaluation


def _annotations(sides: Sequence[Boxes]) -> Any:
    """Yield COCO's records of all boxes."""
    number = 0
    for image, boxes in enumerate(sides):
        for index, (left, top, right, bottom) in enumerate(np.asarray(boxes.corners, float).tolist()):
            number += 1
            width, height = right - left, bottom - top
            yield {
                "id": number,
                "image_id": image,
                "category_id": int(boxes.classes[index]),
                "bbox": [left, top, width, height],
                "area": width * height,
                "iscrowd": 0,
                **({} if boxes.scores is None else {"score": float(boxes.scores[index])}),
            }


def _mean_precision(thresholds: slice) -> Callable[[Any, Sequence[Boxes]], _MeanPrecision]:
    """Create the mean average precision over some overlap thresholds."""

    def measure(evaluation: Any, references: Sequence[Boxes]) -> _MeanPrecision:
        if evaluation is None:
            return _MeanPrecision(float("nan"), ())
        precision = evaluation.eval["precision"][thresholds]
        value = float(precision[precision > -1].mean())
        samples = len(references)
        parts = np.array_split(np.asarray(evaluation.evalImgs, object), len(evaluation.params.catIds))
        return _MeanPrecision(value, [_matches([row for row in part if row], thresholds, samples) for part in parts])

    return measure


def _matches(images: Sequence[Mapping[str, Any]], thresholds: slice, samples: int) -> _ClassMatches:
    """Merge the detections of one class from all images, in descending order of score.

    Args:
        images: Results of pycocotools for the class, by image.
        thresholds: Range of the thresholds of overlap.
        samples: Number of all images.
    """
    objects = np.zeros(samples)
    for image in images:
        objects[image["image_id"]] = len(image["gtIds"])
    owners = np.concatenate([np.full(len(image["dtIds"]), image["image_id"]) for image in images]).astype(np.int64)
    scores = np.concatenate([np.asarray(image["dtScores"], float) for image in images])
    order = np.argsort(-scores, kind="mergesort")
    is_right = np.concatenate([image["dtMatches"][thresholds] > 0 for image in images], axis=1)
    is_counted = ~np.concatenate([image["dtIgnore"][thresholds].astype(bool) for image in images], axis=1)
    return _ClassMatches(owners[order], is_right[:, order], is_counted[:, order], objects)


BOX_METRICS = (
    Metric("map", _mean_precision(slice(None)), "pycocotools", prepare=_evaluate_boxes, resamples=_RESAMPLED),
    Metric("map_50", _mean_precision(slice(1)), "pycocotools", prepare=_evaluate_boxes, resamples=_RESAMPLED),
)
"""Overlaps of 0.5 to 0.95 in steps of 0.05, and of 0.5 alone."""
