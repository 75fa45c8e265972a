"""The first wrong module in the error of a failed verification."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import numpy_helper

from winml.modelkit import WinMLExportConfig, export_pytorch, quantize_onnx
from winml.modelkit.compare.by_module.first_wrong_module import name_first_wrong_module
from winml.modelkit.errors import VerificationError
from winml.modelkit.metadata_keys import MODULE_KEY
from winml.modelkit.onnx.stage import StageResult
from winml.modelkit.tags.tagging import measure_coverage
from winml.modelkit.transform.graph_file import GraphFileTask, GraphWork, transform_file


class Scaled(torch.nn.Module):
    """A linear layer; with ``by_value`` its scale is a Python number that a trace keeps."""

    def __init__(self, *, by_value: bool = False) -> None:
        super().__init__()
        self.linear, self.by_value = torch.nn.Linear(8, 8), by_value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale the output of the layer."""
        y = self.linear(x)
        return y * float(x.abs().mean()) if self.by_value else y


class Net(torch.nn.Module):
    """Three scaled layers."""

    def __init__(self, *, by_value: bool = False) -> None:
        super().__init__()
        self.first, self.middle, self.last = Scaled(), Scaled(by_value=by_value), Scaled()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call the layers one after the other."""
        return self.last(torch.relu(self.middle(torch.relu(self.first(x)))))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of three layers."""
    torch.manual_seed(0)
    path: Path = tmp_path_factory.mktemp("net") / "net.onnx"
    net = Net()
    with torch.no_grad():
        net.first.linear.bias[0] = -100  # the first number that the middle layer reads is always 0
    export_pytorch(net, path, inputs=torch.randn(2, 8), config=WinMLExportConfig(verify=False))
    return path


class WrongWork(GraphWork[StageResult]):
    """Graph work with a mistake in one module."""

    step_name = "mistake"

    def apply(self, model: ir.Model) -> StageResult:
        """Double a weight of the middle layer."""
        node = next(node for node in model.graph if node.metadata_props.get(MODULE_KEY) == "middle")
        weight = next(value for value in node.inputs if value is not None and value.const_value is not None)
        assert weight.const_value is not None
        weight.const_value = ir.tensor(weight.const_value.numpy() * 2, name=weight.name)
        return StageResult(model, True, (), measure_coverage(model))

    def summary(self, result: StageResult) -> str:
        """Return words without a meaning."""
        return f"changed {result.changed}"


def test_graph_stage_names_the_module(exported: Path, tmp_path: Path) -> None:
    """Every verb that changes a graph names the module in the error, since all call this skeleton.

    No file is written.
    """
    with pytest.raises(VerificationError) as failure:
        transform_file(GraphFileTask(exported, tmp_path / "wrong.onnx"), WrongWork())
    assert "middle (/Net/Scaled" in failure.value.message
    assert [] == list(tmp_path.iterdir())


def test_quantization_names_the_module_that_suffers(exported: Path, tmp_path: Path) -> None:
    """Weights far larger than the others leave the others no bits in int8."""
    model = onnx.load(exported)
    node = next(
        node
        for node in model.graph.node
        if node.op_type in ("Gemm", "MatMul") and any(entry.value == "middle" for entry in node.metadata_props)
    )
    weight = next(item for item in model.graph.initializer if item.name in node.input and len(item.dims) == 2)
    values = numpy_helper.to_array(weight).copy()
    is_transposed = any(entry.name == "transB" and entry.i for entry in node.attribute)
    (values.T if is_transposed else values)[0, :] = 1e4
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    onnx.save(model, tmp_path / "outlier.onnx")
    with pytest.raises(VerificationError, match="module: middle"):
        quantize_onnx(tmp_path / "outlier.onnx", tmp_path / "int8.onnx")


def test_export_names_the_module_with_the_fixed_value(tmp_path: Path) -> None:
    """A trace keeps the scale as a number; PyTorch and the file are then compared by module."""
    config = WinMLExportConfig(exporter="torchscript")
    with pytest.raises(VerificationError, match="module: middle"):
        export_pytorch(Net(by_value=True), tmp_path / "net.onnx", inputs=torch.randn(2, 8), config=config)


def test_failure_keeps_its_message_if_modules_cannot_be_compared(exported: Path, tmp_path: Path) -> None:
    """The error keeps its message, and the hint says that the modules cannot be compared.

    Without values nothing is added.
    """
    error = VerificationError("they differ", hint="Look.", inputs={"nothing": np.zeros(1)})
    name_first_wrong_module(error, exported, exported)
    assert "they differ" == error.message
    assert error.hint.startswith("Look. The first wrong module was not found: ")
    bare = VerificationError("it does not run", hint="Look.")
    name_first_wrong_module(bare, exported, tmp_path / "missing.onnx")
    assert ("it does not run", "Look.") == (bare.message, bare.hint)
