"""What was exported: for people, and the ``<stem>_htp_metadata.json`` sidecar for programs."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from winml.modelkit.compare.words import fidelity_words
from winml.modelkit.graph.bundle import PartDescription
from winml.modelkit.graph.specs import DynamicDimension, InputTensorSpec, OutputTensorSpec
from winml.modelkit.hierarchy.tagging import Coverage
from winml.modelkit.hierarchy.tree import ModuleNode
from winml.modelkit.report import document as doc
from winml.modelkit.report.module_tree import DisplayedModule, TreeLimits, displayed_modules
from winml.modelkit.results.export_result import ExportedPart, ExportResult, NodeRecord
from winml.modelkit.results.words import coverage_words, verification_words
from winml.modelkit.words import count_words, json_printable, shape_words, size_words

# --- A dynamic dimension in words: its bounds, the traced size and the checked sizes.


def _dimension_words(dimension: DynamicDimension, checked: Sequence[int]) -> str:
    """Return the bounds of a dynamic dimension, the size of the trace, and the sizes the file was checked at.

    >>> _dimension_words(DynamicDimension(name="sequence", max=64, example=48), (1, 55))
    'sequence 1 to 64 (traced 48; checked 1, 55)'
    """
    bounds = f"{dimension.min} to {dimension.max}" if dimension.max is not None else f"from {dimension.min}"
    checked_words = f"; checked {', '.join(map(str, checked))}" if checked else "; not checked"
    return f"{dimension.name} {bounds} (traced {dimension.example}{checked_words})"


# --- In words, which tensors a graph takes and returns; those of a cache together, however many there are.


_MOST_SINGLE = 2
"""Tensors of a cache that are still named one by one."""


def input_words(inputs: Sequence[InputTensorSpec]) -> str:
    """Return the inputs of a graph: ``input_ids int64[batch, sequence], …``."""
    return _words(inputs, {spec.name for spec in inputs if spec.cache is not None})


def output_words(outputs: Sequence[OutputTensorSpec], description: PartDescription | None) -> str:
    """Return the outputs of a graph; what its description says that it feeds to itself is the cache."""
    own_feeds = [feed for feed in description.feeds if feed.part == description.name] if description else []
    return _words(outputs, {feed.output for feed in own_feeds})


def _words(specs: Sequence[InputTensorSpec] | Sequence[OutputTensorSpec], together: Collection[str]) -> str:
    single = [spec for spec in specs if spec.name not in together or len(together) <= _MOST_SINGLE]
    rest = [spec for spec in specs if spec not in single]
    words = [f"{spec.name} {shape_words(spec.dtype, spec.shape)}" for spec in single]
    if rest:
        shapes = list(dict.fromkeys(shape_words(spec.dtype, spec.shape) for spec in rest))
        others = f" and {len(shapes) - 1} other shapes" if len(shapes) > 1 else ""
        words.append(f"{rest[0].name} to {rest[-1].name} ({len(rest)} of the cache) {shapes[0]}{others}")
    return ", ".join(words)


# --- An export as a document: in a terminal, and as the ``<stem>_htp_export_report.md`` of FORMATS.


def export_document(result: ExportResult, limits: TreeLimits | None = None) -> doc.Document:
    """Describe what was exported: the model, its inputs and outputs, coverage, verification and files, part by part.

    Args:
        result: The export.
        limits: How much of the module tree of each part is shown; None shows none.
    """
    fields = list(_model_fields(result, result.parts[0]))
    trees: list[doc.Block] = []
    for part in result.parts:
        tree: list[doc.Block] = [_module_tree(part, limits)] if limits is not None else []
        if part.description is not None and part.description.is_one_of_several:
            fields.append(("part", part.name))
            tree = [doc.Section(part.name, tree)] if tree else []
        fields += _part_fields(part)
        trees += tree
    fields += [("wrote", f"{file.path} ({size_words(file.size_bytes)})") for file in result.files]
    if result.companions.names:
        companions = f"{', '.join(result.companions.names)} ({size_words(result.companions.size_bytes)})"
        fields.append(("beside it", companions))
    return doc.Document(trees, doc.Fields([*fields, *doc.note_fields(result.notes)]))


def export_report(result: ExportResult, part: ExportedPart) -> doc.Document:
    """Describe one part of an export with each of its nodes."""
    is_one_of_several = part.description is not None and part.description.is_one_of_several
    return doc.Document(
        [
            doc.Table(
                doc.columns(("#", "count"), "step", ("seconds", "score"), "what it did"),
                [(step.number, step.name, f"{step.seconds:.2f}", step.summary) for step in part.steps],
                heading="Steps",
            ),
            doc.Table(
                doc.columns("", ("name", "name"), "type"),
                [
                    (role, spec.name, shape_words(spec.dtype, spec.shape))
                    for role, specs in (("input", part.inputs), ("output", part.outputs))
                    for spec in specs
                ],
                heading="Inputs and outputs",
            ),
            replace(_module_tree(part, TreeLimits()), heading="Modules"),
            doc.Table(
                doc.columns("source", ("nodes", "count"), ("share", "share")),
                [(name, count, count / part.coverage.nodes) for name, count in sorted(part.coverage.sources.items())],
                heading="How the tags were won",
            ),
            doc.Section("Nodes by module", list(_node_sections(part))),
        ],
        doc.Fields(
            [
                *_model_fields(result, part),
                *_part_fields(part),
                ("started", result.started.isoformat(timespec="seconds")),
                ("made by", f"winml-modelkit {result.tool_version}"),
                *([("SHA-256", part.model_sha256)] if part.model_sha256 else []),
                *(("wrote", f"{file.path.name} ({size_words(file.size_bytes)})") for file in part.files),
                *doc.note_fields((*result.model_notes, *part.notes)),
            ]
        ),
        title=f"Export of {result.model.name_or_path}{f', part {part.name}' if is_one_of_several else ''}",
    )


def _model_fields(result: ExportResult, part: ExportedPart) -> Iterator[doc.Field]:
    yield "model", f"{result.model.class_name} · {count_words(part.tree.root.parameter_count)} parameters"
    if result.model.task:
        yield "task", f"{result.model.task} ({result.model.task_rule})"


def _part_fields(part: ExportedPart) -> Iterator[doc.Field]:
    coverage, checked = part.coverage, part.checked_sizes
    tagged = "not written (--no-hierarchy)" if coverage.nodes and not coverage.tagged else coverage_words(coverage)
    yield "inputs", input_words(part.inputs)
    yield "outputs", output_words(part.outputs, part.description)
    if part.dimensions:
        yield "dynamic", ", ".join(_dimension_words(item, checked.get(item.name, ())) for item in part.dimensions)
    yield "exporter", part.exporter_words
    yield "hierarchy", f"{len(part.tree)} modules ({part.tree.registered} registered, with torch.nn layers) · {tagged}"
    if coverage.tagged:
        yield "sources", ", ".join(f"{name} {count}" for name, count in sorted(coverage.sources.items()))
    if part.functions:
        yield "functions", part.functions.words
    yield (
        "verified",
        verification_words(part.verification) if part.fidelity is None else fidelity_words(part.fidelity),
    )
    if part.assumed:
        yield "assumed", ", ".join(item.words for item in part.assumed)


def _module_tree(part: ExportedPart, limits: TreeLimits) -> doc.Tree:
    size_of = part.module_sizes()

    def branch(displayed: DisplayedModule[ModuleNode]) -> doc.Branch:
        return doc.Branch(
            displayed.name(lambda node: node.tag.rpartition("/")[2]),
            displayed.name(lambda node: node.path),
            f"{displayed.count_words} · {size_of(displayed.item).words}",
            tuple(map(branch, displayed.children)),
        )

    (root,) = displayed_modules(
        [part.tree.root],
        lambda node: part.tree.children(node.path),
        lambda node: (node.class_name, size_of(node)),
        limits,
    )
    return doc.Tree(branch(root))


def _node_sections(part: ExportedPart) -> Iterator[doc.Section]:
    by_tag: dict[str, list[NodeRecord]] = defaultdict(list)
    for node in part.nodes:
        by_tag[node.tag].append(node)
    for module in part.tree:
        if module.tag in by_tag:
            rows = [(node.name, node.op_type, node.source or "") for node in by_tag[module.tag]]
            columns = [doc.Column("node", "name"), doc.Column("operator"), doc.Column("source")]
            yield doc.Section(module.tag, [doc.Table(columns, rows)], is_name=True)


# --- An exported graph for programs: the ``<stem>_htp_metadata.json`` of FORMATS.
#
# Its JSON Schema ships beside this file. Reads the result only.


_SIDECAR_VERSION = 2
"""``schema_version``: raised when a key changes its name or meaning.

Sidecars of version 1 have no ``verification.assumed``; those before have no version and are otherwise as 1.
"""


def sidecar_json(result: ExportResult, part: ExportedPart) -> str:
    """Return the sidecar of one part of an export as JSON text."""
    return json_printable(json.dumps(_sidecar_record(result, part), indent=2, ensure_ascii=False)) + "\n"


@dataclass(frozen=True)
class DescribedFile:
    """A file that a later stage made of an exported one."""

    sha256: str
    """Of the model file."""
    files: tuple[tuple[str, int], ...]
    """Name and size in bytes, the model first."""
    nodes: Mapping[str, str]
    """Node → tag."""
    root_nodes: tuple[str, ...]
    """Nodes whose tag is the root's for want of another."""
    coverage: Coverage


def adapted_sidecar_json(sidecar: Mapping[str, Any], file: DescribedFile) -> str:
    """Return the sidecar of an export as JSON text, with what it says of the file as it is for another."""
    names = ", ".join(name for name, _ in file.files[:1])
    note = f"Nodes, coverage and files are those of {names}; all else was written down by the export."
    own = Counter(file.nodes.values())
    record = {
        **sidecar,
        "model_sha256": file.sha256,
        **{key: _with_node_counts(module, own) for key, module in sidecar.items() if key == "modules"},
        "nodes": dict(file.nodes),
        "statistics": {**sidecar["statistics"], **_coverage_record(file.coverage), "root_nodes": list(file.root_nodes)},
        "outputs": {**sidecar["outputs"], "files": [{"name": name, "size_bytes": size} for name, size in file.files]},
        "notes": [*sidecar["notes"], note],
    }
    return json_printable(json.dumps(record, indent=2, ensure_ascii=False)) + "\n"


def sidecar_schema() -> dict[str, object]:
    """Return the JSON Schema every sidecar satisfies."""
    text = resources.files(__package__).joinpath("htp_metadata.schema.json").read_text(encoding="utf-8")
    schema: dict[str, object] = json.loads(text)
    return schema


def _sidecar_record(result: ExportResult, part: ExportedPart) -> dict[str, object]:
    return {
        "schema_version": _SIDECAR_VERSION,
        "model_sha256": part.model_sha256,
        "export_context": {
            "timestamp": result.started.isoformat(timespec="seconds"),
            "tool_version": result.tool_version,
            "exporter": part.exporter,
            "exporter_reason": part.exporter_reason,
            "strategy": "htp",
            "opset_requested": part.opset_requested,
            "opset_produced": part.opset_produced,
            "seconds": round(part.seconds, 3),
        },
        "model": {
            "name_or_path": result.model.name_or_path,
            "class_name": result.model.class_name,
            "framework": "pytorch",
            "total_modules": part.tree.registered,
            "total_parameters": part.tree.root.parameter_count,
        },
        **({"part": part.description.as_record()} if part.description is not None else {}),
        "tracing": {
            "modules_traced": len(part.tree),
            "execution_steps": part.tree.execution_steps,
            "task": result.model.task,
            "inputs": [spec.as_record() for spec in part.inputs],
        },
        "modules": _with_node_counts(_module_record(part, part.tree.root), Counter(node.tag for node in part.nodes)),
        "nodes": {node.name: node.tag for node in part.nodes},
        "statistics": _statistics_record(part),
        "verification": part.verification.as_record() if part.verification else None,
        "outputs": {
            "files": [{"name": file.path.name, "size_bytes": file.size_bytes} for file in part.files],
            "companions": list(result.companions.names),
            "companions_sha256": dict(result.companions.sha256),
            "inputs": [spec.as_record() for spec in part.inputs],
            "outputs": [spec.as_record() for spec in part.outputs],
        },
        "notes": [*result.model_notes, *part.notes],
    }


def _module_record(part: ExportedPart, node: ModuleNode) -> dict[str, object]:
    return {
        "class_name": node.class_name,
        "tag": node.tag,
        "path": node.path,
        "execution_order": node.execution_order,
        "calls": node.calls,
        "depth": node.depth,
        "module_type": "torch.nn" if node.is_torch_nn else "custom",
        "is_leaf": node.is_leaf,
        "parameters": {
            "total": node.parameter_count,
            "trainable": node.trainable_count,
            "shapes": {name: list(shape) for name, shape in node.parameter_shapes.items()},
        },
        "children": [_module_record(part, child) for child in part.tree.children(node.path)],
    }


def _with_node_counts(module: Mapping[str, Any], own: Mapping[str, int]) -> dict[str, Any]:
    """Return the record of a module and those inside it with the nodes of each, counted by tag."""
    children = [_with_node_counts(child, own) for child in module["children"]]
    count = own.get(module["tag"], 0)
    nodes = {"total": count + sum(child["nodes"]["total"] for child in children), "own": count}
    return {**module, "nodes": nodes, "children": children}


def _statistics_record(part: ExportedPart) -> dict[str, object]:
    return {
        "steps": [{"name": step.name, "seconds": round(step.seconds, 4)} for step in part.steps],
        **_coverage_record(part.coverage),
        # FORMATS: the nodes that ran in the root's own forward, so that "root" can be checked.
        "root_nodes": [node.name for node in part.nodes if node.source == "root"],
    }


def _coverage_record(coverage: Coverage) -> dict[str, object]:
    return {
        "node_count": coverage.nodes,
        "tagged_count": coverage.tagged,
        "coverage_percent": round(coverage.percent, 4),
        "at_root_count": coverage.at_root,
        "at_root_percent": round(coverage.at_root_percent, 4),
        "sources": {
            source: {"count": count, "percent": round(100 * count / coverage.nodes, 4)}
            for source, count in coverage.sources.items()
        },
    }
