"""Files of other tools, made by the tools themselves: modules of every node, and the verbs that select modules.

``tests/data/dialects/make.py`` makes the files and states the versions of the tools.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from installed_versions import OPSET_24
from winml.modelkit import extract_modules, inspect_model, optimize_onnx, profile_model
from winml.modelkit.errors import UsageError
from winml.modelkit.metadata_keys import MODULE_KEY, TAG_KEY
from winml.modelkit.onnx.module_tree import OnnxTree, read_tree
from winml.modelkit.quantize.verb import quantize_onnx
from winml.modelkit.tags.address import is_within
from winml.modelkit.tags.dialects import DIALECTS
from winml.modelkit.transform.module_functions import graph_modules

FOLDER = Path(__file__).parents[1] / "data" / "dialects"
PLAIN = "skl2onnx"
"""File without modules."""
MOST_BYTES = 50_000
"""Chosen: largest file, so that the folder stays small."""


@dataclass(frozen=True)
class Conformance:
    """Modules of a file."""

    source: str
    classes: dict[str, str]
    """Module path → class, of some modules."""
    nodes: dict[str, int]
    """Module path → nodes of the module and its submodules, of some modules."""
    of_nodes: dict[str, str]
    """Name of a node → path of its module, of some nodes; read by hand."""
    without: dict[str, int]
    """Operator → number of nodes without module."""
    selector: str
    """A module with products and submodules, for the verbs."""
    sizes: dict[str, int]


BERT_NAMES = {
    "/embeddings/word_embeddings/Gather": "embeddings.word_embeddings",
    "/embeddings/LayerNorm/LayerNormalization": "embeddings.LayerNorm",
    "/encoder/layer.0/attention/self/query/MatMul": "encoder.layer.0.attention.self.query",
    "/encoder/layer.0/attention/self/Softmax": "encoder.layer.0.attention.self",
    "/encoder/layer.0/intermediate/intermediate_act_fn/Erf": "encoder.layer.0.intermediate.intermediate_act_fn",
}
LLAMA_SIZES = {"kv_cache_dim": 16, "past_sequence_length": 2, "sequence_length": 3, "total_sequence_length": 5}
FILES = {
    "torch_dynamo": Conformance(
        source="pkg.torch.onnx metadata",
        classes={
            "": "BertModel",
            "encoder.layer.0": "BertLayer",
            "encoder.layer.0.attention.self": "BertSelfAttention",
        },
        nodes={"": 34, "embeddings": 4, "encoder.layer.0": 30, "encoder.layer.0.attention": 23},
        of_nodes={
            "node_embedding": "embeddings",
            "node_linear": "encoder.layer.0.attention.self",
            "node_gelu": "encoder.layer.0.intermediate.intermediate_act_fn",
            "node_layer_norm_2": "encoder.layer.0.output",
        },
        without={},
        selector="encoder.layer.0.attention",
        sizes={},
    ),
    "torchscript": Conformance(
        source="node names",
        classes={"": "", "encoder.layer.0": ""},
        nodes={"": 59, "embeddings": 25, "encoder.layer.0": 34, "encoder.layer.0.attention": 27},
        of_nodes={name: path for name, path in BERT_NAMES.items() if "Erf" not in name},
        without={"Identity": 10},
        selector="encoder.layer.0.attention",
        sizes={},
    ),
    "transformers": Conformance(
        source="pkg.torch.onnx metadata",
        classes={"": "ViTModel", "layers.0.attention": "ViTAttention"},
        nodes={"": 61, "embeddings": 7, "layers.0": 48, "pooler": 3},
        # The exporter names torch's placeholder as the module of this node.
        of_nodes={"node_Shape_0": "", "node_Conv_113": "embeddings.patch_embeddings"},
        without={"Shape": 1},
        selector="layers.0.attention",
        sizes={"s99": 2},
    ),
    "optimum": Conformance(
        source="node names",
        classes={"": "", "encoder.layer.0": ""},
        nodes={"": 123, "embeddings": 12, "encoder.layer.0": 74},
        of_nodes=BERT_NAMES,
        without={"Identity": 10, "Constant": 6},
        selector="encoder.layer.0.attention",
        sizes={"sequence_length": 4},
    ),
    "genai": Conformance(
        source="onnxruntime-genai names",
        classes={"": "", "model.layers.0": ""},
        nodes={"": 33, "model": 32, "model.layers.1": 11, "model.layers.1.attn": 3},
        of_nodes={
            "/model/constant_nodes/INT64/1": "model",
            "/model/attn_mask_reformat/attn_mask_subgraph/Sub/Cast": "model",
            "/model/layers.0/attn/GroupQueryAttention": "model.layers.0.attn",
            "/model/layers.1/input_layernorm/SkipLayerNorm": "model.layers.1.input_layernorm",
            "/lm_head/MatMul": "lm_head",
        },
        without={},
        selector="model.layers.1.attn",
        sizes=LLAMA_SIZES,
    ),
    "mobius": Conformance(
        source="pkg.onnxscript metadata",
        classes={"": "CausalLMModel", "model.layers.1.self_attn.q_proj": "Linear"},
        nodes={"": 43, "model": 42, "model.layers.1": 15, "model.layers.1.self_attn": 7},
        of_nodes={
            "model/layers.0/self_attn/RotaryEmbedding_node_18": "model.layers.0.self_attn",
            "node_SkipSimplifiedLayerNormalization_3": "model.norm",
            "lm_head/MatMul_node_61": "lm_head",
        },
        without={},
        selector="model.layers.1.self_attn",
        sizes={"past_sequence_len": 2, "sequence_len": 3, "past_seq_len + seq_len": 5},
    ),
    "winml": Conformance(
        source="winml tags",
        classes={"": "BertModel", "encoder.layer.0.attention.self": "BertSelfAttention"},
        nodes={"": 52, "embeddings": 5, "encoder.layer.0": 38, "pooler": 3},
        of_nodes={
            "/encoder/layer.0/attention/self/query/MatMul": "encoder.layer.0.attention.self",
            "/encoder/layer.0/intermediate/intermediate_act_fn/Erf": "encoder.layer.0.intermediate.intermediate_act_fn",
        },
        without={},
        selector="encoder.layer.0.attention",
        sizes={},
    ),
}


def read_file(name: str) -> tuple[list[onnx.NodeProto], OnnxTree]:
    """Return the nodes of the main graph of a file, and their tree."""
    model = onnx.load(FOLDER / f"{name}.onnx")
    nodes = list(model.graph.node)
    return nodes, read_tree(nodes, {entry.key: entry.value for entry in model.metadata_props}, "graph")


def test_every_file_of_the_folder_is_checked() -> None:
    """The table has each file, every dialect has a file, and the files are small."""
    files = sorted(FOLDER.glob("*.onnx"))
    assert sorted([*FILES, PLAIN]) == [path.stem for path in files]
    assert {case.source for case in FILES.values()} >= {dialect.name for dialect in DIALECTS} - {"namespace"}
    assert MOST_BYTES > max(path.stat().st_size for path in files)


@pytest.mark.parametrize("name", FILES)
def test_modules_of_every_node_are_those_of_the_tool(name: str) -> None:
    """Paths and classes of modules are read as the tool wrote them."""
    case = FILES[name]
    nodes, tree = read_file(name)
    modules = {module.path: module for module in tree.modules}
    path_of_tag = {module.tag: module.path for module in tree.modules}
    assert case.source == tree.source
    assert case.classes == {path: modules[path].class_name for path in case.classes}
    tags = {path: modules[path].tag for path in case.nodes}
    assert case.nodes == {path: sum(is_within(node_tag, tag) for node_tag in tree.tags) for path, tag in tags.items()}
    module_of = {node.name: path_of_tag.get(tag, "") for node, tag in zip(nodes, tree.tags, strict=True)}
    assert case.of_nodes == {node: module_of[node] for node in case.of_nodes}
    assert case.without == Counter(node.op_type for node, tag in zip(nodes, tree.tags, strict=True) if not tag)


@pytest.mark.parametrize("name", [name for name, case in FILES.items() if case.source.startswith("pkg.")])
def test_namespace_alone_gives_the_same_modules(name: str) -> None:
    """Model Explorer's key, which both tools write as well, is enough."""
    nodes, tree = read_file(name)
    for node in nodes:
        kept = [entry for entry in node.metadata_props if entry.key == "namespace"]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
    by_namespace = read_tree(nodes, {}, "graph")
    assert "namespace" == by_namespace.source
    assert tree.tags == by_namespace.tags


def test_tag_and_module_alone_are_tags_of_winml(tmp_path: Path) -> None:
    """The two keys that a tool has to write give the same modules, and an extracted module."""
    model = onnx.load(FOLDER / "winml.onnx")
    for node in model.graph.node:
        kept = [entry for entry in node.metadata_props if entry.key in (TAG_KEY, MODULE_KEY)]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "model.onnx")
    _, tree = read_file("winml")
    alone = read_tree(list(model.graph.node), {}, "graph")
    assert ("winml tags", tree.tags) == (alone.source, alone.tags)
    assert {module.path for module in alone.modules} <= {module.path for module in tree.modules}
    cut = extract_modules(tmp_path / "model.onnx", "BertSelfAttention", tmp_path / "cut")
    assert ["encoder.layer.0.attention.self"] == [module.identity.module for module in cut.modules]


def test_names_that_are_no_paths_give_no_modules() -> None:
    """No module is guessed, and a selector is refused."""
    nodes, tree = read_file(PLAIN)
    assert ("none", (), len(nodes)) == (tree.source, tree.modules, len(tree.tags))
    with pytest.raises(UsageError):
        quantize_onnx(FOLDER / f"{PLAIN}.onnx", "unused.onnx", precision="int8", exclude=("MatMul",))


def _valid_inputs(path: Path, case: Conformance, folder: Path) -> Path:
    """Write a mask without padding and valid tokens: this graph does not run with random masks."""
    inputs = {value.name: value.type.tensor_type for value in onnx.load(path).graph.input}
    arrays = {
        name: np.ones(
            [case.sizes.get(size.dim_param, size.dim_value or 1) for size in tensor.shape.dim],
            helper.tensor_dtype_to_np_dtype(tensor.elem_type),
        )
        for name, tensor in inputs.items()
    }
    np.savez(folder / "inputs.npz", **arrays)
    return folder / "inputs.npz"


@pytest.mark.parametrize("name", [pytest.param(name, marks=OPSET_24) if name == "mobius" else name for name in FILES])
def test_verbs_act_on_the_modules_of_the_tool(name: str, tmp_path: Path) -> None:
    """A module is shown, extracted, measured and left out of a quantization."""
    case, path = FILES[name], FOLDER / f"{name}.onnx"
    nodes = case.nodes.get(case.selector)
    shown = inspect_model(path, module=case.selector)
    assert shown.module_nodes
    assert nodes in (None, len(shown.module_nodes))
    options = {"input_data": _valid_inputs(path, case, tmp_path)} if name == "genai" else {"sizes": case.sizes}
    cut = extract_modules(path, case.selector, tmp_path, **options)
    assert [case.selector] == [module.identity.module for module in cut.modules]
    assert "winml tags" == graph_modules(ir.load(tmp_path / cut.modules[0].file), "cut").source
    profile = profile_model(path, by_module=True, iterations=1, **options)
    assert case.selector in {row.path for root in profile.profile.roots for row in root.walk()}

    after = tmp_path / "quantized.onnx"
    quantize_onnx(path, after, mode="dynamic", exclude=(case.selector,), verify=False)
    modules = graph_modules(ir.load(after), "graph")
    assert case.source == modules.source
    (selected,) = modules.selected_tags(case.selector)
    integer = {node.name for node in ir.load(after).graph if node.op_type in ("MatMulInteger", "DynamicQuantizeMatMul")}
    assert integer
    assert not [node for node in integer if is_within(modules.tag_of[node], selected)]


@pytest.mark.parametrize("name", ["torch_dynamo", "torchscript"])
def test_optimized_file_keeps_the_modules(name: str, tmp_path: Path) -> None:
    """A file without tags keeps the modules of its nodes: keys are transferred, names stay paths."""
    optimize_onnx(FOLDER / f"{name}.onnx", tmp_path / "after.onnx", level="full")
    modules = graph_modules(ir.load(tmp_path / "after.onnx"), "graph")
    _, tree = read_file(name)
    assert tree.source == modules.source
    assert not {module.path for module in modules.modules} - {module.path for module in tree.modules}
    assert all(modules.tag_of.values())
