"""Modules shown in a tree: equal ones once, deep ones omitted."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from winml.modelkit.report.module_tree import (
    FEWEST_FOLDED,
    TreeLimits,
    TreeRow,
    tree_rows,
    walk_rows,
)


@dataclass(frozen=True)
class _Module:
    name: str
    facts: tuple[str, int]
    children: tuple[_Module, ...] = ()


def _shown(roots: list[_Module], limits: TreeLimits) -> tuple[TreeRow[_Module], ...]:
    return tree_rows(roots, lambda module: module.children, lambda module: module.facts, limits)


def _words(roots: list[_Module], limits: TreeLimits) -> list[str]:
    rows = walk_rows(_shown(roots, limits))
    return [f"{'  ' * level}{shown.name(lambda module: module.name)}{shown.count_words}" for shown, level in rows]


def _layer(number: int, *, nodes: int = 5) -> _Module:
    return _Module(f"Layer.{number}", ("Layer", 9), (_Module("Act", ("Act", nodes)), _Module("Out", ("Out", 4))))


def test_equal_layers_are_shown_once() -> None:
    """The first layer represents all, with its inner modules."""
    model = _Module("M", ("M", 30), tuple(_layer(number) for number in range(12)))
    assert ["M", "  Layer.0 … .11 × 12, equal", "    Act", "    Out"] == _words([model], TreeLimits())
    assert 1 + 12 * 3 == len(_words([model], TreeLimits(folds=False)))


def test_layer_with_a_different_descendant_is_not_folded() -> None:
    """Equality includes all descendants; two equal layers are too few to be folded."""
    layers = [_layer(0, nodes=6), *(_layer(number) for number in range(1, 4)), _layer(4, nodes=6), _layer(5), _layer(6)]
    names = [line for line in _words([_Module("M", ("M", 1), tuple(layers))], TreeLimits(depth=2)) if "Layer" in line]
    below = " · 2 more below"
    expected = ["0", "1 … .3 × 3, equal", "4", "5", "6"]
    assert [f"  Layer.{words}{below}" for words in expected] == names


def test_depth_has_the_number_of_hidden_modules() -> None:
    """Folded modules below count each."""
    model = _Module("M", ("M", 30), tuple(_layer(number) for number in range(3)))
    assert ["M · 9 more below"] == _words([model], TreeLimits(depth=1))


def test_names_without_a_common_prefix_are_written_out() -> None:
    """Only the text after the last dot may follow an abbreviation."""
    model = [_Module(name, ("Linear", 1)) for name in ("Linear.query", "Linear.key", "Linear")]
    assert ["Linear.query … Linear × 3, equal"] == _words(model, TreeLimits())


def test_deep_tree_is_shown() -> None:
    """A path of 2000 modules, more than Python's limit of recursion, has 2000 rows."""
    children = {number: [number + 1] for number in range(1999)}
    rows = tree_rows([0], lambda number: children.get(number, []), lambda number: number, TreeLimits())
    assert list(range(2000)) == [shown.item for shown, _ in walk_rows(rows)]
    assert list(range(2000)) == [level for _, level in walk_rows(rows)]


_trees = st.recursive(
    st.builds(_Module, st.just("leaf"), st.tuples(st.sampled_from("AB"), st.integers(0, 1))),
    lambda inner: st.builds(
        _Module,
        st.just("module"),
        st.tuples(st.sampled_from("AB"), st.integers(0, 1)),
        st.lists(inner, max_size=6).map(tuple),
    ),
    max_leaves=30,
)


@given(_trees)
def test_folded_tree_covers_every_module_without_equal_siblings(model: _Module) -> None:
    """Counts multiplied from the root down give the whole tree; long runs of equal modules are folded."""

    def count(modules: tuple[TreeRow[_Module], ...]) -> int:
        return sum(shown.count * (1 + count(shown.children)) for shown in modules)

    def size(module: _Module) -> int:
        return 1 + sum(map(size, module.children))

    folded = _shown([model], TreeLimits())
    assert size(model) == count(folded)
    for shown, _ in walk_rows(folded):
        assert shown.count == 1 or shown.count >= FEWEST_FOLDED
        for left, right in pairwise(shown.children):
            together = left.count + right.count
            is_same = (left.item.facts, left.item.children) == (right.item.facts, right.item.children)
            assert not is_same or together < FEWEST_FOLDED or left.count == right.count == 1
