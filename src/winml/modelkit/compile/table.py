"""Tables of compiled files."""

from __future__ import annotations

from collections import Counter

from winml.modelkit.compare.words import comparison_words, coverage_words
from winml.modelkit.compile.records import CompilableProvider, CompiledFile
from winml.modelkit.errors import opt
from winml.modelkit.report import document as doc
from winml.modelkit.report.placements import placement_table
from winml.modelkit.transform.table import MAX_ROWS, written_fields
from winml.modelkit.words import count_noun


def compilation_document(result: CompiledFile) -> doc.Document:
    """Describe a compiled file, the placement of each module, and the nodes outside."""
    compiled = result.compiled
    fields: list[doc.Field] = [
        ("provider", f"{compiled['provider']} {compiled['provider_version']}, for the {compiled['device']}"),
        ("nodes", f"{result.before.nodes} → {result.after.nodes}"),
        ("compiled", _parts_words(result) if result.parts else None),
        ("hierarchy", coverage_words(result.coverage, is_tagged=result.is_tagged)),
        ("verified", comparison_words(result.comparison)),
        *written_fields(result.files),
        *doc.note_fields(result.notes),
    ]
    rest_words = f"… and {{}} more ({opt.verbose} shows all)"
    return doc.Document(
        [
            doc.Fields(fields),
            placement_table(result.modules, str(compiled["device"]), [part.modules for part in result.parts]),
            doc.Table(
                doc.columns(("left to the CPU provider", "name"), "operator", "dtype", ("module", "name"), "reason"),
                [(node.name, node.operator, node.dtype, node.tag, node.reason) for node in result.outside],
                brief=range(MAX_ROWS),
                rest=rest_words,
            ),
        ]
    )


def compilable_providers_document(providers: tuple[CompilableProvider, ...]) -> doc.Document:
    """List the providers that support compilation."""
    columns = ("provider", "here", "devices", "a compiled file holds", "package")
    rows = [
        (
            provider.short,
            "yes" if provider.is_present else "no",
            ", ".join(provider.devices),
            provider.makes,
            provider.package or "none for this platform",
        )
        for provider in providers
    ]
    return doc.Document([doc.Table([doc.Column(name) for name in columns], rows)])


def _parts_words(result: CompiledFile) -> str:
    modules = {module for part in result.parts for module in part.modules}
    outside = Counter(node.operator for node in result.outside)
    operator_words = ", ".join(f"{count} {operator}" for operator, count in outside.most_common())
    return f"{count_noun(len(result.parts), 'part')} of {len(modules)} modules; outside: {operator_words or 'no node'}"
