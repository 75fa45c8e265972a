"""Selection of one choice for each module with the least loss within a limit of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

GRAINS = 20_000
"""Number of steps of a limit. Chosen: costs are rounded up to a step, so that each module wastes at most a
twenty-thousandth of the limit; limits up to this number are solved exactly."""


class Choice(NamedTuple):
    """Cost and loss of one candidate of a module."""

    cost: int
    """Bytes."""
    loss: float
    """Contribution to the loss of the whole model."""


def allocate(modules: Sequence[Sequence[Choice]], limit: int) -> list[int] | None:
    """Solve the knapsack: position of the choice of each module; ``None`` if even the smallest choices do not fit.

    The sum of the losses is minimal among selections whose costs, rounded up to steps, fit.

    Args:
        modules: The choices of each module, at least one.
        limit: The largest sum of costs.

    >>> allocate([[Choice(1, 9.0), Choice(4, 1.0)], [Choice(1, 5.0), Choice(4, 0.0)]], 5)
    [1, 0]
    """
    grain = max(1, -(-limit // GRAINS))
    steps = limit // grain
    lowest_loss = np.zeros(steps + 1)
    selections = []
    for choices in modules:
        best = np.full(steps + 1, np.inf)
        selection = np.zeros(steps + 1, np.int16)
        for number, (cost, loss) in enumerate(choices):
            size = -(-cost // grain)
            if size > steps:
                continue
            tried = np.full(steps + 1, np.inf)
            tried[size:] = lowest_loss[: steps + 1 - size] + loss
            is_better = tried < best
            best[is_better], selection[is_better] = tried[is_better], number
        lowest_loss = best
        selections.append(selection)
    if not np.isfinite(lowest_loss[steps]):
        return None
    positions, remaining_steps = [], steps
    for choices, selection in zip(reversed(modules), reversed(selections), strict=True):
        number = int(selection[remaining_steps])
        positions.append(number)
        remaining_steps -= -(-choices[number].cost // grain)
    return positions[::-1]
