"""Tells what changed between two files, module by module: in a terminal, and as Markdown that fits a comment."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from rich.console import Console

from winml.modelkit.report.export import markdown_text, table_lines
from winml.modelkit.report.terminal import TextTable, print_rows
from winml.modelkit.results.comparison import ChangedModule, ComparedFile, StructureDiff
from winml.modelkit.words import count_words, size_words

__all__ = ["diff_markdown", "print_diff"]

SHOWN_ROWS = 20
"""Rows shown unless all are asked for. Chosen: a table that fits on a screen and in a comment."""
SHOWN_OPERATORS = 8
"""Operators named in a line. Chosen: they fit on it."""

_HEADER = ("", "module", "nodes", "operators", "weights", "size")
_NUMBER = re.compile(r"\.\d+(?=/|$)")
"""The number of a module among its siblings, in a tag."""


def print_diff(diff: StructureDiff, console: Console, *, verbose: bool) -> None:
    """Print what changed; with ``verbose`` every module, and the names of weights."""
    print_rows(list(_rows(diff)), console)
    rows = [_Row.of(module) for module in diff.modules] if verbose else _folded(diff.modules)
    shown = rows if verbose else rows[:SHOWN_ROWS]
    if not shown:
        return
    console.print()
    table = TextTable(_HEADER, numbers=frozenset({2, 5}))
    for row in shown:
        table.add(*row.cells)
    table.print(console)
    if len(shown) < len(rows):
        hidden = sum(row.modules for row in rows[len(shown) :])
        console.print(f"… and {hidden} more modules (--verbose shows all)")
    if verbose:
        _print_weights(diff, console)


def diff_markdown(diff: StructureDiff) -> str:
    """Return what changed as Markdown: a summary, and a table of the modules that changed most."""
    lines = [f"### {markdown_text(diff.before.path.name)} → {markdown_text(diff.after.path.name)}", ""]
    lines += list(table_lines(("", "value"), list(_rows(diff))))
    rows = _folded(sorted(diff.modules, key=_weight_of_change, reverse=True))
    if rows:
        lines += ["", *table_lines(_HEADER, [row.cells for row in rows[:SHOWN_ROWS]], code_columns={1})]
    if len(rows) > SHOWN_ROWS:
        lines += ["", f"{sum(row.modules for row in rows[SHOWN_ROWS:])} more modules changed less."]
    return "\n".join(lines) + "\n"


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


def _rows(diff: StructureDiff) -> Iterator[tuple[str, str]]:
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
    yield from (("note", note) for note in diff.notes)


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


def _print_weights(diff: StructureDiff, console: Console) -> None:
    table = TextTable(("weight", "", "before", "after"))
    for module in diff.modules:
        for weight in module.weights:
            name = f"{weight.renamed_from} → {weight.name}" if weight.renamed_from else weight.name
            table.add(name, weight.status, weight.before, weight.after)
    console.print()
    table.print(console)
