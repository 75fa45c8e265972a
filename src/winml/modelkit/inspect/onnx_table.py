"""Describes an inspected ONNX file, from graph to initializers, and its support by an execution provider."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from winml.modelkit.compare.words import ONLY_ROOT, at_root_words
from winml.modelkit.errors import opt
from winml.modelkit.inspect.onnx_inspection import OnnxInspection, ValueInfo
from winml.modelkit.metadata_keys import COMPILE_TRACE_KEY, QUANTIZATION_KEY
from winml.modelkit.onnx.module_costs import Cost, ModuleCost
from winml.modelkit.report import document as doc
from winml.modelkit.report.module_tree import TreeLimits, TreeRow, tree_rows, walk_rows
from winml.modelkit.tags import address
from winml.modelkit.words import count_noun, count_words, shape_words, size_words

if TYPE_CHECKING:
    from winml.modelkit.inspect.provider_fit import ProviderFit

_UNKNOWN = "?"
"""Text in number columns if a number depends on a shape that is not static, or a file is missing."""
_TOP_OPERATORS = 8
"""Number of operators without ``--verbose``. Chosen: they fit on a line."""
_MAX_LISTED_MODULES = 3
"""Modules of a finding unless all are asked for. Chosen: they fit on a line."""

_BASIS_WORDS = {
    "provider": "the provider itself",
    "kernels": "its list of kernels",
    "document": "its documentation",
    "compilation": "the trace of its compilation, in the file",
}


def onnx_inspection_document(inspection: OnnxInspection, limits: TreeLimits | None = None) -> doc.Document:
    """Describe an inspected ONNX file.

    Args:
        inspection: The inspected file.
        limits: Limits of the displayed module tree; None: no module tree.
    """
    fields = [
        *_file_fields(inspection),
        *_graph_fields(inspection),
        *_record_fields(inspection),
        *_hierarchy_fields(inspection),
        *([("assumed", assumption.message) for assumption in inspection.assumed or ()]),
        *doc.note_fields(inspection.notes),
    ]
    return doc.Document(
        [
            doc.Fields(fields),
            *([_module_table(inspection, limits)] if limits is not None and inspection.modules else []),
            *([_node_table(inspection)] if inspection.module_nodes is not None else []),
            _weight_table(inspection),
            *([] if inspection.fit is None else provider_fit_document(inspection.fit).blocks),
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
        yield "sizes", ", ".join(f"{dimension.name} {dimension.words}" for dimension in inspection.dimensions)
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
    lists = {
        "operators": [f"{name} {count}" for name, count in inspection.operators.items()],
        "functions": [f"{name} ({count_noun(count, 'node')})" for name, count in inspection.functions.items()],
    }
    for label, texts in lists.items():
        if texts:
            yield label, doc.first_of(texts, _TOP_OPERATORS, "and {} others")
    yield "MACs", _macs_words(total.macs)


def _record_fields(inspection: OnnxInspection) -> Iterator[doc.Field]:
    """Yield the parsed metadata of winml by key, then the names and values of other metadata."""
    for key, record in inspection.records.items():
        if key == QUANTIZATION_KEY:
            yield key, _quantization_words(record)
        elif key == COMPILE_TRACE_KEY:
            yield key, _trace_words(record)
        else:
            # A list repeats the inputs and outputs above, for programs.
            yield key, _record_words(record), doc.Detail.VERBOSE if isinstance(record, list) else doc.Detail.ALWAYS
    if inspection.metadata:
        yield "metadata", ", ".join(inspection.metadata)
    yield from ((key, text, doc.Detail.VERBOSE) for key, text in inspection.metadata.items())


def _quantization_words(record: Any) -> doc.Shortened:
    """Format request, number of quantized nodes and calibration; the full text also lists the quantized modules."""
    try:
        modules = record["modules"]
        quantized = sum(module["quantized"] for module in modules)
        unquantized = sum(sum(module["left"].values()) for module in modules)
        brief = f"{_record_words(record['requested'])} · {quantized} of {quantized + unquantized} nodes with weights"
        if calibration := record.get("calibration"):
            brief += f" · calibration {_record_words(calibration)}"
        return doc.Shortened(brief, "; ".join([brief, *(f"{module['tag']} {module['actual']}" for module in modules)]))
    except (KeyError, TypeError, AttributeError):
        return doc.Shortened(*[_record_words(record)] * 2)  # of another tool, or damaged


def _trace_words(record: Any) -> doc.Shortened:
    """Format the numbers of nodes in the trace of a compilation; the full text lists the trace."""
    full = _record_words(record)
    try:
        nodes = [node for listed in record["modules"].values() for node in listed]
        modules, outside = count_noun(len(record["modules"]), "module"), sum(len(node) > 2 for node in nodes)
        return doc.Shortened(
            f"{count_noun(len(nodes), 'node')} of {modules}, {outside} outside of compiled parts", full
        )
    except (KeyError, TypeError, AttributeError):
        return doc.Shortened(full, full)  # damaged


def _record_words(record: Any) -> str:
    """Format a metadata record of winml on one line: ``key value`` pairs; tensors separated by semicolons."""
    if isinstance(record, dict):
        return ", ".join(
            f"{key} {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
            for key, value in record.items()
            # Values without information, such as the reason for the exporter if there was no choice.
            if value not in ("", None)
        )
    if isinstance(record, list) and record and all(isinstance(entry, dict) and "name" in entry for entry in record):
        return "; ".join(_record_words(entry) for entry in record)
    return record if isinstance(record, str) else json.dumps(record, ensure_ascii=False)


def _hierarchy_fields(inspection: OnnxInspection) -> Iterator[doc.Field]:
    coverage = inspection.coverage
    if inspection.tree_source == "none":
        yield "hierarchy", "none: no node says which module it came from"
        return
    tag_words = f"{coverage.tagged} of {coverage.nodes} nodes ({coverage.percent:.0f} %)"
    if coverage.is_root_only:
        yield "hierarchy", f"{ONLY_ROOT} · from {inspection.tree_source} · {tag_words}"
    else:
        yield "hierarchy", f"from {inspection.tree_source} · {tag_words}, {at_root_words(coverage)}"
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
    """Return the module tree with the costs of each module, with and without its children."""
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
    for row, level in walk_rows(_module_rows(inspection.modules, limits)):
        segment = row.name(lambda module: address.last_segment(module.tag)) + row.count_words
        path = row.name(lambda module: module.path)
        rows.append([doc.Nested(segment, segment, level), path, *_cost_cells(row.item.total, row.item.own)])
    if inspection.selector is None and inspection.unclaimed != Cost():
        rows.append(["(no module)", "", *_cost_cells(inspection.unclaimed, inspection.unclaimed)])
    return doc.Table(columns, rows)


def _cost_cells(total: Cost, own_cost: Cost) -> Iterator[doc.Cell]:
    """Yield each cost of a module twice: with its children, and without (``own_cost``)."""
    for name in ("nodes", "parameters", "size_bytes", "bits"):
        yield from (getattr(total, name), getattr(own_cost, name))
    yield from (_UNKNOWN if cost.macs is None else cost.macs for cost in (total, own_cost))


def _module_rows(modules: Sequence[ModuleCost], limits: TreeLimits) -> tuple[TreeRow[ModuleCost], ...]:
    """Return the displayed tree; a module whose parent is not displayed is at the top level."""
    tags = {module.tag for module in modules}
    children: dict[str, list[ModuleCost]] = {}
    for module in modules:
        parent = module.tag.rpartition(address.SEPARATOR)[0]
        children.setdefault(parent if parent in tags else "", []).append(module)
    return tree_rows(
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


def _copy_fields(fit: ProviderFit) -> Iterator[doc.Field]:
    """Describe the values that are copied between the CPU and the device in each run."""
    if fit.copies:
        total = sum(len(entry.values) for entry in fit.copies)
        modules = count_noun(len(fit.copies), "module")
        where = f" in {modules} ({opt.verbose} shows all)" if len(fit.copies) > _MAX_LISTED_MODULES else ""
        yield "copies", f"{count_noun(total, 'value')} in each run{where}, between nodes on the CPU and on the device"
    for number, entry in enumerate(fit.copies):
        detail = doc.Detail.ALWAYS if number < _MAX_LISTED_MODULES else doc.Detail.VERBOSE
        yield "copies", entry.words, detail


def _precision_fields(fit: ProviderFit) -> Iterator[doc.Field]:
    """Yield the precisions that the provider runs, and those that it does not run with the reason."""
    run = [name for name, refusal in fit.precisions.items() if not refusal]
    if fit.precisions:
        yield "precisions", f"{', '.join(run)} ({fit.precisions_source})"
    for name, refusal in fit.precisions.items():
        if refusal:
            yield "not run", f"{name}: {refusal}", doc.Detail.VERBOSE


def provider_fit_document(fit: ProviderFit) -> doc.Document:
    """Describe the number of supported nodes, and each cause of unsupported nodes."""
    from winml.modelkit.report.placements import placement_table  # used only with a provider

    verb = "lists" if fit.basis == "document" else "runs"
    output = f"{verb} all {fit.nodes} nodes" if fit.runs_all else f"{verb} {fit.taken} of {fit.nodes} nodes"
    fields: list[doc.Field] = [
        ("provider", f"{fit.name}, for the {fit.device}: {output}"),
        ("source", f"{_BASIS_WORDS[fit.basis]} ({fit.source})"),
        *_copy_fields(fit),
        *_precision_fields(fit),
        *(("limit", f"{limit.count} {limit.operator}: {limit.limit}") for limit in fit.limits),
        *doc.note_fields(fit.notes),
    ]
    remedies = dict.fromkeys(finding.remedy for finding in fit.findings)
    return doc.Document(
        [
            doc.Fields(fields),
            doc.Table(
                doc.columns("unsupported", ("nodes", "count"), "reason", "modules"),
                [
                    [
                        f"{finding.kind} {finding.what}",
                        sum(finding.modules.values()) or "all",
                        finding.reason,
                        doc.first_of(
                            [f"{module or '(the root)'} {count}" for module, count in finding.modules.items()],
                            _MAX_LISTED_MODULES,
                            "and {} more",
                        ),
                    ]
                    for finding in fit.findings
                ],
            ),
            replace(
                placement_table(fit.modules, fit.device.partition(",")[0]),
                detail=doc.Detail.VERBOSE if fit.runs_all else doc.Detail.ALWAYS,
            ),
            doc.Fields(
                [
                    *(("remedy", remedy) for remedy in remedies),
                    *(
                        ("node", f"{name} ({finding.what})", doc.Detail.VERBOSE)
                        for finding in fit.findings
                        for name in finding.nodes
                    ),
                ]
            ),
        ]
    )
