"""Invariants of node tags and of the module hierarchy, for random modules."""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnx_ir as ir
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from checkpoints import make_distinct
from oracle import observe
from tag_checks import check_order
from winml.modelkit import WinMLExportConfig, export_pytorch
from winml.modelkit.tags import address
from winml.modelkit.tags.tagging import SOURCES, NodeTag, clear_tag, read_tag, write_tag

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
segments = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/"), min_size=1, max_size=8)
node_tags = st.builds(
    NodeTag, st.lists(segments, min_size=1, max_size=6).map(address.format_tag), texts, st.sampled_from(SOURCES)
)
foreign_keys = texts.filter(lambda key: key != "namespace" and not key.startswith(("winml.", "pkg.torch.")))
foreign_metadata = st.dictionaries(foreign_keys, texts, max_size=4)


def node(metadata: dict[str, str]) -> ir.Node:
    """Build a node with metadata."""
    made = ir.node("Relu", [ir.Value(name="x")])
    made.metadata_props.update(metadata)
    return made


@given(st.lists(node_tags, min_size=1, max_size=3), foreign_metadata)
def test_written_tag_is_read(tags: list[NodeTag], others: dict[str, str]) -> None:
    """The last written tag is read, its depth is the number of slashes, and other keys stay."""
    tagged = node(others)
    for tag in tags:
        write_tag(tagged, tag)
    assert tags[-1] == read_tag(tagged)
    assert str(tags[-1].tag.count("/")) == tagged.metadata_props["winml.hierarchy.depth"]
    assert others.items() <= tagged.metadata_props.items()


@given(node_tags, foreign_metadata, st.dictionaries(texts.map("pkg.torch.{}".format), texts, max_size=2))
def test_clear_leaves_foreign_keys_only(tag: NodeTag, others: dict[str, str], torchs: dict[str, str]) -> None:
    """Keys of winml and torch are removed, other keys stay; a second call changes nothing."""
    tagged = node({**others, **torchs, "namespace": "M"})
    write_tag(tagged, tag)
    for _ in range(2):
        clear_tag(tagged)
        assert others == dict(tagged.metadata_props)
    assert read_tag(tagged) is None


class Leaf(nn.Module):
    """A linear layer and an activation with a residual, so that the signal never fades."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Apply the layer."""
        return values + torch.tanh(self.linear(values))


class Branch(nn.Module):
    """Calls its children in order; the first child is an attribute, the others are in containers."""

    def __init__(self, children: list[nn.Module]) -> None:
        super().__init__()
        self.first = children[0]
        self.listed = nn.ModuleList(children[1:2])
        self.keyed = nn.ModuleDict({f"a/{number}": child for number, child in enumerate(children[2:])})

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Call all children."""
        for child in (self.first, *self.listed, *self.keyed.values()):
            values = torch.sigmoid(child(values)) + values
        return values


class Twig(Branch):
    """Another class with the same body."""


@st.composite
def module_trees(draw: st.DrawFn) -> nn.Module:
    """Draw nested modules; a module may be a child of several modules, or several times of one."""
    pool: list[nn.Module] = [Leaf(), nn.Linear(3, 3)]
    for _ in range(draw(st.integers(1, 4))):
        children = draw(st.lists(st.integers(0, len(pool) - 1), min_size=1, max_size=3))
        kind = draw(st.sampled_from(["branch", "twig", "sequential", "leaf"]))
        chosen = [pool[number] for number in children]
        if kind == "leaf":
            pool.append(Leaf())
        elif kind == "sequential":
            pool.append(nn.Sequential(*chosen))
        else:
            pool.append((Branch if kind == "branch" else Twig)(chosen))
    return Branch([pool[-1], pool[draw(st.integers(0, len(pool) - 1))]])


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(module_trees())
def test_every_executed_module_has_one_tag_and_every_node_its_module(model: nn.Module) -> None:
    """Tags of nested and shared modules are unique, complete and in the order of the forward pass."""
    torch.manual_seed(0)
    make_distinct(model.eval())
    values = torch.randn(2, 3)
    with tempfile.TemporaryDirectory() as folder:
        result = export_pytorch(model, Path(folder) / "model.onnx", values, config=WinMLExportConfig())
        check_order(result, model, observe(model, values), {"MatMul", "Tanh", "Sigmoid"})
    tags = [module.tag for module in result.only_part.tree]
    assert len(set(tags)) == len(tags)
    assert 100.0 == result.only_part.coverage.percent
    for module in result.only_part.tree:
        assert module.tag.count("/") == module.depth
        parent = result.only_part.tree.get(module.parent) if module.parent is not None else None
        assert (parent.tag if parent else "") == module.tag.rpartition("/")[0]
