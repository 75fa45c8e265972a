"""Tags on nodes."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from winml.modelkit.tags.tagging import SOURCES, NodeTag, clear_tag, listed_modules, read_tag, write_tag

TAG = NodeTag("/BertModel/BertEncoder/BertLayer.0/BertAttention", "encoder.layer.0.attention", "direct")


def node(**metadata: str) -> ir.Node:
    """Build a node with metadata; ``__`` in a keyword becomes a dot."""
    node = ir.node("Relu", [ir.Value(name="x")])
    node.metadata_props.update({key.replace("__", "."): value for key, value in metadata.items()})
    return node


def test_write_tag_keys_are_documented() -> None:
    """Four keys, the depth as a decimal text."""
    write_tag(tagged := node(), TAG)
    assert {
        "winml.hierarchy.tag": "/BertModel/BertEncoder/BertLayer.0/BertAttention",
        "winml.hierarchy.depth": "4",
        "winml.hierarchy.module": "encoder.layer.0.attention",
        "winml.hierarchy.source": "direct",
    } == dict(tagged.metadata_props)


def test_write_tag_replaces_an_earlier_tag() -> None:
    """A second tag replaces the first, and other keys stay."""
    tagged = node(other="kept")
    write_tag(tagged, TAG)
    write_tag(tagged, NodeTag("/BertModel", "", "root"))
    assert NodeTag("/BertModel", "", "root") == read_tag(tagged)
    assert ("1", "kept") == (tagged.metadata_props["winml.hierarchy.depth"], tagged.metadata_props["other"])


def test_write_tag_refuses_malformed_tags() -> None:
    """A text that cannot be split into segments is an internal error."""
    with pytest.raises(ValueError, match="not a tag"):
        write_tag(node(), NodeTag("BertModel", "", "root"))


@pytest.mark.parametrize("source", SOURCES)
def test_read_tag_knows_every_source(source: str) -> None:
    """Each source of FORMATS is read back."""
    tag = read_tag(node(winml__hierarchy__tag="/M", winml__hierarchy__source=source))
    assert tag is not None
    assert source == tag.source


@pytest.mark.parametrize("metadata", [{}, {"winml__hierarchy__tag": ""}, {"namespace": "M"}])
def test_read_tag_of_an_untagged_node_is_empty(metadata: dict[str, str]) -> None:
    """An empty tag and torch's namespace are no tags."""
    assert read_tag(node(**metadata)) is None


def test_read_tag_unknown_source_is_refused() -> None:
    """The error lists the known sources."""
    with pytest.raises(ValueError, match=r"'guessed'; .* direct, parent"):
        read_tag(node(winml__hierarchy__tag="/M", winml__hierarchy__source="guessed"))


def test_clear_tag_removes_keys_of_winml_and_torch_only() -> None:
    """Keys of other tools stay on the node; keys of the hierarchy do not."""
    tagged = node(
        namespace="M", pkg__torch__onnx__stack_trace="x", winmlish="kept", namespaces="kept", pkg__other="kept"
    )
    write_tag(tagged, TAG)
    clear_tag(tagged)
    assert ["namespaces", "pkg.other", "winmlish"] == sorted(tagged.metadata_props)


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": 1}', "[" * 100_000])
def test_damaged_list_of_modules_is_reported_with_its_key(text: str) -> None:
    """The reader of the file adds the file name to the error."""
    assert ["a.b"] == listed_modules(node(winml__hierarchy__modules='["a.b"]'))
    with pytest.raises(ValueError, match=r"winml\.hierarchy\.modules"):
        listed_modules(node(winml__hierarchy__modules=text))
