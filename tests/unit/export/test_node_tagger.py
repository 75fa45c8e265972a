"""Tags from scopes, in graphs built by hand."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch
from torch import nn

from winml.modelkit.export.capture import NodeTagger, neighbours, shared_scope
from winml.modelkit.metadata_keys import NAMESPACE_KEY
from winml.modelkit.tags.tagging import read_tag
from winml.modelkit.tags.torch_modules import record_calls
from winml.modelkit.tags.tree import ModuleTree, build_tree

ROOT = ("",)
BLOCK = ("", "block")
LINEAR = ("", "block", "block.inner.linear")


class Block(nn.Module):
    """A block with a layer inside an uncalled container."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"linear": nn.Linear(2, 2)})

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Apply the layer."""
        return self.inner["linear"](values)


class Model(nn.Module):
    """A model of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.other = Block()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Call both blocks."""
        return self.other(self.block(values))


@pytest.fixture
def tree() -> ModuleTree:
    """The tree of the model."""
    with record_calls(model := Model()) as trace:
        model(torch.ones(1, 2))
    return build_tree(trace)


def chain(length: int) -> list[ir.Node]:
    """Build nodes in a chain: ``x → n0 → n1 → …``."""
    value = ir.Value(name="x")
    nodes = []
    for number in range(length):
        node = ir.node("Relu", [value], name=f"n{number}")
        nodes.append(node)
        value = node.outputs[0]
    return nodes


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        (BLOCK, ("/Model/Block.block", "block", "direct")),
        (LINEAR, ("/Model/Block.block", "block", "parent")),
        (ROOT, ("/Model", "", "root")),
        ((), ("/Model", "", "root")),
        (("", "gone"), ("/Model", "", "parent")),
        (("", "other", "block", "block.inner.linear"), ("/Model/Block.block", "block", "parent")),
    ],
    ids=["direct", "parent", "ran in the root", "unknown", "only the root is known", "innermost wins"],
)
def test_tag_for_scope_is_the_tag_of_the_innermost_hierarchy_module(
    tree: ModuleTree, scope: tuple[str, ...], expected: tuple[str, str, str]
) -> None:
    """A hierarchy module tags its own nodes and those of plain layers; other nodes get the root's tag."""
    tag = NodeTagger(tree).tag_for(scope)
    assert expected == (tag.tag, tag.module, tag.source)


def test_tag_nodes_writes_tag_and_namespace(tree: ModuleTree) -> None:
    """The namespace is the whole scope in torch's notation, plain layers included."""
    first, second, third = chain(3)
    NodeTagger(tree).tag_nodes({first: LINEAR, second: BLOCK, third: ROOT})
    assert ["parent", "direct", "root"] == [tag.source for node in (first, second, third) if (tag := read_tag(node))]
    assert "Model/block: Block/block.inner.linear: Linear" == first.metadata_props[NAMESPACE_KEY]
    assert "Model/block: Block" == second.metadata_props[NAMESPACE_KEY]
    assert "Model" == third.metadata_props[NAMESPACE_KEY]


def test_tag_nodes_without_fallback_gives_unknown_scopes_to_the_root(tree: ModuleTree) -> None:
    """No scope is guessed unless requested."""
    first, unscoped, last = chain(3)
    NodeTagger(tree).tag_nodes({first: LINEAR, unscoped: (), last: BLOCK})
    assert "root" == read_tag(unscoped).source  # type: ignore[union-attr]


def test_tag_nodes_with_fallback_takes_the_scope_neighbours_share(tree: ModuleTree) -> None:
    """A node without scope gets the longest common scope of its neighbours on request, as its source says."""
    first, unscoped, last = chain(3)
    NodeTagger(tree, operation_fallback=True).tag_nodes({first: LINEAR, unscoped: (), last: BLOCK})
    tag = read_tag(unscoped)
    assert tag is not None
    assert ("/Model/Block.block", "block", "operation") == (tag.tag, tag.module, tag.source)
    assert "Model/block: Block" == unscoped.metadata_props[NAMESPACE_KEY]


def test_tag_nodes_with_fallback_hands_scopes_on(tree: ModuleTree) -> None:
    """A node with a derived scope is a neighbour of the next one."""
    first, unscoped, also_lost = chain(3)
    NodeTagger(tree, operation_fallback=True).tag_nodes({first: LINEAR, unscoped: (), also_lost: ()})
    assert ["operation", "operation"] == [tag.source for node in (unscoped, also_lost) if (tag := read_tag(node))]


def test_tag_nodes_with_fallback_and_no_neighbour_uses_the_root(tree: ModuleTree) -> None:
    """Without neighbours there is no scope to derive."""
    (alone,) = chain(1)
    NodeTagger(tree, operation_fallback=True).tag_nodes({alone: ()})
    assert "root" == read_tag(alone).source  # type: ignore[union-attr]


def test_tag_nodes_with_fallback_leaves_known_scopes(tree: ModuleTree) -> None:
    """Neighbours never overrule a traced scope."""
    first, second, third = chain(3)
    NodeTagger(tree, operation_fallback=True).tag_nodes({first: BLOCK, second: ("", "other"), third: BLOCK})
    tag = read_tag(second)
    assert tag is not None
    assert ("other", "direct") == (tag.module, tag.source)


def test_neighbours_are_producers_and_readers() -> None:
    """Neighbours are the producers of a node's inputs and the readers of its outputs.

    Graph inputs and omitted inputs have no producer.
    """
    first, second, third = chain(3)
    assert [second] == neighbours(first)
    assert [first, third] == neighbours(second)
    gapped = ir.node("Clip", [third.outputs[0], None])
    assert [third] == neighbours(gapped)


def test_shared_scope_is_the_longest_common_scope() -> None:
    """Only known scopes count; without any the result is empty."""
    first, second, third, unknown = chain(4)
    scopes = {first: LINEAR, second: BLOCK, third: ("", "other"), unknown: ()}
    assert BLOCK == shared_scope(scopes, [first, second, unknown])
    assert ROOT == shared_scope(scopes, [first, third])
    assert LINEAR == shared_scope(scopes, [first])
    assert () == shared_scope(scopes, [unknown])
    assert () == shared_scope(scopes, [])
