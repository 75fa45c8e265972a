"""Which module is the first whose error is its own?

An error travels: every module behind a wrong one is wrong as well. A module's error is its own where its outputs are
off by much more than what it was fed. Compares numbers that are already measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ModuleErrors", "first_divergence", "own_error"]

OUTSTANDING = 6.0
"""Chosen: how many times the usual own error of a module one has to be, where all modules have some because numbers of
few bits are rounded everywhere. In int8 files with nothing planted, own errors spread over a factor of 4."""


@dataclass(frozen=True)
class ModuleErrors:
    """Relative errors at the boundary of one module, as shares of the reference."""

    inputs: float
    """Largest of its known inputs; 0 where nothing is known of them."""
    outputs: float
    """Largest of its outputs; infinite where values are missing, or NaN on one side."""


def own_error(errors: ModuleErrors) -> float:
    """Return the part of a module's error that it was not fed.

    Errors of rounding are independent of each other, so that their squares add up.
    """
    if not math.isfinite(errors.outputs):
        return errors.outputs if math.isfinite(errors.inputs) else 0.0
    return math.sqrt(max(0.0, errors.outputs**2 - errors.inputs**2)) if math.isfinite(errors.inputs) else 0.0


def first_divergence(modules: Sequence[ModuleErrors], tolerance: float, *, is_rounded: bool) -> int | None:
    """Return the position of the first module whose error is its own, or None.

    Args:
        modules: In the order their outputs are computed, inner modules before those around them.
        tolerance: Relative error that is no error, being rounding of the type that is computed in.
        is_rounded: Whether all modules have errors of their own, since the graph computes with few bits; then one
            has to stand out from the others.
    """
    own = [own_error(errors) for errors in modules]
    usual = [error for error in own if 0.0 < error < math.inf]
    typical = statistics.median(usual) if usual and is_rounded else 0.0
    limit = max(tolerance, OUTSTANDING * typical)
    return next((position for position, error in enumerate(own) if error > limit), None)
