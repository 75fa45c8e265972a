"""Summaries of transformed files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from winml.modelkit.compare.words import coverage_words
from winml.modelkit.report import document as doc
from winml.modelkit.tags.carry.matching import Way
from winml.modelkit.transform.records import PinnedModel, RetaggedModel, TransformedFolder, WrittenFile
from winml.modelkit.words import count_noun, size_words

MAX_ROWS = 12
"""Rows of a table without ``--verbose``. Chosen: the whole summary fits on a screen."""


def pinned_document(result: PinnedModel, source: str) -> doc.Document:
    """Describe the fixed dimensions.

    Args:
        result: The record of the result.
        source: The source file, as the user wrote it.
    """
    verified_words = "skipped: the files were not compared"
    if result.verification:
        worst = result.verification.worst.relative_diff
        verified_words = f"equals {source} at these sizes (largest relative difference {worst:.1e})"
    fields: list[doc.Field] = [
        ("pinned", ", ".join(f"{name} {size}" for name, size in result.sizes.items())),
        ("dynamic", ", ".join(result.still_open) or None),
        ("inputs", ", ".join(f"{spec.name} {spec.words}" for spec in result.inputs)),
        ("outputs", ", ".join(f"{spec.name} {spec.words}" for spec in result.outputs)),
        ("hierarchy", coverage_words(result.coverage)),
        ("verified", verified_words),
        ("wrote", f"{result.model_path} ({size_words(result.size_bytes)})"),
        *doc.note_fields(result.notes),
    ]
    return doc.Document([doc.Fields(fields)])


_WAY_WORDS: Mapping[Way, str] = {
    "kept": "tagged already",
    "name": "matched by node name",
    "output": "matched by output name",
    "fused": "matched by the name of a fused node",
    "replaced": "matched by the nodes they replace",
    "neighbours": "new, tagged like their neighbours",
    "root": "unknown, tagged as root",
}
"""Rule of a tag transfer → words after the number of nodes."""


def retagged_document(result: RetaggedModel) -> doc.Document:
    """Describe a tag transfer, with node counts by rule."""
    ways = result.report.by_way
    fields: list[doc.Field] = [
        ("hierarchy", coverage_words(result.coverage)),
        *(("", f"{ways[rule]} {rule_words}") for rule, rule_words in _WAY_WORDS.items() if ways.get(rule)),
        ("repaired", f"{count_noun(result.repaired, 'node')} with duplicate keys" if result.repaired else None),
        ("wrote", f"{result.model_path} ({size_words(result.size_bytes)})"),
        *doc.note_fields(result.notes),
    ]
    return doc.Document([doc.Fields(fields)])


def folder_document(result: TransformedFolder[Any]) -> doc.Document:
    """Describe the result of a folder: its parts, and the copied files."""
    rows = [(part, f"copied unchanged ({why})") for part, why in result.unchanged.items()]
    rows += [("beside", ", ".join(result.companions))] if result.companions else []
    folder = doc.Fields([*rows, ("folder", f"{result.folder} ({size_words(result.size_bytes)})")])
    if result.is_of_one_part:
        (record,) = result.parts.values()
        return replace(doc.joined(record.document()), summary=folder)
    return replace(doc.joined(doc.parts_document(result.parts, lambda record: record.document())), summary=folder)


def written_fields(files: Iterable[WrittenFile]) -> list[doc.Field]:
    """Return a field for each written file."""
    return [("wrote", f"{file.path} ({size_words(file.size_bytes)})") for file in files]
