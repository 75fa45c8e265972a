"""Documents of an export for people; the ``<stem>_htp_metadata.json`` sidecar is for programs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from winml.modelkit.compare.words import coverage_words
from winml.modelkit.errors import opt
from winml.modelkit.export.records import ExportedPart, ExportResult, NodeRecord
from winml.modelkit.onnx.bundle import PartDescription
from winml.modelkit.onnx.specs import DynamicDimension, InputTensorSpec, OutputTensorSpec, fixed_size_words
from winml.modelkit.report import document as doc
from winml.modelkit.report.module_tree import TreeLimits, TreeRow, tree_rows
from winml.modelkit.tags import address
from winml.modelkit.tags.tree import ModuleNode
from winml.modelkit.transform.table import written_fields
from winml.modelkit.words import count_words, size_words


def _dimension_words(dimension: DynamicDimension, checked: Sequence[int]) -> str:
    """Return the bounds of a dynamic dimension, the size of the trace, and the sizes the file was checked at.

    >>> _dimension_words(DynamicDimension(name="sequence", max=64, example=48), (1, 55))
    'sequence 1 to 64 (traced 48; checked 1, 55)'
    """
    checked_words = f"; checked {', '.join(map(str, checked))}" if checked else "; not checked"
    return f"{dimension.name} {dimension.words} (traced {dimension.example}{checked_words})"


_MOST_SINGLE = 2
"""Maximum number of cache tensors that are named one by one."""


def input_words(inputs: Sequence[InputTensorSpec]) -> str:
    """Return the inputs of a graph: ``input_ids int64[batch, sequence], …``."""
    return _describe_specs(inputs, {spec.name for spec in inputs if spec.cache is not None})


def output_words(outputs: Sequence[OutputTensorSpec], description: PartDescription | None) -> str:
    """List the outputs of a graph; outputs that the part feeds to itself are summarized as the cache."""
    own_feeds = [feed for feed in description.feeds if feed.part == description.name] if description else []
    return _describe_specs(outputs, {feed.output for feed in own_feeds})


def _describe_specs(specs: Sequence[InputTensorSpec] | Sequence[OutputTensorSpec], together: Collection[str]) -> str:
    """List tensors with type and shape; of many cache tensors, only the first and the last are named."""
    single = [spec for spec in specs if spec.name not in together or len(together) <= _MOST_SINGLE]
    cached = [spec for spec in specs if spec not in single]
    texts = [f"{spec.name} {spec.words}" for spec in single]
    if cached:
        shapes = list(dict.fromkeys(spec.words for spec in cached))
        further = f" and {len(shapes) - 1} other shapes" if len(shapes) > 1 else ""
        texts.append(f"{cached[0].name} to {cached[-1].name} ({len(cached)} of the cache) {shapes[0]}{further}")
    return ", ".join(texts)


def export_document(result: ExportResult, limits: TreeLimits | None = None) -> doc.Document:
    """Describe an export: the model, its inputs and outputs, coverage, verification and files, part by part.

    Args:
        result: The export.
        limits: Limits of the displayed module tree of each part; None: no tree.
    """
    fields = list(_model_fields(result, result.parts[0]))
    trees: list[doc.Block] = []
    for part in result.parts:
        is_one_of_several = part.description is not None and part.description.is_one_of_several
        fields += [("part", part.name if is_one_of_several else None), *_part_fields(part)]
        if limits is not None:
            tree = _module_tree(part, limits)
            trees.append(doc.Section(part.name, [tree]) if is_one_of_several else tree)
    fields += written_fields(result.files)
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
                    (role, spec.name, spec.words)
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
                ("SHA-256", part.model_sha256 or None),
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
    tagged = f"not written ({opt.no_hierarchy})" if coverage.nodes and not coverage.tagged else coverage_words(coverage)
    yield "inputs", input_words(part.inputs)
    yield "outputs", output_words(part.outputs, part.description)
    if part.dimensions:
        yield "dynamic", ", ".join(_dimension_words(size, checked.get(size.name, ())) for size in part.dimensions)
    if part.openable_sizes:
        yield "fixed", fixed_size_words(part.openable_sizes)
    yield "exporter", part.exporter_words
    modules = f"{len(part.tree)} modules ({part.tree.registered} registered, with torch.nn layers)"
    yield "hierarchy", " · ".join((tagged, modules) if coverage.is_root_only else (modules, tagged))
    if coverage.tagged:
        yield "sources", ", ".join(f"{name} {count}" for name, count in sorted(coverage.sources.items()))
    if part.functions:
        yield "functions", part.functions.words
    yield "verified", part.comparison_words
    if part.assumed:
        yield "assumed", ", ".join(assumption.words for assumption in part.assumed)


def _module_tree(part: ExportedPart, limits: TreeLimits) -> doc.Tree:
    size_of = part.module_sizes()

    def make_branch(displayed: TreeRow[ModuleNode]) -> doc.Branch:
        return doc.Branch(
            displayed.name(lambda node: address.last_segment(node.tag)),
            displayed.name(lambda node: node.path),
            f"{displayed.count_words} · {size_of(displayed.item).words}",
            tuple(map(make_branch, displayed.children)),
        )

    (root,) = tree_rows(
        [part.tree.root],
        lambda node: part.tree.children(node.path),
        lambda node: (node.class_name, size_of(node)),
        limits,
    )
    return doc.Tree(make_branch(root))


def _node_sections(part: ExportedPart) -> Iterator[doc.Section]:
    by_tag: dict[str, list[NodeRecord]] = defaultdict(list)
    for node in part.nodes:
        by_tag[node.tag].append(node)
    for module in part.tree:
        if module.tag in by_tag:
            rows = [(node.name, node.op_type, node.source or "") for node in by_tag[module.tag]]
            columns = [doc.Column("node", "name"), doc.Column("operator"), doc.Column("source")]
            yield doc.Section(module.tag, [doc.Table(columns, rows)], is_name=True)
