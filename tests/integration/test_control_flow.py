"""Control flow of torch and complex tables, exported with dynamo and compared with PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from graphs import run_onnx
from hostile_modules import Leaf
from tag_checks import load_nodes
from winml.modelkit import export_pytorch

VALUES = torch.linspace(-1, 2, 12).reshape(3, 4)


class Either(nn.Module):
    """Calls one of two modules, chosen by the sum of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Leaf(4), Leaf(4)

    def forward(self, values: torch.Tensor) -> Any:
        """Call the chosen module."""
        return torch.cond(values.sum() > 0, self.first, lambda x: self.second(x) + 1, (values,))


class Repeated(nn.Module):
    """Calls a module three times."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf = Leaf(4)

    def forward(self, values: torch.Tensor) -> Any:
        """Loop."""
        from torch._higher_order_ops.while_loop import while_loop

        start = torch.tensor(0)
        return while_loop(lambda i, _x: i < 3, lambda i, x: (i + 1, self.leaf(x)), (start, values))[1]


class Turned(nn.Module):
    """Rotates pairs by a table of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf = Leaf(4)
        self.register_buffer("table", torch.polar(torch.ones(3, 2), torch.arange(6.0).reshape(3, 2)))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        pairs = torch.view_as_complex(self.leaf(values).reshape(3, 2, 2))
        return torch.view_as_real(pairs * self.table).flatten(1)


def _has_loops() -> bool:
    """True if torch has an ONNX conversion of ``while_loop``."""
    from torch.onnx._internal.exporter._torchlib.ops import hop

    return hasattr(hop, "higher_order_while_loop")


_LOOPS = pytest.mark.skipif(not _has_loops(), reason="torch before 2.11 has no ONNX form of while_loop")


@pytest.mark.parametrize(
    ("make", "operator"), [(Either, "If"), pytest.param(Repeated, "Loop", marks=_LOOPS), (Turned, "Gemm")]
)
def test_control_flow_and_complex_tables_are_exported(make: Any, operator: str, tmp_path: Path) -> None:
    """The outputs equal PyTorch's in both branches, and every node, branches included, has a tag."""
    torch.manual_seed(0)
    model = make().eval()
    result = export_pytorch(model, tmp_path / "model.onnx", VALUES)
    assert result.only_part.verification is not None
    assert result.only_part.verification.is_verified
    nodes = load_nodes(result)
    assert operator in {node.op_type for node in nodes}
    assert all(node.metadata_props["winml.hierarchy.tag"] for node in nodes)
    for values in (VALUES, -VALUES):
        (answer,) = run_onnx(result.only_part.model_path, {result.only_part.inputs[0].name: values.numpy()}).values()
        with torch.no_grad():
            expected = model(values).numpy()
        np.testing.assert_allclose(answer, expected, atol=1e-5)
