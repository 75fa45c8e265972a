"""Renders what fixing the open dimensions of a file did, as lines for a terminal."""

from __future__ import annotations

from winml.modelkit.results.pinned_model import PinnedModel
from winml.modelkit.results.words import coverage_words
from winml.modelkit.words import shape_words, size_words

__all__ = ["pinned_lines"]


def pinned_lines(result: PinnedModel, source: str) -> list[tuple[str, str]]:
    """Return what was fixed, as pairs of a heading and a text.

    Args:
        result: What was done.
        source: The file the dimensions were fixed of, as the user wrote it.
    """
    verification = result.verification
    verified = f"equals {source} at these sizes" if verification else "skipped: the files were not compared"
    if verification:
        verified += f" (largest difference {verification.worst.relative_diff:.1e} of scale)"
    return [
        ("pinned", ", ".join(f"{name} {size}" for name, size in result.sizes.items())),
        *([("open", ", ".join(result.still_open))] if result.still_open else []),
        ("inputs", ", ".join(f"{spec.name} {shape_words(spec.dtype, spec.shape)}" for spec in result.inputs)),
        ("outputs", ", ".join(f"{spec.name} {shape_words(spec.dtype, spec.shape)}" for spec in result.outputs)),
        ("hierarchy", coverage_words(result.coverage)),
        ("verified", verified),
        ("wrote", f"{result.model_path} ({size_words(result.size_bytes)})"),
        *(("note", note) for note in result.notes),
    ]
