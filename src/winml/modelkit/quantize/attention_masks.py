"""Replacement of the minimum of attention masks by a value in the integer range.

A mask adds minus infinity, or the smallest float, to scores before a Softmax. An integer range that contains this value
cannot resolve other values. Before / After::

    scores + Where(mask, 0, -inf) → Softmax → Where(IsNaN, 0, ·)      →      scores + Where(mask, 0, -m) → Softmax

Must not fire when the constant reaches a Softmax by other than additions, selections and rearrangements.
Tags: no node is created; the guard against rows without scores is removed, since no score is infinite any more.
Why it is safe: ``m`` is the spread of the scores plus a margin, so that masked values stay below the resolution of the
Softmax. A fully masked row, such as padding, averages all values instead of returning zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from winml.modelkit.onnx.fresh_names import FreshNames
from winml.modelkit.onnx.operators import walk_back
from winml.modelkit.onnx.weights import add_initializer, constant_tensor, drop_unused_initializers

_MASKING = -1e4
"""Values at or below this are mask values. Chosen: checkpoints use -1e4, -1e9, the smallest float16 or float32, and
infinity; no score is as low."""
_PASSING = frozenset({
    "Where", "Add", "Sub", "Mul", "Min", "Max", "Reshape", "Expand", "Unsqueeze", "Squeeze", "Slice", "Concat", "Tile",
    "Transpose", "Cast", "Gather", "Identity", "Clip",
})  # fmt: skip
"""Operators between a mask and the Softmax."""


def make_masks_finite(model: ir.Model) -> None:
    """Replace the constants of masks by :data:`_MASKING`, and remove guards against rows without scores, in place."""
    graph = model.graph
    fresh: FreshNames | None = None
    finite: dict[ir.Value, ir.Value] = {}
    for softmax in _find_softmaxes(model):
        for node in _masking_nodes(softmax):
            for index, value in enumerate(node.inputs):
                low = _constant_minimum(value)
                if value is None or low is None or low >= _MASKING:
                    continue
                if value not in finite:
                    fresh = fresh or FreshNames.of_graph(graph)
                    finite[value] = add_initializer(graph, _clip_mask(value, fresh.take(f"{value.name}_finite")))
                node.replace_input_with(index, finite[value])
    drop_unused_initializers(graph, finite)
    if finite:
        for softmax in _find_softmaxes(model):
            _remove_guard(softmax)


def mask_values(model: ir.Model) -> frozenset[str]:
    """Names of the values between a mask or the scores and the Softmax, which depend on the mask."""
    mask_names = {
        value.name for node in _find_softmaxes(model) for inner in _masking_nodes(node) for value in inner.outputs
    }
    return frozenset(name for name in mask_names if name)


def narrow_masks(
    model: ir.Model, ranges: Mapping[str, tuple[float, float]], bits: Mapping[str, int]
) -> dict[str, tuple[float, float]]:
    """Narrow the ranges of masks to the width required by the scores.

    Args:
        model: The model after :func:`make_masks_finite`.
        ranges: Name of a value → its smallest and largest value.
        bits: Name of a quantized node → bits of its activations.
    """
    narrowed = dict(ranges)
    lowest: dict[str, float] = {}
    for softmax in _find_softmaxes(model):
        nodes = list(_masking_nodes(softmax))
        inputs = {value.name or "": value for node in nodes for value in node.inputs if value is not None}
        scores = [ranges[name] for name in inputs if name in ranges and ranges[name][0] > _MASKING / 2]
        data = softmax.inputs[0]
        is_masked = {name: value for name, value in inputs.items() if _is_masking(name, value, ranges)}
        if data is None or softmax.name not in bits or not scores or not is_masked:
            continue
        # Specified by the Softmax: exp(-bits) is below the step of its output, 2 ** -bits.
        margin = float(bits[softmax.name or ""])
        low, high = min(0.0, *(low for low, _ in scores)), max(0.0, *(high for _, high in scores))
        for name in is_masked:
            lowest[name] = min(lowest.get(name, 0.0), low - high - margin)
        if (name := data.name or "") in ranges and ranges[name][0] <= _MASKING / 2:
            narrowed[name] = (low - margin, ranges[name][1])
    for name, low in lowest.items():
        high = ranges[name][1] if name in ranges else 0.0
        narrowed[name] = (low, high if high > low else 0.0)
    return narrowed


def _find_softmaxes(model: ir.Model) -> list[ir.Node]:
    """List the Softmax nodes of the main graph."""
    return [node for node in model.graph if node.op_type == "Softmax"]


def _masking_nodes(softmax: ir.Node) -> Iterator[ir.Node]:
    """Yield the nodes between a mask and a Softmax."""
    nodes = walk_back([softmax.inputs[0]], lambda node: node.inputs if node.op_type in _PASSING else ())
    return (node for node in nodes if node.op_type in _PASSING)


def _constant_minimum(value: ir.Value | None) -> float | None:
    """Return the smallest number of a float32 constant; ``None`` for other values."""
    tensor = constant_tensor(value)
    if tensor is None or tensor.dtype != ir.DataType.FLOAT:
        return None
    array = np.asarray(tensor.numpy())
    return float(array.min()) if array.size else None


def _is_masking(name: str, value: ir.Value, ranges: Mapping[str, tuple[float, float]]) -> bool:
    """Return True if the minimum of a value, constant or measured, is far below any score."""
    low = _constant_minimum(value)
    return low <= _MASKING if low is not None else name in ranges and ranges[name][0] <= _MASKING / 2


def _clip_mask(value: ir.Value, name: str) -> ir.TensorProtocol:
    """Return the constant with its most negative numbers replaced."""
    assert value.const_value is not None  # its minimum was read
    array = np.maximum(np.asarray(value.const_value.numpy()), np.float32(_MASKING))
    return ir.Tensor(array, name=name)


def _remove_guard(softmax: ir.Node) -> None:
    """Remove ``Where(IsNaN(y), 0, y)`` after a Softmax, in place."""
    result = softmax.outputs[0]
    tests = [node for node, _ in result.uses() if node.op_type == "IsNaN"]
    graph = softmax.graph
    for test in tests:
        guards = [node for node, index in test.outputs[0].uses() if node.op_type == "Where" and index == 0]
        if graph is None or len(guards) != len(list(test.outputs[0].uses())):
            continue
        for guard in guards:
            if guard.inputs[2] is not result or guard.outputs[0].is_graph_output():
                continue
            for node, index in list(guard.outputs[0].uses()):
                node.replace_input_with(index, result)
            graph.remove(guard, safe=True)
        if not test.outputs[0].uses():
            graph.remove(test, safe=True)
