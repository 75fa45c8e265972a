"""Equal computations of siblings: TorchScript writes one node, which names the modules of all."""

from __future__ import annotations

import json
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
    """Two that compute the same of the same, one that computes it of something else."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.other = Doubled(), Doubled(), Doubled()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Use all three."""
        return self.left(values) + self.right(values).cos() + self.other(values + 1)


def test_node_that_stands_for_equal_computations_lists_their_modules(tmp_path: Path) -> None:
    """It keeps the tag of the first; where nothing was merged there is no list."""
    found = {}
    for exporter in ("torchscript", "dynamo"):
        config = WinMLExportConfig(exporter=exporter)
        result = export_pytorch(Siblings().eval(), tmp_path / f"{exporter}.onnx", torch.randn(2, 3), config=config)
        found[exporter] = {
            node.name: (
                node.metadata_props["winml.hierarchy.module"],
                json.loads(node.metadata_props.get("winml.hierarchy.modules", "[]")),
            )
            for node in ir.load(result.model_path).graph
            if node.op_type in {"Sin", "Mul"}
        }
    assert {
        "/left/Sin": ("left", ["left", "right"]),
        "/left/Mul": ("left", ["left", "right"]),
        "/other/Sin": ("other", []),
        "/other/Mul": ("other", []),
    } == found["torchscript"]
    assert {"left", "right", "other"} == {module for module, _ in found["dynamo"].values()}
    assert not any(modules for _, modules in found["dynamo"].values())
