"""Invariants of selectors."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from winml.modelkit.errors import UsageError
from winml.modelkit.tags import address
from winml.modelkit.tags.selector import ModuleAddress, Selector, escape, select

names = st.text(st.sampled_from("abM0[]*?!-"), min_size=1, max_size=4)
modules = st.builds(
    lambda parts, segments, class_name: ModuleAddress(".".join(parts), address.format_tag(segments), class_name),
    st.lists(names, max_size=4),
    st.lists(names, min_size=1, max_size=4),
    names,
)
trees = st.lists(modules, min_size=1, max_size=8)
globs = st.text(st.sampled_from("abM0[]*?!-/."), min_size=1, max_size=12)


def _select(tree: list[ModuleAddress], selector: str) -> list[ModuleAddress]:
    try:
        return select(tree, selector)
    except UsageError:
        return []


@given(trees, globs)
def test_select_any_text_gives_some_of_the_modules_in_order(tree: list[ModuleAddress], glob: str) -> None:
    """A selector raises no other error, returns existing modules only, and keeps the order."""
    remaining = iter(tree)
    assert all(any(found is module for module in remaining) for found in _select(tree, glob))


@given(trees, st.data())
def test_select_escaped_tag_gives_exactly_the_modules_of_that_tag(
    tree: list[ModuleAddress], data: st.DataObject
) -> None:
    """An escaped tag may contain any character."""
    tag = data.draw(st.sampled_from(tree)).tag
    assert [module for module in tree if module.tag == tag] == select(tree, escape(tag))


@given(modules)
def test_select_escaped_path_and_class_name_the_module(module: ModuleAddress) -> None:
    """An escaped path or class may contain any character."""
    assert Selector(escape(module.class_name)).matches(module)
    assert not module.path or Selector(escape(module.path)).matches(module)


@given(modules, st.data())
def test_selector_two_stars_for_any_run_of_parts_still_match(module: ModuleAddress, data: st.DataObject) -> None:
    """Two stars may replace any number of neighbouring segments of a tag, zero included."""
    segments = [escape(segment) for segment in address.parse_tag(module.tag)]
    start = data.draw(st.integers(0, len(segments)))
    stop = data.draw(st.integers(start, len(segments)))
    assert Selector(address.format_tag([*segments[:start], "**", *segments[stop:]])).matches(module)


@given(trees, st.integers(1, 4))
def test_select_stars_between_slashes_give_the_tags_of_that_depth(tree: list[ModuleAddress], depth: int) -> None:
    """A single star never crosses a separator and always fills a segment."""
    expected = [module for module in tree if address.depth(module.tag) == depth]
    assert expected == _select(tree, "/*" * depth)


@given(trees, globs)
def test_select_more_stars_never_give_less(tree: list[ModuleAddress], glob: str) -> None:
    """Two stars match at least the modules that a single star matches."""
    if "[" not in glob:
        doubled = glob.replace("*", "**")
        assert {*_select(tree, glob)} <= {*_select(tree, doubled)}
