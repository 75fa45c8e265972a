"""Count of multiply-accumulate operations from shapes, unknown for unknown shapes."""

from __future__ import annotations

from typing import Any

import pytest
from onnx import helper

from winml.modelkit.onnx.macs import count_macs, is_counted

Sizes = tuple[Any, ...]


def _count_node_macs(
    operator: str, inputs: list[Sizes | None], output: Sizes = (), domain: str = "", **attributes: Any
) -> int | None:
    names = ["" if shape is None else f"x{index}" for index, shape in enumerate(inputs)]
    node = helper.make_node(operator, names, ["y"], domain=domain, **attributes)
    shapes = {name: shape for name, shape in zip(names, inputs, strict=True) if shape is not None}
    return count_macs(node, {**shapes, "y": output})


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ([(3, 4), (4, 5)], 3 * 4 * 5),
        ([(2, 7, 3, 4), (2, 7, 4, 5)], 14 * 3 * 4 * 5),
        ([(2, 1, 3, 4), (7, 4, 5)], 14 * 3 * 4 * 5),
        ([(4,), (4, 5)], 4 * 5),
        ([(3, 4), (4,)], 3 * 4),
        ([(4,), (4,)], 4),
        ([(0, 4), (4, 5)], 0),
    ],
)
def test_count_macs_matrix_product_multiplies_all_sizes(inputs: list[Sizes], expected: int) -> None:
    """Batches broadcast, and a vector is a matrix of one row or column."""
    assert expected == _count_node_macs("MatMul", inputs)


def test_count_macs_gemm_obeys_transposition() -> None:
    """M, N and K follow from the transposition attributes."""
    assert 3 * 4 * 5 == _count_node_macs("Gemm", [(4, 3), (5, 4), (5,)], transA=1, transB=1)
    assert 3 * 4 * 5 == _count_node_macs("Gemm", [(3, 4), (4, 5)])
    assert 2 * 3 * 4 * 5 == _count_node_macs("FusedMatMul", [(2, 3, 4), (2, 5, 4)], domain="com.microsoft", transB=1)


def test_count_macs_convolution_counts_one_window_per_output() -> None:
    """Groups and kernel come with the weight, stride and padding with the output."""
    assert 8 * 7 * 7 * 3 * 5 * 5 == _count_node_macs(
        "Conv", [(1, 3, 16, 16), (8, 3, 5, 5)], (1, 8, 7, 7), strides=[2, 2]
    )
    assert 8 * 16 * 16 * 9 == _count_node_macs("Conv", [(1, 8, 16, 16), (8, 1, 3, 3)], (1, 8, 16, 16), group=8)
    assert 8 * 4 * 4 * 3 * 9 == _count_node_macs(
        "FusedConv", [(1, 3, 4, 4), (8, 3, 3, 3)], (1, 8, 4, 4), domain="com.microsoft"
    )
    assert 8 * 4 * 4 * 6 * 9 == _count_node_macs("ConvTranspose", [(1, 8, 4, 4), (8, 6, 3, 3)], (1, 6, 8, 8))


def test_count_macs_quantized_operators_use_the_shape_of_the_weight() -> None:
    """Scales and zero points lie between the operands."""
    scalar: Sizes = ()
    assert 60 == _count_node_macs("QLinearMatMul", [(3, 4), scalar, scalar, (4, 5), scalar, scalar, scalar, scalar])
    assert 60 == _count_node_macs("MatMulInteger", [(3, 4), (4, 5)])
    assert 8 * 16 * 27 == _count_node_macs("QLinearConv", [(1, 3, 6, 6), scalar, scalar, (8, 3, 3, 3)], (1, 8, 4, 4))
    assert 2 * 3 * 64 * 32 == _count_node_macs(
        "MatMulNBits", [(2, 3, 64), (32, 2, 16)], domain="com.microsoft", N=32, K=64
    )


@pytest.mark.parametrize("operator", ["MoE", "QMoE"])
def test_count_macs_experts_count_the_selected_ones(operator: str) -> None:
    """Seven tokens with two of four experts of 16 → 32 → 16 values; the last size of packed weights is in bytes."""
    inputs: list[Sizes | None] = [(7, 16), (7, 4), (4, 64, 8)]
    found = _count_node_macs(operator, inputs, domain="com.microsoft", k=2, swiglu_fusion=1)
    assert 7 * 2 * (2 * 32 * 16 + 32 * 16) == found


def test_count_macs_recurrence_multiplies_every_step() -> None:
    """An LSTM of 6 features and 5 states over 7 steps of 2 rows."""
    assert 7 * 2 * 4 * 5 * (6 + 5) == _count_node_macs("LSTM", [(7, 2, 6), (1, 20, 6), (1, 20, 5)], hidden_size=5)


@pytest.mark.parametrize(
    ("equation", "inputs", "expected"),
    [
        ("bij, bjk -> bik", [(2, 3, 4), (2, 4, 5)], 2 * 3 * 4 * 5),
        ("ij->ji", [(3, 4)], 0),
        ("i,j,k->ijk", [(2,), (3,), (4,)], None),
        ("...ij,...jk->...ik", [(2, 3, 4), (2, 4, 5)], None),
    ],
)
def test_count_macs_einsum_of_two_operands(equation: str, inputs: list[Sizes], expected: int | None) -> None:
    """Two operands take one product for every combination of indices; more depend on the order."""
    assert expected == _count_node_macs("Einsum", inputs, equation=equation)


def test_count_macs_attention_counts_scores_and_values() -> None:
    """Both layouts of the inputs, cross attention and a past give scores plus weighted values."""
    heads, queries, keys, size = 2, 3, 5, 4
    expected = 2 * heads * queries * keys * size
    four = [(1, heads, queries, size), (1, heads, keys, size), (1, heads, keys, size)]
    assert expected == _count_node_macs("Attention", four, (1, heads, queries, size))
    three = [(1, queries, heads * size), (1, keys, heads * size), (1, keys, heads * size)]
    assert expected == _count_node_macs("Attention", three, (1, queries, heads * size))
    assert expected == _count_node_macs("MultiHeadAttention", three, (1, queries, heads * size), domain="com.microsoft")
    past = [*three, None, (1, heads, 2, size)]
    assert 2 * heads * queries * (keys + 2) * size == _count_node_macs("Attention", past, (1, queries, heads * size))
    projected = 1 * 3 * 8 * 24 + 2 * 3 * 3 * 8
    assert projected == _count_node_macs("Attention", [(1, 3, 8), (8, 24), (24,)], (1, 3, 8), domain="com.microsoft")


@pytest.mark.parametrize(
    ("operator", "inputs", "domain"),
    [
        ("MatMul", [("batch", 4), (4, 5)], ""),
        ("MatMul", [(None, 4), (4, 5)], ""),
        ("MatMul", [None, (4, 5)], ""),
        ("Conv", [(1, 3, 4, 4), (8, 3, 3, 3)], ""),
        ("DFT", [(1, 4, 1)], ""),
        ("GroupQueryAttention", [(1, 4, 8)], "com.microsoft"),
        ("EPContext", [(1, 4)], "com.microsoft"),
        ("MatMul", [(3, 4), (4, 5)], "example.custom"),
        ("InventedTomorrow", [(3, 4)], ""),
    ],
)
def test_count_macs_without_static_shapes_or_definition_is_unknown(
    operator: str, inputs: list[Sizes | None], domain: str
) -> None:
    """Unknown counts are not zero."""
    assert _count_node_macs(operator, inputs, ("batch", 5), domain=domain) is None


@pytest.mark.parametrize(
    ("operator", "domain"), [("Add", ""), ("LayerNormalization", ""), ("FastGelu", "com.microsoft"), ("If", "")]
)
def test_count_macs_of_other_operators_is_zero(operator: str, domain: str) -> None:
    """Only products that are added up count, for every shape."""
    assert 0 == _count_node_macs(operator, [("batch",)], ("batch",), domain=domain)
    assert not is_counted(helper.make_node(operator, [], [], domain=domain))
