"""Prints an export in a terminal: its summary and its module tree.

Renders with rich.
"""

from __future__ import annotations

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from winml.modelkit.graph.files.companions import Companions
from winml.modelkit.hierarchy.coverage import Coverage
from winml.modelkit.hierarchy.tree import ModuleNode
from winml.modelkit.report.dimension_words import dimension_words
from winml.modelkit.report.module_tree import ShownModule, TreeLimits, shown_modules
from winml.modelkit.report.tensor_words import input_words, output_words
from winml.modelkit.report.terminal import label, print_rows
from winml.modelkit.results.export_result import ExportedPart, ExportResult
from winml.modelkit.results.words import coverage_words, verification_words
from winml.modelkit.words import count_words, size_words

__all__ = ["print_export", "print_tree"]


def print_tree(result: ExportResult, console: Console, limits: TreeLimits | None = None) -> None:
    """Print the module tree of each part with the nodes and parameters of each module.

    Args:
        result: The export.
        console: Where to print.
        limits: How much of the tree is shown; None shows all levels, and equal modules once.
    """
    for part in result.parts:
        if part.description is not None and part.description.is_one_of_several:
            console.print(label((part.name, "bold")))
        _print_part_tree(part, console, limits or TreeLimits())


def _print_part_tree(part: ExportedPart, console: Console, limits: TreeLimits) -> None:
    size_of = part.module_sizes()

    def node_label(shown: ShownModule[ModuleNode]) -> Text:
        segment = shown.name(lambda node: node.tag.rpartition("/")[2])
        path = f" {shown.name(lambda node: node.path)}" if shown.item.path else ""
        size = size_of(shown.item).words
        return label((segment, "bold"), (path, "dim"), f"{shown.count_words} · {size}")

    def add_children(branch: Tree, shown: ShownModule[ModuleNode]) -> None:
        for child in shown.children:
            add_children(branch.add(node_label(child)), child)

    (root,) = shown_modules(
        [part.tree.root],
        lambda node: part.tree.children(node.path),
        lambda node: (node.class_name, size_of(node)),
        limits,
    )
    tree = Tree(node_label(root), guide_style="dim")
    add_children(tree, root)
    console.print(tree)


def print_export(result: ExportResult, console: Console) -> None:
    """Print what was exported: the model, its inputs and outputs, coverage, verification and files, part by part."""
    root = result.parts[0].tree.root
    rows = [
        ("model", f"{result.model.class_name} · {count_words(root.parameter_count)} parameters"),
        *([("task", f"{result.model.task} ({result.model.task_rule})")] if result.model.task else []),
    ]
    for part in result.parts:
        if part.description is not None and part.description.is_one_of_several:
            rows.append(("part", part.name))
        rows += _part_rows(part)
    rows += [("wrote", f"{file.path} ({size_words(file.size_bytes)})") for file in result.files]
    rows += [("beside it", _companion_words(result.companions))] if result.companions.names else []
    rows += [("note", note) for note in result.notes]
    print_rows(rows, console)


def _companion_words(companions: Companions) -> str:
    return f"{', '.join(companions.names)} ({size_words(companions.size_bytes)})"


def _part_rows(part: ExportedPart) -> list[tuple[str, str]]:
    """Return what is told of one graph: a word, and what it says."""
    coverage, checked = part.coverage, part.checked_sizes
    open_dimensions = ", ".join(dimension_words(item, checked.get(item.name, ())) for item in part.dimensions)
    sources = ", ".join(f"{name} {count}" for name, count in sorted(coverage.sources.items()))
    modules = f"{len(part.tree)} modules traced of {part.tree.registered} registered"
    return [
        ("inputs", input_words(part.inputs)),
        ("outputs", output_words(part.outputs, part.description)),
        *([("open", open_dimensions)] if part.dimensions else []),
        ("exporter", part.exporter_words),
        ("hierarchy", f"{modules} · {_coverage_words(coverage)}"),
        *([("sources", sources)] if coverage.tagged else []),
        *([("functions", part.functions.words)] if part.functions else []),
        ("verified", verification_words(part.verification)),
    ]


def _coverage_words(coverage: Coverage) -> str:
    if coverage.nodes and not coverage.tagged:
        return "not written (--no-hierarchy)"
    return coverage_words(coverage)
