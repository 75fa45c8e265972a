"""Prints in a terminal what optimizing would do, and what an open size keeps it from."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console

from winml.modelkit.report.terminal import TextTable, print_rows
from winml.modelkit.results.optimization_check import CheckedCapability, OptimizationCheck

__all__ = ["print_optimization_check"]

SHOWN_MODULES = 3
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
    shown = list(modules.items()) if verbose else list(modules.items())[:SHOWN_MODULES]
    words = [f"{tag or '(no tag)'} {count}" for tag, count in shown]
    more = [f"and {len(modules) - len(shown)} more"] if len(shown) < len(modules) else []
    return ", ".join([*words, *more])
