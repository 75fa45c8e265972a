"""Traces of forwards that round numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from winml.modelkit.export.torchscript.tracing import tensors_rounded_as_numbers


class Scaled(nn.Module):
    """A model that takes as many columns as a rounded number computed from the sizes of the values."""

    def __init__(self, digits: int | None) -> None:
        super().__init__()
        self.digits = digits

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Take 21 of 30 columns, by a quotient without an exact binary value."""
        height, width = values.shape
        return values[:, : int(round(width * (height / 10), self.digits))]


def traced(digits: int | None, values: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Trace the model as the exporter does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer tells that it keeps a number
        trace: Callable[[torch.Tensor], torch.Tensor] = torch.jit.trace(Scaled(digits), (values,), check_trace=False)
    return trace


@pytest.mark.parametrize("digits", [None, 0, 7])
def test_rounded_number_is_that_without_a_trace(digits: int | None) -> None:
    """Inside a trace, a quotient in 64 bits is computed in 32: 20.999999 is not 21."""
    values = torch.arange(210.0).reshape(7, 30)
    with pytest.raises(TypeError, match="__round__"):
        traced(digits, values)
    with tensors_rounded_as_numbers():
        actual = traced(digits, values)(values)
    assert not hasattr(torch.Tensor, "__round__")
    assert torch.equal(Scaled(digits)(values), actual)


def test_rounding_is_undone_after_a_failure() -> None:
    """No attribute stays on torch."""
    with pytest.raises(KeyError), tensors_rounded_as_numbers():
        raise KeyError
    assert not hasattr(torch.Tensor, "__round__")


@pytest.mark.parametrize(
    ("number", "digits", "expected"),
    [
        (torch.tensor(20.9999981), 7, 21.0),
        (torch.tensor(7), None, 7),
        (torch.tensor(0.1 + 0.2, dtype=torch.float64), 3, 0.3),
    ],
)
def test_digits_that_32_bits_do_not_hold_are_dropped(number: torch.Tensor, digits: int, expected: float) -> None:
    """Numbers of 64 bits keep their digits."""
    with tensors_rounded_as_numbers():
        assert round(number, digits) == expected  # type: ignore[call-overload]
