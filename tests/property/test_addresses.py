"""Invariants of tags."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from winml.modelkit.tags import address

segments = st.text(st.characters(whitelist_categories=["L", "N"], whitelist_characters="._"), min_size=1, max_size=8)
tags = st.lists(segments, min_size=1, max_size=6).map(address.format_tag)
class_names = st.sampled_from(["Block", "Linear", "Attention"])
path_parts = st.sampled_from(["0", "1", "10", "down", "up", "attn", "layer"])
paths = st.lists(path_parts, min_size=1, max_size=4).map(".".join)


@given(st.lists(segments, max_size=6))
def test_parse_is_the_inverse_of_format(parts: list[str]) -> None:
    """A tag splits back into the segments it was made of."""
    assert tuple(parts) == address.parse_tag(address.format_tag(parts))


@given(st.lists(tags, min_size=1, max_size=5))
def test_common_ancestor_contains_every_tag_and_is_deepest(given_tags: list[str]) -> None:
    """Every tag is within the ancestor, and one more segment would exclude a tag."""
    ancestor = address.common_ancestor(given_tags)
    assert all(address.is_within(tag, ancestor) for tag in given_tags)
    longer = [parts[: address.depth(ancestor) + 1] for parts in map(address.parse_tag, given_tags)]
    if len(set(longer)) == 1:
        assert longer[0] == address.parse_tag(ancestor), "all tags share a deeper ancestor"


@given(st.dictionaries(paths, class_names, min_size=1, max_size=10))
def test_sibling_segments_are_unique_and_start_with_the_class(modules: dict[str, str]) -> None:
    """Siblings never share a segment, and each segment starts with its module's class."""
    siblings = list(modules.items())
    result = address.sibling_segments(siblings)
    assert len(set(result)) == len(result)
    for segment, (path, class_name) in zip(result, siblings, strict=True):
        assert segment.partition(".")[0] == class_name
        suffix = segment.partition(".")[2]
        assert path == suffix or path.endswith(f".{suffix}") or not suffix


@given(st.dictionaries(paths, class_names, min_size=1, max_size=10), st.randoms(use_true_random=False))
def test_sibling_segments_do_not_depend_on_order(modules: dict[str, str], random: object) -> None:
    """A module's segment depends on the set of its siblings only."""
    siblings = list(modules.items())
    shuffled = list(siblings)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    before = dict(zip(siblings, address.sibling_segments(siblings), strict=True))
    assert before == dict(zip(shuffled, address.sibling_segments(shuffled), strict=True))
