"""Document of a model package."""

from __future__ import annotations

from collections.abc import Sequence

from winml.modelkit.builds.package_records import PackageResult
from winml.modelkit.report import document as doc
from winml.modelkit.words import size_words


def package_document(result: PackageResult, usage: Sequence[str] = ()) -> doc.Document:
    """Describe a package: its variants, and the sizes beside separate folders.

    Args:
        result: The package.
        usage: Lines of code that open it.
    """
    table = doc.Table(
        doc.columns(
            ("variant", "name"), "chosen for", ("nodes", "count"), ("own files", "bytes"), ("shared weights", "bytes"),
            ("separate folder", "bytes"), "quality", ("median on CPU, ms", "latency"),
        ),
        [
            (
                variant.name,
                ", ".join(provider.removesuffix("ExecutionProvider") for provider in variant.providers),
                variant.nodes,
                variant.size_bytes,
                variant.shared_bytes,
                variant.separate_bytes,
                variant.quality,
                variant.latency_ms,
            )
            for variant in result.variants
        ],
        name="variants",
        heading="Variants",
    )  # fmt: skip
    fields: list[doc.Field] = [
        ("wrote", f"{result.folder} ({size_words(result.size_bytes)})"),
        ("shared", f"{size_words(result.shared_bytes)} of weights that several variants read"),
        ("separate", f"{size_words(result.separate_bytes)} for the models in a folder for each variant"),
        *doc.note_fields(result.notes),
        *(("" if number else "use", line) for number, line in enumerate(usage)),
    ]
    return doc.Document([table, doc.Fields(fields)])
