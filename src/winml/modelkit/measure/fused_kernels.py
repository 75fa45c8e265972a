"""Which module does the work of a kernel that stands for nodes of several?

Compares what the nodes compute; which nodes a kernel stands for, and how much each computes, is found by the caller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["NodeWork", "working_module"]


@dataclass(frozen=True)
class NodeWork:
    """One node that a kernel stands for, and how much it computes."""

    tag: str
    macs: int | None
    """Multiply-accumulate operations; None where it has some and their number is unknown."""
    elements: int | None
    """Number of values it makes; None where that is unknown."""


def working_module(nodes: Sequence[NodeWork]) -> str | None:
    """Return the tag of the module that does most of the work.

    Multiply-accumulate operations count, and where no node has any, the values that are made.

    Returns:
        The tag; None where modules do equally much, or it is unknown which does more.

    >>> working_module([NodeWork("/Net/conv", 9000, 100), NodeWork("/Net", 0, 100), NodeWork("/Net", 0, 100)])
    '/Net/conv'
    """
    if any(node.macs != 0 for node in nodes):
        return _largest((node.tag, node.macs) for node in nodes if node.macs != 0)
    return _largest((node.tag, node.elements) for node in nodes)


def _largest(amounts: Iterable[tuple[str, int | None]]) -> str | None:
    sums: Counter[str] = Counter()
    is_known = True
    for tag, amount in amounts:
        sums[tag] += amount or 0
        is_known = is_known and amount is not None
    if len(sums) < 2:
        return next(iter(sums), None)
    (first, most), (_, second) = sums.most_common(2)
    return first if is_known and most > second else None
