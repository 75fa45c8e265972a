"""Sizes that close a graph with a cache are those of one step over a filled cache, within what its parts take."""

from __future__ import annotations

import json
import re

import pytest
from torch import nn

from winml.modelkit.flows.export.export import fixed_cache_hint, frozen_by_default
from winml.modelkit.graph.specs import DynamicDimension
from winml.modelkit.load.parts import ModelPart


def _part(*dimensions: DynamicDimension, **options: object) -> ModelPart:
    return ModelPart(nn.Identity(), (), dimensions=dimensions, **options)  # type: ignore[arg-type]


def _sizes(hint: str) -> dict[str, int]:
    found = re.search(r"--shape-config '(.*?)'", hint)
    return {} if found is None else dict(json.loads(found[1]))


@pytest.mark.parametrize(("positions", "past"), [(None, 127), (64, 64)])
def test_hint_fixes_a_step_over_a_cache_that_the_part_takes(positions: int | None, past: int) -> None:
    """One token; what the user gave stands beside it."""
    part = _part(
        DynamicDimension(name="sequence_length"),
        DynamicDimension(name="past_sequence_length", min=0, max=positions),
    )
    expected = {"batch_size": 2, "sequence_length": 1, "past_sequence_length": past}
    assert expected == _sizes(fixed_cache_hint([part], {"batch_size": 2}))


def test_hint_names_no_size_for_a_dimension_without_a_key() -> None:
    """Then the cache is left out, or the file fixed later."""
    hint = fixed_cache_hint([_part(DynamicDimension(name="windows"))], {})
    assert {} == _sizes(hint)
    assert "--no-cache" in hint


def test_cache_that_froze_is_not_fixed_by_default() -> None:
    """A decoder whose cache has one length writes no text."""
    part = _part(DynamicDimension(name="past"), open_by_default={"past": "past_sequence_length"})
    assert {} == frozen_by_default(["past"], [part])
