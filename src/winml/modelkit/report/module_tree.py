"""Which modules does a shown tree have? Equal ones that follow each other are shown once, deep ones not at all.

Modules are equal where their classes and all that is shown of them are equal, and so for every module inside. Renders
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

FEWEST_FOLDED = 3
"""Chosen: two modules are as quickly seen as compared."""

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class TreeLimits:
    """How much of a tree is shown."""

    depth: int | None = None
    """Levels; None shows all."""
    folds: bool = True
    """Whether equal modules that follow each other are shown once."""


@dataclass(frozen=True)
class DisplayedModule(Generic[_Item]):
    """A module of a shown tree; of equal ones the first."""

    item: _Item
    last: _Item
    """The last of equal ones; else the module itself."""
    count: int
    """How many are equal."""
    children: tuple[DisplayedModule[_Item], ...]
    hidden: int
    """Modules below it that are too deep to be shown."""

    def name(self, of: Callable[[_Item], str]) -> str:
        """Return a name of the module, or of equal ones what it ranges over: ``BertLayer.0 … .11``."""
        first, last = of(self.item), of(self.last)
        if first == last:
            return first
        head, dot, tail = last.rpartition(".")
        return f"{first} … {dot}{tail}" if dot and first.startswith(f"{head}.") else f"{first} … {last}"

    @property
    def count_words(self) -> str:
        """How many are equal, and how many are hidden: `` × 12, equal``; empty where there is nothing to say."""
        equal = f" × {self.count}, equal" if self.count > 1 else ""
        return f"{equal} · {self.hidden} more below" if self.hidden else equal


@dataclass(frozen=True)
class _Folder(Generic[_Item]):
    children_of: Callable[[_Item], Sequence[_Item]]
    facts_of: Callable[[_Item], Hashable]
    limits: TreeLimits
    numbers: dict[Hashable, int] = field(default_factory=dict)
    """What is shown of a module and all inside it → a number: equal numbers, equal modules."""

    def shown(self, items: Sequence[_Item], level: int) -> tuple[tuple[DisplayedModule[_Item], ...], tuple[int, ...]]:
        """Return how modules of one level are shown, and the number of each."""
        displayed: list[DisplayedModule[_Item]] = []
        numbers: list[int] = []
        for item in items:
            children, inside = self.shown(self.children_of(item), level + 1)
            number = self.numbers.setdefault((self.facts_of(item), inside), len(self.numbers))
            numbers.append(number)
            is_last_level = self.limits.depth is not None and level >= self.limits.depth
            hidden = sum(child.count * (1 + child.hidden) for child in children) if is_last_level else 0
            displayed.append(DisplayedModule(item, item, 1, () if is_last_level else children, hidden))
        return tuple(self._runs(displayed, numbers)), tuple(numbers)

    def _runs(
        self, displayed: Sequence[DisplayedModule[_Item]], numbers: Sequence[int]
    ) -> Iterator[DisplayedModule[_Item]]:
        start = 0
        while start < len(displayed):
            stop = start + 1
            while stop < len(displayed) and numbers[stop] == numbers[start]:
                stop += 1
            first = displayed[start]
            if self.limits.folds and stop - start >= FEWEST_FOLDED:
                yield DisplayedModule(first.item, displayed[stop - 1].item, stop - start, first.children, first.hidden)
            else:
                yield from displayed[start:stop]
            start = stop


def displayed_modules(
    roots: Sequence[_Item],
    children_of: Callable[[_Item], Sequence[_Item]],
    facts_of: Callable[[_Item], Hashable],
    limits: TreeLimits,
) -> tuple[DisplayedModule[_Item], ...]:
    """Return the modules of a tree that are shown.

    Args:
        roots: Modules of the first level.
        children_of: Returns the modules inside one.
        facts_of: Returns its class and what is shown of it, but for its name and path.
        limits: How much is shown.
    """
    return _Folder(children_of, facts_of, limits).shown(roots, 1)[0]


def displayed_rows(
    modules: Sequence[DisplayedModule[_Item]], level: int = 0
) -> Iterator[tuple[DisplayedModule[_Item], int]]:
    """Yield shown modules, each before those inside it, with its level from 0."""
    for module in modules:
        yield module, level
        yield from displayed_rows(module.children, level + 1)
