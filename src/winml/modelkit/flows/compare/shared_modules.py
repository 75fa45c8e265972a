"""Says where two models have few modules in common, so that their answers may be those of two models.

A module is on both sides where path and class are the same, as far as a file tells the class.
"""

from __future__ import annotations

from collections.abc import Mapping

from winml.modelkit.verify.by_module.onnx_side import OnnxSide
from winml.modelkit.verify.by_module.sides import Side

__all__ = ["few_shared_notes"]

_FEW = 0.5
"""Chosen: other forms of a model, such as optimized and quantized files, keep all modules in their metadata. A tree of
node names also holds modules of torch.nn, so the side with fewer modules is the one to ask."""


def few_shared_notes(reference: Side, candidate: Side) -> tuple[str, ...]:
    """Return one sentence where the side with fewer modules has less than half of them in common with the other.

    A PyTorch model beside a file has modules that do not run, which do not count.

    Args:
        reference: What is right.
        candidate: What is compared with it.
    """
    sides = (reference, candidate)
    counted: tuple[Side, ...] = tuple(side for side in sides if isinstance(side, OnnxSide)) or sides
    numbers = [len(side.module_classes) for side in counted]
    shared = _shared(reference.module_classes, candidate.module_classes)
    # Nobody knows the modules of a file without tags and scopes.
    if not all(numbers) or shared >= _FEW * min(numbers):
        return ()
    counts = ", ".join(f"{shared} of {number} of {side.shown}" for side, number in zip(counted, numbers, strict=True))
    meaning = "These look like two models, not like two forms of one, and how near their answers are may mean nothing"
    return (f"Few modules are on both sides: {counts}. {meaning}; winml eval says how well each does a task.",)


def _shared(left: Mapping[str, str], right: Mapping[str, str]) -> int:
    """Return how many modules have one path, and no other class."""
    common = left.keys() & right.keys()
    return sum(left[path] == right[path] or not (left[path] and right[path]) for path in common)
