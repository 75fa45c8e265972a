"""Traces of forwards that pass Python bools as numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from winml.modelkit.export.torchscript.tracing import booleans_as_numbers

Values = torch.Tensor
PLACES = torch.tensor([[0, 2], [1, 0]])
NUMBERS = torch.tensor([[1.5, 0.0, 1.0], [0.0, -2.0, 1.0]])


class Applied(nn.Module):
    """A module that applies a function."""

    def __init__(self, function: Callable[[Values, Values], Values]) -> None:
        super().__init__()
        self.function = function

    def forward(self, values: Values, places: Values) -> Values:
        """Apply the function."""
        return self.function(values, places)


def traced(function: Callable[[Values, Values], Values], values: Values) -> Callable[[Values, Values], Values]:
    """Trace a function as the exporter does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        trace: Callable[[Values, Values], Values] = torch.jit.trace(
            Applied(function), (values, PLACES), check_trace=False
        )
    return trace


@pytest.mark.parametrize("values", [NUMBERS, NUMBERS > 0], ids=["numbers", "booleans"])
@pytest.mark.parametrize(
    "function",
    [
        lambda values, _: torch.full_like(values, True),
        lambda values, _: torch.full_like(values, fill_value=True, requires_grad=False),
        lambda values, _: values.new_full((2,), False),
        lambda values, _: torch.full(values.shape, True),
        lambda values, _: torch.full((2, 3), fill_value=True, dtype=torch.float16).to(values.device),
        lambda values, places: values.scatter(1, places, True),
        lambda values, places: torch.scatter(values, 1, places, value=True),
        lambda values, _: values.masked_fill(values > 0, False),
        lambda values, places: values.clone().index_fill_(0, places[:, 0], True),
        lambda values, _: values.clone().fill_(True),
    ],
)  # fmt: skip
def test_bool_for_a_number_is_traced_with_equal_output(
    function: Callable[[Values, Values], Values], values: Values
) -> None:
    """Value and dtype are those of torch; without the patch the tracer fails."""
    expected = function(values, PLACES)
    with pytest.raises(RuntimeError, match="alias_analysis"):
        traced(function, values)
    with booleans_as_numbers():
        actual = traced(function, values)(values, PLACES)
    assert "fill_" not in vars(torch.Tensor)
    assert expected.dtype == actual.dtype
    assert torch.equal(expected, actual)
