"""Metadata of a file."""

from __future__ import annotations

import json

import onnx_ir as ir
import torch
from torch import nn

from graphs import parse
from winml.modelkit.models.parts import ModelInfo
from winml.modelkit.onnx.model_metadata import ModelDescription, output_specs, write_model_metadata
from winml.modelkit.onnx.specs import InputTensorSpec
from winml.modelkit.tags.torch_modules import record_calls
from winml.modelkit.tags.tree import build_tree

GRAPH = """
agraph (float[2, 3] x, int64[N] i) => (float16[2, N] half, bool[] flag, bfloat16[1] brief) {
    half = Cast <to = 10> (x)
    flag = ReduceAny (i)
    brief = Cast <to = 16> (x)
}
"""


def test_output_specs_equal_the_declarations_of_the_graph() -> None:
    """Names, sizes, open dimensions and dtypes, bfloat16 and scalars included."""
    model = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["": 17]>\n{GRAPH}')
    assert [("half", (2, "N"), "float16"), ("flag", (), "bool"), ("brief", (1,), "bfloat16")] == [
        (spec.name, spec.shape, spec.dtype) for spec in output_specs(model.graph)
    ]


def test_write_model_metadata_keys_and_values_are_documented() -> None:
    """The five entries are compact JSON, without unknown values."""
    with record_calls(module := nn.Linear(2, 2)) as trace:
        module(torch.ones(1, 2))
    model = parse("agraph (float[1, 2] x) => (float[1, 2] y) { y = Relu (x) }")
    spec = InputTensorSpec(name="x", shape=(1, 2), dtype="float32", value_range=(0.0, 0.5))
    info = ModelInfo(name_or_path="gemälde", class_name="Linear", library="torch", library_version="2")
    description = ModelDescription(
        tree=build_tree(trace),
        info=info.as_record(),
        inputs=[spec],
        outputs=output_specs(model.graph),
        export={"exporter": "torchscript"},
    )
    write_model_metadata(model, description)
    texts = dict(model.metadata_props)
    assert {
        "winml.io.inputs": [{"name": "x", "shape": [1, 2], "dtype": "float32", "value_range": [0.0, 0.5]}],
        "winml.io.outputs": [{"name": "y", "shape": [1, 2], "dtype": "float32"}],
        "winml.model": {"name_or_path": "gemälde", "class": "Linear", "library": "torch", "library_version": "2"},
        "winml.export": {"exporter": "torchscript"},
        "winml.hierarchy.tree": [
            {"path": "", "tag": "/Linear", "class": "Linear", "execution_order": 0, "calls": 1, "parameters": 6}
        ],
    } == {key: json.loads(text) for key, text in texts.items()}
    assert "gemälde" in texts["winml.model"]
    assert not any(": " in text for text in texts.values())
