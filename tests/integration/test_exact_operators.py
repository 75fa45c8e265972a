"""Operators that both exporters convert exactly, where torch's own conversions differ from PyTorch.

The values are zeros with a sign, numbers near and far from zero and negative integers, which random inputs seldom hold.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from winml.modelkit import HTPExporter, WinMLExportConfig
from winml.modelkit.models.tensors import to_numpy
from winml.modelkit.ort.sessions import Session

ZERO = [0.0, -0.0]
POINTS = torch.tensor([[y, x] for y in (*ZERO, 1.0, -2.0) for x in (*ZERO, 3.0, -1.0)])
SMALL = torch.tensor([[-0.9, -1e-3, -1e-6, 0.0, 1e-8, 1e-6, 1e-3, 0.5, 30.0]])
SIGNED = torch.tensor([[-8, -7, -1, 0, 1, 7, 8]])
DIVISORS = torch.tensor([[3, -2, 2, 5, -3, 2, -8]])
SHORT = torch.tensor([[1e-7, -2e-7, 3e-7], [3e-9, 1e-9, -1e-9]])

DISTANCES = [0.0, 1e-7, 1e-6, 1e-3, 0.5, 1.0, 3.0, 17.0, 18.0, 20.0, 50.0, 88.0, 90.0, 1e4, float("inf")]
EVERYWHERE = torch.tensor([[*DISTANCES, *(-distance for distance in DISTANCES)]])
PAIRS = torch.cartesian_prod(EVERYWHERE[0], EVERYWHERE[0]).T
TARGETS = torch.linspace(0, 1, EVERYWHERE.numel()).reshape(EVERYWHERE.shape)
BELOW_ONE = torch.tensor([[0.0, 1e-7, 1e-3, 0.5, 0.7, 0.99, 0.9999, 0.999999, 1 - 2**-23, 1 - 2**-24, 1.0]])
WHOLE = torch.tensor([[1.0, 6.0, 1.2, 0.3, -1.0, -6.0, 7.5, -7.5, 0.0, 5.0, 1e8, 3.0, -3.0, 2.0**23 + 1, 1.0]])
STEPS = torch.tensor([[0.1, 0.1, 0.4, 0.1, 0.1, 0.1, 2.5, 2.5, 3.0, -0.1, 3.0, -1.0, 1e30, 1.0, 0.0]])
RISING = torch.tensor([[[-200.0, 3], [-100, 2], [0, 1], [50, -80], [89, 400], [100, 4], [2, 1], [1000, -1e4]]])
FACTORS = torch.tensor([[2**31, 2**31, 3, 5], [2**40, 2**40, 1, 1], [3, -3, 3, 3]])
LARGE = torch.tensor([[2**40 + 1, -(2**53) - 1, 2**62 - 1]])


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Apply every option."""
    binary = nn.functional.binary_cross_entropy_with_logits
    plain = binary(logits, targets, reduction="none")
    weighted = binary(logits, targets, torch.tensor(0.3), reduction="none", pos_weight=torch.tensor(3.0))
    finite = logits.clamp(-1e4, 1e4)
    return torch.stack([plain, weighted, binary(finite, targets) + 0 * plain, finite * 0 + binary(finite, targets)])


CASES: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "atan2": (lambda points: torch.atan2(points[:, 0], points[:, 1]), (POINTS,)),
    "expm1": (torch.expm1, (SMALL,)),
    "log1p": (torch.log1p, (SMALL,)),
    "cosine": (lambda values: nn.functional.cosine_similarity(values, values.roll(1, 0), dim=1), (SHORT,)),
    "floor_divide": (lambda values, divisor: values // divisor, (SIGNED, DIVISORS)),
    "floor_divide_int32": (lambda values: values.int() // 2, (SIGNED,)),
    "floor_divide_floats": (lambda values, divisor: values / 2 // divisor, (SIGNED, DIVISORS)),
    "right_shift": (lambda values: values >> 1, (SIGNED,)),
    "remainder": (lambda values, divisor: values % divisor, (SIGNED, DIVISORS)),
    "log_sigmoid": (nn.functional.logsigmoid, (EVERYWHERE,)),
    # PyTorch's sigmoid is 0 from -89 on.
    "log_of_sigmoid": (lambda values: values.sigmoid().log(), (EVERYWHERE[EVERYWHERE.abs() <= 88][None],)),
    "cross_entropy": (cross_entropy, (EVERYWHERE, TARGETS)),
    "softplus_with_threshold": (lambda values: nn.functional.softplus(values, 2.0, 5.0), (EVERYWHERE,)),
    "logaddexp": (lambda pairs: torch.logaddexp(pairs[0], pairs[1]), (PAIRS,)),
    "logaddexp2": (lambda pairs: torch.logaddexp2(pairs[0], pairs[1]), (PAIRS,)),
    "erfc": (torch.erfc, (EVERYWHERE,)),
    "erfcx": (torch.special.erfcx, (EVERYWHERE,)),
    "erfinv": (lambda values: torch.erfinv(torch.cat([values, -values])), (BELOW_ONE,)),
    "product": (lambda values: values.prod(1), (FACTORS,)),
    "product_keeps_axis": (lambda values: values.prod(-1, keepdim=True), (FACTORS,)),
    "floor_divide_at_multiples": (lambda values, steps: values // steps, (WHOLE, STEPS)),
    "floor_divide_by_number": (lambda values: values // 0.1, (WHOLE,)),
    "remainder_at_multiples": (lambda values, steps: values % steps, (WHOLE, STEPS)),
    "remainder_of_number": (lambda steps: 1.0 % steps, (STEPS[STEPS != 0][None],)),
    "remainder_of_integers_by_float": (lambda values: values % 0.1, (SIGNED,)),
    "round_mode_floor": (lambda values: torch.div(values, 3, rounding_mode="floor"), (LARGE,)),
    "round_mode_trunc": (lambda values: torch.div(-values, 3, rounding_mode="trunc"), (LARGE,)),
    "trunc_of_large_floats": (lambda values: torch.div(values, 0.5, rounding_mode="trunc"), (EVERYWHERE * 1e20,)),
}
"""Name → function and its argument tensors."""

DYNAMO_CASES: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "logcumsumexp": (lambda values: values.logcumsumexp(1), (RISING,)),
    "logcumsumexp_of_rows": (lambda values: values.logcumsumexp(-1), (RISING,)),
    "log_ndtr": (torch.special.log_ndtr, (EVERYWHERE,)),
    "ndtr": (torch.special.ndtr, (EVERYWHERE,)),
}
"""Operators without TorchScript conversion, exported by dynamo."""

LARGEST_ERROR = {"erfc": 5e-6, "erfcx": 5e-6, "log_ndtr": 2e-6}
"""Largest relative difference. ``exp(x ** 2)`` multiplies the rounding of its argument, in PyTorch as well."""


class Applied(nn.Module):
    """Applies a function."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, first: torch.Tensor, second: torch.Tensor | None = None) -> torch.Tensor:
        """Apply the function."""
        return self.function(first) if second is None else self.function(first, second)


@pytest.mark.parametrize(
    ("name", "exporter"),
    [
        *((name, exporter) for name in CASES for exporter in ("torchscript", "dynamo")),
        *((n, "auto") for n in DYNAMO_CASES),
    ],
)
def test_operator_equals_torch(name: str, exporter: Any, tmp_path: Path) -> None:
    """Floats agree to seven digits and integers exactly, for other values than the traced ones."""
    function, tensors = {**CASES, **DYNAMO_CASES}[name]
    traced = {
        key: torch.rand_like(value) / 2 + 0.3 if value.is_floating_point() else torch.randint_like(value, 1, 9)
        for key, value in zip(("first", "second"), tensors, strict=False)
    }
    config = WinMLExportConfig(exporter=exporter, verify=False)
    HTPExporter(config).export(Applied(function), tmp_path / "model.onnx", traced)
    feeds = dict(zip(traced, map(to_numpy, tensors), strict=True))
    (answer,) = Session(tmp_path / "model.onnx").run(feeds).values()
    tolerance = LARGEST_ERROR.get(name, 1e-6)
    # A difference below 1e-7 is one unit in the last place of a number rounded near 1.0.
    least = 1e-7 if name in ("log_of_sigmoid", "logaddexp2") else 0.0
    expected = function(*tensors)
    torch.testing.assert_close(torch.from_numpy(answer), expected, rtol=tolerance, atol=least, equal_nan=True)


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
@pytest.mark.parametrize("function", [nn.functional.elu, nn.functional.selu, nn.functional.celu])
def test_elu_stays_one_operator(function: Callable[..., torch.Tensor], exporter: Any, tmp_path: Path) -> None:
    """ONNX Runtime rounds ``exp(x) - 1`` to a unit in the last place of 1.0: relative digits of 1e-7 are lost."""
    config = WinMLExportConfig(exporter=exporter, verify=False)
    result = HTPExporter(config).export(Applied(function), tmp_path / "model.onnx", {"first": torch.randn(1, 30)})
    assert {node.op_type for node in result.only_part.nodes} <= {"Elu", "Selu", "Celu", "Mul"}
    (answer,) = Session(tmp_path / "model.onnx").run({"first": to_numpy(EVERYWHERE)}).values()
    torch.testing.assert_close(torch.from_numpy(answer), function(EVERYWHERE), rtol=1e-6, atol=2.4e-7)


def test_loop_body_belongs_to_the_calling_module(tmp_path: Path) -> None:
    """The loop of ``logcumsumexp`` and its nodes have the tag of one module; its length is dynamic."""
    model = nn.Sequential(Applied(lambda values: values.logcumsumexp(1)), nn.Linear(2, 2))
    config = WinMLExportConfig(exporter="dynamo", torch_module=("all",), dynamic_axes={"input": {1: "length"}})
    result = HTPExporter(config).export(model, tmp_path / "model.onnx", {"input": RISING / 1e4})
    part = result.only_part
    assert part.verification is not None
    assert part.verification.is_verified
    assert {"0", "1"} == {node.module for node in part.nodes}


def test_sizes_are_divided_by_one_operator(tmp_path: Path) -> None:
    """Sizes are never negative, so no correction for negative numbers is written."""

    def halves(values: torch.Tensor) -> torch.Tensor:
        return values[:, : values.shape[1] // 2]

    config = WinMLExportConfig(exporter="torchscript", dynamic_axes={"first": {1: "length"}})
    result = HTPExporter(config).export(Applied(halves), tmp_path / "model.onnx", {"first": torch.randn(2, 8)})
    assert "Xor" not in {node.op_type for node in result.only_part.nodes}
    assert result.only_part.verification is not None
    assert result.only_part.verification.is_verified
