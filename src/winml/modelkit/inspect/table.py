"""Tables of inspected models and ONNX files, of available tasks, and of the support by a provider."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from winml.modelkit.file_names import ONLY_PART
from winml.modelkit.inspect.records import InspectedModel, StoredBits, StoredParameter
from winml.modelkit.onnx.specs import InputTensorSpec
from winml.modelkit.report import document as doc
from winml.modelkit.report.module_tree import TreeLimits, TreeRow, tree_rows
from winml.modelkit.tags import address
from winml.modelkit.tags.torch_modules import TracedModule
from winml.modelkit.tags.tree import ModuleNode, ModuleTree
from winml.modelkit.words import count_words, size_words

_Module = ModuleNode | TracedModule
"""A module of the tree; a traced module if it never ran."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
"""Index of a layer or an expert in the name of a parameter."""
_MAX_FIRST_VALUES = 4
"""Number of displayed first values, with equal values counted once. Chosen: a grid has three."""


def model_inspection_document(record: InspectedModel, limits: TreeLimits | None = None) -> doc.Document:
    """Describe the model that an export would read, and its module tree if present.

    Args:
        record: The inspected model.
        limits: Limits of the displayed module tree; None: all levels, with equal modules folded.
    """
    fields = [*_model_fields(record), *_tensor_fields(record), *_weight_fields(record)]
    if record.tree is not None:
        registered = f"{record.tree.registered} registered, with torch.nn layers"
        description = f"{len(record.tree)} modules ({registered}), from {record.tree_source}"
        fields.append(("hierarchy", description))
    tree = [] if record.tree is None else [_module_tree(record.tree, record.never_ran, limits or TreeLimits())]
    bits = [] if record.quantization is None else [_bits_table(record.quantization)]
    fit: Sequence[doc.Block] = ()
    if record.fit is not None:
        from winml.modelkit.inspect.onnx_table import provider_fit_document  # reads graphs

        fit = provider_fit_document(record.fit).blocks
    return doc.Document([doc.Fields([*fields, *doc.note_fields(record.notes)]), *bits, *tree, *fit])


def _model_fields(record: InspectedModel) -> Iterator[doc.Field]:
    info = record.info
    yield "model", info.name_or_path
    kind = f" ({info.model_type})" if info.model_type else ""
    yield "class", f"{info.class_name}{kind}, {info.library} {info.library_version}"
    if info.task:
        yield "task", f"{info.task}, {info.task_rule}"
    if record.tasks:
        yield "tasks", ", ".join(record.tasks)
    for task, classes in record.tasks.items():
        yield "can do", f"{task}: {', '.join(classes)}", doc.Detail.VERBOSE
    if record.inference_class:
        yield "inference", record.inference_class
    for processor in record.processors:
        yield processor.role, f"{processor.class_name}, from {processor.origin}"


def _tensor_fields(record: InspectedModel) -> Iterator[doc.Field]:
    for part in record.parts:
        if part.name != ONLY_PART:
            yield "part", part.name
        for spec in part.inputs:
            yield "input", f"{spec.name} {spec.words}{_range_words(spec)}"
        for output in part.outputs or ():
            yield "output", f"{output.name} {output.words}"
        if part.outputs is None:
            yield "outputs", "not known without values"
    yield "export", f"opset {record.opset_version}"


def _range_words(spec: InputTensorSpec) -> str:
    """Format the value range and the first values of an input; empty if none are stated."""
    bounds = spec.as_record().get("value_range")
    bounds_text = "" if bounds is None else f", values {bounds[0]} to {bounds[1]}"
    first_values = [
        f"{count} times {value}" if count > 1 else str(value) for value, count in spec.first_values[:_MAX_FIRST_VALUES]
    ]
    ellipsis = ", …" if len(spec.first_values) > _MAX_FIRST_VALUES else ""
    return f"{bounds_text}, first {', '.join(first_values)}{ellipsis}" if first_values else bounds_text


def _weight_fields(record: InspectedModel) -> Iterator[doc.Field]:
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
    yield from (("file", str(file), doc.Detail.VERBOSE) for file in weights.files)
    if record.quantization is not None:
        yield "quantization", record.quantization.words


def _bits_table(stored: StoredBits) -> doc.Table:
    """Return format and bits of each parameter; parameters of equal layers share a row."""
    groups: dict[StoredParameter, list[str]] = {}
    for parameter in stored.parameters:
        groups.setdefault(replace(parameter, name=_NUMBER.sub("*", parameter.name)), []).append(parameter.name)
    rows: list[list[doc.Cell]] = [
        [
            names[0] if len(names) == 1 else kind.name,
            len(names),
            kind.format or "–",
            kind.precision,
            kind.bits,
            kind.block_size,
            ", ".join(["zero points"] * kind.has_zero_points + ["act-order"] * kind.is_reordered),
        ]
        for kind, names in groups.items()
    ]
    kinds = doc.columns(
        ("weights", "name"),
        ("count", "count"),
        ("format", "text"),
        ("type", "text"),
        ("bits", "count"),
        ("block", "count"),
        ("with", "text"),
    )
    return doc.Table(kinds, rows)


def _dtype_words(counts: Mapping[str, int]) -> str:
    """Format the number of parameters of each dtype."""
    return ", ".join(f"{dtype} {count_words(count)}" for dtype, count in counts.items()) or "none"


def _module_tree(tree: ModuleTree, never_ran: tuple[TracedModule, ...], limits: TreeLimits) -> doc.Tree:
    """Return the tree with class, path, parameters and calls; a module that never ran is below its nearest parent."""
    never_ran_below: dict[str, list[TracedModule]] = {}
    for module in never_ran:
        never_ran_below.setdefault(_nearest_traced_path(tree, module.path), []).append(module)

    def children_of(module: _Module) -> list[_Module]:
        if isinstance(module, TracedModule):
            return []
        return [*tree.children(module.path), *never_ran_below.get(module.path, ())]

    roots: list[_Module] = [tree.root]
    (root,) = tree_rows(roots, children_of, _module_facts, limits)
    return doc.Tree(_module_branch(root))


def _module_facts(module: _Module) -> tuple[object, ...]:
    """Return the class, parameters and calls by which equal modules are folded."""
    if isinstance(module, TracedModule):
        return (module.class_name,)
    return (module.class_name, module.parameter_count, module.calls)


def _nearest_traced_path(tree: ModuleTree, path: str) -> str:
    """Return the path of the closest ancestor in the tree, or of the module itself."""
    while path and tree.get(path) is None:
        path = path.rpartition(".")[0]
    return path


def _module_branch(row: TreeRow[_Module]) -> doc.Branch:
    """Return the tree entry of a displayed module and, recursively, of its children."""
    node, children = row.item, tuple(map(_module_branch, row.children))
    path = row.name(lambda module: module.path) if node.path else ""
    if isinstance(node, TracedModule):
        return doc.Branch(node.class_name, path, f"{row.count_words} · never ran", children, is_dim=True)
    segment = row.name(lambda module: address.last_segment(module.tag) if isinstance(module, ModuleNode) else "")
    parameters = f" · {count_words(node.parameter_count)} parameters" if node.parameter_count else ""
    calls = f" · {node.calls} calls" if node.calls > 1 else ""
    return doc.Branch(segment, path, f"{row.count_words}{parameters}{calls}", children)


def tasks_document(
    tasks: Mapping[str, Sequence[str]], aliases: Mapping[str, str] = MappingProxyType({})
) -> doc.Document:
    """List the tasks with their classes and aliases.

    Args:
        tasks: Task → classes.
        aliases: Alias → task.
    """

    def describe_task(task: str) -> str:
        alias_words = ", ".join(alias for alias, target in aliases.items() if target == task)
        return ", ".join(tasks[task]) + (f"; also called {alias_words}" if alias_words else "")

    return doc.Document([doc.Fields([(task, describe_task(task)) for task in tasks])])
