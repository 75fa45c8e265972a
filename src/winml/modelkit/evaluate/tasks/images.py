"""What is where in an image: the class of each pixel, and boxes around objects. The tasks and their metrics.

Outputs become maps and boxes by the image processor of the checkpoint, as in the pipelines.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from winml.modelkit.arrays import Array
from winml.modelkit.errors import InputError, UsageError
from winml.modelkit.evaluate.labels import LabelMap, label_names, match_labels, model_labels
from winml.modelkit.evaluate.metrics import RESAMPLES, Metric, Resamples, SampleRows
from winml.modelkit.evaluate.preprocessing import Batch
from winml.modelkit.evaluate.tasks.task import Evaluator, EvaluatorContext, Outputs, Sample, TaskDefinition

# --- Metrics of boxes around objects: mean average precision by pycocotools, as COCO defines it.


_MOST_DETECTIONS = 100
"""Specified by COCO: detections of an image that count, the surest ones."""
_RECALLS = np.linspace(0, 1, 101)
"""Specified by COCO: where the precision is read."""
_RESAMPLED = 200
"""Resamples of which the precision is computed; each takes as long as a thousand of other metrics. Chosen."""


@dataclass(frozen=True)
class Boxes:
    """The objects of one image."""

    corners: Array
    """``[objects, 4]``: left, top, right, bottom, in pixels."""
    classes: Array
    """``[objects]``."""
    scores: Array | None = None
    """``[objects]``, of predictions."""


@dataclass(frozen=True)
class _ClassMatches:
    """The detections of one class, the surest first."""

    owners: Array
    """``[detections]``: number of the sample."""
    is_right: Array
    """``[thresholds, detections]``."""
    is_counted: Array
    """``[thresholds, detections]``; what has no area is not."""
    objects: Array
    """``[samples]``: objects of the class."""


@dataclass(frozen=True)
class _MeanPrecision:
    """The mean average precision over classes, and over the thresholds of overlap it is of."""

    value: float
    classes: Sequence[_ClassMatches]

    def resampled(self, resamples: Resamples) -> Array:
        """Return the mean average precision on some of the resamples."""
        retained = math.ceil(len(resamples.indices) * _RESAMPLED / RESAMPLES)
        return np.asarray([self._mean(counts) for counts in resamples.counts[:retained]])

    def _mean(self, counts: Array) -> float:
        found = [_average_precision(item, counts) for item in self.classes]
        defined = [value for value in found if math.isfinite(value)]
        return float(np.mean(defined)) if defined else math.nan


def _average_precision(matches: _ClassMatches, counts: Array) -> float:
    """Return the average precision where each sample counts some number of times; NaN without an object."""
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


def _evaluated(predictions: Sequence[Boxes], references: Sequence[Boxes]) -> Any:
    """Return pycocotools' evaluation of all images, None where there is no object at all.

    It prints what it does, which is not shown.
    """
    if not any(len(boxes.classes) for boxes in references):
        return None
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    images = [{"id": number} for number in range(len(references))]
    classes = sorted({int(name) for boxes in references for name in boxes.classes})
    frame = {"images": images, "categories": [{"id": name} for name in classes]}
    truth, found = COCO(), COCO()
    with contextlib.redirect_stdout(io.StringIO()):
        for coco, sides in ((truth, references), (found, predictions)):
            coco.dataset = {**frame, "annotations": list(_annotations(sides))}
            coco.createIndex()
        evaluation = COCOeval(truth, found, "bbox")
        evaluation.params.areaRng, evaluation.params.areaRngLbl = evaluation.params.areaRng[:1], ["all"]
        evaluation.params.maxDets = [_MOST_DETECTIONS]
        evaluation.evaluate()
        evaluation.accumulate()
    return evaluation


def _annotations(sides: Sequence[Boxes]) -> Any:
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
    def measure(evaluation: Any, references: Sequence[Boxes]) -> _MeanPrecision:
        if evaluation is None:
            return _MeanPrecision(float("nan"), ())
        precision = evaluation.eval["precision"][thresholds]
        value = float(precision[precision > -1].mean())
        samples = len(references)
        found = np.array_split(np.asarray(evaluation.evalImgs, object), len(evaluation.params.catIds))
        return _MeanPrecision(value, [_matches([item for item in part if item], thresholds, samples) for part in found])

    return measure


def _matches(images: Sequence[Mapping[str, Any]], thresholds: slice, samples: int) -> _ClassMatches:
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
    Metric("map", _mean_precision(slice(None)), "pycocotools", prepare=_evaluated, resamples=_RESAMPLED),
    Metric("map_50", _mean_precision(slice(1)), "pycocotools", prepare=_evaluated, resamples=_RESAMPLED),
)
"""Over overlaps of 0.5 to 0.95 in steps of 0.05, and of 0.5 alone."""


# --- Metrics of one class a pixel: mean intersection over union, by scikit-learn's Jaccard score, and accuracy.
#
# A sample is its pairs of reference and prediction, counted, so that no image has to be kept.


Pairs = Array
"""``[pairs, 3]``: class of reference, predicted class, pixels."""

IGNORED = 255
"""Specified: the class of pixels that data sets of segmentation leave out (ADE20K and Pascal VOC, reduced labels)."""

_MOST_PAIRS = 1_000_000
"""Pairs of classes that are counted in a table; of more, those that occur are sorted. Chosen: 8 MB."""


def count_pairs(predicted: Array, referred: Array) -> Pairs:
    """Return how often each pair of classes occurs in two maps of one size; pixels left out are not counted."""
    counted = referred != IGNORED
    right, stated = referred[counted].astype(np.int64), predicted[counted].astype(np.int64)
    if not len(right):
        return np.zeros((0, 3), np.int64)
    classes = int(stated.max()) + 1
    codes = right * classes + stated
    if codes.min() >= 0 and codes.max() < _MOST_PAIRS:
        counts = np.bincount(codes)
        found = np.flatnonzero(counts)
        counts = counts[found]
    else:
        found, counts = np.unique(codes, return_counts=True)
    return np.stack([found // classes, found % classes, counts], axis=1)


def _mean_iou(predictions: Sequence[Pairs], _references: Sequence[object]) -> SampleRows:
    from sklearn.metrics import jaccard_score

    every = np.concatenate(list(predictions))
    if not len(every):
        return SampleRows(float("nan"), np.zeros((len(predictions), 2)), _mean_of_occurring)
    known = np.unique(every[:, :2])
    rows = np.zeros((len(predictions), 2, len(known)))
    for (intersections, unions), pairs in zip(rows, predictions, strict=True):
        referred, predicted = np.searchsorted(known, pairs[:, :2]).T
        pixels = pairs[:, 2]
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


def _pixel_accuracy(predictions: Sequence[Pairs], _references: Sequence[object]) -> SampleRows:
    rows = np.asarray(
        [(pairs[pairs[:, 0] == pairs[:, 1], 2].sum(), pairs[:, 2].sum()) for pairs in predictions], np.float64
    )
    right, pixels = rows.sum(axis=0)
    return SampleRows(float(right / pixels) if pixels else float("nan"), rows, lambda sums: sums[:, 0] / sums[:, 1])


MEAN_IOU = Metric("mean_iou", _mean_iou, "sklearn")
PIXEL_ACCURACY = Metric("accuracy", _pixel_accuracy)


_SURE = 0.5
"""Score from which on a box is part of the answer. Specified: the default of the pipeline."""
_SAME_BOX = 0.9
"""Overlap from which on two boxes are the same. Chosen: COCO's largest threshold but one."""


def _record(outputs: Outputs) -> Any:
    """Return outputs as the record that processors of transformers read."""
    import torch
    from transformers.utils.generic import ModelOutput

    tensors = {name: torch.from_numpy(np.ascontiguousarray(array, np.float32)) for name, array in outputs.items()}
    return ModelOutput(tensors)  # type: ignore[no-untyped-call]


def _sizes(batch: Batch) -> list[tuple[int, int]]:
    """Return height and width of the images of a batch, as they are in the data set."""
    return [row.image_size for row in batch.rows if row.image_size is not None]


def _post_processor(context: EvaluatorContext, method: str) -> Any:
    processor = context.processor("image processor")
    found = getattr(processor, method, None)
    if found is None:
        raise UsageError(
            f"the image processor of the checkpoint ({type(processor).__name__}) has no {method}",
            hint="Use a different --task, or a checkpoint with the processor of its model family.",
        )
    return found


@dataclass(frozen=True)
class _PixelEvaluator(Evaluator):
    """A prediction is a map of classes of the size of the image."""

    to_maps: Any
    is_reduced: bool
    """Whether class 0 of the data set means nothing, and the others are the model's, counted from 1."""
    notes: tuple[str, ...] = ()

    def reference(self, sample: Sample) -> Array:
        classes = np.asarray(sample["mask"])
        if classes.ndim != 2:
            raise InputError(
                f"its mask has {classes.shape[-1]} channels; expected one, with the class index of every pixel",
                hint="Use masks with one channel.",
            )
        size = sample["image"].height, sample["image"].width
        if classes.shape != size:
            raise InputError(
                f"its mask has {classes.shape[0]} x {classes.shape[1]} pixels, but its image has {size[0]} x {size[1]}",
                hint="Use masks with the size of their images.",
            )
        classes = classes.astype(np.int64)
        if not self.is_reduced:
            return classes
        reduced: Array = np.where((classes == 0) | (classes == IGNORED), IGNORED, classes - 1)
        return reduced

    def row_predictions(self, outputs: Outputs, batch: Batch) -> list[Array]:
        maps = self.to_maps(_record(outputs), target_sizes=_sizes(batch))
        # Half of what torch's numbers take: a group holds the maps of many pictures.
        return [item.numpy().astype(np.int32) for item in maps]

    def agreement(self, ours: Array, theirs: Array) -> float:
        return float(np.mean(ours == theirs))

    def for_metrics(self, prediction: Array, reference: Array) -> Array:
        return count_pairs(prediction, reference)


def _pixel_evaluator(context: EvaluatorContext) -> _PixelEvaluator:
    processor = context.processor("image processor")
    is_reduced = bool(getattr(processor, "do_reduce_labels", False))
    notes = (
        ("The image processor reduces labels: class 0 of the masks is ignored, and class 1 becomes class 0.",)
        if is_reduced
        else ()
    )
    return _PixelEvaluator(_post_processor(context, "post_process_semantic_segmentation"), is_reduced, notes)


@dataclass(frozen=True)
class _BoxEvaluator(Evaluator):
    """A prediction is all boxes with their scores; those of 0.5 and more are the answer of the pipeline."""

    to_boxes: Any
    labels: LabelMap
    class_key: str
    notes: tuple[str, ...] = ()

    def reference(self, sample: Sample) -> Boxes:
        objects = _columns_of(sample["objects"])
        boxes = np.asarray(objects["bbox"], np.float64).reshape(-1, 4)
        # Specified by COCO: left, top, width, height.
        corners = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
        return Boxes(corners, np.asarray([self.labels.number(label) for label in objects[self.class_key]], np.int64))

    def row_predictions(self, outputs: Outputs, batch: Batch) -> list[Boxes]:
        found = self.to_boxes(_record(outputs), threshold=0.0, target_sizes=_sizes(batch))
        return [
            Boxes(item["boxes"].numpy().astype(np.float64), item["labels"].numpy(), item["scores"].numpy())
            for item in found
        ]

    def agreement(self, ours: Boxes, theirs: Boxes) -> float:
        left, right = _sure(ours), _sure(theirs)
        if len(left.classes) != len(right.classes):
            return 0.0
        free = list(range(len(right.classes)))
        for corners, number in zip(left.corners, left.classes, strict=True):
            same = (index for index in free if right.classes[index] == number)
            partner = next((index for index in same if _overlap(corners, right.corners[index]) >= _SAME_BOX), None)
            if partner is None:
                return 0.0
            free.remove(partner)
        return 1.0


def _sure(boxes: Boxes) -> Boxes:
    assert boxes.scores is not None  # those of predictions have them
    retained = boxes.scores > _SURE
    return Boxes(boxes.corners[retained], boxes.classes[retained], boxes.scores[retained])


def _overlap(left: Array, right: Array) -> float:
    """Return intersection over union of two boxes."""
    sides = np.minimum(left[2:], right[2:]) - np.maximum(left[:2], right[:2])
    shared = float(np.prod(np.maximum(sides, 0)))
    union = float(np.prod(left[2:] - left[:2]) + np.prod(right[2:] - right[:2])) - shared
    return shared / union if union > 0 else 1.0


_CLASS_KEYS = ("category", "label", "labels", "category_id", "class")


def _columns_of(objects: Any) -> Mapping[str, Any]:
    """Return a list of records as a record of lists, as which it is mostly stored."""
    if isinstance(objects, Mapping):
        return objects
    keys = objects[0] if objects else ()
    return {key: [item[key] for item in objects] for key in keys} or {"bbox": [], **dict.fromkeys(_CLASS_KEYS, ())}


def _box_evaluator(context: EvaluatorContext) -> _BoxEvaluator:
    column = context.columns["objects"]
    rows = [_columns_of(cell) for cell in context.values("objects")]
    key = next((key for key in _CLASS_KEYS if all(key in row for row in rows)), None)
    if key is None or not all("bbox" in row for row in rows):
        found = ", ".join(sorted({str(name) for row in rows for name in row})) or "nothing"
        raise UsageError(
            f"column {column} contains {found}; each object requires bbox (left, top, width, height) and "
            f"{_CLASS_KEYS[0]}",
            hint=f"Store the class of an object under one of the keys {', '.join(_CLASS_KEYS)}.",
        )
    names = label_names(_inner_feature(context.data_set.features[column], key))
    values = (label for row in rows for label in row[key])
    labels = match_labels(model_labels(context.config), names, values, f"{column}.{key}")
    return _BoxEvaluator(_post_processor(context, "post_process_object_detection"), labels, key, labels.notes)


def _inner_feature(feature: object, key: str) -> Any:
    """Return the type of one key of objects, of a list of records or of a record of lists."""
    inner = getattr(feature, "feature", feature)
    return inner[key] if isinstance(inner, Mapping) else None


IMAGE_SEGMENTATION = TaskDefinition(
    "image-segmentation",
    ("image", "mask"),
    (MEAN_IOU, PIXEL_ACCURACY),
    _pixel_evaluator,
    "equal classes, pixel by pixel",
)
OBJECT_DETECTION = TaskDefinition(
    "object-detection",
    ("image", "objects"),
    BOX_METRICS,
    _box_evaluator,
    f"equal classes of boxes with scores above {_SURE} that overlap by {_SAME_BOX}",
)
