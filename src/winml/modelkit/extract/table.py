"""Table of extracted modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from winml.modelkit.extract.records import ExtractResult
from winml.modelkit.report import document as doc
from winml.modelkit.words import count_noun, count_words, shape_words, size_words


def extract_document(result: ExtractResult) -> doc.Document:
    """Describe written and refused modules."""
    return doc.Document([doc.Fields(list(_extract_fields(result)))])


def _extract_fields(result: ExtractResult) -> Iterator[doc.Field]:
    for module in result.modules:
        yield "wrote", f"{result.folder / module.file} ({size_words(module.size_bytes)})"
        size = f"{count_noun(module.nodes, 'node')}, {count_words(module.parameters)} parameters"
        yield "", f"{module.identity.words} ({module.identity.class_name}): {size}"
        yield "", f"{_tensor_words(module.inputs)} → {_tensor_words(module.outputs)}"
    if result.modules:
        worst = max(module.relative_diff for module in result.modules)
        equal = "bit for bit" if worst == 0 else f"largest relative difference {worst:.1e}"
        yield "verified", f"the outputs of each equal those inside the whole model, on the recorded inputs ({equal})"
    for refused in result.refused:
        yield "refused", f"{refused.identity.words} ({refused.identity.class_name}): {refused.reason}"
    for identity in result.without_nodes:
        yield "no nodes", f"{identity.words} ({identity.class_name}): nothing of it is left in the graph"
    yield from doc.note_fields(result.notes)


def _tensor_words(records: tuple[Mapping[str, Any], ...]) -> str:
    return ", ".join(f"{record['name']} {shape_words(record['dtype'], record['shape'])}" for record in records) or "-"
