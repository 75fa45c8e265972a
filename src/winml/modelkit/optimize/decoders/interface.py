"""Roles of the inputs of a decoder with a cache.

Read from the file's metadata (``winml.io.inputs``), and from the input names of common runtimes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from winml.modelkit.arrays import Array
from winml.modelkit.onnx.specs import stated_inputs
from winml.modelkit.optimize.graph_matching import shape_of

_TOKENS, _EMBEDDED, _MASK, _POSITIONS = "input_ids", "inputs_embeds", "attention_mask", "position_ids"
"""Specified: names of optimum, transformers.js and onnxruntime-genai."""


@dataclass(frozen=True)
class DecoderInterface:
    """The inputs of a graph with a cache."""

    tokens: ir.Value
    """Rows × tokens, or their embeddings: rows × tokens × size."""
    mask: ir.Value
    """Rows × all tokens, including tokens in the cache: 1 for valid tokens."""
    positions: ir.Value | None
    """Rows × tokens."""
    position_count: int | None
    """Number of positions; None: unknown."""
    windows: Mapping[str, int]
    """Cache input → number of last tokens that its layer attends to, for layers with a window."""
    names: Mapping[str, str]
    """Name of a dynamic size → which it is: ``rows``, ``tokens``, ``past`` or ``total``."""

    @classmethod
    def of(cls, model: ir.Model) -> DecoderInterface | None:
        """Identify the inputs of a graph; `None` without a cache, or if an input name has an unknown use."""
        inputs = {str(value.name): value for value in model.graph.inputs}
        tokens, mask = inputs.get(_TOKENS, inputs.get(_EMBEDDED)), inputs.get(_MASK)
        mask_shape = shape_of(mask, 2)
        if tokens is None or mask is None or mask_shape is None or mask.dtype != ir.DataType.INT64:
            return None
        recorded_inputs = stated_inputs(model.metadata_props)
        slots = {name: record.cache for name, record in recorded_inputs.items() if record.cache is not None}
        keys = [shape for name in slots if (shape := shape_of(inputs.get(name), 4)) is not None]
        token_shape = shape_of(tokens, 2) or shape_of(tokens, 3)
        if not keys or token_shape is None:
            return None
        kinds = (
            ("rows", token_shape[0]),
            ("tokens", token_shape[1]),
            ("past", keys[0][2]),
            ("total", mask_shape[1]),
        )
        names = {str(size.value): kind for kind, size in kinds if isinstance(size, ir.SymbolicDim)}
        positions = recorded_inputs[_POSITIONS].value_range if _POSITIONS in recorded_inputs else None
        return cls(
            tokens=tokens,
            mask=mask,
            positions=inputs.get(_POSITIONS),
            position_count=int(positions[1]) + 1 if positions is not None else None,
            windows={name: slot.window for name, slot in slots.items() if slot.window is not None},
            names=names,
        )

    def is_sized(self, value: ir.Value) -> bool:
        """Return True if a mask reads only the shape of a value: a float tensor whose sizes are input dimensions."""
        shape = shape_of(value, 3)
        if shape is None or value.dtype is None or not value.dtype.is_floating_point() or value.is_initializer():
            return False
        return all(isinstance(size, int) or size.value in self.names for size in shape)

    def feeds(
        self, leaves: Sequence[ir.Value], mask: Array, tokens: int, generator: np.random.Generator
    ) -> dict[ir.Value, Array] | None:
        """Draw inputs for a subgraph; `None` if a size is unknown.

        Args:
            leaves: Inputs of the subgraph.
            mask: Mask of all tokens.
            tokens: Number of new tokens.
            generator: Generator of the values on which a mask does not depend.
        """
        rows, total = mask.shape
        sizes = {"rows": rows, "tokens": tokens, "past": total - tokens, "total": total}
        feeds: dict[ir.Value, Array] = {}
        for leaf in leaves:
            if leaf is self.mask:
                feeds[leaf] = mask
                continue
            if leaf is self.positions:
                feeds[leaf] = (mask.cumsum(-1) - 1).clip(0)[:, total - tokens :]
                continue
            shape = [
                size if isinstance(size, int) else sizes.get(self.names.get(str(size.value), ""))
                for size in leaf.shape or ()
            ]
            if leaf.shape is None or leaf.dtype is None or None in shape:
                return None
            feeds[leaf] = generator.integers(0, 99, [size for size in shape if size is not None]).astype(
                leaf.dtype.numpy()
            )
        return feeds
