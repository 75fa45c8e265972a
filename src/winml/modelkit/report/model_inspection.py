"""Prints an inspected model in a terminal: class, tasks, inputs, outputs, weights and module tree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from winml.modelkit.file_names import ONLY_PART
from winml.modelkit.graph.specs import InputTensorSpec
from winml.modelkit.hierarchy.tracing import TracedModule
from winml.modelkit.hierarchy.tree import ModuleNode, ModuleTree
from winml.modelkit.report.module_tree import ShownModule, TreeLimits, shown_modules
from winml.modelkit.report.terminal import label, print_rows
from winml.modelkit.results.inspected_model import InspectedModel
from winml.modelkit.words import count_words, shape_words, size_words

__all__ = ["print_model_inspection"]

Row = tuple[str, str]
_Module = ModuleNode | TracedModule
"""A module of the tree; one that never ran is a traced one."""

_FIRST_SHOWN = 4
"""Number of first values shown, equal ones counted once. Chosen: a grid has three."""


def print_model_inspection(
    record: InspectedModel, console: Console, *, verbose: bool = False, limits: TreeLimits | None = None
) -> None:
    """Print the model that an export would read, and its module tree if there is one.

    Args:
        record: The inspected model.
        console: Where to print.
        verbose: Show the classes of every task and the weight files.
        limits: How much of the module tree is shown; None shows all levels, and equal modules once.
    """
    rows = [*_model_rows(record, verbose=verbose), *_tensor_rows(record), *_weight_rows(record, verbose=verbose)]
    if record.tree is not None:
        words = f"{len(record.tree)} modules of {record.tree.registered} registered, from {record.tree_source}"
        rows.append(("hierarchy", words))
    rows += [("note", note) for note in record.notes]
    print_rows(rows, console)
    if record.tree is not None:
        console.print()
        console.print(_module_tree(record.tree, record.never_ran, limits or TreeLimits()))


def _model_rows(record: InspectedModel, *, verbose: bool) -> Iterator[Row]:
    info = record.info
    yield "model", info.name_or_path
    kind = f" ({info.model_type})" if info.model_type else ""
    yield "class", f"{info.class_name}{kind}, {info.library} {info.library_version}"
    if info.task:
        yield "task", f"{info.task}, {info.task_rule}"
    if record.tasks and not verbose:
        yield "tasks", ", ".join(record.tasks)
    for task, classes in record.tasks.items() if verbose else ():
        yield "can do", f"{task}: {', '.join(classes)}"
    if record.inference_class:
        yield "inference", record.inference_class
    for processor in record.processors:
        yield processor.role, f"{processor.class_name}, from {processor.origin}"


def _tensor_rows(record: InspectedModel) -> Iterator[Row]:
    for part in record.parts:
        if part.name != ONLY_PART:
            yield "part", part.name
        for spec in part.inputs:
            yield "input", f"{spec.name} {shape_words(spec.dtype, spec.shape)}{_range_words(spec)}"
        for output in part.outputs or ():
            yield "output", f"{output.name} {shape_words(output.dtype, output.shape)}"
        if part.outputs is None:
            yield "outputs", "not known without values"
    yield "export", f"opset {record.opset_version}"


def _range_words(spec: InputTensorSpec) -> str:
    bounds = spec.as_record().get("value_range")
    words = "" if bounds is None else f", values {bounds[0]} to {bounds[1]}"
    first_values = [
        f"{count} times {value}" if count > 1 else str(value) for value, count in spec.first_values[:_FIRST_SHOWN]
    ]
    more = ", …" if len(spec.first_values) > _FIRST_SHOWN else ""
    return f"{words}, first {', '.join(first_values)}{more}" if first_values else words


def _weight_rows(record: InspectedModel, *, verbose: bool) -> Iterator[Row]:
    count, size = count_words(record.parameter_count), size_words(record.parameter_bytes)
    yield "parameters", f"{count}, {size}: {_dtype_words({entry.dtype: entry.count for entry in record.parameters})}"
    weights = record.weights
    if weights is None:
        yield "weights", "no weight file here"
        return
    stored_counts = {entry.dtype: entry.count for entry in weights.stored}
    stored = f": {_dtype_words(stored_counts)}" if stored_counts else ", unread"
    files = f"{len(weights.files)} files" if len(weights.files) > 1 else weights.files[0].name
    yield "weights", f"{files}, {weights.format}, {size_words(weights.size_bytes)}{stored}"
    for file in weights.files if verbose else ():
        yield "file", str(file)


def _dtype_words(counts: Mapping[str, int]) -> str:
    """Return the number of parameters of each dtype."""
    return ", ".join(f"{dtype} {count_words(count)}" for dtype, count in counts.items()) or "none"


def _module_tree(tree: ModuleTree, never_ran: tuple[TracedModule, ...], limits: TreeLimits) -> Tree:
    """Return the tree with class, path, parameters and calls; a module that never ran is below its nearest parent."""
    never_ran_below: dict[str, list[TracedModule]] = {}
    for module in never_ran:
        never_ran_below.setdefault(_nearest_traced_path(tree, module.path), []).append(module)

    def children_of(module: _Module) -> list[_Module]:
        if isinstance(module, TracedModule):
            return []
        return [*tree.children(module.path), *never_ran_below.get(module.path, ())]

    def add_children(branch: Tree, shown: ShownModule[_Module]) -> None:
        for child in shown.children:
            add_children(branch.add(_module_label(child)), child)

    roots: list[_Module] = [tree.root]
    (root,) = shown_modules(roots, children_of, _facts, limits)
    shown_tree = Tree(_module_label(root), guide_style="dim")
    add_children(shown_tree, root)
    return shown_tree


def _facts(module: _Module) -> tuple[object, ...]:
    if isinstance(module, TracedModule):
        return (module.class_name,)
    return (module.class_name, module.parameter_count, module.calls)


def _nearest_traced_path(tree: ModuleTree, path: str) -> str:
    while path and tree.get(path) is None:
        path = path.rpartition(".")[0]
    return path


def _module_label(shown: ShownModule[_Module]) -> Text:
    node = shown.item
    path = f" {shown.name(lambda module: module.path)}" if node.path else ""
    if isinstance(node, TracedModule):
        return label((f"{node.class_name}{path}{shown.count_words} · never ran", "dim"))
    segment = shown.name(lambda module: module.tag.rpartition("/")[2] if isinstance(module, ModuleNode) else "")
    parameters = f" · {count_words(node.parameter_count)} parameters" if node.parameter_count else ""
    calls = f" · {node.calls} calls" if node.calls > 1 else ""
    return label((segment, "bold"), (path, "dim"), f"{shown.count_words}{parameters}{calls}")
