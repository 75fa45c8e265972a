"""Tags as text."""

from __future__ import annotations

import pytest

from winml.modelkit.tags import address


def test_depth_counts_segments() -> None:
    """The depth of FORMATS' example is 4."""
    assert 4 == address.depth("/BertModel/BertEncoder/BertLayer.0/BertAttention")


@pytest.mark.parametrize("text", ["BertModel", "/", "//A", "/A/", "/A//B"])
def test_parse_tag_malformed_is_refused(text: str) -> None:
    """A malformed tag is refused."""
    with pytest.raises(ValueError, match="not a tag"):
        address.parse_tag(text)


def test_is_within_longer_index_is_not_inside() -> None:
    """``Block.10`` does not lie in ``Block.1``."""
    assert not address.is_within("/Model/Block.10", "/Model/Block.1")


def test_common_ancestor_of_strangers_is_empty() -> None:
    """Tags of two roots have no common ancestor."""
    assert "" == address.common_ancestor(["/A/B", "/C/B"])


@pytest.mark.parametrize(
    ("siblings", "expected"),
    [
        ([("layer.0", "BertLayer"), ("layer.1", "BertLayer")], ["BertLayer.0", "BertLayer.1"]),
        ([("query", "Linear"), ("key", "Linear")], ["Linear.query", "Linear.key"]),
        (
            [("self_attn", "BartAttention"), ("encoder_attn", "BartAttention")],
            ["BartAttention.self_attn", "BartAttention.encoder_attn"],
        ),
        ([("down.0", "Block"), ("up.0", "Block"), ("up.1", "Block")], ["Block.down.0", "Block.up.0", "Block.1"]),
        ([("a.x.k", "M"), ("b.x.k", "M"), ("b.y.k", "M")], ["M.a.x.k", "M.b.x.k", "M.b.y.k"]),
        ([("encoder", "BertEncoder"), ("pooler", "BertPooler")], ["BertEncoder", "BertPooler"]),
    ],
)
def test_sibling_segments_shared_class_takes_shortest_separating_suffix(
    siblings: list[tuple[str, str]], expected: list[str]
) -> None:
    """Only siblings that share class and index get a suffix, and the shortest that separates them."""
    assert expected == address.sibling_segments(siblings)


def test_sibling_segments_separator_in_a_name_is_replaced() -> None:
    """A ModuleDict key with a slash does not make a segment look like two."""
    assert ["A.x%2Fy", "A.z"] == address.sibling_segments([("x/y", "A"), ("z", "A")])


def test_sibling_segments_names_with_different_separators_stay_distinct() -> None:
    """The replacement of a slash occurs in no other name."""
    names = ["x/y", "x_y", "x%2Fy", "x%y"]
    assert len(names) == len(set(address.sibling_segments([(name, "A") for name in names])))
