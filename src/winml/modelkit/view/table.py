"""Document of ``winml view``: a page of modules and graph, and its summary in a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from winml.modelkit.report import document as doc
from winml.modelkit.view.records import ModelPage, ViewedModel
from winml.modelkit.view.titles import UNCHANGED
from winml.modelkit.words import count_noun, count_words, size_words


def page_document(page: ModelPage) -> doc.Document:
    """Describe the displayed models; a page also contains their modules and graphs."""
    names = [model.name for model in page.models]
    return doc.Document(
        [doc.Fields([row for model in page.models for row in _model_fields(model)]), doc.ModelView(names, page.data)],
        title=" and ".join(names),
        subject="modules and graph",
        answer=_difference_words(page),
        figures=list(_figures(page.models)),
    )


def _figures(models: Sequence[ViewedModel]) -> Iterator[doc.Figure]:
    """Yield the key numbers; of two models in the form ``before → after``, where a checkpoint has no graph."""
    totals = [model.total for model in models]
    have_graph = [all(part.path for part in model.parts) for model in models]

    def words(numbers: Iterable[float | None], write: Callable[[int], str]) -> str:
        texts = ["?" if number is None else write(int(number)) for number in numbers]
        return " → ".join(dict.fromkeys(texts))

    def graph_words(numbers: Iterable[float | None], write: Callable[[int], str]) -> str:
        texts = [words([number], write) if known else "–" for number, known in zip(numbers, have_graph, strict=True)]
        return " → ".join(dict.fromkeys(texts))

    yield doc.Figure(
        "parameters", words((total.parameters for total in totals), count_words), "elements of the weights"
    )
    if any(total.size_bytes for total in totals):
        bits = " → ".join(dict.fromkeys(f"{total.bits:.3g}" for total in totals if total.bits))
        sizes = graph_words((total.size_bytes for total in totals), size_words)
        yield doc.Figure("weights", sizes, f"{bits} bits of a parameter" if bits else "")
    if any(total.nodes for total in totals):
        yield doc.Figure("nodes", graph_words((total.nodes for total in totals), str), "of the graph, with subgraphs")
        is_known = all(total.macs is not None for total in totals)
        macs = "multiply-accumulate operations of one run" if is_known else "the operations depend on dynamic sizes"
        yield doc.Figure("MACs", graph_words((total.macs for total in totals), count_words), macs)


def _difference_words(page: ModelPage) -> str:
    """Return how many modules of two models differ; empty for one model."""
    if page.differing is None:
        return ""
    if not page.differing:
        return "Both models are equal."
    counts = Counter(change for side in (0, 1) for change in _changes(page, side))
    kinds = f" ({', '.join(f'{count} {change}' for change, count in counts.most_common())})" if counts else ""
    verb = "differs" if page.differing == 1 else "differ"
    return f"{count_noun(page.differing, 'module')} {verb}{kinds}."


def _changes(page: ModelPage, side: int) -> Iterator[str]:
    """Yield the words for the changes of modules: of the first model only those of removed modules."""
    for part in page.data["models"][side]["parts"]:
        for change in part["measures"]["change"]:
            is_counted = change == "removed" if side == 0 else change not in (None, *UNCHANGED)
            if is_counted:
                yield change


def _model_fields(model: ViewedModel) -> Iterator[doc.Field]:
    yield "model", model.name
    for part in model.parts:
        name = f"{part.name}: " if len(model.parts) > 1 else ""
        nodes = f", {count_noun(part.total.nodes, 'node')}" if part.path else ""
        yield "modules", f"{name}{count_noun(part.modules, 'module')} from {part.tree_source}{nodes}"
    yield from model.build.items()
    for known in model.known:
        yield "known", f"{known.title} of {count_noun(known.modules, 'module')}, from {known.source}"
    yield from doc.note_fields(model.notes)
