"""Prints inspected models, ONNX files, tasks and what a provider runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from winml.modelkit.file_names import ONLY_PART
from winml.modelkit.graph.specs import InputTensorSpec
from winml.modelkit.hierarchy import address
from winml.modelkit.hierarchy.tracing import TracedModule
from winml.modelkit.hierarchy.tree import ModuleNode, ModuleTree
from winml.modelkit.inspect.module_costs import Cost, ModuleCost
from winml.modelkit.inspect.onnx_inspection import OnnxInspection, ValueInfo
from winml.modelkit.inspect.provider_fit import Finding, ProviderFit
from winml.modelkit.metadata_keys import QUANTIZATION_KEY
from winml.modelkit.report.module_tree import ShownModule, TreeLimits, shown_modules, shown_rows
from winml.modelkit.report.terminal import TextTable, label, print_rows
from winml.modelkit.results.inspected_model import InspectedModel
from winml.modelkit.results.words import at_root_words
from winml.modelkit.words import count_noun, count_words, shape_words, size_words

__all__ = [
    "print_model_inspection",
    "print_onnx_inspection",
    "print_provider_fit",
    "print_tasks",
]


# --- Prints an inspected model in a terminal: class, tasks, inputs, outputs, weights and module tree.


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


# --- Prints an inspected ONNX file in a terminal: file, graph, metadata, modules, nodes and initializers.
#
# Renders the record of ``inspect`` with rich. Knows no file format.


TOP_OPERATORS = 8
"""Operators shown unless ``verbose``. Chosen: they fit on a line."""


def print_onnx_inspection(
    inspection: OnnxInspection,
    console: Console,
    *,
    with_hierarchy: bool = False,
    verbose: bool = False,
    limits: TreeLimits | None = None,
) -> None:
    """Print an inspected ONNX file.

    Args:
        inspection: The inspected file.
        console: Where to print.
        with_hierarchy: Show the module tree.
        verbose: Show all operators, the other metadata and every initializer.
        limits: How much of the module tree is shown; None shows all levels, and equal modules once.
    """
    rows = [
        *_file_rows(inspection),
        *_graph_rows(inspection, verbose=verbose),
        *_record_rows(inspection, verbose=verbose),
        *_hierarchy_rows(inspection),
        *(("note", note) for note in inspection.notes),
    ]
    print_rows(rows, console)
    tables = [
        _module_table(inspection, limits or TreeLimits()) if with_hierarchy and inspection.modules else None,
        _node_table(inspection) if inspection.selector is not None else None,
        _weight_table(inspection) if verbose and inspection.weights else None,
    ]
    for table in filter(None, tables):
        console.print()
        table.print(console)


def _file_rows(inspection: OnnxInspection) -> Iterator[Row]:
    for index, file in enumerate(inspection.files):
        size = "missing" if file.size_bytes is None else size_words(file.size_bytes)
        yield ("data" if index else "file"), f"{file.path} ({size})"
    if len(inspection.files) > 1:
        yield "on disk", size_words(inspection.size_bytes)
    versions = [f"IR version {inspection.ir_version}"]
    versions += [f"{domain} opset {version}" for domain, version in inspection.opsets.items()]
    yield "format", " · ".join(versions)
    producer = f"{inspection.producer_name} {inspection.producer_version}".strip()
    yield "producer", producer or "does not say"


def _graph_rows(inspection: OnnxInspection, *, verbose: bool) -> Iterator[Row]:
    yield "inputs", ", ".join(map(_value_words, inspection.inputs)) or "none"
    yield "outputs", ", ".join(map(_value_words, inspection.outputs)) or "none"
    groups = [
        f"{dtype} {count_words(summary.parameters)} ({size_words(summary.size_bytes)})"
        for dtype, summary in inspection.weight_summaries.items()
    ]
    total = inspection.total
    yield (
        "initializers",
        f"{len(inspection.weights)}, {count_words(total.parameters)} values, {size_words(total.size_bytes)}"
        + (f": {', '.join(groups)}" if groups else "")
        + (f" · {total.bits:.3g} bits a parameter" if total.bits else ""),
    )
    subgraphs = f", {inspection.subgraph_nodes} of them in subgraphs" if inspection.subgraph_nodes else ""
    yield "nodes", f"{total.nodes}{subgraphs}"
    operators = [f"{name} {count}" for name, count in inspection.operators.items()]
    if not verbose and len(operators) > TOP_OPERATORS:
        operators[TOP_OPERATORS:] = [f"and {len(operators) - TOP_OPERATORS} others"]
    if operators:
        yield "operators", ", ".join(operators)
    if inspection.functions:
        functions = [f"{name} ({count_noun(count, 'node')})" for name, count in inspection.functions.items()]
        if not verbose and len(functions) > TOP_OPERATORS:
            functions[TOP_OPERATORS:] = [f"and {len(functions) - TOP_OPERATORS} others"]
        yield "functions", ", ".join(functions)
    yield "MACs", _macs_words(total.macs)


def _record_rows(inspection: OnnxInspection, *, verbose: bool) -> Iterator[Row]:
    for key, record in inspection.records.items():
        # A list repeats the inputs and outputs above, in a form for programs.
        if key == QUANTIZATION_KEY:
            yield key, _quantization_words(record, verbose=verbose)
        elif verbose or not isinstance(record, list):
            yield key, _record_words(record)
    if verbose:
        yield from inspection.metadata.items()
    elif inspection.metadata:
        yield "metadata", ", ".join(inspection.metadata)


def _quantization_words(record: Any, *, verbose: bool) -> str:
    """Return what was asked for and how many nodes have it; with ``verbose`` also the modules, which have columns."""
    try:
        modules = record["modules"]
        quantized = sum(module["quantized"] for module in modules)
        left = sum(sum(module["left"].values()) for module in modules)
        words = f"{_record_words(record['requested'])} · {quantized} of {quantized + left} nodes with weights"
        if not verbose:
            return words
        return "; ".join([words, *(f"{module['tag']} {module['actual']}" for module in modules)])
    except (KeyError, TypeError, AttributeError):
        return _record_words(record)  # of another tool, or damaged


def _record_words(record: Any) -> str:
    """Return a metadata record of winml on one line: ``key value`` pairs; tensors separated by semicolons."""
    if isinstance(record, dict):
        return ", ".join(
            f"{key} {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
            for key, value in record.items()
            # Nothing to say, such as the reason for the exporter where there was no choice.
            if value not in ("", None)
        )
    if isinstance(record, list) and record and all(isinstance(item, dict) and "name" in item for item in record):
        return "; ".join(_record_words(item) for item in record)
    return record if isinstance(record, str) else json.dumps(record, ensure_ascii=False)


def _hierarchy_rows(inspection: OnnxInspection) -> Iterator[Row]:
    coverage = inspection.coverage
    if inspection.tree_source == "none":
        yield "hierarchy", "none: no node says which module it came from"
        return
    found = f"{coverage.tagged} of {coverage.nodes} nodes ({coverage.percent:.0f} %), {at_root_words(coverage)}"
    yield "hierarchy", f"from {inspection.tree_source} · {found}"
    yield "sources", ", ".join(f"{name} {count}" for name, count in sorted(coverage.sources.items()))


def _value_words(value: ValueInfo) -> str:
    if value.shape is None:
        return f"{value.name} {value.dtype} of unknown shape"
    return f"{value.name} {shape_words(value.dtype, ['?' if size is None else size for size in value.shape])}"


def _macs_words(macs: int | None) -> str:
    return (
        "unknown: a shape they depend on is not static, or an operator is foreign"
        if macs is None
        else count_words(macs)
    )


def _module_table(inspection: OnnxInspection, limits: TreeLimits) -> TextTable:
    """Return the module tree with the costs of each module, including its children and without them."""
    costs = [name for total in ("nodes", "parameters", "size", "bits", "MACs") for name in (total, "own")]
    table = TextTable(("module", "path", *costs), numbers=frozenset(range(2, 12)), dim=frozenset({3, 5, 7, 9, 11}))
    for shown, level in shown_rows(_shown_tree(inspection.modules, limits)):
        segment = shown.name(lambda module: module.tag.rpartition(address.SEPARATOR)[2])
        path = shown.name(lambda module: module.path)
        module = shown.item
        table.add(f"{'  ' * level}{segment}{shown.count_words}", path, *_cost_cells(module.total, module.own))
    if inspection.selector is None and inspection.unclaimed != Cost():
        table.add("(no module)", "", *_cost_cells(inspection.unclaimed, inspection.unclaimed))
    return table


def _cost_cells(total: Cost, own: Cost) -> Iterator[str]:
    yield from (str(total.nodes), str(own.nodes))
    yield from (count_words(total.parameters), count_words(own.parameters))
    yield from (size_words(total.size_bytes), size_words(own.size_bytes))
    yield from ("–" if bits is None else f"{bits:.3g}" for bits in (total.bits, own.bits))
    yield from ("?" if macs is None else count_words(macs) for macs in (total.macs, own.macs))


def _shown_tree(modules: Sequence[ModuleCost], limits: TreeLimits) -> tuple[ShownModule[ModuleCost], ...]:
    """Return the shown tree; a module whose parent is not shown stands at the top."""
    tags = {module.tag for module in modules}
    children: dict[str, list[ModuleCost]] = {}
    for module in modules:
        parent = module.tag.rpartition(address.SEPARATOR)[0]
        children.setdefault(parent if parent in tags else "", []).append(module)
    return shown_modules(
        children.get("", []),
        lambda module: children.get(module.tag, []),
        lambda module: (module.class_name, module.total, module.own),
        limits,
    )


def _node_table(inspection: OnnxInspection) -> TextTable:
    table = TextTable(("node", "operator", "tag", "reads", "makes", "MACs"), numbers=frozenset({5}))
    for node in inspection.module_nodes:
        cells = (node.name, node.operator, node.tag, _name_list(node.inputs), _name_list(node.outputs))
        table.add(*cells, "?" if node.macs is None else count_words(node.macs))
    return table


def _name_list(names: Iterable[str]) -> str:
    return ", ".join(name or "–" for name in names)


def _weight_table(inspection: OnnxInspection) -> TextTable:
    table = TextTable(("initializer", "type", "file", "size"), numbers=frozenset({3}))
    for weight in inspection.weights:
        size = "?" if weight.size_bytes is None else size_words(weight.size_bytes)
        file = weight.location.file if weight.location else ""
        table.add(weight.name, shape_words(weight.dtype, weight.shape), file, size)
    return table


# --- Prints tasks in a terminal, each with the classes that serve it.


def print_tasks(
    tasks: Mapping[str, Sequence[str]], console: Console, *, aliases: Mapping[str, str] | None = None
) -> None:
    """Print the tasks with the classes that implement them, and other names that are understood.

    Args:
        tasks: Task → classes.
        console: Where to print.
        aliases: Other name → task.
    """

    def words(task: str) -> str:
        others = ", ".join(alias for alias, meant in (aliases or {}).items() if meant == task)
        return ", ".join(tasks[task]) + (f"; also called {others}" if others else "")

    print_rows(((task, words(task)) for task in tasks), console)


# --- Prints in a terminal whether a provider runs a file, what keeps nodes from it, and what to do.


SHOWN_MODULES = 3
"""Modules of a finding unless ``verbose``. Chosen: they fit on a line."""

_SAID_BY = {
    "provider": "the provider itself",
    "kernels": "its list of kernels",
    "document": "its documentation",
}


def print_provider_fit(fit: ProviderFit, console: Console, *, verbose: bool = False) -> None:
    """Print the answer; with ``verbose`` every module and node of a finding."""
    verb = "lists" if fit.basis == "document" else "takes"
    answer = f"{verb} all {fit.nodes} nodes" if fit.runs_all else f"{verb} {fit.taken} of {fit.nodes} nodes"
    rows = [
        ("provider", f"{fit.name}, for the {fit.device}: {answer}"),
        ("said by", f"{_SAID_BY[fit.basis]} ({fit.source})"),
        *(("limit", f"{limit.count} {limit.operator}: {limit.limit}") for limit in fit.limits),
        *(("note", note) for note in fit.notes),
    ]
    print_rows(rows, console)
    if fit.findings:
        console.print()
        table = TextTable(("keeps nodes from it", "nodes", "why", "modules"), numbers=frozenset({1}))
        for finding in fit.findings:
            count = str(sum(finding.modules.values()) or "all")
            table.add(f"{finding.kind} {finding.what}", count, finding.reason, _module_words(finding, verbose=verbose))
        table.print(console)
        console.print()
        remedies = dict.fromkeys(finding.remedy for finding in fit.findings)
        print_rows((("do", remedy) for remedy in remedies), console)
    if verbose:
        for finding in fit.findings:
            print_rows((("node", f"{name} ({finding.what})") for name in finding.nodes), console)


def _module_words(finding: Finding, *, verbose: bool) -> str:
    modules = list(finding.modules.items())
    shown = modules if verbose else modules[:SHOWN_MODULES]
    words = [f"{module or '(the root)'} {count}" for module, count in shown]
    more = [f"and {len(modules) - len(shown)} more"] if len(shown) < len(modules) else []
    return ", ".join([*words, *more])
