"""Finds the modules that must stay in float for a target, by measuring.

Modules are taken in the order of the damage they do alone. How many of them are needed is found by halving; then each
is put back, the one that costs most bytes first, and stays so where the target is met all the same. Makes and runs no
graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from winml.modelkit.flows.quantize.sensitivity_parts import ModulePart
from winml.modelkit.results.quantization_sensitivity import FidelityTarget, MeasuredForm, MetricTarget, Trial

__all__ = ["ExcludeSearch", "FoundList"]


@dataclass(frozen=True)
class FoundList:
    """The end of a search."""

    excluded: tuple[ModulePart, ...]
    """The most sensitive first."""
    form: MeasuredForm
    is_met: bool


@dataclass
class ExcludeSearch:
    """One search; every measurement is kept in :attr:`trials`."""

    units: Sequence[ModulePart]
    """Parts that may stay in float, the most sensitive first."""
    most: int
    """How many of them may: with all, nothing might be left to quantize."""
    target: FidelityTarget | MetricTarget
    measure: Callable[[Sequence[ModulePart]], MeasuredForm]
    """Measures the model with some of them in float."""
    costs_bytes: Callable[[ModulePart], int]
    """Returns by how much one makes the model larger."""
    trials: list[Trial] = field(default_factory=list)
    _lists: list[FoundList] = field(default_factory=list)

    def find(self) -> FoundList:
        """Return the list that meets the target, from which no module can be taken; else the best there was."""
        if self._try(0, "all modules quantized").is_met:
            return self._lists[-1]
        if not self.most or not self._try(self.most, f"the {self.most} most sensitive in float").is_met:
            return max(self._lists, key=lambda found: self.target.quality(found.form))
        return self._without_needless(self._halved())

    def _halved(self) -> FoundList:
        too_few, found = 0, self._lists[-1]
        while len(found.excluded) - too_few > 1:
            count = (too_few + len(found.excluded)) // 2
            tried = self._try(count, f"the {count} most sensitive in float")
            if tried.is_met:
                found = tried
            else:
                too_few = count
        return found

    def _without_needless(self, found: FoundList) -> FoundList:
        # Of two that cost the same, the one that does less damage is put back first.
        ranked = sorted(enumerate(found.excluded), key=lambda item: (self.costs_bytes(item[1]), item[0]), reverse=True)
        for _, unit in ranked:
            if len(found.excluded) == 1:
                break  # none at all was tried first
            fewer = tuple(other for other in found.excluded if other is not unit)
            name = unit.module.path or unit.module.tag
            tried = self._try_units(fewer, f"{name}{' (own nodes)' if unit.inner else ''} put back")
            found = tried if tried.is_met else found
        return found

    def _try(self, count: int, words: str) -> FoundList:
        return self._try_units(tuple(self.units[:count]), words)

    def _try_units(self, excluded: tuple[ModulePart, ...], words: str) -> FoundList:
        form = self.measure(excluded)
        found = FoundList(excluded, form, self.target.is_met(form))
        self._lists.append(found)
        self.trials.append(Trial(len(excluded), words, form, found.is_met))
        return found
