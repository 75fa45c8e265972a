"""Document of the changes of structure and weights of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from winml.modelkit.compare import records
from winml.modelkit.errors import opt
from winml.modelkit.report import document as doc
from winml.modelkit.words import count_noun, count_words, first_words, size_words

MAX_ROWS = 20
"""Default number of rows. Chosen: a table that fits on a screen and in a comment."""
_STATUSES = ("changed", "added", "removed", "renamed")
MAX_LISTED_OPERATORS = 8
"""Maximum number of operators in a line. Chosen: they fit on it."""


def diff_document(diff: records.StructureDiff, *, folds: bool = True, by_change: bool = False) -> doc.Document:
    """Build the document of the changes.

    Args:
        diff: The changes.
        folds: Merge the rows of equally changed modules of repeated layers.
        by_change: Sort modules by size of the change, for a comment limited to these; else in the order of the file.
    """
    modules = sorted(diff.modules, key=_weight_of_change, reverse=True) if by_change else diff.modules
    rows = _build_rows(modules, folds=folds)
    hidden = sum(row.modules for row in rows[MAX_ROWS:])
    weights = [
        (
            f"{weight.renamed_from} → {weight.name}" if weight.renamed_from else weight.name,
            weight.status,
            weight.before,
            weight.after,
        )
        for module in modules
        for weight in module.weights
    ]
    return doc.Document(
        [
            doc.Fields(list(_diff_fields(diff))),
            doc.Table(
                doc.columns(
                    "change", ("module", "name"), ("nodes", "count"), "operators", "weights", ("size", "bytes")
                ),
                [cells for row in rows for cells in row.members],
                name="modules",
                heading="Modules that differ",
                folds=list(_list_folds(rows)),
                is_searched=True,
                brief=range(MAX_ROWS),
                rest=f"{hidden} more modules changed less."
                if by_change
                else f"… and {hidden} more modules ({opt.verbose} shows all)",
            ),
            doc.Table(
                doc.columns(("weight", "name"), "change", "before", "after"),
                weights,
                name="weights",
                heading="Weights that differ",
                detail=doc.Detail.VERBOSE,
            ),
        ],
        title=f"{diff.before.path.name} → {diff.after.path.name}",
        subject="structure and weights",
        answer="Both files have the same nodes and weights."
        if diff.is_same
        else f"{count_noun(len(diff.modules), 'module')} of {len(diff.modules) + diff.same_modules} "
        f"{'differs' if len(diff.modules) == 1 else 'differ'}.",
        introduction="Neither file was run: nodes, attributes and the content of weights were compared, module by "
        "module.",
        figures=list(_diff_figures(diff)),
    )


def _diff_figures(diff: records.StructureDiff) -> Iterator[doc.Figure]:
    before, after = diff.before, diff.after
    if diff.is_same:
        yield doc.Figure("files", "equal", f"every node and weight of {diff.same_modules} modules", "good")
    else:
        statuses = Counter(module.status for module in diff.modules)
        text = ", ".join(f"{count} {status}" for status, count in statuses.items())
        meaning = f"{text}; {diff.same_modules} are equal" if text else f"{diff.same_modules} are equal"
        yield doc.Figure("modules that differ", str(len(diff.modules)), meaning)
    yield doc.Figure("nodes", f"{after.nodes - before.nodes:+,}", f"{before.nodes:,} before, {after.nodes:,} after")
    change = after.size_bytes - before.size_bytes
    sizes = f"{size_words(before.size_bytes)} before, {size_words(after.size_bytes)} after, weights included"
    yield doc.Figure("size", f"{'-' if change < 0 else '+'}{size_words(abs(change))}", sizes)
    weights = sum(len(module.weights) for module in diff.modules)
    yield doc.Figure("weights that differ", str(weights), "by content, name, type or shape")


@dataclass(frozen=True)
class _Row:
    """A table row of one module, or of several equally changed modules."""

    cells: tuple[doc.Cell, ...]
    members: Sequence[tuple[doc.Cell, ...]]
    """The row of each module."""

    @property
    def modules(self) -> int:
        """Number of modules."""
        return len(self.members)


def _list_folds(rows: Iterable[_Row]) -> Iterator[doc.Fold]:
    """Yield a fold for each row of several modules."""
    start = 0
    for row in rows:
        if row.modules > 1:
            yield doc.Fold(start, start + row.modules, [row.cells])
        start += row.modules


def _build_rows(modules: Iterable[records.ChangedModule], *, folds: bool) -> list[_Row]:
    """Build a row per module, or, if folded, per kind of change of modules that differ in numbers only."""
    rows: list[tuple[str, tuple[doc.Cell, ...]]] = []
    for module in modules:
        name = module.tag or module.class_name
        if module.renamed_from:
            name = f"{module.renamed_from} → {name}"
        rows.append((name, (module.status, *_module_cells(module))))
    groups = doc.group_layers(rows) if folds else [([name], name, cells) for name, cells in rows]
    return [
        _Row((status, name, *cells), [(status, member, *cells) for member in names])
        for names, name, (status, *cells) in groups
    ]


def _diff_fields(diff: records.StructureDiff) -> Iterator[doc.Field]:
    yield "before", _file_words(diff.before)
    yield "after", _file_words(diff.after)
    if diff.is_same:
        yield "same", f"every node and every weight of {diff.same_modules} modules"
        return
    counts = Counter[str](module.status for module in diff.modules)
    counted = [f"{count} {status}" for status in _STATUSES if (count := counts[status])]
    yield "modules", ", ".join([*counted, f"{diff.same_modules} the same"])
    if diff.operators:
        yield "operators", _operator_words(diff.operators)
    yield from (("interface", change) for change in diff.interface)
    if diff.is_rewired:
        yield "wiring", "nodes and weights of every module are as before, and read each other otherwise"
    yield doc.view_field(str(diff.before.path), str(diff.after.path))
    yield from doc.note_fields(diff.notes)


def _file_words(file: records.ComparedFile) -> str:
    return (
        f"{file.path} · {file.nodes} nodes, {count_words(file.parameters)} parameters, "
        f"{size_words(file.size_bytes)}, opset {file.opset}"
    )


def _module_cells(module: records.ChangedModule) -> tuple[doc.Cell, ...]:
    """Return the cells of a changed module: nodes, operators, weights and size."""
    attributes = f"attributes of {module.attributes_changed}" if module.attributes_changed else ""
    operators = ", ".join(filter(None, [_operator_words(module.operators), attributes]))
    nodes, (size_before, size_after) = module.nodes, module.size_bytes
    nodes_words = str(nodes[1]) if nodes[0] == nodes[1] else f"{nodes[0]} → {nodes[1]}"
    size: doc.Cell = ""
    if size_before != size_after:
        size = doc.Number(size_after - size_before, f"{size_words(size_before)} → {size_words(size_after)}")
    statuses = Counter(weight.status for weight in module.weights)
    weights = ", ".join(f"{count} {status}" for status, count in statuses.items())
    return doc.Number(nodes[1], nodes_words), operators, weights, size


def _operator_words(operators: Mapping[str, tuple[int, int]]) -> str:
    texts = [f"{name} {after - before:+d}" for name, (before, after) in operators.items()]
    return first_words(texts, MAX_LISTED_OPERATORS, "others")


def _weight_of_change(module: records.ChangedModule) -> int:
    """Size of a change for sorting: bytes of weights, then nodes."""
    bytes_changed = sum(abs(after - before) for before, after in module.dtypes.values())
    return bytes_changed + sum(abs(after - before) for before, after in module.operators.values()) + len(module.weights)
