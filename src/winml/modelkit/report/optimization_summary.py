"""Prints an optimization in a terminal: nodes, operators, sizes and modules before and after."""

from __future__ import annotations

from rich.console import Console

from winml.modelkit.compare.words import equality_words
from winml.modelkit.report.terminal import TextTable, print_rows
from winml.modelkit.results.optimized_model import ModuleChange, OptimizedFile
from winml.modelkit.results.words import coverage_words
from winml.modelkit.words import size_words

__all__ = ["print_optimization"]

SHOWN_MODULES = 12
"""Rows of the module table unless ``verbose``. Chosen: the whole summary fits on a screen."""


def print_optimization(result: OptimizedFile, console: Console, *, verbose: bool) -> None:
    """Print the changes; with ``verbose`` those of every module."""
    before, after = result.before, result.after
    rows = [
        ("nodes", f"{before.nodes} → {after.nodes}"),
        ("operators", ", ".join(_operator_change_words(result)) or "as before"),
        ("size", f"{size_words(before.size_bytes)} → {size_words(after.size_bytes)}"),
        *([("opset", f"{before.opset} → {after.opset}")] if before.opset != after.opset else []),
        *([("fired", ", ".join(f"{name} {count}" for name, count in result.fired.items() if count) or "none")]
          if result.enabled else []),
        ("hierarchy", _coverage_words(result)),
        *([("functions", result.functions.words)] if result.functions else []),
        ("verified", "a copy of the source" if result.is_copy else equality_words(result.verification)),
        *(("wrote", f"{file.path} ({size_words(file.size_bytes)})") for file in result.files),
        *(("note", note) for note in result.notes),
    ]  # fmt: skip
    print_rows(rows, console)
    changes = result.module_changes()
    if changes:
        shown_changes = changes if verbose else changes[:SHOWN_MODULES]
        console.print()
        _module_table(shown_changes).print(console)
        if len(shown_changes) < len(changes):
            console.print(f"… and {len(changes) - len(shown_changes)} more modules (--verbose shows all)")


def _operator_change_words(result: OptimizedFile) -> list[str]:
    return [f"{name} {before} → {after}" for name, (before, after) in result.operator_changes().items()]


def _coverage_words(result: OptimizedFile) -> str:
    if not result.is_tagged:
        return "unknown: the source does not say which module its nodes came from"
    return coverage_words(result.coverage)


def _module_table(changes: tuple[ModuleChange, ...]) -> TextTable:
    table = TextTable(("module", "nodes", "operators"), numbers=frozenset({1}))
    for change in changes:
        words = ", ".join(f"{name} {count:+d}" for name, count in change.operators.items())
        table.add(change.tag, f"{change.nodes_before} → {change.nodes_after}", words)
    return table
