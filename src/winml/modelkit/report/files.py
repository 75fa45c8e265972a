"""Prints in a terminal what became of a file: compiled, extracted, pinned or retagged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console

from winml.modelkit.compare.words import comparison_words
from winml.modelkit.hierarchy.carry.carrying import Way
from winml.modelkit.report.terminal import TextTable, print_rows
from winml.modelkit.results.compiled_model import CompilableProvider, CompiledFile
from winml.modelkit.results.extract_result import ExtractResult
from winml.modelkit.results.words import coverage_words
from winml.modelkit.results.written_file import PinnedModel, RetaggedModel
from winml.modelkit.words import count_words, shape_words, size_words

__all__ = [
    "extract_lines",
    "pinned_lines",
    "print_compilable_providers",
    "print_compilation",
    "retagged_lines",
]


# --- Prints a compilation in a terminal: what was compiled, which modules it holds, and what stayed outside.


SHOWN_ROWS = 12
"""Rows of a table unless ``verbose``. Chosen: the whole summary fits on a screen."""


def print_compilation(result: CompiledFile, console: Console, *, verbose: bool) -> None:
    """Print what came of it; with ``verbose`` every module and node."""
    compiled = result.compiled
    coverage = coverage_words(result.coverage) if result.is_tagged else "unknown: the source has no tags"
    rows = [
        ("provider", f"{compiled['provider']} {compiled['provider_version']}, for the {compiled['device']}"),
        ("nodes", f"{result.before.nodes} → {result.after.nodes}"),
        *([("compiled", _parts_words(result))] if result.parts else []),
        ("hierarchy", coverage),
        ("verified", comparison_words(result.comparison)),
        *(("wrote", f"{file.path} ({size_words(file.size_bytes)})") for file in result.files),
        *(("note", note) for note in result.notes),
    ]
    print_rows(rows, console)
    if result.parts:
        console.print()
        _print_table(_parts_table(result, verbose=verbose), console)
    if result.outside:
        console.print()
        _print_table(_outside_table(result, verbose=verbose), console)


def print_compilable_providers(providers: tuple[CompilableProvider, ...], console: Console) -> None:
    """Print the providers that a file can be compiled for."""
    table = TextTable(("provider", "here", "devices", "a compiled file holds", "package"))
    for item in providers:
        here = "yes" if item.is_present else "no"
        table.add(item.short, here, ", ".join(item.devices), item.makes, item.package or "none for this platform")
    table.print(console)


def _parts_words(result: CompiledFile) -> str:
    modules = {module for part in result.parts for module in part.modules}
    parts = f"{len(result.parts)} part{'' if len(result.parts) == 1 else 's'} of {len(modules)} modules"
    outside = Counter(node.operator for node in result.outside)
    words = ", ".join(f"{count} {operator}" for operator, count in outside.most_common())
    return f"{parts}; outside: {words or 'no node'}"


def _parts_table(result: CompiledFile, *, verbose: bool) -> tuple[TextTable, int]:
    table = TextTable(("compiled part", "module"))
    rows = [(part.name, module or "(the root)") for part in result.parts for module in part.modules]
    shown = rows if verbose else rows[:SHOWN_ROWS]
    for position, (name, module) in enumerate(shown):
        table.add("" if position and rows[position - 1][0] == name else name, module)
    return table, len(rows) - len(shown)


def _outside_table(result: CompiledFile, *, verbose: bool) -> tuple[TextTable, int]:
    table = TextTable(("left to the CPU provider", "operator", "module"))
    shown = result.outside if verbose else result.outside[:SHOWN_ROWS]
    for node in shown:
        table.add(node.name, node.operator, node.tag)
    return table, len(result.outside) - len(shown)


def _print_table(table: tuple[TextTable, int], console: Console) -> None:
    table[0].print(console)
    if table[1]:
        console.print(f"… and {table[1]} more (--verbose shows all)")


# --- Describes an extraction to people: which models were written, which modules were refused, and why.


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


# --- Renders what fixing the open dimensions of a file did, as lines for a terminal.


def pinned_lines(result: PinnedModel, source: str) -> list[tuple[str, str]]:
    """Return what was fixed, as pairs of a heading and a text.

    Args:
        result: What was done.
        source: The file the dimensions were fixed of, as the user wrote it.
    """
    verification = result.verification
    verified = f"equals {source} at these sizes" if verification else "skipped: the files were not compared"
    if verification:
        verified += f" (largest difference {verification.worst.relative_diff:.1e} of scale)"
    return [
        ("pinned", ", ".join(f"{name} {size}" for name, size in result.sizes.items())),
        *([("open", ", ".join(result.still_open))] if result.still_open else []),
        ("inputs", ", ".join(f"{spec.name} {shape_words(spec.dtype, spec.shape)}" for spec in result.inputs)),
        ("outputs", ", ".join(f"{spec.name} {shape_words(spec.dtype, spec.shape)}" for spec in result.outputs)),
        ("hierarchy", coverage_words(result.coverage)),
        ("verified", verified),
        ("wrote", f"{result.model_path} ({size_words(result.size_bytes)})"),
        *(("note", note) for note in result.notes),
    ]


# --- Renders what carrying tags to a file did, as lines for a terminal.


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
