"""Prints an inspected ONNX file in a terminal: file, graph, metadata, modules, nodes and initializers.

Renders the record of ``inspect`` with rich. Knows no file format.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console

from winml.modelkit.hierarchy import address
from winml.modelkit.inspect.module_costs import Cost, ModuleCost
from winml.modelkit.inspect.onnx_inspection import OnnxInspection, ValueInfo
from winml.modelkit.metadata_keys import QUANTIZATION_KEY
from winml.modelkit.report.module_tree import ShownModule, TreeLimits, shown_modules, shown_rows
from winml.modelkit.report.terminal import TextTable, print_rows
from winml.modelkit.results.words import at_root_words
from winml.modelkit.words import count_noun, count_words, shape_words, size_words

__all__ = ["print_onnx_inspection"]

TOP_OPERATORS = 8
"""Operators shown unless ``verbose``. Chosen: they fit on a line."""

Row = tuple[str, str]


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
