"""Selection of the modules in a displayed tree: equal consecutive modules are folded, deep modules are omitted.

Two modules are equal if classes, displayed facts and all inner modules are equal. Renders nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

FEWEST_FOLDED = 3
"""Chosen: two equal modules are read as quickly as a folded entry."""

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class TreeLimits:
    """Limits of a displayed module tree."""

    depth: int | None = None
    """Number of levels; None: all."""
    folds: bool = True
    """True if equal consecutive modules are folded into one entry."""


@dataclass(frozen=True)
class TreeRow(Generic[_Item]):
    """An entry of a displayed tree: a module, or the first of several equal modules."""

    item: _Item
    last: _Item
    """Last of several equal modules; else the module itself."""
    count: int
    """Number of equal modules."""
    children: tuple[TreeRow[_Item], ...]
    hidden: int
    """Number of omitted modules below the last displayed level."""

    def name(self, name_of: Callable[[_Item], str]) -> str:
        """Return the name of the module; for equal modules the range of names: ``BertLayer.0 … .11``."""
        start, stop = name_of(self.item), name_of(self.last)
        if start == stop:
            return start
        head, dot, tail = stop.rpartition(".")
        return f"{start} … {dot}{tail}" if dot and start.startswith(f"{head}.") else f"{start} … {stop}"

    @property
    def count_words(self) -> str:
        """Text with the numbers of equal and of hidden modules: `` × 12, equal``; empty without such modules."""
        equal = f" × {self.count}, equal" if self.count > 1 else ""
        return f"{equal} · {self.hidden} more below" if self.hidden else equal


@dataclass(frozen=True)
class _TreeFolder(Generic[_Item]):
    children_of: Callable[[_Item], Sequence[_Item]]
    facts_of: Callable[[_Item], Hashable]
    limits: TreeLimits
    numbers: dict[Hashable, int] = field(default_factory=dict)
    """Displayed facts of a module and the numbers of its children → number. Equal numbers mean equal modules."""

    def fold(self, roots: Sequence[_Item]) -> tuple[TreeRow[_Item], ...]:
        """Return the displayed modules of the first level, with their children."""
        # Parents first, without recursion: a path may have a thousand segments.
        modules: list[tuple[_Item, int, list[int]]] = []  # module, level, positions of its children
        root_positions: list[int] = []
        waiting = [(root, 1, root_positions) for root in roots]
        for module, level, siblings in waiting:
            siblings.append(len(modules))
            positions: list[int] = []
            modules.append((module, level, positions))
            waiting += [(child, level + 1, positions) for child in self.children_of(module)]
        rows: dict[int, TreeRow[_Item]] = {}
        numbers: dict[int, int] = {}

        def folded(positions: Sequence[int]) -> tuple[TreeRow[_Item], ...]:
            return tuple(self._fold_runs([rows[place] for place in positions], [numbers[place] for place in positions]))

        for position, (module, level, positions) in reversed(list(enumerate(modules))):
            children = folded(positions)
            facts = (self.facts_of(module), tuple(numbers[place] for place in positions))
            numbers[position] = self.numbers.setdefault(facts, len(self.numbers))
            is_last_level = self.limits.depth is not None and level >= self.limits.depth
            hidden = sum(child.count * (1 + child.hidden) for child in children) if is_last_level else 0
            rows[position] = TreeRow(module, module, 1, () if is_last_level else children, hidden)
        return folded(root_positions)

    def _fold_runs(self, modules: Sequence[TreeRow[_Item]], numbers: Sequence[int]) -> Iterator[TreeRow[_Item]]:
        """Yield the modules of one level; consecutive modules with equal numbers become one entry."""
        for _, group in itertools.groupby(zip(numbers, modules, strict=True), lambda numbered: numbered[0]):
            run = [module for _, module in group]
            if self.limits.folds and len(run) >= FEWEST_FOLDED:
                yield TreeRow(run[0].item, run[-1].item, len(run), run[0].children, run[0].hidden)
            else:
                yield from run


def tree_rows(
    roots: Sequence[_Item],
    children_of: Callable[[_Item], Sequence[_Item]],
    facts_of: Callable[[_Item], Hashable],
    limits: TreeLimits,
) -> tuple[TreeRow[_Item], ...]:
    """Select the modules of a tree to display.

    Args:
        roots: Modules of the first level.
        children_of: Returns the child modules of a module.
        facts_of: Returns the class and the displayed facts of a module, without its name and path.
        limits: Limits of the tree.
    """
    return _TreeFolder(children_of, facts_of, limits).fold(roots)


def walk_rows(modules: Sequence[TreeRow[_Item]], level: int = 0) -> Iterator[tuple[TreeRow[_Item], int]]:
    """Yield displayed modules in preorder, each with its level from 0."""
    waiting = [(module, level) for module in reversed(modules)]
    while waiting:
        module, depth = waiting.pop()
        yield module, depth
        waiting += [(child, depth + 1) for child in reversed(module.children)]
