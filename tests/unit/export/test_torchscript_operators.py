"""Operators that torch's TorchScript exporter lacks, and that are known to it for one export."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import onnxruntime
import pytest
import torch
from torch import nn
from torch.onnx._internal.torchscript_exporter.registration import registry
from torch.onnx.errors import UnsupportedOperatorError

from winml.modelkit.export.torchscript_operators import further_operators

OPSET = 17
Values = torch.Tensor


class Applied(nn.Module):
    """Applies a function."""

    def __init__(self, function: Callable[[Values], Values]) -> None:
        super().__init__()
        self.function = function

    def forward(self, values: Values) -> Values:
        """Apply it."""
        return self.function(values)


def written(function: Callable[[Values], Values], values: Values, opset_version: int = OPSET) -> bytes:
    """Export a function with torch's exporter."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter uses what torch calls outdated
        torch.onnx.export(Applied(function), (values,), buffer, opset_version=opset_version, dynamo=False)  # type: ignore[arg-type]
    return buffer.getvalue()


def answer(model: bytes, values: Values) -> Values:
    """Run a graph of one input and one output."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: values.numpy()})[0])


COUNTS = torch.tensor([[3, 5, 5, 9], [1, 0, 7, 2]])
SMALL = torch.tensor([-30.0, -1.0, -1e-3, -1e-7, 0.0, 1e-7, 1e-3, 1.0, 30.0])


@pytest.mark.parametrize("opset_version", [11, OPSET, 20])
@pytest.mark.parametrize(
    ("function", "values"),
    [
        (torch.diff, COUNTS),
        (lambda values: torch.diff(values, n=2, dim=0), torch.arange(12).reshape(4, 3) ** 2),
        (lambda values: torch.diff(values, n=0), COUNTS),
        (lambda values: torch.diff(values, prepend=values[:, :1] - 1), COUNTS),
        (lambda values: torch.diff(values, append=values[:, :1], dim=-1), COUNTS),
        (lambda values: torch.diff(values, dim=0, prepend=values, append=values + 4), COUNTS),
        (lambda values: torch.diff(values > 3), COUNTS),
    ],
    ids=["plain", "twice", "never", "before", "after", "both", "booleans"],
)
def test_diff_is_that_of_torch(function: Callable[[Values], Values], values: Values, opset_version: int) -> None:
    """Along any axis, again and again, with values put before and after, and for booleans."""
    with further_operators(opset_version):
        model = written(function, values, opset_version)
    expected = function(values)
    actual = answer(model, values)
    assert expected.dtype == actual.dtype
    assert torch.equal(expected, actual)


def test_expm1_keeps_every_digit_of_small_values() -> None:
    """Where ``exp(x) - 1`` would leave none."""
    with further_operators(OPSET):
        model = written(torch.expm1, SMALL)
    torch.testing.assert_close(answer(model, SMALL), torch.expm1(SMALL), rtol=1e-6, atol=0.0)


def _overlapping(values: Values) -> Values:
    """Return the windows of a sequence, as Longformer takes them: views whose strides are those of the tensor."""
    sequences, length, width = values.shape
    along, step, inner = values.stride()
    size = (sequences, torch.div(length, 2, rounding_mode="trunc") - 1, 4, width)
    return values.as_strided(size, (along, 2 * step, step, inner)) * 1


TOKENS = torch.randn(1, 8, 3, 2, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "function",
    [
        lambda values: _overlapping(values.transpose(1, 2).reshape(3, 8, 2)),
        lambda values: _overlapping(values.reshape(8, 3, 2).transpose(0, 1)),
        lambda values: _overlapping(
            values.view(torch.div(values.shape[1], 1, rounding_mode="trunc"), 3, 2).transpose(0, 1)
        ),
        lambda values: _overlapping(values.reshape(3, 8, 2)),
    ],
    ids=["heads", "transposed", "sizes unknown", "contiguous"],
)
def test_as_strided_reads_memory_in_the_order_it_lies(function: Callable[[Values], Values]) -> None:
    """A view of a transposed tensor reads what the tensor holds, which torch's own form does not."""
    with further_operators(OPSET):
        model = written(function, TOKENS)
    assert torch.equal(function(TOKENS), answer(model, TOKENS))


def test_as_strided_of_a_tensor_with_gaps_is_refused() -> None:
    """Memory between the values of a tensor is not in the graph: the other exporter is asked."""
    with pytest.raises(UnsupportedOperatorError, match="aten::as_strided"), further_operators(OPSET):
        written(lambda values: values[:, ::2].as_strided((2, 2), (2, 1)), COUNTS)


def test_further_operators_are_gone_after_the_block() -> None:
    """After the block the exporter knows as much as before it, also when it ends in a failure."""
    with pytest.raises(UnsupportedOperatorError, match="bessel_j0"), further_operators(OPSET):
        written(torch.special.bessel_j0, SMALL)
    assert not registry.is_registered_op("aten::diff", OPSET)
    with pytest.raises(UnsupportedOperatorError, match="aten::diff"):
        written(torch.diff, COUNTS)


def test_further_operators_leave_what_the_user_registered() -> None:
    """A form of the user's own is used, and stays."""

    def twice(graph: Any, *values: Any) -> Any:
        return graph.op("Add", values[0], values[0])

    torch.onnx.register_custom_op_symbolic("aten::expm1", twice, OPSET)  # type: ignore[attr-defined]
    try:
        with further_operators(OPSET):
            model = written(torch.expm1, SMALL)
        assert registry.is_registered_op("aten::expm1", OPSET)
    finally:
        torch.onnx.unregister_custom_op_symbolic("aten::expm1", OPSET)  # type: ignore[attr-defined]
    assert torch.equal(SMALL * 2, answer(model, SMALL))
