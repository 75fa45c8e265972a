"""The table of architectures against its summary, and the shares that the documents promise."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from architecture.sources import REPOSITORY
from architecture_documents import document

_FOLDER = REPOSITORY / "docs" / "reference"
_LEAST_SHARE = 0.95
"""Specified: the documents promise this share."""
_LEAST_COUNT = 100
_LEAST_SHARE_WITH_CACHE = 0.93
"""Measured: the present share."""
_LEAST_SHARE_OF_CAUSAL = 0.95
"""Specified: share of the types with a class named ``…ForCausalLM``."""


@pytest.fixture(scope="module")
def summary() -> dict[str, Any]:
    """Return the summary of the run that the documents cite."""
    content: dict[str, Any] = json.loads((_FOLDER / "architectures.json").read_text(encoding="utf-8"))
    return content


def test_architecture_table_is_written_from_its_summary(summary: dict[str, Any]) -> None:
    """Nobody edits the table: ``run_eval.py --docs`` writes both."""
    assert document(summary) == (_FOLDER / "architectures.md").read_text(encoding="utf-8")


def test_share_of_exported_architectures_does_not_fall(summary: dict[str, Any]) -> None:
    """The share is of the architectures that PyTorch runs on the decided inputs; each missing row states its reason."""
    counts = Counter(row["state"] for row in summary["architectures"])
    attempted = counts["exported"] + counts["failed"]
    assert attempted >= _LEAST_COUNT
    assert counts["exported"] / attempted >= _LEAST_SHARE
    missing = [row for row in summary["architectures"] if row["state"] != "exported"]
    assert all(row["reason"] for row in missing)


def test_share_of_decoders_with_a_cache_does_not_fall(summary: dict[str, Any]) -> None:
    """The share is of all types that generate text.

    A type without a cache states the reason, a type with a cache wrote a text.
    """
    rows = summary["generation"]
    with_cache = [row for row in rows if row["state"] == "with cache"]
    assert len(with_cache) / len(rows) >= _LEAST_SHARE_WITH_CACHE
    causal = [row in with_cache for row in rows if row["class"].endswith("ForCausalLM")]
    assert sum(causal) / len(causal) >= _LEAST_SHARE_OF_CAUSAL
    assert all(row["cache"] and row["tokens"] for row in with_cache)
    assert all(row["reason"] for row in rows if row["state"] != "with cache")
