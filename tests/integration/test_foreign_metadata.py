"""Transfer of foreign node metadata through every command that changes a graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

from winml.modelkit import HTPExporter, WinMLExportConfig, compile_onnx, extract_modules, optimize_onnx
from winml.modelkit.quantize.verb import quantize_onnx
from winml.modelkit.tags.tagging import clear_tag
from winml.modelkit.transform.module_functions import graph_modules

KEY = "layer_ann"
"""Key that ONNX Runtime reads to place nodes on devices."""


class Net(nn.Module):
    """A convolution with a batch norm and an activation, and two products."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.act = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()
        self.up, self.head = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.up(self.act(self.norm(self.conv(x))).mean((2, 3)))))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The network with its operators as annotations, with tags and without."""
    folder = tmp_path_factory.mktemp("sources")
    tagged, plain = folder / "tagged.onnx", folder / "plain.onnx"
    config = WinMLExportConfig(exporter="torchscript", verify=False)
    HTPExporter(config).export(Net().eval(), tagged, {"x": torch.randn(1, 3, 8, 8)})
    model = ir.load(tagged)
    for node in model.graph:
        node.metadata_props[KEY] = f"{node.op_type.lower()} of {node.metadata_props['winml.hierarchy.module'] or 'net'}"
    ir.save(model, tagged)
    for node in model.graph:
        clear_tag(node)
        node.name = node.name.replace("/", "_")
    model.metadata_props.clear()
    ir.save(model, plain)
    return {"tagged": tagged, "plain": plain}


WORKS: dict[str, Callable[[Path, Path], object]] = {
    "opset": lambda source, target: optimize_onnx(source, target, opset=21),
    **{
        level: lambda source, target, level=level: optimize_onnx(source, target, level=level)
        for level in ("basic", "extended", "full")
    },
    **{
        name: lambda source, target, options=options: quantize_onnx(source, target, verify=False, **options)
        for name, options in {
            "dynamic": {"mode": "dynamic"},
            "qdq": {"mode": "qdq"},
            "weight-only": {"precision": "int4", "block_size": 16},
            "fp16": {"precision": "fp16"},
        }.items()
    },
}


def annotations(path: Path) -> dict[str, str]:
    """Return output name → annotation of its node."""
    return {
        value.name or "": node.metadata_props.get(KEY, "") for node in ir.load(path).graph for value in node.outputs
    }


@pytest.mark.parametrize("kind", ["tagged", "plain"])
@pytest.mark.parametrize("work", WORKS)
def test_annotation_stays_on_nodes_and_is_joined_on_fused_nodes(
    sources: dict[str, Path], tmp_path: Path, kind: str, work: str
) -> None:
    """The node of a value of the source keeps the annotation; a fused node has the annotations of all its nodes."""
    WORKS[work](sources[kind], tmp_path / "after.onnx")
    onnx.checker.check_model(tmp_path / "after.onnx")
    before, after = annotations(sources[kind]), annotations(tmp_path / "after.onnx")
    shared = before.keys() & after.keys()
    assert len(shared) >= 5
    assert {name: before[name] for name in shared} == {
        name: before[name] for name in shared if before[name] in after[name].split(";")
    }
    fused = next((text for text in after.values() if "batchnorm" in text and "conv of" in text), "")
    assert bool(fused) == (work in ("basic", "extended", "full", "qdq"))


@pytest.mark.parametrize("kind", ["tagged", "plain"])
def test_annotation_of_a_folded_convolution_has_both(sources: dict[str, Path], tmp_path: Path, kind: str) -> None:
    """Annotations are joined in graph order, each once."""
    optimize_onnx(sources[kind], tmp_path / "after.onnx", level="basic")
    (node,) = [node for node in ir.load(tmp_path / "after.onnx").graph if node.op_type == "Conv"]
    assert "conv of conv;batchnormalization of norm" == node.metadata_props[KEY]


def test_nodes_that_replace_a_product_have_its_annotation(sources: dict[str, Path], tmp_path: Path) -> None:
    """Dynamic quantization replaces a product by several nodes."""
    quantize_onnx(sources["tagged"], tmp_path / "after.onnx", mode="dynamic", verify=False)
    made = [node for node in ir.load(tmp_path / "after.onnx").graph if node.op_type == "MatMulInteger"]
    assert ["gemm of up", "gemm of head"] == [node.metadata_props.get(KEY) for node in made]


DIALECTS = Path(__file__).parents[1] / "data" / "dialects"
EVERY_NODE: dict[str, Callable[[Path, Path], object]] = {
    **WORKS,
    "without a module": lambda source, target: optimize_onnx(source, target, level="full", exclude=("**.output",)),
    "compile": lambda source, target: compile_onnx(source, target, ep="cpu", verify=False),
}


def _values_by_node(model: ir.Model) -> dict[tuple[str, str, tuple[str | None, ...]], list[str]]:
    """Return name, operator and outputs of a node → values of its key."""
    return {
        (node.name or "", node.op_type, tuple(value.name for value in node.outputs)): (
            node.metadata_props[KEY].split(";")
        )
        for node in model.graph
    }


@pytest.mark.parametrize("name", ["winml", "torchscript"])
@pytest.mark.parametrize("work", EVERY_NODE)
def test_key_of_every_node_is_kept_merged_or_noted(name: str, work: str, tmp_path: Path) -> None:
    """Untouched nodes keep their value, merged nodes have those of all their sources, and lost values are noted."""
    model = ir.load(DIALECTS / f"{name}.onnx")
    for number, node in enumerate(model.graph):
        node.metadata_props[KEY] = f"{node.op_type} {number}"
    ir.save(model, tmp_path / "before.onnx")
    result: Any = EVERY_NODE[work](tmp_path / "before.onnx", tmp_path / "after.onnx")

    before = _values_by_node(model)
    after = _values_by_node(ir.load(tmp_path / "after.onnx"))
    assert {node: before[node] for node in before.keys() & after.keys()} == {
        node: [value for value in after[node] if value in before[node]] for node in before.keys() & after.keys()
    }
    before_values, after_values = (
        {value for values in nodes.values() for value in values} for nodes in (before, after)
    )
    assert after_values <= before_values
    lost = before_values - after_values
    notes = [note for note in result.notes if KEY in note]
    assert [bool(lost)] == [str(len(lost)) in note for note in notes] or not (lost or notes)
    # No product, sum or activation is lost: these are merged, where constants and copies are folded.
    assert not {value for value in lost if value.split()[0] in ("MatMul", "Gemm", "Softmax", "Gelu", "Erf", "Tanh")}


def test_extracted_modules_keep_the_key(sources: dict[str, Path], tmp_path: Path) -> None:
    """The nodes of a module are copied with all of their metadata."""
    extract_modules(sources["tagged"], "up", tmp_path)
    (path,) = tmp_path.glob("*.onnx")
    assert ["gemm of up"] == [node.metadata_props[KEY] for node in ir.load(path).graph]


def test_untagged_file_gets_no_tags(sources: dict[str, Path], tmp_path: Path) -> None:
    """Only the metadata of the source is carried over."""
    optimize_onnx(sources["plain"], tmp_path / "after.onnx", level="full")
    keys = {key for node in ir.load(tmp_path / "after.onnx").graph for key in node.metadata_props}
    assert {KEY} == keys


@pytest.mark.parametrize("options", [{"mode": "dynamic"}, {"mode": "qdq"}, {"precision": "int4", "block_size": 16}])
def test_modules_of_a_file_of_onnxscript_builder_survive(tmp_path: Path, options: dict[str, str]) -> None:
    """Each node of the quantized file has the module that the builder wrote."""
    keys = {"pkg.onnxscript.name_scopes": "['net', '{}']", "pkg.onnxscript.class_hierarchy": "['Net', 'Linear']"}
    model = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["" : 21]> g (float[2, 16] x) => (float[2, 16] z)
        <float[16, 16] v, float[16, 16] w> { a = MatMul (x, v) y = Relu (a) z = MatMul (y, w) }"""
    )
    for number, name in enumerate("vw"):
        weight = np.random.default_rng(number).normal(size=(16, 16)).astype(np.float32)
        model.graph.initializers.pop(name, None)
        value = next(value for node in model.graph for value in node.inputs if value is not None and value.name == name)
        value.const_value = ir.tensor(weight, name=name)
        model.graph.register_initializer(value)
    for node, module in zip(model.graph, ("up", "up", "down"), strict=True):
        node.name = f"{module}_{node.op_type}"
        node.metadata_props.update({key: text.format(module) for key, text in keys.items()})
    ir.save(model, tmp_path / "source.onnx")
    quantize_onnx(tmp_path / "source.onnx", tmp_path / "after.onnx", verify=False, exclude=("down",), **options)
    modules = graph_modules(ir.load(tmp_path / "after.onnx"), "net")
    assert "pkg.onnxscript metadata" == modules.source
    assert {"/Net/Linear.up", "/Net/Linear.down"} == set(modules.tag_of.values())
    assert {"/Net/Linear.down"} == {tag for name, tag in modules.tag_of.items() if name == "down_MatMul"}
