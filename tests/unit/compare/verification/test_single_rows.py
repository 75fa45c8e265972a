"""Several tokens after a cache, run row by row because some operators accept one row only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from graphs import parse
from winml.modelkit.compare.verification.single_rows import feeds_by_rows, joined_rows, takes_single_rows


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
