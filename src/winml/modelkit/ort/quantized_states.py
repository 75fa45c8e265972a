"""Conversion of a KV cache to the type of another graph: 8-bit integers, float16 or float32.

Scales of integers are read from the attention nodes of the file. A graph with an integer cache is thus fed and compared
like a graph with a float cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.onnx.specs import PAST_PREFIX

if TYPE_CHECKING:
    from pathlib import Path

    from winml.modelkit.ort.sessions import Session

_OPERATOR, _DOMAIN = "GroupQueryAttention", "com.microsoft"
_STATES_OF_SCALES = {12: (3, 1), 13: (4, 2)}
"""Specified: positions of the key and value scales among the inputs → positions of the past among the inputs and of the
present among the outputs.
"""
_INTEGERS = "tensor(int8)"
"""Specified by ONNX Runtime: type of a cache in 8 bits."""
_FLOATS: Mapping[str, type[np.floating[Any]]] = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


@dataclass(frozen=True)
class QuantizedStates:
    """Scales of the 8-bit states of a graph."""

    scales: Mapping[str, Array] = field(default_factory=dict)
    """Name of an input or output of the graph → scale of its integers, broadcast to its shape."""
    float_inputs: Mapping[str, type[np.floating[Any]]] = field(default_factory=dict)
    """Input of the graph in float32 or float16 → its type."""

    @classmethod
    def of(cls, path: Path, session: Session) -> QuantizedStates:
        """Read the quantized states of a file; the file is read only if the session has 8-bit integer inputs.

        Args:
            path: The file.
            session: The opened file.
        """
        float_inputs = {name: _FLOATS[words] for name, words in session.inputs.items() if words in _FLOATS}
        if _INTEGERS not in session.inputs.values():
            return cls(float_inputs=float_inputs)
        from winml.modelkit.onnx.files.graph_reading import load_by_reference

        scales: dict[str, Array] = {}
        for node in load_by_reference(path).graph:
            if node.op_type != _OPERATOR or node.domain != _DOMAIN:
                continue
            for index, (past, present) in _STATES_OF_SCALES.items():
                scale = node.inputs[index] if len(node.inputs) > index else None
                if scale is not None and scale.const_value is not None:
                    values = (node.inputs[past], node.outputs[present])
                    names = [str(value.name) for value in values if value is not None]
                    if session.inputs.get(names[0]) == _INTEGERS:
                        scales.update(dict.fromkeys(names, scale.const_value.numpy()))
        return cls(scales, float_inputs)

    def quantized(self, feeds: Arrays) -> dict[str, Array]:
        """Return the inputs of a graph, with float states quantized to their integers.

        Empty states of another graph, as before a prompt, get the type of this graph.
        """
        return {name: self._fit_array(name, array) for name, array in feeds.items()}

    def _fit_array(self, name: str, array: Array) -> Array:
        """Quantize a float state; give a state the float type of the graph. Other arrays are returned unchanged."""
        if name in self.scales:
            if array.dtype == np.int8:
                return array
            return np.clip(np.round(array.astype(np.float32) / self.scales[name]), -128, 127).astype(np.int8)
        is_float = name in self.float_inputs and (name.startswith(PAST_PREFIX) or array.dtype == np.int8)
        has_values = array.dtype == np.int8 and array.size  # integers without a scale
        return array.astype(self.float_inputs[name]) if is_float and not has_values else array

    def dequantized(self, outputs: Arrays) -> dict[str, Array]:
        """Return the outputs of a graph, with integer states dequantized."""
        return {
            name: array if name not in self.scales else array.astype(np.float32) * self.scales[name]
            for name, array in outputs.items()
        }
