"""Which modules of two graphs differ, and in what?

Compares records of modules: operators, attributes, weights. Which weights have the same values is given, since finding
it needs the files; nothing is run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from winml.modelkit.words import shape_words


@dataclass(frozen=True)
class StoredWeight:
    """One initializer as its header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int

    @property
    def words(self) -> str:
        """Type and shape: ``float32[384, 384]``."""
        return shape_words(self.dtype, self.shape)


@dataclass(frozen=True)
class ModuleStructure:
    """What one module holds itself, those below it not included."""

    path: str
    tag: str
    class_name: str
    operators: Mapping[str, int]
    signatures: Mapping[str, int]
    """Operator with its attributes → nodes."""
    weights: tuple[StoredWeight, ...]
    parameters: int
    size_bytes: int

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return sum(self.operators.values())

    @property
    def shape_of_weights(self) -> tuple[str, ...]:
        """Types and shapes of its weights, in no order."""
        return tuple(sorted(weight.words for weight in self.weights))


@dataclass(frozen=True)
class MatchedModule:
    """A module before and after; None where it is missing."""

    before: ModuleStructure | None
    after: ModuleStructure | None

    @property
    def is_renamed(self) -> bool:
        """Whether it stands under another tag now."""
        return self.before is not None and self.after is not None and self.before.tag != self.after.tag


def match_modules(before: Sequence[ModuleStructure], after: Sequence[ModuleStructure]) -> list[MatchedModule]:
    """Pair the modules of two graphs, in the order of the second; those that went follow the one they followed.

    Modules of one tag are the same. Of the others, those of one path are, then those that look alike: the same class,
    operators and shapes of weights, or at least the same shapes of weights where it has any.
    """
    partner = _partners(before, after)
    by_tag = {module.tag: module for module in before}
    matches = [MatchedModule(by_tag.get(partner.get(module.tag, "")), module) for module in after]
    found = set(partner.values())
    for position, module in enumerate(before):
        if module.tag in found:
            continue
        previous = {earlier.tag for earlier in before[:position]}
        place = max(
            (i + 1 for i, match in enumerate(matches) if match.before and match.before.tag in previous), default=0
        )
        matches.insert(place, MatchedModule(module, None))
    return matches


def _partners(before: Sequence[ModuleStructure], after: Sequence[ModuleStructure]) -> dict[str, str]:
    """Return the tag after → the tag before, of the modules that are on both sides."""
    partner: dict[str, str] = {}
    keys: tuple[Callable[[ModuleStructure], object], ...] = (
        lambda module: module.tag,
        lambda module: module.path or None,
        lambda module: (module.class_name, tuple(sorted(module.operators.items())), module.shape_of_weights),
        lambda module: module.shape_of_weights or None,
    )
    for key in keys:
        waiting: defaultdict[object, list[ModuleStructure]] = defaultdict(list)
        for module in before:
            if module.tag not in partner.values() and key(module) is not None:
                waiting[key(module)].append(module)
        for module in after:
            if module.tag not in partner and waiting.get(key(module)):
                partner[module.tag] = waiting[key(module)].pop(0).tag
    return partner


def match_weights(
    before: Sequence[StoredWeight],
    after: Sequence[StoredWeight],
    are_equal: Callable[[str, str], bool],
) -> list[tuple[StoredWeight | None, StoredWeight | None]]:
    """Pair the weights of one module that are not the same on both sides.

    Args:
        before: Its weights before.
        after: Its weights after.
        are_equal: Says of two names, before and after, of one type and shape, whether the values are the same.

    Returns:
        Pairs of one name with other values, type or shape; two names with the same values, or of one shape where the
        type changed and the name was added to; and the others alone. Weights of one name with the same values are left
        out.
    """
    old, new = {weight.name: weight for weight in before}, {weight.name: weight for weight in after}
    matches: list[tuple[StoredWeight | None, StoredWeight | None]] = []
    for name in [name for name in new if name in old]:
        left, right = old.pop(name), new.pop(name)
        if left.words != right.words or not are_equal(name, name):
            matches.append((left, right))
    by_words: defaultdict[str, list[StoredWeight]] = defaultdict(list)
    for weight in old.values():
        by_words[weight.words].append(weight)
    for weight in new.values():
        twin = next((other for other in by_words[weight.words] if are_equal(other.name, weight.name)), None)
        twin = twin or _retyped(weight, by_words)
        if twin is not None:
            by_words[twin.words].remove(twin)
        matches.append((twin, weight))
    matches += [(weight, None) for weights in by_words.values() for weight in weights]
    return matches


def _retyped(weight: StoredWeight, gone: Mapping[str, Sequence[StoredWeight]]) -> StoredWeight | None:
    """Return the weight that stands in another type now: tools that change a type add to the name."""
    return next(
        (
            other
            for weights in gone.values()
            for other in weights
            if other.dtype != weight.dtype and other.shape == weight.shape and weight.name.startswith(other.name)
        ),
        None,
    )


def changed_counts(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return what differs between two counts: before and after, the largest change first."""
    difference = Counter(after)
    difference.subtract(before)
    ordered = sorted(difference.items(), key=lambda item: (-abs(item[1]), item[0]))
    return {name: (before.get(name, 0), after.get(name, 0)) for name, change in ordered if change}
