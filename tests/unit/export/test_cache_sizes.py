"""Sizes that close a graph with a cache: one step over a filled cache, within the bounds of its parts."""

from __future__ import annotations

import pytest
from torch import nn

from winml.modelkit.export.exporting import frozen_by_default
from winml.modelkit.export.loading import closing_sizes
from winml.modelkit.models.parts import ModelPart
from winml.modelkit.onnx.specs import DynamicDimension


def _part(*dimensions: DynamicDimension, **options: object) -> ModelPart:
    return ModelPart(nn.Identity(), (), dimensions=dimensions, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("positions", "past"), [(None, 127), (64, 64)])
def test_step_over_a_cache_that_the_part_takes(positions: int | None, past: int) -> None:
    """The run has one token."""
    part = _part(
        DynamicDimension(name="sequence_length"),
        DynamicDimension(name="past_sequence_length", min=0, max=positions),
    )
    assert {"sequence_length": 1, "past_sequence_length": past} == closing_sizes([part])


def test_dimension_without_a_key_is_not_fixed() -> None:
    """Without sizes, the cache is left out or the file is fixed later."""
    assert closing_sizes([_part(DynamicDimension(name="windows"))]) is None


def test_cache_that_froze_is_not_fixed_by_default() -> None:
    """A decoder with a fixed cache length generates no text."""
    part = _part(DynamicDimension(name="past"), open_by_default={"past": "past_sequence_length"})
    assert {} == frozen_by_default(["past"], [part])
