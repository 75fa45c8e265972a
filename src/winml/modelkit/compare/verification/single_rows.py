"""Limits of decoders with ONNX Runtime's ``GroupQueryAttention``, and inputs within them.

The operator supports several tokens after a cache for one row only. Rows are independent, so row-by-row runs have equal
outputs. It may count positions in the cache, or hide padding by lengths: tokens of a row are then consecutive.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.ort.decoding.inputs import MASK, POSITIONS, TOKEN_IDS, TOKEN_VECTORS
from winml.modelkit.tags.tagging import all_nodes

_OPERATOR, _BIAS = "GroupQueryAttention", 10
"""Specified by ONNX Runtime: the operator, and its input with a mask that is added to the scores."""
_TOKENS = (TOKEN_IDS, TOKEN_VECTORS)


def takes_single_rows(model: ir.Model) -> bool:
    """Return True if a graph supports several tokens after a cache for one row at a time only."""
    return any(node.op_type == _OPERATOR for node in all_nodes(model))


def reads_consecutive_tokens(model: ir.Model) -> bool:
    """Return True if a graph has the outputs of its source for rows of consecutive tokens only."""
    attentions = [node for node in all_nodes(model) if node.op_type == _OPERATOR]
    return any(
        node.attributes.get_int("do_rotary", 0) or len(node.inputs) <= _BIAS or node.inputs[_BIAS] is None
        for node in attentions
    )


def with_consecutive_tokens(feeds: Arrays) -> Arrays:
    """Return the inputs of a decoder with a cache without padding, and with consecutive positions."""
    total = feeds[MASK].shape[1]
    changed = {MASK: np.ones_like(feeds[MASK])}
    if POSITIONS in feeds:
        positions = feeds[POSITIONS]
        counted = np.arange(total - positions.shape[-1], total, dtype=positions.dtype)
        changed[POSITIONS] = np.broadcast_to(counted, positions.shape).copy()
    return {**feeds, **changed}


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
