"""Equal computations of sibling modules: each module has its own nodes, with both exporters."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import torch
from torch import nn

from winml.modelkit import WinMLExportConfig, export_pytorch


class Doubled(nn.Module):
    """Two operators in a row."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Double the sine."""
        return values.sin() * 2


class Siblings(nn.Module):
    """Two modules with equal input and computation, and one with another input."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.other = Doubled(), Doubled(), Doubled()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Call all three modules."""
        return self.left(values) + self.right(values).cos() + self.other(values + 1)


def test_each_module_keeps_its_own_nodes(tmp_path: Path) -> None:
    """Equal computations of two modules are written twice, and no node belongs to several modules."""
    for exporter in ("torchscript", "dynamo"):
        config = WinMLExportConfig(exporter=exporter)
        result = export_pytorch(Siblings().eval(), tmp_path / f"{exporter}.onnx", torch.randn(2, 3), config=config)
        nodes = [node for node in ir.load(result.only_part.model_path).graph if node.op_type in {"Sin", "Mul"}]
        modules = sorted((node.metadata_props["winml.hierarchy.module"], node.op_type) for node in nodes)
        assert [(name, kind) for name in ("left", "other", "right") for kind in ("Mul", "Sin")] == modules
        assert not any("winml.hierarchy.modules" in node.metadata_props for node in nodes)


class Twice(nn.Module):
    """Computes an equal value twice."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Add the sine to itself."""
        return values.sin() * values.sin().cos()


def test_equal_computations_of_one_call_are_one_node(tmp_path: Path) -> None:
    """Torch's exporter merges them."""
    model = nn.Sequential(Twice())
    config = WinMLExportConfig(exporter="torchscript")
    result = export_pytorch(model.eval(), tmp_path / "net.onnx", torch.randn(2, 3), config=config)
    assert 1 == sum(node.op_type == "Sin" for node in ir.load(result.only_part.model_path).graph)
