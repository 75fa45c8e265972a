"""What became of a file: optimized, compiled, extracted, pinned or retagged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from winml.modelkit.compare.words import comparison_words
from winml.modelkit.hierarchy.carry.matching import Way
from winml.modelkit.report import document as doc
from winml.modelkit.results.plan import Plan
from winml.modelkit.results.transformed_file import (
    CompilableProvider,
    CompiledFile,
    ExtractResult,
    PinnedModel,
    RetaggedModel,
)
from winml.modelkit.results.words import coverage_words
from winml.modelkit.words import count_noun, count_words, shape_words, size_words

DISPLAYED_ROWS = 12
"""Rows of a table unless all are asked for. Chosen: the whole summary fits on a screen."""


def compilation_document(result: CompiledFile) -> doc.Document:
    """Describe what was compiled, the modules in each part, and the nodes outside."""
    compiled = result.compiled
    fields: list[doc.Field] = [
        ("provider", f"{compiled['provider']} {compiled['provider_version']}, for the {compiled['device']}"),
        ("nodes", f"{result.before.nodes} → {result.after.nodes}"),
        ("compiled", _parts_words(result) if result.parts else None),
        ("hierarchy", coverage_words(result.coverage, is_tagged=result.is_tagged)),
        ("verified", comparison_words(result.comparison)),
        *doc.written_fields(result.files),
        *doc.note_fields(result.notes),
    ]
    rest = "… and {} more (--verbose shows all)"
    return doc.Document(
        [
            doc.Fields(fields),
            doc.Table(
                doc.columns("compiled part", ("module", "name")),
                [
                    ("" if position else part.name, module or "(the root)")
                    for part in result.parts
                    for position, module in enumerate(part.modules)
                ],
                brief=range(DISPLAYED_ROWS),
                rest=rest,
            ),
            doc.Table(
                doc.columns(("left to the CPU provider", "name"), "operator", "dtype", ("module", "name"), "reason"),
                [(node.name, node.operator, node.dtype, node.tag, node.reason) for node in result.outside],
                brief=range(DISPLAYED_ROWS),
                rest=rest,
            ),
        ]
    )


def compilable_providers_document(providers: tuple[CompilableProvider, ...]) -> doc.Document:
    """List the providers that a file can be compiled for."""
    columns = ("provider", "here", "devices", "a compiled file holds", "package")
    rows = [
        (
            item.short,
            "yes" if item.is_present else "no",
            ", ".join(item.devices),
            item.makes,
            item.package or "none for this platform",
        )
        for item in providers
    ]
    return doc.Document([doc.Table([doc.Column(name) for name in columns], rows)])


def _parts_words(result: CompiledFile) -> str:
    modules = {module for part in result.parts for module in part.modules}
    outside = Counter(node.operator for node in result.outside)
    words = ", ".join(f"{count} {operator}" for operator, count in outside.most_common())
    return f"{count_noun(len(result.parts), 'part')} of {len(modules)} modules; outside: {words or 'no node'}"


def extract_document(result: ExtractResult) -> doc.Document:
    """Describe each module that was written or refused."""
    return doc.Document([doc.Fields(list(_extract_fields(result)))])


def _extract_fields(result: ExtractResult) -> Iterator[doc.Field]:
    for module in result.modules:
        yield "wrote", f"{result.folder / module.file} ({size_words(module.size_bytes)})"
        size = f"{count_noun(module.nodes, 'node')}, {count_words(module.parameters)} parameters"
        yield "", f"{module.identity.words} ({module.identity.class_name}): {size}"
        yield "", f"{_tensor_words(module.inputs)} → {_tensor_words(module.outputs)}"
    if result.modules:
        worst = max(module.relative_diff for module in result.modules)
        equal = "bit for bit" if worst == 0 else f"largest relative difference {worst:.1e}"
        yield "verified", f"each answers its recorded inputs as the whole model does ({equal})"
    for refused in result.refused:
        yield "refused", f"{refused.identity.words} ({refused.identity.class_name}): {refused.reason}"
    for identity in result.without_nodes:
        yield "no nodes", f"{identity.words} ({identity.class_name}): nothing of it is left in the graph"
    yield from doc.note_fields(result.notes)


def _tensor_words(records: tuple[Mapping[str, Any], ...]) -> str:
    return ", ".join(f"{record['name']} {shape_words(record['dtype'], record['shape'])}" for record in records) or "-"


def pinned_document(result: PinnedModel, source: str) -> doc.Document:
    """Describe what was fixed.

    Args:
        result: What was done.
        source: The file the dimensions were fixed of, as the user wrote it.
    """
    verified = "skipped: the files were not compared"
    if result.verification:
        worst = result.verification.worst.relative_diff
        verified = f"equals {source} at these sizes (largest relative difference {worst:.1e})"
    fields: list[doc.Field] = [
        ("pinned", ", ".join(f"{name} {size}" for name, size in result.sizes.items())),
        ("dynamic", ", ".join(result.still_open) or None),
        ("inputs", ", ".join(f"{spec.name} {shape_words(spec.dtype, spec.shape)}" for spec in result.inputs)),
        ("outputs", ", ".join(f"{spec.name} {shape_words(spec.dtype, spec.shape)}" for spec in result.outputs)),
        ("hierarchy", coverage_words(result.coverage)),
        ("verified", verified),
        ("wrote", f"{result.model_path} ({size_words(result.size_bytes)})"),
        *doc.note_fields(result.notes),
    ]
    return doc.Document([doc.Fields(fields)])


_WAY_WORDS: Mapping[Way, str] = {
    "kept": "tagged already",
    "name": "matched by node name",
    "output": "matched by output name",
    "fused": "matched by the name of a fused node",
    "replaced": "matched by the nodes they replace",
    "neighbours": "new, tagged like their neighbours",
    "root": "unknown, tagged as root",
}
"""How nodes got their tags, in words behind their number."""


def retagged_document(result: RetaggedModel) -> doc.Document:
    """Describe how each tag was won."""
    ways = result.report.by_way
    fields: list[doc.Field] = [
        ("hierarchy", coverage_words(result.coverage)),
        *(("", f"{ways[way]} {words}") for way, words in _WAY_WORDS.items() if ways.get(way)),
        ("repaired", f"{result.repaired} nodes whose keys stood there twice" if result.repaired else None),
        ("wrote", f"{result.model_path} ({size_words(result.size_bytes)})"),
        *doc.note_fields(result.notes),
    ]
    return doc.Document([doc.Fields(fields)])


def plan_document(plan: Plan) -> doc.Document:
    """Describe a plan: what is recovered first, what is read, written and removed, and in which steps."""
    fields: list[doc.Field] = [
        *(
            (
                "recovery",
                f"{found.folder}, of a command that was killed or still runs: "
                + (f"would put in place {', '.join(found.completes)}" if found.completes else "would be removed"),
            )
            for found in plan.interrupted
        ),
        *(("reads", str(path)) for path in plan.reads),
        *((f"{number}. {step.name}", step.words) for number, step in enumerate(plan.steps, 1)),
        *(
            (
                "would write",
                f"{file.path}{' (replaced)' * file.replaces}{f' if {file.only_if}' if file.only_if else ''}",
            )
            for file in plan.writes
        ),
        *(("would remove", f"{path}, if nothing uses it") for path in plan.removes),
        *doc.note_fields(plan.notes),
        ("wrote", "nothing: this is a plan"),
    ]
    return doc.Document([doc.Fields(fields)])
