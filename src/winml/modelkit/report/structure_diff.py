"""What changed between two files, module by module."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from winml.modelkit.report import document as doc
from winml.modelkit.results.comparison import ChangedModule, ComparedFile, StructureDiff
from winml.modelkit.words import count_words, size_words

__all__ = ["diff_document"]

SHOWN_ROWS = 20
"""Rows unless all are asked for. Chosen: a table that fits on a screen and in a comment."""
SHOWN_OPERATORS = 8
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
    hidden = sum(row.modules for row in rows[SHOWN_ROWS:])
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
            doc.Fields(list(_fields(diff))),
            doc.Table(
                doc.columns("", ("module", "name"), ("nodes", "count"), "operators", "weights", ("size", "bytes")),
                [row.cells for row in rows],
                brief=range(SHOWN_ROWS),
                rest=f"{hidden} more modules changed less."
                if by_change
                else f"… and {hidden} more modules (--verbose shows all)",
            ),
            doc.Table(doc.columns(("weight", "name"), "", "before", "after"), weights, detail=doc.Detail.VERBOSE),
        ],
        title=f"{diff.before.path.name} → {diff.after.path.name}",
    )


@dataclass(frozen=True)
class _Row:
    """One line of the table: a module, or several that changed alike and differ in their numbers only."""

    status: str
    name: str
    rest: tuple[str, str, str, str]
    modules: int = 1

    @classmethod
    def of(cls, module: ChangedModule) -> _Row:
        return cls(module.status, _module_name(module), _cells(module))

    @property
    def cells(self) -> tuple[str, ...]:
        name = f"{self.name} × {self.modules}" if self.modules > 1 else self.name
        return (self.status, name, *self.rest)


def _folded(modules: Iterable[ChangedModule]) -> list[_Row]:
    """Return a row for each kind of change; modules of equal layers that changed alike share one."""
    groups: dict[tuple[str, str, tuple[str, str, str, str]], list[_Row]] = {}
    for row in map(_Row.of, modules):
        groups.setdefault((row.status, _NUMBER.sub(".*", row.name), row.rest), []).append(row)
    return [
        rows[0] if len(rows) == 1 else _Row(status, name, rest, len(rows))
        for (status, name, rest), rows in groups.items()
    ]


def _fields(diff: StructureDiff) -> Iterator[doc.Field]:
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


def _cells(module: ChangedModule) -> tuple[str, str, str, str]:
    attributes = f"attributes of {module.attributes_changed}" if module.attributes_changed else ""
    operators = ", ".join(filter(None, [_operator_words(module.operators), attributes]))
    return _arrow(module.nodes), operators, _weight_words(module), _arrow_of_sizes(module)


def _operator_words(operators: Mapping[str, tuple[int, int]]) -> str:
    words = [f"{name} {after - before:+d}" for name, (before, after) in operators.items()]
    more = len(words) - SHOWN_OPERATORS
    return ", ".join(words[:SHOWN_OPERATORS]) + (f" and {more} others" if more > 0 else "")


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
