"""Document of ``winml view``: a page of modules and graph, and its summary in a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from winml.modelkit.report import document as doc
from winml.modelkit.view.records import ModelPage, ViewedModel
from winml.modelkit.words import count_noun


def page_document(page: ModelPage) -> doc.Document:
    """Describe the displayed models; a page also contains their modules and graphs."""
    names = [model.name for model in page.models]
    return doc.Document(
        [doc.Fields([row for model in page.models for row in _model_fields(model)]), doc.ModelView(names, page.data)],
        title=" and ".join(names),
        subject="modules and graph",
        answer=_difference_words(page),
    )


def _difference_words(page: ModelPage) -> str:
    """Return how many modules of two models differ; empty for one model."""
    if page.differing is None:
        return ""
    verb = "differs" if page.differing == 1 else "differ"
    return f"{count_noun(page.differing, 'module')} {verb}." if page.differing else "Both models are equal."


def _model_fields(model: ViewedModel) -> Iterator[doc.Field]:
    yield "model", model.name
    for part in model.parts:
        name = f"{part.name}: " if len(model.parts) > 1 else ""
        nodes = f", {count_noun(part.nodes, 'node')}" if part.path else ""
        yield "modules", f"{name}{count_noun(part.modules, 'module')} from {part.tree_source}{nodes}"
    for known in model.known:
        yield "known", f"{known.title} of {count_noun(known.modules, 'module')}, from {known.source}"
    yield from doc.note_fields(model.notes)
