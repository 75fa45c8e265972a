"""Chooses one of several forms for each module so that all together fit a limit and lose least.

A multiple-choice knapsack problem, solved by dynamic programming over the limit. Knows numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

GRAINS = 20_000
"""Steps that a limit is divided into. Chosen: a cost is rounded up to a step, so that each module wastes at most a
twenty-thousandth of the limit; limits up to this are solved exactly."""


class Choice(NamedTuple):
    """A form that a module may have."""

    cost: int
    """Bytes."""
    loss: float
    """Added by it to the loss of the whole."""


def allocate(modules: Sequence[Sequence[Choice]], limit: int) -> list[int] | None:
    """Return the position of the choice of each module; None where not even the smallest fit.

    The sum of the losses is the least there is among those whose costs, rounded up to steps, fit.

    Args:
        modules: The choices of each module, at least one.
        limit: The largest sum of costs.

    >>> allocate([[Choice(1, 9.0), Choice(4, 1.0)], [Choice(1, 5.0), Choice(4, 0.0)]], 5)
    [1, 0]
    """
    grain = max(1, -(-limit // GRAINS))
    steps = limit // grain
    least = np.zeros(steps + 1)
    taken = []
    for choices in modules:
        best = np.full(steps + 1, np.inf)
        which = np.zeros(steps + 1, np.int16)
        for number, (cost, loss) in enumerate(choices):
            size = -(-cost // grain)
            if size > steps:
                continue
            tried = np.full(steps + 1, np.inf)
            tried[size:] = least[: steps + 1 - size] + loss
            is_better = tried < best
            best[is_better], which[is_better] = tried[is_better], number
        least = best
        taken.append(which)
    if not np.isfinite(least[steps]):
        return None
    found, left = [], steps
    for choices, which in zip(reversed(modules), reversed(taken), strict=True):
        number = int(which[left])
        found.append(number)
        left -= -(-choices[number].cost // grain)
    return found[::-1]
