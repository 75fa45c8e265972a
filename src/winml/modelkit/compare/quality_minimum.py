"""Minimum quality of a lossy file relative to its source, the default limit of all commands.

Where the outputs are scores of classes or tokens, the task decides: the share of equal predictions. Elsewhere the SQNR
decides. The values belong to the precisions (``quantize/precisions.py``). Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PREDICTIONS = "logits"
"""Specified by transformers: name of the output with scores of classes or tokens. Scores of positions, such as
``start_logits``, have other names."""
LEAST_AGREEMENT = 0.85
"""Minimum top-1 agreement. Chosen: two of 16 samples may differ. Measured: int8 of small decoders with random weights,
whose scores are close to each other, reaches 0.92 and more."""

FLOAT32_PROVIDER_DB = 40.0
"""Minimum SQNR of a float32 file on a provider other than the CPU. Chosen: products of GPUs may have 10 bits of
mantissa (TF32); a wrong graph is near 0 dB."""

TARGET_DB = 25.0
"""SQNR that a recommended search for modules in float has to reach. Chosen: an error of 6 % of the signal. Measured:
six modules of MiniLM in float suffice in w8a16, and it stays one part on QNN."""
WEAK_DB = 20.0
"""SQNR below which such a search is recommended after a quantization of activations. Chosen: an error of a tenth of the
signal."""
_AGREEING_DB = 20.0
"""SQNR that a search for modules in float has to reach where predictions decide. Chosen: an error of a tenth of the
signal."""


@dataclass(frozen=True)
class QualityMinimum:
    """Minimum of one output.

    >>> QualityMinimum(6.0).is_met(8.0, 0.5), QualityMinimum(6.0, 0.85).is_met(8.0, 0.5)
    (True, False)
    >>> QualityMinimum(6.0, 0.85).is_met(2.0, 1.0), QualityMinimum(6.0, 0.85).is_met(2.0, None)
    (True, False)
    """

    sqnr_db: float
    """Minimum SQNR in dB, at the lower end of the interval over the samples."""
    agreement: float | None = None
    """Minimum top-1 agreement, which replaces the SQNR for outputs with scores; ``None``: the SQNR applies to all."""

    @classmethod
    def least_of(cls, minimums: Iterable[QualityMinimum]) -> QualityMinimum:
        """Combine the minimums of modules in one file: the lowest of each; the SQNR alone if one has no agreement."""
        items = list(minimums)
        agreements = [item.agreement for item in items if item.agreement is not None]
        agreement = min(agreements) if len(agreements) == len(items) else None
        return cls(min(item.sqnr_db for item in items), agreement)

    def is_by_agreement(self, agreement: float | None) -> bool:
        """Return True if the agreement decides for an output.

        Args:
            agreement: Top-1 agreement of the output; ``None`` for an output without scores.
        """
        return self.agreement is not None and agreement is not None

    def searched_db(self, agreement: float | None) -> float:
        """Return the SQNR that a search for modules in float has to reach.

        Args:
            agreement: Top-1 agreement of the output; ``None`` for an output without scores.
        """
        return max(self.sqnr_db, _AGREEING_DB) if self.is_by_agreement(agreement) else self.sqnr_db

    def is_met(self, sqnr_db: float, agreement: float | None) -> bool:
        """Return True if an output meets the minimum.

        Args:
            sqnr_db: Lower end of its SQNR.
            agreement: Its top-1 agreement; ``None`` for an output without scores.
        """
        if self.agreement is not None and agreement is not None:
            return agreement >= self.agreement
        return sqnr_db >= self.sqnr_db
