"""Are two answers the same? That of a built model, and that of PyTorch on the same inputs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from winml.modelkit.evaluate.tasks.similarity import ALIKE
from winml.modelkit.generate.answering import Answer
from winml.modelkit.generate.records import AnswerEntry, ReferenceAnswer

_PIXELS = 1.0
"""Largest difference of a side of two boxes, in pixels. Chosen: pipelines round to whole pixels."""


def compared_answers(ours: Answer, theirs: Answer, name: str) -> ReferenceAnswer:
    """Return what PyTorch answers, and whether it is the same.

    Args:
        ours: The answer of the built model.
        theirs: That of PyTorch.
        name: The checkpoint, as the user wrote it.
    """
    found = list(_differences(ours, theirs))
    numbers = [number for number, _ in found if number is not None]
    words = next((words for _, words in found if words), None)
    return ReferenceAnswer(name, theirs.entries, words is None, max(numbers, default=None), ALIKE, words)


def _differences(ours: Answer, theirs: Answer) -> Iterator[tuple[float | None, str]]:
    """Yield the size of each difference, and what it is where it counts."""
    if ours.arrays:
        yield from _array_differences(ours, theirs)
    if ours.kind == "labels":
        yield from _class_differences(ours.entries, theirs.entries)
    elif ours.kind not in ("embedding", "depth", "tensors", "segments"):
        yield from _entry_differences(ours.entries, theirs.entries)


def _array_differences(ours: Answer, theirs: Answer) -> Iterator[tuple[float | None, str]]:
    for name, array in ours.arrays.items():
        other = theirs.arrays[name]
        if array.shape != other.shape:
            yield None, f"{name} has shape {list(array.shape)} instead of {list(other.shape)}"
        elif ours.kind == "segments":
            share = float((_labels(ours) != _labels(theirs)).mean())
            yield share, f"{share:.2%} of the pixels have a different label" if share > ALIKE else ""
        else:
            largest = float(np.abs(np.asarray(other, np.float64)).max(initial=0)) or 1.0
            error = float(np.abs(np.asarray(array, np.float64) - other).max(initial=0)) / largest
            yield error, f"{name} differs by {error:.2%} of its largest value" if error > ALIKE else ""


def _labels(answer: Answer) -> np.ndarray[tuple[int, ...], np.dtype[np.object_]]:
    names = np.asarray(["", *(entry.label for entry in answer.entries)], object)
    labels: np.ndarray[tuple[int, ...], np.dtype[np.object_]] = names[answer.arrays["segments"]]
    return labels


def _class_differences(
    ours: tuple[AnswerEntry, ...], theirs: tuple[AnswerEntry, ...]
) -> Iterator[tuple[float | None, str]]:
    if ours[0].label != theirs[0].label:
        yield None, f"the first is {ours[0].label} instead of {theirs[0].label}"
    names = [entry.label for entry in (*ours, *theirs)]  # special tokens have no text, and one label for all
    scores = {entry.label: entry.score or 0.0 for entry in theirs if names.count(entry.label) == 2}
    for entry in (entry for entry in ours if entry.label in scores):
        difference = abs((entry.score or 0.0) - scores[entry.label])
        yield difference, f"the score of {entry.label} differs by {difference:.4f}" if difference > ALIKE else ""


def _entry_differences(
    ours: tuple[AnswerEntry, ...], theirs: tuple[AnswerEntry, ...]
) -> Iterator[tuple[float | None, str]]:
    if len(ours) != len(theirs):
        yield None, f"{len(ours)} results instead of {len(theirs)}"
    for place, (one, other) in enumerate(zip(ours, theirs, strict=False), 1):
        if one.label != other.label or one.text != other.text:
            yield None, f"result {place} is {one.label or one.text!r} instead of {other.label or other.text!r}"
        if one.score is not None and other.score is not None:
            difference = abs(one.score - other.score)
            yield difference, f"the score of result {place} differs by {difference:.4f}" if difference > ALIKE else ""
        if one.box is not None and other.box is not None:
            pixels = max(abs(left - right) for left, right in zip(one.box, other.box, strict=True))
            yield None, f"the box of result {place} differs by {pixels:g} pixels" if pixels > _PIXELS else ""
