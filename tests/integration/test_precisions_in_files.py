"""The requested precision in the written file and in the output of each reader."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

from winml.modelkit import HTPExporter, WinMLExportConfig
from winml.modelkit.builds.config import parse_build_config, quantize_options
from winml.modelkit.inspect.onnx_inspection import inspect_onnx
from winml.modelkit.quantize.placements import PLACEMENTS, placement_for
from winml.modelkit.quantize.precisions import MODES, PRECISIONS, Precision, problem_of
from winml.modelkit.quantize.verb import quantize_onnx

WEIGHTS = {
    "int8": {"INT8"},
    "uint8": {"UINT8"},
    "w8a8": {"INT8"},
    "w8a16": {"INT8"},
    "w16a16": {"INT16"},
    "w4a16": {"INT4"},
    "w4a8": {"INT4"},
    "nf4": {"UINT8"},
    "fp16": {"FLOAT16"},
    "bf16": {"BFLOAT16"},
}
ACTIVATIONS = {8: {"UINT8", "INT8"}, 16: {"UINT16", "INT16"}}
FEW_BITS = {"int4": 4, "int2": 2}

CASES = [
    (name, mode, ep)
    for name, precision in PRECISIONS.items()
    for mode in precision.modes
    for ep in ([None, *(name for name in PLACEMENTS if name != "cpu")] if MODES[mode].needs_ranges else [None])
    if mode != "qdq" or not placement_for(ep).refusal(precision, mode)
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two products with a nonlinearity between."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    path = tmp_path_factory.mktemp("source") / "model.onnx"
    config = WinMLExportConfig(exporter="torchscript", verify=False)
    HTPExporter(config).export(net.eval(), path, {"input": torch.randn(1, 4, 64)})
    return path


def stored_types(model: ir.Model) -> set[str]:
    """Return the data types of the weights."""
    return {
        value.const_value.dtype.name
        for value in model.graph.initializers.values()
        if value.const_value is not None and value.const_value.size >= 2048 // 4
    }


@pytest.mark.parametrize(("name", "mode", "ep"), CASES)
def test_requested_precision_agrees_with_the_file_and_its_readers(
    source: Path, tmp_path: Path, name: str, mode: str, ep: str | None
) -> None:
    """Types of weights and activations, record, inspect and config agree."""
    precision, path = PRECISIONS[name], tmp_path / "q.onnx"
    quantize_onnx(source, path, precision=name, mode=mode, ep=ep, verify=False)
    onnx.checker.check_model(path)
    model = ir.load(path)
    types = stored_types(model)
    if mode == "weight-only":
        bits = {node.attributes["bits"].as_int() for node in model.graph if node.op_type == "MatMulNBits"}
        assert {precision.weight_bits} == bits
    elif ep in ("qnn", "vitisai", "tensorrt", "nvtensorrtrtx", "openvino", "dml"):
        # The provider decides whether weights are signed.
        assert types <= {f"{sign}INT{precision.weight_bits}" for sign in ("", "U")}
        assert types
    else:
        assert WEIGHTS[name] == types
    if MODES[mode].needs_ranges:
        zeros = {node.inputs[2].const_value.dtype.name for node in model.graph if node.op_type == "QuantizeLinear"}
        assert zeros
        assert zeros <= ACTIVATIONS[precision.activation_bits or 8]
    record = json.loads(model.metadata_props["winml.quantization"])
    assert name == record["requested"]["precision"]
    assert {name} == {module["actual"] for module in record["modules"]}
    inspected = inspect_onnx(path).total
    assert inspected.bits is not None
    assert inspected.bits < precision.weight_bits + 3
    section = parse_build_config({"quant": {"precision": name, "mode": mode, "ep": ep}}, "test")[0].quant
    assert section is not None
    assert (precision, mode) == next(iter(quantize_options(section).requested_modes()))


@pytest.mark.parametrize(
    ("precision", "words"),
    [
        (Precision("w2a16", 2, ("qdq",), "", 4.0, activation_bits=16), "2 and 16"),
        (Precision("int4d", 4, ("dynamic",), "", 4.0), "dynamic"),
        (Precision("int6", 6, ("weight-only",), "", 4.0), "6 and float"),
        (Precision("int4a8", 4, ("weight-only",), "", 4.0, activation_bits=8), "4 and 8"),
        (Precision("w16a8", 16, ("qdq",), "", 4.0, activation_bits=8), "16 and 8"),
        (Precision("uw16a16", 16, ("qdq",), "", 4.0, activation_bits=16, signed_weights=False), "signed"),
        (Precision("tf32", 19, ("float",), "", 4.0), "fp16 and bf16"),
    ],
)
def test_precision_without_an_engine_is_refused_at_registration(precision: Precision, words: str) -> None:
    """A package gets the error when its precision is registered, not later by a file with other types."""
    problem = problem_of(precision.name, precision)
    assert words in problem


@pytest.mark.parametrize("name", [name for name, precision in PRECISIONS.items() if precision.modes])
def test_precision_that_an_engine_writes_is_accepted(name: str) -> None:
    """The precision is another name for bits that winml supports; nodes in 16-bit floats have fixed names."""
    precision = PRECISIONS[name]
    assert bool(precision.float_type) == bool(problem_of("other", replace(precision, name="other")))
