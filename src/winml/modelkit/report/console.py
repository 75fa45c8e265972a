"""Prints an export in a terminal: its summary and its module tree.

Renders with rich. Colour alone carries no information; the given console obeys ``NO_COLOR`` and pipes.
"""

from __future__ import annotations

from typing import TextIO

from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from winml.modelkit.hierarchy.tree import ModuleNode
from winml.modelkit.report.dimension_words import dimension_words
from winml.modelkit.results.export_result import ExportResult
from winml.modelkit.results.words import verification_words
from winml.modelkit.words import count_words, shape_words, size_words

__all__ = ["console_for", "print_export", "print_tree"]

WIDE = 400
"""Chosen: more columns than the deepest module path of the tested models."""


def console_for(stream: TextIO) -> Console:
    """Return a console that never cuts a line: a terminal wraps it, and a pipe needs all of it."""
    return Console(file=stream, width=WIDE)


def print_tree(result: ExportResult, console: Console) -> None:
    """Print the module tree with the node count of each module, without those of its children."""
    counts = result.node_counts()

    def label(node: ModuleNode) -> str:
        segment = node.tag.rpartition("/")[2]
        count = counts.get(node.path, 0)
        path = f" [dim]{escape(node.path)}[/dim]" if node.path else ""
        return f"[bold]{escape(segment)}[/bold]{path} · {count} node{'' if count == 1 else 's'}"

    def add_children(branch: Tree, node: ModuleNode) -> None:
        for child in result.tree.children(node.path):
            add_children(branch.add(label(child)), child)

    root = Tree(label(result.tree.root), guide_style="dim")
    add_children(root, result.tree.root)
    console.print(root)


def print_export(result: ExportResult, console: Console) -> None:
    """Print the summary: the model, its inputs and outputs, coverage, verification and files."""
    coverage, checked_sizes = result.coverage, result.checked_sizes
    rows = [
        ("model", f"{result.model.class_name} · {count_words(result.tree.root.parameter_count)} parameters"),
        *([("task", f"{result.model.task} ({result.model.task_rule})")] if result.model.task else []),
        ("inputs", ", ".join(f"{spec.name} {shape_words(spec.dtype, spec.shape)}" for spec in result.inputs)),
        ("outputs", ", ".join(f"{spec.name} {shape_words(spec.dtype, spec.shape)}" for spec in result.outputs)),
        *(
            [("open", ", ".join(dimension_words(item, checked_sizes.get(item.name, ())) for item in result.dimensions))]
            if result.dimensions
            else []
        ),
        ("exporter", result.exporter_words),
        (
            "hierarchy",
            f"{len(result.tree)} modules traced of {result.tree.registered} registered · {_coverage_words(result)}",
        ),
        *(
            [("sources", ", ".join(f"{name} {count}" for name, count in sorted(coverage.sources.items())))]
            if coverage.tagged
            else []
        ),
        ("verified", verification_words(result.verification)),
    ]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        console.print(f"[bold]{name:<{width}}[/bold]  {escape(value)}", highlight=False)
    for file in result.files:
        console.print(
            f"[bold]{'wrote':<{width}}[/bold]  {escape(str(file.path))} ({size_words(file.size_bytes)})",
            highlight=False,
        )
    for note in result.notes:
        console.print(f"[bold]{'note':<{width}}[/bold]  {escape(note)}", highlight=False)


def _coverage_words(result: ExportResult) -> str:
    coverage = result.coverage
    if coverage.nodes and not coverage.tagged:
        return "not written (--no-hierarchy)"
    return f"{coverage.tagged} of {coverage.nodes} nodes tagged ({coverage.percent:.0f} %)"
