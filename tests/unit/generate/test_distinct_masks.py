"""Non-maximum suppression of masks."""

from __future__ import annotations

import numpy as np
import torch

from winml.modelkit.generate.answering import distinct_masks


def _overlap(first: list[float], second: list[float]) -> float:
    width, height = (min(first[axis + 2], second[axis + 2]) - max(first[axis], second[axis]) for axis in (0, 1))
    shared = max(0, width) * max(0, height)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (first, second)]
    return shared / (sum(areas) - shared) if shared else 0


def test_boxes_overlap_at_most_as_requested_and_the_best_remain() -> None:
    """Masks are decoded from run lengths by columns."""
    values = np.random.default_rng(0)
    corners = values.integers(0, 12, (40, 2))
    boxes = torch.from_numpy(np.concatenate([corners, corners + values.integers(4, 9, (40, 2))], axis=1))
    scores = torch.from_numpy(values.permutation(40) / 40)
    codes = [{"size": [2, 3], "counts": [index % 4, 6 - index % 4]} for index in range(40)]
    expected: list[int] = []
    for index in scores.argsort(descending=True).tolist():
        if all(_overlap(boxes[index].tolist(), boxes[other].tolist()) <= 0.3 for other in expected):
            expected.append(index)
    masks, kept_scores, kept_codes, kept_boxes = distinct_masks(codes, scores, boxes, 0.3)
    assert 1 < len(expected) < 40
    assert scores[expected].tolist() == kept_scores.tolist()
    assert boxes[expected].tolist() == kept_boxes.tolist()
    assert [codes[index] for index in expected] == list(kept_codes)
    assert [(np.arange(6) >= index % 4).reshape(3, 2).T.tolist() for index in expected] == [m.tolist() for m in masks]
