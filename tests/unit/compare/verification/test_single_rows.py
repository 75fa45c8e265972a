"""Several tokens after a cache, run row by row because some operators accept one row only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from graphs import parse
from winml.modelkit.compare.verification.single_rows import (
    feeds_by_rows,
    joined_rows,
    reads_consecutive_tokens,
    takes_single_rows,
    with_consecutive_tokens,
)


class _Sums:
    """A session that adds tokens up along each row, and stores the number of rows."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, feeds: Any) -> Any:
        """Return the sums."""
        self.rows.append(len(feeds["input_ids"]))
        return {"sums": feeds["input_ids"].cumsum(-1)}


@pytest.mark.parametrize(
    ("rows", "tokens", "past", "runs"), [(3, 2, 4, [1, 1, 1]), (3, 2, 0, [3]), (3, 1, 4, [3]), (1, 2, 4, [1])]
)
def test_rows_run_separately_only_for_several_tokens_after_a_cache(
    rows: int, tokens: int, past: int, runs: list[int]
) -> None:
    """A prompt and a step run all rows at once; the output has all rows in order in every case."""
    feeds = {
        "input_ids": np.arange(rows * tokens).reshape(rows, tokens),
        "attention_mask": np.ones((rows, past + tokens), np.int64),
    }
    run = _Sums()
    answer = joined_rows([run(rows) for rows in feeds_by_rows(feeds)])
    np.testing.assert_array_equal(answer["sums"], feeds["input_ids"].cumsum(-1))
    assert run.rows == runs


def test_operator_limited_to_one_row_is_detected() -> None:
    """The operator is ONNX Runtime's attention over a cache."""
    plain = parse("m (float[2] x) => (float[2] y) { y = Neg (x) }")
    assert not takes_single_rows(plain)
    next(iter(plain.graph)).op_type = "GroupQueryAttention"
    assert takes_single_rows(plain)


@pytest.mark.parametrize(("rotates", "bias", "expected"), [(0, "b", False), (1, "b", True), (0, "", True)])
def test_attention_that_counts_in_the_cache_needs_consecutive_tokens(rotates: int, bias: str, expected: bool) -> None:
    """It rotates by the place in the cache, or hides padding by lengths instead of a mask."""
    inputs = f"x, x, x, , , x, x, , , , {bias}" if bias else "x, x, x, , , x, x"
    attention = f"com.microsoft.GroupQueryAttention <num_heads = 1, kv_num_heads = 1, do_rotary = {rotates}>"
    text = f"m (float[2] x, float[2] b) => (float[2] y) {{ y = {attention} ({inputs}) }}"
    assert expected == reads_consecutive_tokens(parse(text, domains=', "com.microsoft" : 1'))
    assert not reads_consecutive_tokens(parse("m (float[2] x) => (float[2] y) { y = Neg (x) }"))


def test_consecutive_tokens_have_no_padding_and_their_place_as_position() -> None:
    feeds = {
        "input_ids": np.array([[7, 8], [9, 4]]),
        "attention_mask": np.array([[1, 0, 1, 0, 1], [1] * 5]),
        "position_ids": np.array([[9, 2], [4, 4]]),
    }
    changed = with_consecutive_tokens(feeds)
    assert feeds["input_ids"] is changed["input_ids"]
    assert changed["attention_mask"].all()
    assert [[3, 4], [3, 4]] == changed["position_ids"].tolist()
