"""Inspected models and ONNX files, the tasks there are, and what a provider runs of a file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from winml.modelkit.file_names import ONLY_PART
from winml.modelkit.graph.specs import InputTensorSpec
from winml.modelkit.hierarchy import address
from winml.modelkit.hierarchy.torch_modules import TracedModule
from winml.modelkit.hierarchy.tree import ModuleNode, ModuleTree
from winml.modelkit.inspect.module_costs import Cost, ModuleCost
from winml.modelkit.inspect.onnx_inspection import OnnxInspection, ValueInfo
from winml.modelkit.inspect.provider_fit import ProviderFit
from winml.modelkit.metadata_keys import QUANTIZATION_KEY
from winml.modelkit.report import document as doc
from winml.modelkit.report.module_tree import DisplayedModule, TreeLimits, displayed_modules, displayed_rows
from winml.modelkit.results.inspected_model import InspectedModel, StoredBits, StoredParameter
from winml.modelkit.results.words import at_root_words
from winml.modelkit.words import count_noun, count_words, shape_words, size_words

# --- An inspected model: class, tasks, inputs, outputs, weights and module tree.


_Module = ModuleNode | TracedModule
"""A module of the tree; one that never ran is a traced one."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
"""A layer or an expert in the name of a parameter."""
_FIRST_DISPLAYED = 4
"""Number of first values shown, equal ones counted once. Chosen: a grid has three."""


def model_inspection_document(record: InspectedModel, limits: TreeLimits | None = None) -> doc.Document:
    """Describe the model that an export would read, and its module tree if there is one.

    Args:
        record: The inspected model.
        limits: How much of the module tree is shown; None shows all levels, and equal modules once.
    """
    fields = [*_model_fields(record), *_tensor_fields(record), *_weight_fields(record)]
    if record.tree is not None:
        registered = f"{record.tree.registered} registered, with torch.nn layers"
        words = f"{len(record.tree)} modules ({registered}), from {record.tree_source}"
        fields.append(("hierarchy", words))
    tree = [] if record.tree is None else [_module_tree(record.tree, record.never_ran, limits or TreeLimits())]
    bits = [] if record.quantization is None else [_bits_table(record.quantization)]
    return doc.Document([doc.Fields([*fields, *doc.note_fields(record.notes)]), *bits, *tree])


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
        f"{count} times {value}" if count > 1 else str(value) for value, count in spec.first_values[:_FIRST_DISPLAYED]
    ]
    more = ", …" if len(spec.first_values) > _FIRST_DISPLAYED else ""
    return f"{words}, first {', '.join(first_values)}{more}" if first_values else words


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
    """Return format and bits by parameter, those of equal layers once."""
    groups: dict[StoredParameter, list[str]] = {}
    for item in stored.parameters:
        groups.setdefault(replace(item, name=_NUMBER.sub("*", item.name)), []).append(item.name)
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
    """Return the number of parameters of each dtype."""
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
    (root,) = displayed_modules(roots, children_of, _facts, limits)
    return doc.Tree(_module_branch(root))


def _facts(module: _Module) -> tuple[object, ...]:
    if isinstance(module, TracedModule):
        return (module.class_name,)
    return (module.class_name, module.parameter_count, module.calls)


def _nearest_traced_path(tree: ModuleTree, path: str) -> str:
    while path and tree.get(path) is None:
        path = path.rpartition(".")[0]
    return path


def _module_branch(displayed: DisplayedModule[_Module]) -> doc.Branch:
    node, children = displayed.item, tuple(map(_module_branch, displayed.children))
    path = displayed.name(lambda module: module.path) if node.path else ""
    if isinstance(node, TracedModule):
        return doc.Branch(node.class_name, path, f"{displayed.count_words} · never ran", children, is_dim=True)
    segment = displayed.name(lambda module: module.tag.rpartition("/")[2] if isinstance(module, ModuleNode) else "")
    parameters = f" · {count_words(node.parameter_count)} parameters" if node.parameter_count else ""
    calls = f" · {node.calls} calls" if node.calls > 1 else ""
    return doc.Branch(segment, path, f"{displayed.count_words}{parameters}{calls}", children)


# --- An inspected ONNX file: file, graph, metadata, modules, nodes and initializers.


_UNKNOWN = "?"
"""Beside numbers of the same kind: it depends on a shape that is not static, or a file is missing."""
_TOP_OPERATORS = 8
"""Operators unless all are asked for. Chosen: they fit on a line."""


def onnx_inspection_document(inspection: OnnxInspection, limits: TreeLimits | None = None) -> doc.Document:
    """Describe an inspected ONNX file.

    Args:
        inspection: The inspected file.
        limits: How much of the module tree is shown; None shows none of it.
    """
    fields = [
        *_file_fields(inspection),
        *_graph_fields(inspection),
        *_record_fields(inspection),
        *_hierarchy_fields(inspection),
        *([("assumed", item.message) for item in inspection.assumed or ()]),
        *doc.note_fields(inspection.notes),
    ]
    return doc.Document(
        [
            doc.Fields(fields),
            *([_module_table(inspection, limits)] if limits is not None and inspection.modules else []),
            *([_node_table(inspection)] if inspection.module_nodes is not None else []),
            _weight_table(inspection),
        ]
    )


def _file_fields(inspection: OnnxInspection) -> Iterator[doc.Field]:
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


def _graph_fields(inspection: OnnxInspection) -> Iterator[doc.Field]:
    yield "inputs", ", ".join(map(_value_words, inspection.inputs)) or "none"
    yield "outputs", ", ".join(map(_value_words, inspection.outputs)) or "none"
    if inspection.dimensions:
        yield "sizes", ", ".join(f"{item.name} {item.words}" for item in inspection.dimensions)
    groups = [
        f"{dtype} {count_words(summary.parameters) if summary.parameters else 'packed values or scales'} "
        f"({size_words(summary.size_bytes)})"
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
    listed = {
        "operators": [f"{name} {count}" for name, count in inspection.operators.items()],
        "functions": [f"{name} ({count_noun(count, 'node')})" for name, count in inspection.functions.items()],
    }
    for label, words in listed.items():
        if words:
            yield label, doc.first_of(words, _TOP_OPERATORS, "and {} others")
    yield "MACs", _macs_words(total.macs)


def _record_fields(inspection: OnnxInspection) -> Iterator[doc.Field]:
    for key, record in inspection.records.items():
        if key == QUANTIZATION_KEY:
            yield key, _quantization_words(record)
        else:
            # A list repeats the inputs and outputs above, in a form for programs.
            yield key, _record_words(record), doc.Detail.VERBOSE if isinstance(record, list) else doc.Detail.ALWAYS
    if inspection.metadata:
        yield "metadata", ", ".join(inspection.metadata)
    yield from ((key, text, doc.Detail.VERBOSE) for key, text in inspection.metadata.items())


def _quantization_words(record: Any) -> doc.Shortened:
    """Return what was asked for and how many nodes have it; in full also the modules, which have columns."""
    try:
        modules = record["modules"]
        quantized = sum(module["quantized"] for module in modules)
        left = sum(sum(module["left"].values()) for module in modules)
        words = f"{_record_words(record['requested'])} · {quantized} of {quantized + left} nodes with weights"
        return doc.Shortened(words, "; ".join([words, *(f"{module['tag']} {module['actual']}" for module in modules)]))
    except (KeyError, TypeError, AttributeError):
        return doc.Shortened(*[_record_words(record)] * 2)  # of another tool, or damaged


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


def _hierarchy_fields(inspection: OnnxInspection) -> Iterator[doc.Field]:
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


def _module_table(inspection: OnnxInspection, limits: TreeLimits) -> doc.Table:
    """Return the module tree with the costs of each module, including its children and without them."""
    costs: tuple[tuple[str, doc.Kind], ...] = (
        ("nodes", "count"),
        ("parameters", "parameters"),
        ("size", "bytes"),
        ("bits", "bits"),
        ("MACs", "parameters"),
    )
    columns = [doc.Column("module"), doc.Column("path", "name")]
    for name, kind in costs:
        columns += [doc.Column(name, kind), doc.Column("own", kind, is_dim=True, key=f"own {name}")]
    rows: list[list[doc.Cell]] = []
    for displayed, level in displayed_rows(_displayed_tree(inspection.modules, limits)):
        segment = displayed.name(lambda module: module.tag.rpartition(address.SEPARATOR)[2]) + displayed.count_words
        path = displayed.name(lambda module: module.path)
        rows.append([doc.Nested(segment, segment, level), path, *_cost_cells(displayed.item.total, displayed.item.own)])
    if inspection.selector is None and inspection.unclaimed != Cost():
        rows.append(["(no module)", "", *_cost_cells(inspection.unclaimed, inspection.unclaimed)])
    return doc.Table(columns, rows)


def _cost_cells(total: Cost, own: Cost) -> Iterator[doc.Cell]:
    for name in ("nodes", "parameters", "size_bytes", "bits"):
        yield from (getattr(total, name), getattr(own, name))
    yield from (_UNKNOWN if cost.macs is None else cost.macs for cost in (total, own))


def _displayed_tree(modules: Sequence[ModuleCost], limits: TreeLimits) -> tuple[DisplayedModule[ModuleCost], ...]:
    """Return the shown tree; a module whose parent is not shown stands at the top."""
    tags = {module.tag for module in modules}
    children: dict[str, list[ModuleCost]] = {}
    for module in modules:
        parent = module.tag.rpartition(address.SEPARATOR)[0]
        children.setdefault(parent if parent in tags else "", []).append(module)
    return displayed_modules(
        children.get("", []),
        lambda module: children.get(module.tag, []),
        lambda module: (module.class_name, module.total, module.own),
        limits,
    )


def _node_table(inspection: OnnxInspection) -> doc.Table:
    return doc.Table(
        doc.columns(("node", "name"), "operator", ("tag", "name"), "reads", "makes", ("MACs", "parameters")),
        [
            [
                node.name,
                node.operator,
                node.tag,
                *(", ".join(name or doc.MISSING for name in names) for names in (node.inputs, node.outputs)),
                _UNKNOWN if node.macs is None else node.macs,
            ]
            for node in inspection.module_nodes or ()
        ],
    )


def _weight_table(inspection: OnnxInspection) -> doc.Table:
    return doc.Table(
        doc.columns(("initializer", "name"), "type", "file", ("size", "bytes")),
        [
            [
                weight.name,
                shape_words(weight.dtype, weight.shape),
                weight.location.file if weight.location else "",
                _UNKNOWN if weight.size_bytes is None else weight.size_bytes,
            ]
            for weight in inspection.weights
        ],
        detail=doc.Detail.VERBOSE,
    )


# --- Tasks, each with the classes that implement it.


def tasks_document(
    tasks: Mapping[str, Sequence[str]], aliases: Mapping[str, str] = MappingProxyType({})
) -> doc.Document:
    """List the tasks with the classes that implement them, and other names that are understood.

    Args:
        tasks: Task → classes.
        aliases: Other name → task.
    """

    def words(task: str) -> str:
        others = ", ".join(alias for alias, meant in aliases.items() if meant == task)
        return ", ".join(tasks[task]) + (f"; also called {others}" if others else "")

    return doc.Document([doc.Fields([(task, words(task)) for task in tasks])])


# --- Whether a provider runs a file, what keeps nodes from it, and what to do.


DISPLAYED_MODULES = 3
"""Modules of a finding unless all are asked for. Chosen: they fit on a line."""

_SAID_BY = {"provider": "the provider itself", "kernels": "its list of kernels", "document": "its documentation"}


def provider_fit_document(fit: ProviderFit) -> doc.Document:
    """Describe how many nodes a provider takes, and each finding that keeps nodes from it."""
    verb = "lists" if fit.basis == "document" else "takes"
    output = f"{verb} all {fit.nodes} nodes" if fit.runs_all else f"{verb} {fit.taken} of {fit.nodes} nodes"
    fields: list[doc.Field] = [
        ("provider", f"{fit.name}, for the {fit.device}: {output}"),
        ("said by", f"{_SAID_BY[fit.basis]} ({fit.source})"),
        *(("limit", f"{limit.count} {limit.operator}: {limit.limit}") for limit in fit.limits),
        *doc.note_fields(fit.notes),
    ]
    remedies = dict.fromkeys(finding.remedy for finding in fit.findings)
    return doc.Document(
        [
            doc.Fields(fields),
            doc.Table(
                doc.columns("keeps nodes from it", ("nodes", "count"), "why", "modules"),
                [
                    [
                        f"{finding.kind} {finding.what}",
                        sum(finding.modules.values()) or "all",
                        finding.reason,
                        doc.first_of(
                            [f"{module or '(the root)'} {count}" for module, count in finding.modules.items()],
                            DISPLAYED_MODULES,
                            "and {} more",
                        ),
                    ]
                    for finding in fit.findings
                ],
            ),
            doc.Fields(
                [
                    *(("do", remedy) for remedy in remedies),
                    *(
                        ("node", f"{name} ({finding.what})", doc.Detail.VERBOSE)
                        for finding in fit.findings
                        for name in finding.nodes
                    ),
                ]
            ),
        ]
    )
