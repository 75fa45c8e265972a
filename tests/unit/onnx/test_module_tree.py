"""Module tree of an ONNX file from tags, torch's metadata, namespaces or node names."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxscript
import pytest
from onnx import helper

from winml.modelkit.onnx.module_tree import OnnxTree, read_tree
from winml.modelkit.tags.address import is_within
from winml.modelkit.tags.selector import select


def _make_node(name: str, **metadata: str) -> onnx.NodeProto:
    node = helper.make_node("Relu", ["x"], ["y"], name=name)
    for key, value in metadata.items():
        entry = node.metadata_props.add()
        entry.key, entry.value = key.replace("__", "."), value
    return node


def _winml_node(tag: str, module: str = "", source: str = "direct") -> onnx.NodeProto:
    return _make_node("n", winml__hierarchy__tag=tag, winml__hierarchy__module=module, winml__hierarchy__source=source)


def _torch_node(paths: list[str], classes: list[str]) -> onnx.NodeProto:
    return _make_node("n", pkg__torch__onnx__name_scopes=repr(paths), pkg__torch__onnx__class_hierarchy=repr(classes))


def _module_triples(tree: OnnxTree) -> list[tuple[str, str, str]]:
    return [(module.path, module.tag, module.class_name) for module in tree.modules]


def test_read_tree_own_tags_stay_unchanged() -> None:
    """Nodes keep their tags, sources are counted, and a module between two tags is there as well."""
    nodes = [_winml_node("/M", source="root"), _winml_node("/M/Block.0/Gelu", "block.0.act"), _make_node("plain")]
    tree = read_tree(nodes, {}, "main")
    assert "winml tags" == tree.source
    assert [
        ("", "/M", "M"),
        ("", "/M/Block.0", "Block"),
        ("block.0.act", "/M/Block.0/Gelu", "Gelu"),
    ] == _module_triples(tree)
    assert ("/M", "/M/Block.0/Gelu", "") == tree.tags
    assert (3, 2, {"root": 1, "direct": 1}) == (tree.coverage.nodes, tree.coverage.tagged, tree.coverage.sources)


def test_read_tree_recorded_modules_give_order_and_paths() -> None:
    """The model's own list of modules comes first, those without nodes included."""
    record = [
        {"path": "", "tag": "/M", "class": "M"},
        {"path": "b", "tag": "/M/B", "class": "B"},
        {"path": "a", "tag": "/M/A", "class": "A"},
    ]
    tree = read_tree([_winml_node("/M/A", "a")], {"winml.hierarchy.tree": json.dumps(record)}, "main")
    assert [("", "/M", "M"), ("b", "/M/B", "B"), ("a", "/M/A", "A")] == _module_triples(tree)
    assert () == tree.notes


def test_read_tree_damaged_record_is_noted_and_nodes_are_read() -> None:
    """A list that is no list of modules does not hide the tags of the nodes."""
    for damaged in ("{", "[1]", '[{"path": "", "tag": "M", "class": "M"}]', "null"):
        tree = read_tree([_winml_node("/M")], {"winml.hierarchy.tree": damaged}, "main")
        assert [("", "/M", "M")] == _module_triples(tree)
        assert ["winml.hierarchy.tree of the model is damaged; the tree was built from the node tags"] == [*tree.notes]


def test_read_tree_malformed_tag_counts_as_untagged() -> None:
    """A malformed tag belongs to no module, and a note reports the tag."""
    tree = read_tree([_winml_node("/M"), _winml_node("M//x")], {}, "main")
    assert ("/M", "") == tree.tags
    assert 1 == tree.coverage.tagged
    assert ["1 node(s) have an invalid tag and count as untagged"] == [*tree.notes]


def test_read_tree_torch_metadata_gives_the_tags_an_export_would() -> None:
    """Classes of torch.nn are left out, siblings have different tags, and the last entry is the node."""
    block, linear = "models.Block", "torch.nn.modules.linear.Linear"
    nodes = [
        _torch_node(
            ["", "down", "down.0", "down.0.fc", "linear"], ["models.Net", "models.Stack", block, linear, "aten.linear"]
        ),
        _torch_node(["", "up", "up.0", "add"], ["models.Net", "models.Stack", block, "aten.add.Tensor"]),
        _torch_node(["", "mul"], ["models.Net", "aten.mul.Tensor"]),
    ]
    tree = read_tree(nodes, {}, "main")
    assert "pkg.torch.onnx metadata" == tree.source
    assert ("/Net/Stack.down/Block.0", "/Net/Stack.up/Block.0", "/Net") == tree.tags
    assert [("", "/Net", "Net"), ("down", "/Net/Stack.down", "Stack")] == _module_triples(tree)[:2]
    assert {"pkg.torch.onnx metadata": 3} == tree.coverage.sources


def test_read_tree_of_plain_torch_network_has_its_modules() -> None:
    """Modules of torch.nn are in the tree if only the root has another class, as in an export."""
    convolution, group = "torch.nn.modules.conv.Conv2d", "torch.nn.modules.container.Sequential"
    nodes = [
        _torch_node(["", "stem", "stem.0", "conv2d"], ["models.Net", group, convolution, "aten.conv2d"]),
        _torch_node(["", "head", "linear"], ["models.Net", "torch.nn.modules.linear.Linear", "aten.linear"]),
        _torch_node(["", "relu"], ["models.Net", "aten.relu"]),
    ]
    tree = read_tree(nodes, {}, "main")
    assert ("/Net/Sequential/Conv2d.0", "/Net/Linear", "/Net") == tree.tags
    assert 1 == tree.coverage.at_root


def test_read_tree_of_transformers_model_keeps_torch_modules_out() -> None:
    """Modules of torch.nn are left out, even directly below the root."""
    root, linear = "transformers.models.bert.modeling_bert.BertForMaskedLM", "torch.nn.modules.linear.Linear"
    nodes = [
        _torch_node(["", "head", "linear"], [root, linear, "aten.linear"]),
        _torch_node(["", "tail", "linear"], [root, linear, "aten.linear"]),
    ]
    assert ("/BertForMaskedLM", "/BertForMaskedLM") == read_tree(nodes, {}, "main").tags


def test_read_tree_malformed_torch_metadata_leaves_the_node_without_module() -> None:
    """Text that is no list, and lists that do not match, are not guessed at."""
    good = _torch_node(["", "a", "relu"], ["M", "A", "aten.relu.default"])
    bad = [_torch_node(["", "a"], ["M"]), _make_node("n", pkg__torch__onnx__name_scopes="__import__('os')")]
    assert ("/M/A", "", "") == read_tree([good, *bad], {}, "main").tags


class _Product(onnxscript.nn.Module):
    """A matrix product with a weight."""

    def __init__(self) -> None:
        super().__init__()
        weight = ir.tensor(np.zeros((4, 4), np.float32))
        self.weight = onnxscript.nn.Parameter([4, 4], name="weight", data=weight)

    def forward(self, op: Any, x: Any) -> Any:
        return op.MatMul(x, self.weight)


class _Layer(onnxscript.nn.Module):
    """Two products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = _Product(), _Product()

    def forward(self, op: Any, x: Any) -> Any:
        return op.Add(x, self.down(op, self.up(op, x)))


class _Layers(onnxscript.nn.Module):
    """Two layers and a head, as Olive and onnxruntime/mobius build decoders."""

    def __init__(self, name: str | None) -> None:
        super().__init__(name)
        self.layers, self.head = onnxscript.nn.ModuleList([_Layer(), _Layer()]), _Product()

    def forward(self, op: Any, x: Any) -> Any:
        for layer in self.layers:
            x = layer(op, x)
        return self.head(op, x)


def _built_nodes(name: str | None, *without: str) -> list[onnx.NodeProto]:
    """Return the nodes that onnxscript's builder makes of the layers."""
    graph = ir.Graph([], [], nodes=[], name="g", opset_imports={"": 21})
    builder = onnxscript.GraphBuilder(graph)
    builder.add_output(_Layers(name)(builder.op, builder.input("x", ir.DataType.FLOAT, [2, 4])), "y")
    for node in graph:
        for key in [key for key in node.metadata_props if key.startswith(without or ("none",))]:
            del node.metadata_props[key]
    return [ir.serde.serialize_node(node) for node in graph]


@pytest.mark.parametrize("name", [None, "model"])
@pytest.mark.parametrize(("without", "source"), [((), "pkg.onnxscript metadata"), (("pkg.",), "namespace")])
def test_read_tree_of_onnxscript_builder_joins_names_to_paths(
    name: str | None, without: tuple[str, ...], source: str
) -> None:
    """Its scopes hold the name of each module inside the one before; the outermost is the root."""
    nodes = _built_nodes(name, *without)
    tree = read_tree(nodes, {}, "main")
    assert source == tree.source
    assert ["", "layers.0", "layers.0.up", "layers.0.down", "layers.1", "layers.1.up", "layers.1.down", "head"] == [
        module.path for module in tree.modules
    ]
    assert "/_Layers/_Layer.1/_Product.down" == tree.tags[4]
    assert tree.coverage.is_complete


def test_selector_of_onnxscript_layer_excludes_the_whole_layer() -> None:
    """The selector includes the modules inside the layer."""
    tree = read_tree(_built_nodes("model"), {}, "main")
    (layer,) = select(tree.modules, "layers.1")
    assert 3 == sum(is_within(tag, layer.tag) for tag in tree.tags)


def test_read_tree_of_several_outermost_modules_has_the_graph_as_root() -> None:
    """Modules called one after another are siblings."""
    nodes = [_make_node("n", **_builder_keys(["a", "x"], ["A", "X"])), _make_node("m", **_builder_keys(["b"], ["B"]))]
    assert ["", "a", "a.x", "b"] == [module.path for module in read_tree(nodes, {}, "main").modules]


def _builder_keys(names: list[str], classes: list[str]) -> dict[str, str]:
    return {"pkg__onnxscript__name_scopes": repr(names), "pkg__onnxscript__class_hierarchy": repr(classes)}


def test_read_tree_ignores_the_placeholder_of_torch_passes() -> None:
    """A node with a module unknown to torch belongs to none."""
    placeholder = "_empty_nn_module_stack_from_metadata_hook"
    nodes = [
        _torch_node(["", "a", "relu"], ["models.M", "models.A", "aten.relu"]),
        _torch_node([placeholder, "add"], [placeholder, "aten.add.Tensor"]),
    ]
    tree = read_tree(nodes, {}, "main")
    assert ("/M/A", "") == tree.tags
    assert ["", "a"] == [module.path for module in tree.modules]


def test_read_tree_namespace_alone_is_read_in_both_spellings() -> None:
    """Torch's namespace ends in the node itself, the project's in the module."""
    torch = _make_node(
        "n", namespace=": models.Net/act: models.Act/fc: torch.nn.modules.linear.Linear/relu: aten.relu.default"
    )
    ours = _make_node("n", namespace="Net/act: Act")
    for node in (torch, ours):
        tree = read_tree([node, _make_node("m")], {}, "main")
        assert "namespace" == tree.source
        assert [("", "/Net", "Net"), ("act", "/Net/Act", "Act")] == _module_triples(tree)
        assert ("/Net/Act", "") == tree.tags


def test_read_tree_node_names_give_scopes_under_the_graph() -> None:
    """Node names give paths but no classes if there are no metadata."""
    tree = read_tree([_make_node("/encoder/layer.0/Relu"), _make_node("/Add"), _make_node("Cast_3")], {}, "main")
    assert "node names" == tree.source
    assert [
        ("", "/main", ""),
        ("encoder", "/main/encoder", ""),
        ("encoder.layer.0", "/main/encoder/layer.0", ""),
    ] == _module_triples(tree)
    assert ("/main/encoder/layer.0", "/main", "") == tree.tags


def test_read_tree_without_any_hint_is_empty() -> None:
    """Names without a scope and empty graphs contain no modules."""
    for nodes in ([_make_node("Relu_0"), _make_node("")], [_make_node("/Relu")], []):
        tree = read_tree(nodes, {}, "main")
        assert ("none", (), ("",) * len(nodes), 0) == (tree.source, tree.modules, tree.tags, tree.coverage.tagged)
