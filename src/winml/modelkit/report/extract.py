"""Describes an extraction to people: which models were written, which modules were refused, and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from winml.modelkit.results.extract_result import ExtractResult
from winml.modelkit.words import count_words, shape_words, size_words

__all__ = ["extract_lines"]


def extract_lines(result: ExtractResult) -> Iterator[tuple[str, str]]:
    """Yield the lines of the summary: a keyword, and the text beside it."""
    for module in result.modules:
        yield "wrote", f"{result.folder / module.file} ({size_words(module.size_bytes)})"
        module_words = f"{module.identity.words} ({module.identity.class_name})"
        nodes = f"{module.nodes} node{'' if module.nodes == 1 else 's'}"
        yield "", f"{module_words}: {nodes}, {count_words(module.parameters)} parameters"
        yield "", f"{_tensor_words(module.inputs)} → {_tensor_words(module.outputs)}"
    if result.modules:
        worst = max(module.relative_diff for module in result.modules)
        equal = "bit for bit" if worst == 0 else f"largest difference {worst:.1e} of scale"
        yield "verified", f"each answers its recorded inputs as the whole model does ({equal})"
    for refused in result.refused:
        yield "refused", f"{refused.identity.words} ({refused.identity.class_name}): {refused.reason}"
    for identity in result.without_nodes:
        yield "no nodes", f"{identity.words} ({identity.class_name}): nothing of it is left in the graph"
    yield from (("note", note) for note in result.notes)


def _tensor_words(records: tuple[dict[str, Any], ...]) -> str:
    return ", ".join(f"{record['name']} {shape_words(record['dtype'], record['shape'])}" for record in records) or "-"
