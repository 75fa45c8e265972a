"""Row-by-row runs of a decoder whose operators support several tokens after a cache for one row only.

ONNX Runtime's ``GroupQueryAttention`` has this limit. Rows are independent, so the outputs are equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.ort.decoding.inputs import MASK, POSITIONS, TOKEN_IDS, TOKEN_VECTORS
from winml.modelkit.tags.tagging import all_nodes

_OPERATOR = "GroupQueryAttention"
_TOKENS = (TOKEN_IDS, TOKEN_VECTORS)


def takes_single_rows(model: ir.Model) -> bool:
    """Return True if a graph supports several tokens after a cache for one row at a time only."""
    return any(node.op_type == _OPERATOR for node in all_nodes(model))


def feeds_by_rows(feeds: Arrays) -> list[Arrays]:
    """Split the feeds of such a graph into runs: all rows at once if supported, else one row each.

    Args:
        feeds: Input name → array.
    """
    tokens, mask = next((feeds[name] for name in _TOKENS if name in feeds), None), feeds.get(MASK)
    if tokens is None or mask is None or len(tokens) < 2 or not 1 < tokens.shape[1] < mask.shape[1]:
        return [feeds]
    return [{name: _row_of(name, array, row) for name, array in feeds.items()} for row in range(len(tokens))]


def _row_of(name: str, array: Array, row: int) -> Array:
    # Positions in several rows have the rows of texts along the second axis.
    return array[:, row : row + 1] if name == POSITIONS and array.ndim > 2 else array[row : row + 1]


def joined_rows(outputs: Sequence[Arrays]) -> Arrays:
    """Join the outputs of the runs of :func:`feeds_by_rows`."""
    first, *others = outputs
    return {name: np.concatenate([output[name] for output in outputs]) for name in first} if others else first
