"""Hints after the failed export of a part with a cache."""

from __future__ import annotations

import pytest

from winml.modelkit.export.part_export import hint_with_cache
from winml.modelkit.models.caches.finding import no_cache_hint


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        ("", no_cache_hint()),
        ("Choose another --opset.", f"Choose another --opset. {no_cache_hint()}"),
        ("--no-verify writes it, --no-cache another graph.", "--no-verify writes it, --no-cache another graph."),
        ("Choose another --mode, or lower --min-sqnr.", "Choose another --mode, or lower --min-sqnr."),
    ],
    ids=["none", "another", "said already", "few bits"],
)
def test_hint_on_a_graph_without_a_cache_appears_once(hint: str, expected: str) -> None:
    """Quantization below the minimum SQNR fails with and without a cache, so its hint does not change."""
    assert expected == hint_with_cache(hint)
