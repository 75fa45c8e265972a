"""Words for the comparison of a file with its source."""

from __future__ import annotations

from collections.abc import Mapping

from winml.modelkit.compare.fidelity import FidelityInfo, OutputFidelity, QualitySamples, QualitySource
from winml.modelkit.compare.outputs import VerificationInfo, silent_words
from winml.modelkit.words import count_noun

_LEAST_SPREAD_DB = 0.05
"""Chosen: below it, both ends read alike."""
_SOURCES: Mapping[QualitySource, tuple[str, bool]] = {
    "processor": ("of its processor", True),
    "dataset": ("of the dataset", False),
    "random": ("of random values", True),
    "file": ("of the file", False),
}
"""Where samples come from → the words for it, and whether another seed gives others."""


def comparison_words(comparison: VerificationInfo | FidelityInfo | None) -> str:
    """Return the outcome of comparing the result with its source in one sentence."""
    return fidelity_words(comparison) if isinstance(comparison, FidelityInfo) else equality_words(comparison)


def fidelity_words(fidelity: FidelityInfo) -> str:
    """Return how near the result is to its source, where it is farthest."""
    if not fidelity.has_signal:
        return _inconclusive(fidelity.silent)
    if not fidelity.outputs:
        return _together_words(fidelity)
    worst = fidelity.worst
    draws = count_noun(fidelity.draws, "random input")
    where = f"for {worst.name} on {draws if fidelity.samples is None else samples_words(fidelity.samples)}"
    streamed = ", of the whole model, weights streamed" if fidelity.is_streamed else ""
    alone = "; compared without the remaining parts" if fidelity.is_part_alone else ""
    least = f"(minimum {fidelity.limit_db(worst):.4g} dB{_source_words(fidelity, worst)})"
    together = "" if fidelity.together is None else f"; {_together_words(fidelity)}"
    return f"{nearness_words(worst)} {where}{streamed} {least}{alone}{together}"


def _source_words(fidelity: FidelityInfo, output: OutputFidelity) -> str:
    """Return what the source of a compiled file reaches, where both were compared with a float file."""
    beside = fidelity.beside
    if beside is None:
        return ""
    own = next((item for item in beside.outputs if item.name == output.name), None)
    reached = "" if own is None else f"; {beside.source} reaches {own.problem or nearness_words(own)}"
    return f", against {beside.reference}{reached}"


def _inconclusive(silent: tuple[str, ...] | None) -> str:
    words = "no number" if silent is None else silent_words(silent)
    return f"inconclusive: the source returns {words}, so a wrong graph would go unnoticed"


def _together_words(fidelity: FidelityInfo) -> str:
    """Return how near the text of several parts is, where it was compared."""
    text = fidelity.together
    if text is None:
        return ""
    which = "after the encoder of the source" if fidelity.has_encoder_of_source else "all parts together"
    return f"{which} {nearness_words(text)} for {text.name} (minimum {fidelity.least_together_db:.1f} dB)"


def nearness_words(output: OutputFidelity) -> str:
    """Return how near one output is to that of the reference."""
    share = "" if output.equal_share is None else f"{100 * output.equal_share:.1f} % of its values equal, "
    top1 = "" if output.top1_agreement is None else f", top-1 agreement {100 * output.top1_agreement:.1f} %"
    ratio = f"SQNR {output.sqnr_db:.1f} dB{interval_words(output)}"
    return output.problem or f"{share}{ratio}, cosine {output.cosine:.4f}{top1}"


def interval_words(output: OutputFidelity) -> str:
    """Return the interval of the SQNR over the samples, where there is one."""
    spread = output.spread
    if spread is None or spread.p95 - spread.p05 < _LEAST_SPREAD_DB:
        return ""
    return f" (90 % of samples: {spread.p05:.1f} to {spread.p95:.1f})"


def samples_words(samples: QualitySamples) -> str:
    """Return what two files were fed.

    >>> samples_words(QualitySamples("processor", 16, 0))
    '16 samples of its processor, seed 0'
    """
    words, is_made = _SOURCES[samples.source]
    return f"{count_noun(samples.count, 'sample')} {words}{f', seed {samples.seed}' if is_made else ''}"


def difference_words(verification: VerificationInfo) -> str:
    """Return by how much the result differs from its source, where it differs most."""
    worst = verification.worst
    how = worst.problem or f"largest relative difference {worst.relative_diff:.1e}, tolerance {worst.threshold:.0e}"
    return f"output {worst.name!r}, sample {worst.draw}: {how.replace('PyTorch returns', 'the source returns')}"


def equality_words(verification: VerificationInfo | None) -> str:
    """Return the outcome of comparing the result with its source in one sentence."""
    if verification is None:
        return "skipped: the files were not compared"
    if not verification.has_signal:
        return _inconclusive(verification.silent)
    worst = verification.worst
    in_float32 = " in float32" if verification.in_float32 else ""
    if worst.threshold == 0:
        return f"outputs equal those of the source{in_float32}"
    return (
        f"outputs equal those of the source{in_float32} (largest relative difference {worst.relative_diff:.1e}, "
        f"tolerance {worst.threshold:.0e})"
    )
