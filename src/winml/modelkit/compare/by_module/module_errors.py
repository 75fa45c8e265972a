"""Finds the first module whose error is its own, by numbers that are already measured.

An error travels: every module behind a wrong one is wrong as well. A module's error is its own where its inputs agree
and its outputs do not.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_OUTSTANDING = 6.0
"""Chosen: how many times the usual own error of a module one has to be, where all modules have some because numbers of
few bits are rounded everywhere. In int8 files with nothing planted, own errors spread over a factor of 4."""


@dataclass(frozen=True)
class ModuleErrors:
    """Relative errors at the boundary of one module, as shares of the reference."""

    inputs: float | None
    """Largest of its inputs; None where one of them is unknown."""
    outputs: float
    """Largest of its outputs; infinite where values are missing, or NaN on one side."""
    before: tuple[tuple[float, float], ...] = ()
    """Of a module around others: the largest error of what its own nodes were fed until then, and that of what they
    feed to a module inside, for each of these in order."""
    last_fed: float | None = None
    """Of a module around others: the largest error of what its nodes were fed until the end. None: as ``inputs``."""
    is_passing_on: bool = False
    """Whether it computes the same on both sides, so that its error has to come from elsewhere, larger as it may be."""

    @property
    def steps(self) -> tuple[tuple[float, float], ...]:
        """Errors of what its own nodes are fed, and of what they hand on; nothing where one of its inputs is unknown.

        What arises inside of another module is fed to it by that.
        """
        if self.inputs is None:
            return ()
        return (*self.before, (self.inputs if self.last_fed is None else self.last_fed, self.outputs))


def own_error(errors: ModuleErrors) -> float | None:
    """Return the part of a module's error that its inputs do not explain; None where nobody knows what it was fed.

    Errors of rounding are independent of each other, so that their squares add up: it is the square root of
    error² - inputs². Of a module around others it is what arises in its own nodes, and no more than that: an error that
    vanishes before its outputs, such as before a scale near 0, is not one of the module.
    """
    arising = _largest_step(errors)
    if arising is None or errors.inputs is None or not math.isfinite(arising):
        return arising
    return min(arising, _arising(errors.inputs, errors.outputs))


def _largest_step(errors: ModuleErrors) -> float | None:
    return max((_arising(*step) for step in errors.steps), default=None)


def _arising(fed: float, handed_on: float) -> float:
    if not math.isfinite(fed):
        return 0.0
    return math.sqrt(max(0.0, handed_on**2 - fed**2)) if math.isfinite(handed_on) else handed_on


def first_divergence(modules: Sequence[ModuleErrors], tolerance: float, *, is_rounded: bool) -> int | None:
    """Return the position of the first module whose error is its own, or None.

    Args:
        modules: In the order their outputs are computed, inner modules before those around them.
        tolerance: Relative error that is no error, being rounding of the type that is computed in.
        is_rounded: Whether all modules have errors of their own, since the graph computes with few bits; then one
            has to stand out from the others, and from what it was fed, of which a difference of large numbers makes
            more.
    """
    own = [_largest_step(errors) for errors in modules if not errors.is_passing_on]
    usual = [error for error in own if error is not None and 0.0 < error < math.inf]
    typical = statistics.median_low(usual) if usual and is_rounded else 0.0
    limit = max(tolerance, _OUTSTANDING * typical)
    return next(
        (
            position
            for position, errors in enumerate(modules)
            # What is fed something wrong may make more of it: a wrong value before a GELU is no fault of the GELU.
            if not errors.is_passing_on
            and any(
                fed <= limit and _arising(fed, handed_on) > max(limit, _OUTSTANDING * fed * is_rounded)
                for fed, handed_on in errors.steps
            )
        ),
        None,
    )
