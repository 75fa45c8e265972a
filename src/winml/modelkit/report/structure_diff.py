"""Describes what changed in the structure and the weights of a model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from winml.modelkit.report import document as doc
from winml.modelkit.report.comparison import DISPLAYED_BARS
from winml.modelkit.results.comparison import (
    ChangedModule,
    ComparedFile,
    StructureDiff,
)
from winml.modelkit.words import count_words, size_words

DISPLAYED_ROWS = 20
"""Rows unless all are asked for. Chosen: a table that fits on a screen and in a comment."""
DISPLAYED_OPERATORS = 8
"""Operators named in a line. Chosen: they fit on it."""
_NUMBER = re.compile(r"\.\d+(?=/|$)")
"""The number of a module among its siblings, in a tag."""


def diff_document(diff: StructureDiff, *, folds: bool = True, by_change: bool = False) -> doc.Document:
    """Describe what changed.

    Args:
        diff: The changes.
        folds: Whether modules of equal layers that changed alike share a row.
        by_change: Put the modules that changed most first, as for a comment that shows only these; else in the order
            of the file.
    """
    modules = sorted(diff.modules, key=_weight_of_change, reverse=True) if by_change else diff.modules
    rows = _folded(modules) if folds else list(map(_Row.of, modules))
    hidden = sum(row.modules for row in rows[DISPLAYED_ROWS:])
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
            *_diff_bars(diff),
            doc.Table(
                doc.columns(
                    "change", ("module", "name"), ("nodes", "count"), "operators", "weights", ("size", "bytes")
                ),
                [row.cells for row in rows],
                name="modules",
                heading="Modules that differ",
                is_searched=True,
                brief=range(DISPLAYED_ROWS),
                rest=f"{hidden} more modules changed less."
                if by_change
                else f"… and {hidden} more modules (--verbose shows all)",
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
        introduction="Neither file was run: nodes, attributes and the content of weights were compared, module by "
        "module.",
        figures=list(_diff_figures(diff)),
    )


def _diff_figures(diff: StructureDiff) -> Iterator[doc.Figure]:
    before, after = diff.before, diff.after
    if diff.is_same:
        yield doc.Figure("files", "equal", f"every node and weight of {diff.same_modules} modules", "good")
    else:
        statuses = [module.status for module in diff.modules]
        words = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
        meaning = f"{words}; {diff.same_modules} are equal" if words else f"{diff.same_modules} are equal"
        yield doc.Figure("modules that differ", str(len(diff.modules)), meaning)
    yield doc.Figure("nodes", f"{after.nodes - before.nodes:+,}", f"{before.nodes:,} before, {after.nodes:,} after")
    change = after.size_bytes - before.size_bytes
    sizes = f"{size_words(before.size_bytes)} before, {size_words(after.size_bytes)} after, weights included"
    yield doc.Figure("size", f"{'-' if change < 0 else '+'}{size_words(abs(change))}", sizes)
    weights = sum(len(module.weights) for module in diff.modules)
    yield doc.Figure("weights that differ", str(weights), "by content, name, type or shape")


def _diff_bars(diff: StructureDiff) -> Iterator[doc.Block]:
    changes = sorted(diff.operators.items(), key=lambda item: -abs(item[1][1] - item[1][0]))[:DISPLAYED_BARS]
    yield doc.Bars(
        [
            doc.Bar(name, after - before, f"{after - before:+d}", f"{before} → {after}")
            for name, (before, after) in changes
        ],
        heading="Operators: nodes after minus nodes before",
    )
    sizes: dict[str, list[int]] = {}
    for module in diff.modules:
        for kind, (before, after) in module.dtypes.items():
            pair = sizes.setdefault(kind, [0, 0])
            pair[0] += before
            pair[1] += after
    yield doc.Bars(
        [
            doc.Bar(
                kind,
                after - before,
                f"{'-' if after < before else '+'}{size_words(abs(after - before))}",
                f"{size_words(before)} → {size_words(after)}",
            )
            for kind, (before, after) in sorted(sizes.items(), key=lambda item: -abs(item[1][1] - item[1][0]))
        ],
        heading="Weights of modules that differ, by type",
    )


@dataclass(frozen=True)
class _Row:
    """One line of the table: a module, or several that changed alike and differ in their numbers only."""

    status: str
    name: str
    rest: tuple[doc.Cell, ...]
    modules: int = 1

    @classmethod
    def of(cls, module: ChangedModule) -> _Row:
        return cls(module.status, _module_name(module), _cells(module))

    @property
    def cells(self) -> tuple[doc.Cell, ...]:
        name = f"{self.name} × {self.modules}" if self.modules > 1 else self.name
        return (self.status, name, *self.rest)


def _folded(modules: Iterable[ChangedModule]) -> list[_Row]:
    """Return a row for each kind of change; modules of equal layers that changed alike share one."""
    groups: dict[tuple[str, str, tuple[doc.Cell, ...]], list[_Row]] = {}
    for row in map(_Row.of, modules):
        groups.setdefault((row.status, _NUMBER.sub(".*", row.name), row.rest), []).append(row)
    return [
        rows[0] if len(rows) == 1 else _Row(status, name, rest, len(rows))
        for (status, name, rest), rows in groups.items()
    ]


def _diff_fields(diff: StructureDiff) -> Iterator[doc.Field]:
    yield "before", _file_words(diff.before)
    yield "after", _file_words(diff.after)
    if diff.is_same:
        yield "same", f"every node and every weight of {diff.same_modules} modules"
        return
    counts = dict.fromkeys(("changed", "added", "removed", "renamed"), 0)
    for module in diff.modules:
        counts[module.status] += 1
    counted = [f"{count} {status}" for status, count in counts.items() if count]
    yield "modules", ", ".join([*counted, f"{diff.same_modules} the same"])
    if diff.operators:
        yield "operators", _operator_words(diff.operators)
    yield from (("interface", change) for change in diff.interface)
    if diff.is_rewired:
        yield "wiring", "nodes and weights of every module are as before, and read each other otherwise"
    yield from doc.note_fields(diff.notes)


def _file_words(file: ComparedFile) -> str:
    return (
        f"{file.path} · {file.nodes} nodes, {count_words(file.parameters)} parameters, "
        f"{size_words(file.size_bytes)}, opset {file.opset}"
    )


def _module_name(module: ChangedModule) -> str:
    name = module.tag or module.class_name
    return f"{module.renamed_from} → {name}" if module.renamed_from else name


def _cells(module: ChangedModule) -> tuple[doc.Cell, ...]:
    attributes = f"attributes of {module.attributes_changed}" if module.attributes_changed else ""
    operators = ", ".join(filter(None, [_operator_words(module.operators), attributes]))
    nodes, sizes = module.nodes, module.size_bytes
    size = doc.Number(sizes[1] - sizes[0], _arrow_of_sizes(module)) if sizes[0] != sizes[1] else ""
    return doc.Number(nodes[1], _arrow(nodes)), operators, _weight_words(module), size


def _operator_words(operators: Mapping[str, tuple[int, int]]) -> str:
    words = [f"{name} {after - before:+d}" for name, (before, after) in operators.items()]
    more = len(words) - DISPLAYED_OPERATORS
    return ", ".join(words[:DISPLAYED_OPERATORS]) + (f" and {more} others" if more > 0 else "")


def _weight_words(module: ChangedModule) -> str:
    counts: dict[str, int] = {}
    for weight in module.weights:
        counts[weight.status] = counts.get(weight.status, 0) + 1
    return ", ".join(f"{count} {status}" for status, count in counts.items())


def _arrow(pair: tuple[int, int]) -> str:
    return str(pair[1]) if pair[0] == pair[1] else f"{pair[0]} → {pair[1]}"


def _arrow_of_sizes(module: ChangedModule) -> str:
    before, after = module.size_bytes
    return "" if before == after else f"{size_words(before)} → {size_words(after)}"


def _weight_of_change(module: ChangedModule) -> int:
    """Return how much changed, to put the largest change first: bytes of weights, then nodes."""
    bytes_changed = sum(abs(after - before) for before, after in module.dtypes.values())
    return bytes_changed + sum(abs(after - before) for before, after in module.operators.values()) + len(module.weights)
