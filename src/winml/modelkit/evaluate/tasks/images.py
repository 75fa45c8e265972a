"""Image tasks: semantic segmentation and object detection, with their metrics.

The image processor of the checkpoint converts outputs to maps and boxes, as in the pipelines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from winml.modelkit.arrays import Array
from winml.modelkit.errors import InputError, UsageError, opt
from winml.modelkit.evaluate.labels import LabelMap, label_names, match_labels, model_labels
from winml.modelkit.evaluate.tasks.box_metrics import BOX_METRICS, Boxes
from winml.modelkit.evaluate.tasks.pixel_metrics import IGNORED, MEAN_IOU, PIXEL_ACCURACY, count_pairs
from winml.modelkit.evaluate.tasks.task import Evaluator, EvaluatorContext, Outputs, Sample, TaskDefinition
from winml.modelkit.samples.preprocessing import Batch

_SURE = 0.5
"""Minimum score of a predicted box. Specified: the default of the pipeline."""
_SAME_BOX = 0.9
"""Minimum overlap of equal boxes. Chosen: COCO's largest threshold but one."""


def _wrap_outputs(outputs: Outputs) -> Any:
    """Wrap outputs in the record that transformers processors read."""
    import torch
    from transformers.utils.generic import ModelOutput

    tensors = {name: torch.from_numpy(np.ascontiguousarray(array, np.float32)) for name, array in outputs.items()}
    return ModelOutput(tensors)  # type: ignore[no-untyped-call]


def _sizes(batch: Batch) -> list[tuple[int, int]]:
    """(height, width) of the images of a batch, as in the dataset."""
    return [row.image_size for row in batch.rows if row.image_size is not None]


def _post_processor(context: EvaluatorContext, method: str) -> Any:
    """Return a method of the checkpoint's image processor.

    Raises:
        UsageError: the processor has no such method.
    """
    processor = context.processor("image processor")
    post_process = getattr(processor, method, None)
    if post_process is None:
        raise UsageError(
            f"the image processor of the checkpoint ({type(processor).__name__}) has no {method}",
            hint=f"Use a different {opt.task}, or a checkpoint with the processor of its model family.",
        )
    return post_process


@dataclass(frozen=True)
class _PixelEvaluator(Evaluator):
    """Evaluator of class maps with the size of the image."""

    to_maps: Any
    is_reduced: bool
    """True if class 0 of the dataset is ignored, and the other classes are the model's, counted from 1."""
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
        maps = self.to_maps(_wrap_outputs(outputs), target_sizes=_sizes(batch))
        # Half the size of torch's integers: a group holds the maps of many images.
        return [class_map.numpy().astype(np.int32) for class_map in maps]

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
    """Evaluator of scored boxes; the pipeline returns boxes with a score of 0.5 and more."""

    to_boxes: Any
    labels: LabelMap
    class_key: str
    notes: tuple[str, ...] = ()

    def reference(self, sample: Sample) -> Boxes:
        objects = _convert_to_columns(sample["objects"])
        boxes = np.asarray(objects["bbox"], np.float64).reshape(-1, 4)
        # Specified by COCO: left, top, width, height.
        corners = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
        return Boxes(corners, np.asarray([self.labels.number(label) for label in objects[self.class_key]], np.int64))

    def row_predictions(self, outputs: Outputs, batch: Batch) -> list[Boxes]:
        results = self.to_boxes(_wrap_outputs(outputs), threshold=0.0, target_sizes=_sizes(batch))
        return [
            Boxes(result["boxes"].numpy().astype(np.float64), result["labels"].numpy(), result["scores"].numpy())
            for result in results
        ]

    def agreement(self, ours: Boxes, theirs: Boxes) -> float:
        sure, expected = _select_confident(ours), _select_confident(theirs)
        if len(sure.classes) != len(expected.classes):
            return 0.0
        free = list(range(len(expected.classes)))
        for corners, number in zip(sure.corners, sure.classes, strict=True):
            same = (index for index in free if expected.classes[index] == number)
            partner = next((index for index in same if _overlap(corners, expected.corners[index]) >= _SAME_BOX), None)
            if partner is None:
                return 0.0
            free.remove(partner)
        return 1.0


def _select_confident(boxes: Boxes) -> Boxes:
    assert boxes.scores is not None  # predictions have scores
    is_sure = boxes.scores > _SURE
    return Boxes(boxes.corners[is_sure], boxes.classes[is_sure], boxes.scores[is_sure])


def _overlap(a: Array, b: Array) -> float:
    """Compute the intersection over union of two boxes."""
    sides = np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2])
    shared = float(np.prod(np.maximum(sides, 0)))
    union = float(np.prod(a[2:] - a[:2]) + np.prod(b[2:] - b[:2])) - shared
    return shared / union if union > 0 else 1.0


_CLASS_KEYS = ("category", "label", "labels", "category_id", "class")


def _convert_to_columns(objects: Any) -> Mapping[str, Any]:
    """Convert a list of records to a record of lists, the usual storage format."""
    if isinstance(objects, Mapping):
        return objects
    keys = objects[0] if objects else ()
    return {key: [record[key] for record in objects] for key in keys} or {"bbox": [], **dict.fromkeys(_CLASS_KEYS, ())}


def _box_evaluator(context: EvaluatorContext) -> _BoxEvaluator:
    column = context.columns["objects"]
    rows = [_convert_to_columns(cell) for cell in context.values("objects")]
    key = next((key for key in _CLASS_KEYS if all(key in row for row in rows)), None)
    if key is None or not all("bbox" in row for row in rows):
        key_names = ", ".join(sorted({str(name) for row in rows for name in row})) or "nothing"
        raise UsageError(
            f"column {column} contains {key_names}; each object requires bbox (left, top, width, height) and "
            f"{_CLASS_KEYS[0]}",
            hint=f"Store the class of an object under one of the keys {', '.join(_CLASS_KEYS)}.",
        )
    feature = context.data_set.features[column]
    keys = getattr(feature, "feature", feature)  # a list of records, or a record of lists
    names = label_names(keys[key] if isinstance(keys, Mapping) else None)
    values = (label for row in rows for label in row[key])
    labels = match_labels(model_labels(context.config), names, values, f"{column}.{key}")
    return _BoxEvaluator(_post_processor(context, "post_process_object_detection"), labels, key, labels.notes)


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
