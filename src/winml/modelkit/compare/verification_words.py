"""Words for the outcome of a verification and the coverage of tags. Shared by messages, manifests and reports."""

from __future__ import annotations

from winml.modelkit.compare.outputs import CheckedValue, VerificationInfo, silent_words
from winml.modelkit.tags.tagging import Coverage
from winml.modelkit.words import count_noun, count_words


def coverage_words(coverage: Coverage, *, is_tagged: bool = True) -> str:
    """Return how many nodes carry a tag, and how many of them only that of the root.

    Args:
        coverage: The counts.
        is_tagged: Whether the source of the file has tags.

    >>> coverage_words(Coverage(8, 8, {"direct": 8}, at_root=2))
    '8 of 8 nodes tagged (100 %), 2 at the root (25 %)'
    """
    if not is_tagged:
        return "unknown: the source has no module tags"
    tagged = f"{coverage.tagged} of {coverage.nodes} nodes tagged ({coverage.percent:.0f} %)"
    return f"{tagged}, {at_root_words(coverage)}"


def at_root_words(coverage: Coverage) -> str:
    """Return how many nodes only the root stands for: ``2 at the root (25 %)``."""
    if not coverage.at_root:
        return "none at the root"
    return f"{coverage.at_root} at the root ({coverage.at_root_percent:.0f} %)"


_DISPLAYED_FIXED = 2
"""Inputs named in the outcome; the notes name all."""


def verification_words(verification: VerificationInfo | None) -> str:
    """Return the outcome of a verification in one sentence."""
    if verification is None:
        return "skipped: this file was not compared with the model"
    worst = verification.worst
    if worst.problem:
        return f"not equal: output {worst.name!r}, sample {worst.draw}: {worst.problem}"
    bound = f"largest relative difference {worst.relative_diff:.1e}, tolerance {worst.threshold:.0e}"
    if worst.computed_in:
        bound = f"{bound} for {worst.computed_in} inside"
    if worst.threshold == 0:
        bound = "equal" if worst.is_equal else f"largest difference {worst.max_abs_diff:g}, tolerance 0"
    if not verification.has_signal and all(item.is_equal for item in verification.comparisons):
        if verification.silent is not None:
            words = silent_words(verification.silent)
            return f"inconclusive: the model returns {words}, so a wrong graph would go unnoticed"
        return (
            f"inconclusive: no output of the model depends on its inputs, so a wrong graph would go unnoticed ({bound})"
        )
    on_copy = " on a copy with random weights" if verification.on_drawn_weights else ""
    on_copy += " in float32" if verification.in_float32 else ""
    on_copy += ", weights streamed" if verification.is_streamed else ""
    outcome = (
        f"ONNX Runtime equals PyTorch{on_copy}{_fixed_words(verification)}{_assumed_words(verification)}"
        if verification.agrees
        else f"not equal: output {worst.name!r}, sample {worst.draw}"
    )
    generated = f"; {verification.generation.words}" if verification.generation is not None else ""
    return f"{outcome} ({bound}){generated}"


def _assumed_words(verification: VerificationInfo) -> str:
    """Return how much is assumed of other inputs, and whether that was accepted."""
    if not verification.assumed:
        return ""
    accepted = "accepted" if verification.accepts_assumptions else "not verified for other inputs"
    return f" under {count_noun(len(verification.assumed), 'assumption')} ({accepted})"


def _fixed_words(verification: VerificationInfo) -> str:
    """Return for which values of inputs alone the outcome holds."""
    fixed = [f"{value.name} fixed to {value.traced}" for value in verification.fixed]
    if len(fixed) > _DISPLAYED_FIXED:
        fixed = [*fixed[:_DISPLAYED_FIXED], f"{len(fixed) - _DISPLAYED_FIXED} more inputs fixed"]
    return f" with {' and '.join(fixed)}" if fixed else ""


def verification_notes(verification: VerificationInfo | None) -> tuple[str, ...]:
    """Return one sentence for each draw that was set aside, each input with one value, each output with NaN, and a
    prompt that is not to be read in pieces.
    """
    if verification is None:
        return ()
    set_aside_notes = [
        f"Sample {item.draw} is not compared: rounding alone changes {item.name!r} in PyTorch (relative "
        f"difference {item.relative_diff:.1e}). Another random input replaces it."
        for item in verification.set_aside
    ]
    outputs_with_nan = {item.name: item for item in reversed(verification.comparisons) if item.nan_count}
    return (
        *([_DRAWN_WEIGHTS] if verification.on_drawn_weights else []),
        *set_aside_notes,
        *map(_value_note, (value for value in verification.values if value.is_fixed or value.refused)),
        *(verification.generation.notes if verification.generation is not None else ()),
        *(
            f"Output {name!r} contains NaN ({count_words(item.nan_count)} values in sample {item.draw}), in "
            "PyTorch and in the file: check the weights."
            for name, item in sorted(outputs_with_nan.items())
        ),
    )


_DRAWN_WEIGHTS = (
    "With the weights of the model, an output is the same for all inputs, so a wrong graph would go unnoticed: a copy "
    "with random weights was compared as well. The file contains the weights of the model."
)


def _value_note(value: CheckedValue) -> str:
    refused = f"PyTorch rejects {'; '.join(value.refused)}" if value.refused else ""
    if not value.is_fixed:
        return f"Input {value.name}: {refused}. It was compared at {', '.join(value.compared)}."
    reason = refused or "no other value was tried"
    return f"Input {value.name} is fixed to {value.traced}: {reason}. The file was not verified for other values."
