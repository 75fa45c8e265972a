"""Operators added to torch's TorchScript exporter, compared with torch."""

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

from winml.modelkit.export.torchscript.capturing import further_operators

OPSET = 17
Values = torch.Tensor


class Applied(nn.Module):
    """A module that applies a function."""

    def __init__(self, function: Callable[[Values], Values]) -> None:
        super().__init__()
        self.function = function

    def forward(self, values: Values) -> Values:
        """Apply the function."""
        return self.function(values)


def written(function: Callable[[Values], Values], values: Values, opset_version: int = OPSET) -> bytes:
    """Export a function with torch's exporter."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter uses deprecated functions of torch
        torch.onnx.export(Applied(function), (values,), buffer, opset_version=opset_version, dynamo=False)  # type: ignore[arg-type]
    return buffer.getvalue()


def answer(model: bytes, values: Values) -> Values:
    """Run a graph with one input and one output."""
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
def test_diff_equals_torch(function: Callable[[Values], Values], values: Values, opset_version: int) -> None:
    """Axes, repetitions, prepended and appended values, and booleans give the values of torch."""
    with further_operators(opset_version):
        model = written(function, values, opset_version)
    expected = function(values)
    actual = answer(model, values)
    assert expected.dtype == actual.dtype
    assert torch.equal(expected, actual)


def test_expm1_keeps_every_digit_of_small_values() -> None:
    """The formula ``exp(x) - 1`` would lose all digits."""
    with further_operators(OPSET):
        model = written(torch.expm1, SMALL)
    torch.testing.assert_close(answer(model, SMALL), torch.expm1(SMALL), rtol=1e-6, atol=0.0)


def _overlapping_windows(values: Values) -> Values:
    """Return overlapping windows of a sequence, as in Longformer: views with the strides of the tensor."""
    sequences, length, width = values.shape
    along, step, inner = values.stride()
    size = (sequences, torch.div(length, 2, rounding_mode="trunc") - 1, 4, width)
    return values.as_strided(size, (along, 2 * step, step, inner)) * 1


TOKENS = torch.randn(1, 8, 3, 2, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "function",
    [
        lambda values: _overlapping_windows(values.transpose(1, 2).reshape(3, 8, 2)),
        lambda values: _overlapping_windows(values.reshape(8, 3, 2).transpose(0, 1)),
        lambda values: _overlapping_windows(
            values.view(torch.div(values.shape[1], 1, rounding_mode="trunc"), 3, 2).transpose(0, 1)
        ),
        lambda values: _overlapping_windows(values.reshape(3, 8, 2)),
    ],
    ids=["heads", "transposed", "sizes unknown", "contiguous"],
)
def test_as_strided_reads_memory_in_storage_order(function: Callable[[Values], Values]) -> None:
    """A view of a transposed tensor reads the tensor's memory, unlike torch's own decomposition."""
    with further_operators(OPSET):
        model = written(function, TOKENS)
    assert torch.equal(function(TOKENS), answer(model, TOKENS))


def test_as_strided_of_a_tensor_with_gaps_is_refused() -> None:
    """Memory between the values of a tensor is not in the graph, so the other exporter is needed."""
    with pytest.raises(UnsupportedOperatorError, match="aten::as_strided"), further_operators(OPSET):
        written(lambda values: values[:, ::2].as_strided((2, 2), (2, 1)), COUNTS)


@pytest.mark.parametrize("opset_version", [11, OPSET])
def test_repeat_interleave_leaves_the_number_of_its_axis_alone(opset_version: int) -> None:
    """The constant -1 of one operator is shared by others; torch's own decomposition adds the rank to it."""

    def pairs_turned(values: Values) -> Values:
        repeated = values.repeat_interleave(2, dim=-1)
        return torch.stack((repeated, values.repeat_interleave(2, -1) * 2), dim=-1).flatten(-2)

    with further_operators(opset_version):
        model = written(pairs_turned, COUNTS, opset_version)
    assert torch.equal(pairs_turned(COUNTS), answer(model, COUNTS))


@pytest.mark.parametrize("opset_version", [11, OPSET])
@pytest.mark.parametrize(
    "function",
    [
        lambda values: values.repeat_interleave(3),
        lambda values: values.repeat_interleave(torch.tensor([2, 1]), dim=0),
        lambda values: values.repeat_interleave(torch.tensor([2, 0, 1, 3]), dim=-1),
        lambda values: values.repeat_interleave(values[0] - 3, dim=1),
        lambda values: values.repeat_interleave(values.flatten().to(torch.int32)),
        lambda values: values.repeat_interleave(values[0, :1], dim=0),
    ],
    ids=["flat", "counts", "counts from behind", "counts of values", "counts of all", "one count"],
)
def test_repeat_interleave_equals_torch(function: Callable[[Values], Values], opset_version: int) -> None:
    """The axis may be absent and the counts vary, 0 included; other values than the traced ones work."""
    with further_operators(opset_version):
        model = written(function, COUNTS, opset_version)
    for values in (COUNTS, COUNTS.flip(1) + 3):
        assert torch.equal(function(values), answer(model, values))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32], ids=str)
def test_cumsum_equals_torch(dtype: torch.dtype) -> None:
    """Booleans and short integers are summed in 64 bits."""
    values = COUNTS.to(dtype)
    with further_operators(OPSET):
        model = written(lambda values: values.cumsum(-1), values)
    expected, actual = values.cumsum(-1), answer(model, values)
    assert expected.dtype == actual.dtype
    assert torch.equal(expected, actual)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_shares_heads_of_key_and_value(masked: bool) -> None:
    """Six heads of the query share two of key and value, in groups of three neighbours."""

    def attended(values: Values) -> Values:
        heads = values.reshape(1, 8, 3, 2).transpose(1, 2).repeat(1, 2, 1, 1)
        mask = torch.ones(8, 8, dtype=torch.bool).tril() if masked else None
        return nn.functional.scaled_dot_product_attention(
            heads, values[..., :2, :].transpose(1, 2), values[..., 1:, :].transpose(1, 2), mask, enable_gqa=True
        )

    with further_operators(OPSET):
        model = written(attended, TOKENS)
    # Sums of 8 products of numbers below 4, in another order.
    torch.testing.assert_close(answer(model, TOKENS), attended(TOKENS), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("bins", "lowest", "highest"), [(4, 0.0, 3.0), (7, 0.0, 6.0), (5, -1.5, 2.0)])
def test_histc_counts_as_torch(bins: int, lowest: float, highest: float) -> None:
    """Values on the limits, between them and beyond are counted, and integers as in a count of experts."""
    numbers = torch.randn(400, generator=torch.Generator().manual_seed(1)) * 3
    values = torch.cat([torch.arange(-1.0, 9.0), numbers, torch.tensor([lowest, highest, highest])])
    with further_operators(OPSET):
        model = written(lambda values: torch.histc(values, bins=bins, min=lowest, max=highest), values)
    assert torch.equal(torch.histc(values, bins=bins, min=lowest, max=highest), answer(model, values))


def test_histc_over_a_range_of_its_own_is_refused() -> None:
    """The range of the values is unknown during the export."""
    with pytest.raises(UnsupportedOperatorError, match="aten::histc"), further_operators(OPSET):
        written(lambda values: torch.histc(values, bins=3), SMALL)


@pytest.mark.parametrize("counts", [[2, 3, 1, 2], [0, 8, 0, 0], [0, 0, 4, 4]], ids=str)
def test_grouped_product_takes_for_each_row_the_matrix_of_its_group(counts: list[int]) -> None:
    """Groups may be empty; the graph is traced with other groups than it is run with."""
    matrices = torch.randn(4, 12, 4, generator=torch.Generator().manual_seed(2))

    def multiplied(values: Values) -> Values:
        ends = values[:4, 0].cumsum(0).to(torch.int32)
        return nn.functional.grouped_mm(values, matrices.transpose(1, 2), offs=ends)

    def repeat_by_counts(counts: list[int]) -> Values:
        rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(3))
        rows[:4, 0] = torch.tensor(counts)
        return rows

    with further_operators(OPSET):
        model = written(multiplied, repeat_by_counts([2, 2, 2, 2]))
    values = repeat_by_counts(counts)
    # Sums of 4 products of numbers below 30, in another order.
    torch.testing.assert_close(answer(model, values), multiplied(values), rtol=1e-5, atol=1e-5)


def test_grouped_product_of_columns_is_refused() -> None:
    """A product over groups of columns is another operation."""
    values = torch.randn(4, 16, generator=torch.Generator().manual_seed(6))
    ends = torch.tensor([4, 16], dtype=torch.int32)
    with pytest.raises(UnsupportedOperatorError, match="_grouped_mm"), further_operators(OPSET):
        written(lambda values: nn.functional.grouped_mm(values, values.T, offs=ends), values)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("wanted", [(3, 4), (9, 5), (6, 12)], ids=str)
def test_antialiased_resizing_equals_torch(mode: str, aligned: bool, wanted: tuple[int, int]) -> None:
    """The size is smaller, larger, or changed along one axis only."""
    images = torch.randn(2, 3, 6, 8, generator=torch.Generator().manual_seed(4))

    def resized(values: Values) -> Values:
        return nn.functional.interpolate(values, size=wanted, mode=mode, align_corners=aligned, antialias=True)

    with further_operators(OPSET):
        model = written(resized, images)
    # Sums of at most 8 x 6 products of weights below 2, in another order.
    torch.testing.assert_close(answer(model, images), resized(images), rtol=1e-5, atol=1e-5)


def test_resizing_by_factors_equals_torch() -> None:
    """A factor without a whole size is used itself, not the ratio of the sizes."""
    images = torch.randn(1, 2, 7, 9, generator=torch.Generator().manual_seed(5))

    def resized(values: Values) -> Values:
        return nn.functional.interpolate(values, scale_factor=(0.4, 1.3), mode="bilinear", antialias=True)

    with further_operators(OPSET):
        model = written(resized, images)
    # Sums of at most 9 x 7 products of weights below 1, in another order.
    torch.testing.assert_close(answer(model, images), resized(images), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axes", [(0, -2, -1, 1), (-1, -2, -3, -4), (0, 1, -2, -1)], ids=str)
def test_permute_takes_axes_counted_from_behind(axes: tuple[int, ...]) -> None:
    """The axes may have any order."""
    with further_operators(OPSET):
        model = written(lambda values: values.permute(axes) * 1, TOKENS)
    assert torch.equal(TOKENS.permute(axes), answer(model, TOKENS))


def test_empty_index_put_is_accepted() -> None:
    """The decomposition of torch itself ends the process with SIGFPE."""
    nowhere = torch.zeros(0, dtype=torch.int64)
    with further_operators(OPSET):
        model = written(lambda values: values.index_put((nowhere,), values[:0]), SMALL)
    assert torch.equal(SMALL, answer(model, SMALL))


def test_positions_absent_in_the_trace_are_returned_later() -> None:
    """The graph is traced with a forward that finds no position."""

    def marked(values: Values) -> Values:
        flat = values.flatten().clone()
        places = torch.nonzero(flat > 8).flatten()
        flat[places] = flat[places] + 1
        return flat

    with further_operators(OPSET):
        model = written(marked, COUNTS - 5)
    for values in (COUNTS - 5, COUNTS, COUNTS + 5):
        assert torch.equal(marked(values), answer(model, values))


def test_accumulating_empty_index_put_is_refused() -> None:
    """Our decomposition covers only index_put that replaces values."""
    nowhere = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(UnsupportedOperatorError, match="index_put"), further_operators(OPSET):
        written(lambda values: values.index_put((nowhere,), values[:0], accumulate=True), SMALL)


def test_empty_values_have_the_requested_shape() -> None:
    """A size of 0 is no placeholder for another size."""

    def padded(values: Values) -> Values:
        nothing = values[:, 4:].reshape(2, 1, 2, 0).reshape(1, 4, 0)
        return torch.cat([nothing.view(2, 0), values], dim=-1)

    with further_operators(OPSET):
        model = written(padded, COUNTS)
    assert torch.equal(padded(COUNTS), answer(model, COUNTS))


def test_further_operators_are_removed_after_the_block() -> None:
    """The exporter is unchanged after the block, also after an error."""
    with pytest.raises(UnsupportedOperatorError, match="bessel_j0"), further_operators(OPSET):
        written(torch.special.bessel_j0, SMALL)
    assert not registry.is_registered_op("aten::diff", OPSET)
    with pytest.raises(UnsupportedOperatorError, match="aten::diff"):
        written(torch.diff, COUNTS)


def test_further_operators_keep_the_users_registrations() -> None:
    """A decomposition that the user registered is used, and stays."""

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
