"""Renders what carrying tags to a file did, as lines for a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from winml.modelkit.hierarchy.carry.carrying import Way
from winml.modelkit.results.retag_result import RetaggedModel
from winml.modelkit.results.words import coverage_words
from winml.modelkit.words import size_words

__all__ = ["retagged_lines"]

WAY_WORDS: Mapping[Way, str] = {
    "kept": "still carried it",
    "name": "same node",
    "output": "same value",
    "fused": "name of a fused node",
    "replaced": "what it replaced",
    "neighbours": "new, from its neighbours",
    "root": "unknown, root",
}
"""How a tag was won, in words."""


def retagged_lines(result: RetaggedModel) -> list[tuple[str, str]]:
    """Return what was done, as pairs of a heading and a text."""
    ways = result.report.by_way
    return [
        ("hierarchy", coverage_words(result.coverage)),
        *(("", f"{ways[way]} {words}") for way, words in WAY_WORDS.items() if ways.get(way)),
        *([("repaired", f"{result.repaired} nodes whose keys stood there twice")] if result.repaired else []),
        ("wrote", f"{result.model_path} ({size_words(result.size_bytes)})"),
        *(("note", note) for note in result.notes),
    ]
