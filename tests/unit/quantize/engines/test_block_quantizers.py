"""GPTQ and AWQ on matrices, compared with plain rounding and with brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from winml.modelkit.arrays import Array
from winml.modelkit.errors import QuantizeError
from winml.modelkit.quantize.declared_options import Algorithm
from winml.modelkit.quantize.engines.block_quantizers import (
    BlockFormat,
    InputStatistics,
    awq_scale,
    factor_in_place,
    gptq_blocks,
    output_error,
    pack_blocks,
    quantize_blocks,
    relative_error,
    unpack_blocks,
)

DEPTH, WIDTH = 96, 24


def correlated_inputs(rows: int = 400) -> Array:
    """Return rows with correlated columns of very different sizes."""
    generator = np.random.default_rng(0)
    mixed = generator.standard_normal((rows, 12)) @ generator.standard_normal((12, DEPTH))
    noise = 0.3 * generator.standard_normal((rows, DEPTH))
    inputs: Array = ((mixed + noise) * np.exp(generator.standard_normal(DEPTH))).astype(np.float32)
    return inputs


def statistics_of(inputs: Array) -> InputStatistics:
    """Return statistics of inputs, added in three parts."""
    statistics = InputStatistics.of_depth(inputs.shape[-1])
    for part in np.array_split(inputs, 3):
        statistics.add(part)
    return statistics


def matrix() -> Array:
    """Return weights."""
    return np.random.default_rng(1).standard_normal((DEPTH, WIDTH)).astype(np.float32)


def form_of(
    bits: int, block_size: int = 32, algorithm: Algorithm = "rtn", *, is_symmetric: bool = False
) -> BlockFormat:
    """Return the settings of blocks."""
    return BlockFormat(bits, block_size, is_symmetric=is_symmetric, algorithm=algorithm)


def test_error_of_outputs_follows_from_the_gram_matrix() -> None:
    """The squared error of the outputs is that of the product with the inputs themselves."""
    inputs, weights = correlated_inputs(), matrix()
    difference = weights - np.round(weights)
    expected = float(((inputs @ difference) ** 2).sum())
    assert expected == pytest.approx(output_error(difference, statistics_of(inputs)), rel=1e-4)


@pytest.mark.parametrize("size", [1, 5, 511, 513, 1100])
def test_factor_times_its_transpose_is_the_matrix(size: int) -> None:
    """The factor is upper triangular, also of matrices that are factored in pieces."""
    rows = np.random.default_rng(2).standard_normal((size + 20, size)).astype(np.float32)
    gram = rows.T @ rows + np.eye(size, dtype=np.float32)
    factor = factor_in_place(gram.copy())
    assert not np.tril(factor, -1).any()
    np.testing.assert_allclose(gram, factor @ factor.T, atol=1e-5 * float(gram.max()))


def test_factor_of_an_indefinite_matrix_is_refused() -> None:
    """A Gram matrix with a negative eigenvalue is refused."""
    with pytest.raises(QuantizeError):
        factor_in_place(-np.eye(4, dtype=np.float32))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("is_symmetric", [False, True])
def test_gptq_errs_less_than_rounding_on_correlated_inputs(bits: int, *, is_symmetric: bool) -> None:
    """The outputs are nearer than with rounding to the nearest, at the same size."""
    weights, statistics, form = matrix(), statistics_of(correlated_inputs()), form_of(bits, is_symmetric=is_symmetric)
    rounded = quantize_blocks(weights, form)
    before = relative_error(unpack_blocks(rounded, form, DEPTH) - weights, weights, statistics)
    blocks = gptq_blocks(weights, statistics_of(correlated_inputs()), form)
    values = unpack_blocks(blocks, form, DEPTH)
    assert relative_error(values - weights, weights, statistics) < 0.5 * before
    assert [part.shape for part in rounded if part is not None] == [part.shape for part in blocks if part is not None]


def test_gptq_of_whole_channels_has_positive_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """Integers of a DequantizeLinear: one scale for a channel, without the smallest integer, however rows are added."""
    form = BlockFormat(4, DEPTH, is_symmetric=True, algorithm="rtn", has_positive_scales=True)
    weights, statistics, found = matrix(), statistics_of(correlated_inputs()), []
    for rows in (DEPTH, 20):  # rows whose errors are added one by one
        monkeypatch.setattr("winml.modelkit.quantize.engines.block_quantizers._ROWS", rows)
        blocks = gptq_blocks(weights, statistics_of(correlated_inputs()), form)
        values = unpack_blocks(blocks, form, DEPTH)
        assert (blocks.scales > 0).all()
        assert np.abs(values / blocks.scales.T).max() < 7.01
        found.append(relative_error(values - weights, weights, statistics))
    scales = np.abs(weights).max(axis=0) / 7
    nearest = np.rint(weights / scales) * scales
    assert max(found) < 0.5 * relative_error(nearest - weights, weights, statistics)
    assert abs(found[0] - found[1]) < 0.05 * found[0]


def test_gptq_is_close_to_brute_force() -> None:
    """Brute force over all steps of the same grid finds hardly better values for one short column."""
    generator = np.random.default_rng(3)
    depth = 8
    inputs = (generator.standard_normal((60, 3)) @ generator.standard_normal((3, depth))).astype(np.float32)
    inputs += 0.3 * generator.standard_normal(inputs.shape).astype(np.float32)
    weights = generator.standard_normal((depth, 1)).astype(np.float32)
    statistics, form = statistics_of(inputs), form_of(2, 16)
    blocks = gptq_blocks(weights, statistics_of(inputs), form)
    values = unpack_blocks(blocks, form, depth)
    assert blocks.zero_points is not None
    scale, zero_point = float(blocks.scales[0, 0]), float(blocks.zero_points[0, 0] & 3)
    steps = np.array(list(itertools.product(range(4), repeat=depth)), np.float32)
    products = inputs @ ((steps.T - zero_point) * scale - weights)
    best = float((products**2).sum(axis=0).min())
    rounded = np.clip(np.rint(weights / scale) + zero_point, 0, 3)
    nearest = output_error((rounded - zero_point) * scale - weights, statistics)
    found = output_error(values - weights, statistics)
    assert best - 1e-4 <= found <= nearest
    assert found <= 2 * best


def test_gptq_of_inputs_that_never_vary_is_finite() -> None:
    """A channel that is zero on all samples, and no sample at all, give numbers."""
    inputs = correlated_inputs()
    inputs[:, 5] = 0
    for statistics in (statistics_of(inputs), InputStatistics.of_depth(DEPTH)):
        blocks = gptq_blocks(matrix(), statistics, form_of(4))
        assert np.isfinite(unpack_blocks(blocks, form_of(4), DEPTH)).all()


def test_gptq_of_a_depth_that_blocks_do_not_divide() -> None:
    """The last block is filled up."""
    weights, inputs = matrix()[:70], correlated_inputs()[:, :70]
    blocks = gptq_blocks(weights, statistics_of(inputs), form_of(4))
    assert (WIDTH, 3, 16) == blocks.packed.shape
    error = relative_error(unpack_blocks(blocks, form_of(4), 70) - weights, weights, statistics_of(inputs))
    assert error < 0.01


def test_awq_scale_improves_outputs_for_inputs_of_different_size() -> None:
    """The scale reduces the output error; inputs of equal size need none, and a scale does no harm."""
    weights, statistics, form = matrix(), statistics_of(correlated_inputs()), form_of(4)
    scale = awq_scale([weights], statistics, [form])
    assert scale is not None
    plain = unpack_blocks(quantize_blocks(weights, form), form, DEPTH)
    scaled = unpack_blocks(quantize_blocks(weights * scale[:, None], form), form, DEPTH) / scale[:, None]
    assert output_error(scaled - weights, statistics) < output_error(plain - weights, statistics)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_packed_blocks_unpack_to_the_same_steps(bits: int, count: int) -> None:
    """Steps, scales and zero points of any number of blocks come back."""
    generator = np.random.default_rng(4)
    steps = generator.integers(0, 2**bits, (3, count, 16)).astype(np.uint8)
    scales = generator.random((3, count)).astype(np.float32)
    zero_points = generator.integers(0, 2**bits, (3, count)).astype(np.uint8)
    form = form_of(bits, 16)
    expected = ((steps.astype(np.float32) - zero_points[:, :, None]) * scales[:, :, None]).reshape(3, -1).T
    np.testing.assert_array_equal(
        expected, unpack_blocks(pack_blocks(steps, scales, zero_points, form), form, 16 * count)
    )
