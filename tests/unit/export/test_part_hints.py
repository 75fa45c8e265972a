"""What to do next where a part with a cache failed."""

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
def test_graph_without_a_cache_is_named_once_and_where_it_helps(hint: str, expected: str) -> None:
    """Too few bits are too few with and without a cache."""
    assert expected == hint_with_cache(hint)
