"""Prints a compilation in a terminal: what was compiled, which modules it holds, and what stayed outside."""

from __future__ import annotations

from collections import Counter

from rich.console import Console

from winml.modelkit.compare.words import comparison_words
from winml.modelkit.report.terminal import TextTable, print_rows
from winml.modelkit.results.compiled_model import CompilableProvider, CompiledFile
from winml.modelkit.results.words import coverage_words
from winml.modelkit.words import size_words

__all__ = ["print_compilable_providers", "print_compilation"]

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
