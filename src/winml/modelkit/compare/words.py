"""Sentences on the comparison of a file with its source or with PyTorch, and on the coverage of tags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from winml.modelkit.compare.outputs import CheckedValue, VerificationInfo, silent_words
from winml.modelkit.errors import opt
from winml.modelkit.tags.tagging import Coverage
from winml.modelkit.words import MOST_DB, count_noun, count_words, percent_words

if TYPE_CHECKING:
    from winml.modelkit.compare.fidelity import FidelityInfo, OutputFidelity, QualitySamples, QualitySource

_LEAST_SPREAD_DB = 0.05
"""Chosen: below it, both ends read alike."""
_SOURCES: Mapping[QualitySource, tuple[str, bool]] = {
    "processor": ("of its processor", True),
    "dataset": ("of the dataset", False),
    "random": ("of random values", True),
    "file": ("of the file", False),
}
"""Origin of samples → (words, True if they depend on the seed)."""


def comparison_words(comparison: VerificationInfo | FidelityInfo | None) -> str:
    """Describe the comparison of the result with its source in one sentence."""
    if comparison is None or isinstance(comparison, VerificationInfo):
        return equality_words(comparison)
    return fidelity_words(comparison)


def fidelity_words(fidelity: FidelityInfo) -> str:
    """Describe the similarity of the worst output to the source."""
    if not fidelity.has_signal:
        return _unchecked_source_words(fidelity.silent)
    if not fidelity.outputs:
        return _together_words(fidelity)
    worst = fidelity.worst
    draws = count_noun(fidelity.draws, "random input")
    where = f"for {worst.name} on {draws if fidelity.samples is None else samples_words(fidelity.samples)}"
    streamed = ", of the whole model, weights streamed" if fidelity.is_streamed else ""
    alone = "; compared without the remaining parts" if fidelity.is_part_alone else ""
    limit = f"(minimum {fidelity.limit_db(worst):.4g} dB{_source_words(fidelity, worst)})"
    if fidelity.least_agreement is not None and fidelity.is_by_agreement(worst):
        limit = f"(minimum agreement {percent_words(fidelity.least_agreement)})"
    together = "" if fidelity.together is None else f"; {_together_words(fidelity)}"
    count = fidelity.draws if fidelity.samples is None else fidelity.samples.count
    return f"{nearness_words(worst, count)} {where}{streamed} {limit}{alone}{together}"


def _source_words(fidelity: FidelityInfo, output: OutputFidelity) -> str:
    """Describe the SQNR of a compiled file's source, if both were compared with a float file; else ``""``."""
    beside = fidelity.beside
    if beside is None:
        return ""
    source = next((entry for entry in beside.outputs if entry.name == output.name), None)
    reached = "" if source is None else f"; {beside.source} reaches {source.problem or nearness_words(source)}"
    return f", against {beside.reference}{reached}"


def unchecked_words(silent: tuple[str, ...] | None, side: str, remedy: str) -> str:
    """Describe a comparison of outputs that a wrong graph would not change.

    Args:
        silent: Kinds of values in the outputs; ``None``: the same values for all inputs.
        side: The reference, such as ``source``.
        remedy: Clause on what to do.
    """
    what = (
        f"no output of the {side} depends on its inputs"
        if silent is None
        else f"the {side} returns {silent_words(silent)}"
    )
    return f"not checked: {what}, so a wrong graph would go unnoticed; {remedy}"


def _unchecked_source_words(silent: tuple[str, ...] | None) -> str:
    remedy = f"compare on real inputs ({opt.dataset} or {opt.input_data})"
    if silent:
        is_finite = {"NaN", "infinities"}.isdisjoint(silent)
        cause = "the model returns zeros for all inputs" if is_finite else "a weight is NaN or infinite"
        remedy += f"; no input helps if {cause}"
    return unchecked_words(silent, "source", remedy)


def _together_words(fidelity: FidelityInfo) -> str:
    """Describe the similarity of the text of several parts; ``""`` if not compared."""
    text = fidelity.together
    if text is None:
        return ""
    which = "after the encoder of the source" if fidelity.has_encoder_of_source else "all parts together"
    return f"{which} {nearness_words(text)} for {text.name} (minimum {fidelity.least_together_db:.1f} dB)"


def nearness_words(output: OutputFidelity, samples: int = 0) -> str:
    """Describe the similarity of one output to the reference; with the number of samples, the interval of agreement."""
    share = "" if output.equal_share is None else f"{100 * output.equal_share:.1f} % of its values equal, "
    top1 = ""
    if output.top1_agreement is not None:
        interval = f" ({share_interval_words(output.top1_agreement, samples)})" if samples else ""
        top1 = f", top-1 agreement {100 * output.top1_agreement:.1f} %{interval}"
    ratio = f"SQNR {output.sqnr_db:.1f} dB{interval_words(output)}, cosine {output.cosine:.4f}"
    return output.problem or f"{share}{'equal' if output.sqnr_db >= MOST_DB else ratio}{top1}"


def share_interval_words(share: float, samples: int) -> str:
    """Format the interval of a share of samples.

    >>> share_interval_words(1.0, 16)
    '95 % interval 80.6 to 100.0 %'
    """
    from winml.modelkit.compare.fidelity import share_interval  # imports numpy

    low, high = share_interval(share, samples)
    return f"95 % interval {100 * low:.1f} to {100 * high:.1f} %"


def interval_words(output: OutputFidelity) -> str:
    """Format the interval of the SQNR over the samples, if any."""
    spread = output.spread
    if spread is None or spread.p95 - spread.p05 < _LEAST_SPREAD_DB:
        return ""
    return f" (90 % of samples: {spread.p05:.1f} to {spread.p95:.1f})"


def samples_words(samples: QualitySamples) -> str:
    """Describe the samples of a comparison.

    >>> from winml.modelkit.compare.fidelity import QualitySamples
    >>> samples_words(QualitySamples("processor", 16, 0))
    '16 samples of its processor, seed 0'
    """
    words, is_generated = _SOURCES[samples.source]
    words = f"of {samples.data}" if samples.data else words
    return f"{count_noun(samples.count, 'sample')} {words}{f', seed {samples.seed}' if is_generated else ''}"


def difference_words(verification: VerificationInfo) -> str:
    """Describe the largest difference between the result and its source."""
    worst = verification.worst
    how = worst.problem or f"largest relative difference {worst.relative_diff:.1e}, tolerance {worst.threshold:.0e}"
    return f"output {worst.name!r}, sample {worst.draw}: {how.replace('PyTorch returns', 'the source returns')}"


def equality_words(verification: VerificationInfo | None) -> str:
    """Describe the comparison of the result with its source in one sentence."""
    if verification is None:
        return "skipped: the files were not compared"
    if not verification.has_signal:
        return _unchecked_source_words(verification.silent)
    worst = verification.worst
    in_float32 = " in float32" if verification.in_float32 else ""
    if worst.threshold == 0:
        return f"outputs equal those of the source{in_float32}"
    return (
        f"outputs equal those of the source{in_float32} (largest relative difference {worst.relative_diff:.1e}, "
        f"tolerance {worst.threshold:.0e})"
    )


def coverage_words(coverage: Coverage, *, is_tagged: bool = True) -> str:
    """Describe the number of tagged nodes, and of nodes tagged with the root only.

    Args:
        coverage: The counts.
        is_tagged: True if the source of the file has tags.

    >>> coverage_words(Coverage(8, 8, {"direct": 8}, at_root=2))
    '8 of 8 nodes tagged (100 %), 2 at the root (25 %)'
    >>> coverage_words(Coverage(8, 8, {"root": 8}, at_root=8))
    'every node belongs to the root only; 8 of 8 nodes tagged (100 %)'
    """
    if not is_tagged:
        return "unknown: the source has no module tags"
    tagged = f"{coverage.tagged} of {coverage.nodes} nodes tagged ({coverage.percent:.0f} %)"
    if coverage.is_root_only:
        return f"{ONLY_ROOT}; {tagged}"
    return f"{tagged}, {at_root_words(coverage)}"


ONLY_ROOT = "every node belongs to the root only"
"""First words about a file whose tags name no module."""


def at_root_words(coverage: Coverage) -> str:
    """Describe the number of nodes tagged with the root only: ``2 at the root (25 %)``."""
    if not coverage.at_root:
        return "none at the root"
    return f"{coverage.at_root} at the root ({coverage.at_root_percent:.0f} %)"


_MAX_LISTED_FIXED = 2
"""Maximum number of inputs in the sentence; the notes list all."""


def verification_words(verification: VerificationInfo | None) -> str:
    """Describe the result of a verification in one sentence."""
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
        return unchecked_words(verification.silent, "model", f"use real weights or other inputs ({opt.input_specs})")
    on_copy = " on a copy with random weights" if verification.on_drawn_weights else ""
    on_copy += " in float32" if verification.in_float32 else ""
    on_copy += " with fixed random numbers" if verification.fixes_numbers else ""
    on_copy += ", weights streamed" if verification.is_streamed else ""
    outcome = (
        f"ONNX Runtime equals PyTorch{on_copy}{_fixed_words(verification)}{_assumed_words(verification)}"
        if verification.agrees
        else f"not equal: output {worst.name!r}, sample {worst.draw}"
    )
    generated = f"; {verification.generation.words}" if verification.generation is not None else ""
    image = f"; {verification.image.words}" if verification.image is not None else ""
    return f"{outcome} ({bound}){generated}{image}"


def _assumed_words(verification: VerificationInfo) -> str:
    """Describe the number of assumptions about other inputs, and whether the assumptions were accepted."""
    if not verification.assumed:
        return ""
    accepted = "accepted" if verification.accepts_assumptions else "not verified for other inputs"
    return f" under {count_noun(len(verification.assumed), 'assumption')} ({accepted})"


def _fixed_words(verification: VerificationInfo) -> str:
    """Describe the fixed input values that the result is limited to; ``""`` without any."""
    fixed = [f"{value.name} fixed to {value.traced}" for value in verification.fixed]
    if len(fixed) > _MAX_LISTED_FIXED:
        fixed = [*fixed[:_MAX_LISTED_FIXED], f"{len(fixed) - _MAX_LISTED_FIXED} more inputs fixed"]
    return f" with {' and '.join(fixed)}" if fixed else ""


def verification_notes(verification: VerificationInfo | None) -> tuple[str, ...]:
    """Note excluded samples, inputs with one value, outputs with NaN, and the notes of text generation."""
    if verification is None:
        return ()
    set_aside_notes = [
        f"Sample {entry.draw} is not compared: rounding alone changes {entry.name!r} in PyTorch (relative "
        f"difference {entry.relative_diff:.1e}). Another random input replaces it."
        for entry in verification.set_aside
    ]
    outputs_with_nan = {entry.name: entry for entry in reversed(verification.comparisons) if entry.nan_count}
    return (
        *([_DRAWN_WEIGHTS] if verification.on_drawn_weights else []),
        *([_FIXED_NUMBERS] if verification.fixes_numbers else []),
        *set_aside_notes,
        *map(_value_note, (value for value in verification.values if value.is_fixed or value.refused)),
        *(verification.generation.notes if verification.generation is not None else ()),
        *(
            f"Output {name!r} contains NaN ({count_words(entry.nan_count)} values in sample {entry.draw}), in "
            "PyTorch and in the file: check the weights."
            for name, entry in sorted(outputs_with_nan.items())
        ),
    )


_FIXED_NUMBERS = (
    "The graph draws random numbers, which differ from run to run: for the comparison, they are the same fixed numbers "
    "in PyTorch and in the file."
)
_DRAWN_WEIGHTS = (
    "With the weights of the model, an output is the same for all inputs, so a wrong graph would go unnoticed: a copy "
    "with random weights was compared as well. The file contains the weights of the model."
)


def _value_note(value: CheckedValue) -> str:
    """Note the values of an input that PyTorch rejects, or the value that the input is fixed to."""
    refused = f"PyTorch rejects {'; '.join(value.refused)}" if value.refused else ""
    if not value.is_fixed:
        return f"Input {value.name}: {refused}. It was compared at {', '.join(value.compared)}."
    reason = refused or "no other value was tried"
    return f"Input {value.name} is fixed to {value.traced}: {reason}. The file was not verified for other values."
