"""Prints in a terminal what optimizing did, or would do."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console

from winml.modelkit.compare.words import equality_words
from winml.modelkit.report.terminal import TextTable, print_rows
from winml.modelkit.results.optimization_check import CheckedCapability, OptimizationCheck
from winml.modelkit.results.optimized_model import ModuleChange, OptimizedFile
from winml.modelkit.results.words import coverage_words
from winml.modelkit.words import size_words

__all__ = [
    "print_optimization",
    "print_optimization_check",
]


# --- Prints in a terminal what optimizing would do, and what an open size keeps it from.


SHOWN_CHECKED = 3
"""Modules of a capability unless ``verbose``. Chosen: they fit on a line."""


def print_optimization_check(check: OptimizationCheck, console: Console, *, verbose: bool) -> None:
    """Print the answer; with ``verbose`` every module, and capabilities that would do nothing."""
    shown = [entry for entry in check.capabilities if verbose or entry.count or entry.removed or entry.blocked]
    idle = len(check.capabilities) - len(shown)
    rows = [
        ("nodes", f"{check.nodes_before} → {check.nodes_after}"),
        *([("nothing", f"{idle} capabilities would do nothing (--verbose shows them)")] if idle else []),
        *(("note", note) for note in check.notes),
        ("wrote", "nothing: this is a check"),
    ]
    print_rows(rows, console)
    if shown:
        console.print()
        table = TextTable(("capability", "would", "modules"))
        for entry in shown:
            table.add(entry.name, _doing_words(entry), _module_words(entry.modules, verbose=verbose))
        table.print(console)
    blocked = [(entry, item) for entry in shown for item in entry.blocked]
    if blocked:
        console.print()
        table = TextTable(("kept by an open size", "times", "module", "size"), numbers=frozenset({1}))
        for entry, item in blocked:
            sizes = ", ".join(f"{name} ({', '.join(places)})" for name, places in item.dimensions.items())
            table.add(entry.name, str(item.count), item.module, f"{sizes}, at 1 only" if item.only_at_one else sizes)
        table.print(console)


def _doing_words(entry: CheckedCapability) -> str:
    if entry.count is None:
        return f"remove {entry.removed} node{'' if entry.removed == 1 else 's'}"
    return f"fire {entry.count} time{'' if entry.count == 1 else 's'}"


def _module_words(modules: Mapping[str, int], *, verbose: bool) -> str:
    shown = list(modules.items()) if verbose else list(modules.items())[:SHOWN_CHECKED]
    words = [f"{tag or '(no tag)'} {count}" for tag, count in shown]
    more = [f"and {len(modules) - len(shown)} more"] if len(shown) < len(modules) else []
    return ", ".join([*words, *more])


# --- Prints an optimization in a terminal: nodes, operators, sizes and modules before and after.


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
