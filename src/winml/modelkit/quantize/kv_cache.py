"""Quantization of a decoder's KV cache to 8 bits: each attention quantizes new keys and values.

ONNX Runtime's ``GroupQueryAttention`` supports a cache of symmetric integers with constant scales, here one per channel
of each head. Before / After::

    q, k, v, past (float) → GroupQueryAttention → y, present (float)
    q, k, v, past (int8), scales of keys, scales of values → GroupQueryAttention → y, present (int8)

Must not fire when the past is not an input, or the present not an output, of the graph; when nodes other than Shape and
the attention read the past, or any node reads the present; or when the output type is neither float32 nor float16.

Tags: keeps. Measures nothing: the maximum values are arguments.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from winml.modelkit.arrays import Array
from winml.modelkit.errors import QuantizeError, UsageError, opt
from winml.modelkit.metadata_keys import QUANTIZATION_KEY
from winml.modelkit.onnx.fresh_names import FreshNames
from winml.modelkit.onnx.specs import PAST_PREFIX, PRESENT_PREFIX
from winml.modelkit.onnx.weights import add_initializer
from winml.modelkit.options import load_metadata_record
from winml.modelkit.quantize.precisions import INT8
from winml.modelkit.words import count_noun

_OPERATOR, _DOMAIN = "GroupQueryAttention", "com.microsoft"
_PAST, _PRESENT, _SCALES = (3, 4), (1, 2), (12, 13)
"""Specified: input and output positions of keys and values, and input positions of their scales."""
_CACHE_DTYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
"""Specified by ONNX Runtime 1.31: activation types for which the CPU kernel supports an integer cache."""
_HALF = ir.DataType.FLOAT16
_LARGEST = 127 / 1.25
"""Code of the largest measured value; the kernel's maximum is 127. Chosen: a quarter of headroom for values that
samples do not contain. Measured on a small decoder, 16 sentences: 33 dB instead of 27 dB without headroom; 36 dB with
256 sentences and no headroom."""


@dataclass(frozen=True)
class CachedStates:
    """Keys and values of one attention node."""

    node: ir.Node
    past: tuple[ir.Value, ir.Value]
    """Inputs of the graph: rows × heads × tokens × channels."""
    present: tuple[ir.Value, ir.Value]
    """Outputs of the graph."""


def attentions_over_cache(graph: ir.Graph) -> Iterator[CachedStates]:
    """Yield the attentions whose cache may be quantized."""
    for node in graph:
        if node.op_type != _OPERATOR or node.domain != _DOMAIN or len(node.outputs) < 3:
            continue
        key, value = (node.inputs[index] for index in _PAST)
        present = (node.outputs[_PRESENT[0]], node.outputs[_PRESENT[1]])
        if key is None or value is None or node.outputs[0].dtype not in _CACHE_DTYPES:
            continue
        are_free = all(_is_free_past(past, node) for past in (key, value))
        if are_free and all(output.is_graph_output() and not output.uses() for output in present):
            yield CachedStates(node, (key, value), present)


def _is_free_past(past: ir.Value, attention: ir.Node) -> bool:
    """Return True if a past state is a float graph input read only by the attention and Shape nodes."""
    if not past.is_graph_input() or past.dtype not in _CACHE_DTYPES or past.shape is None or len(past.shape) != 4:
        return False
    return all(reader is attention or reader.op_type == "Shape" for reader in past.consumers())


def refuse_no_cache(model: ir.Model) -> None:
    """Refuse a graph without an attention that supports an integer cache.

    Raises:
        UsageError: names a command that creates such a graph.
    """
    if next(attentions_over_cache(model.graph), None) is None:
        raise UsageError(
            f"{opt.kv_cache} int8: the graph has no {_OPERATOR} node with a floating-point KV cache",
            hint="Build a decoder with a KV cache: winml build --kv-cache int8 fuses its attention. For an ONNX "
            "file, run winml optimize --enable-group-query-attention-fusion first.",
        )


def quantize_cache(model: ir.Model, maxima: Mapping[str, Array]) -> tuple[str, ...]:
    """Quantize the cache of every supported attention, in place, and record it in the metadata; return notes.

    Args:
        model: The model.
        maxima: Name of each output with keys or values → maximum absolute values, heads × channels.

    Raises:
        QuantizeError: a value is NaN or infinite.
    """
    fresh = FreshNames.of_graph(model.graph)
    attentions = list(attentions_over_cache(model.graph))
    for states in attentions:
        scales = [_register_scales(model.graph, value, maxima, fresh) for value in states.present]
        _set_scale_inputs(states.node, scales)
        for kind in ("k", "v"):
            states.node.attributes.add(ir.AttrString(f"{kind}_quant_type", "PER_CHANNEL"))
        states.node.attributes.add(ir.AttrInt64("kv_cache_bit_width", 8))
        for value in (*states.past, *states.present):
            value.type = ir.TensorType(ir.DataType.INT8)
    record = _read_record(model)
    record.setdefault("requested", {})["kv_cache"] = INT8
    record.setdefault("modules", [])
    record["kv_cache"] = {"precision": INT8, "attentions": len(attentions)}
    model.metadata_props[QUANTIZATION_KEY] = json.dumps(record, ensure_ascii=False)
    floats = sum(node.op_type == _OPERATOR for node in model.graph) - len(attentions)
    reason = "other nodes read it too, or it is not an input."
    return (f"{count_noun(floats, 'attention')} with a KV cache in floating point: {reason}",) if floats else ()


def _read_record(model: ir.Model) -> dict[str, Any]:
    """Quantization record of a model; ``{}`` if missing or damaged."""
    record = load_metadata_record(model.metadata_props.get(QUANTIZATION_KEY, "{}"))
    return record if isinstance(record.get("requested", {}), dict) else {}


def _register_scales(graph: ir.Graph, present: ir.Value, maxima: Mapping[str, Array], fresh: FreshNames) -> ir.Value:
    """Register the scales of keys or values: heads × 1 × channels.

    Raises:
        QuantizeError: a value is NaN or infinite.
    """
    largest = maxima[str(present.name)]
    if not np.isfinite(largest).all():
        raise QuantizeError(
            f"{opt.kv_cache} int8: {present.name} has NaN or infinite values on the calibration samples",
            hint=f"Use different samples: {opt.calibration_data}.",
        )
    # Channels that are always zero use the largest scale of their head.
    filled = np.where(largest > 0, largest, largest.max(axis=1, keepdims=True))
    scales = (np.where(filled > 0, filled, 1.0) / _LARGEST).astype(np.float32)[:, None, :]
    return add_initializer(graph, ir.tensor(scales, name=fresh.take(f"{present.name}_scale")))


def _set_scale_inputs(node: ir.Node, scales: list[ir.Value]) -> None:
    """Set the scales of keys and values as inputs of an attention, in place."""
    node.resize_inputs(max(len(node.inputs), _SCALES[1] + 1))
    for place, value in zip(_SCALES, scales, strict=True):
        node.replace_input_with(place, value)


def narrow_cache(graph: ir.Graph) -> None:
    """Change the float32 KV cache of a graph that computes in float16 to float16, in place: its Casts are removed.

    Before / After::

        past32 → Cast → past16 → attention → present16 → Cast → present32       past16 → attention → present16

    A state stays float32 if a node reads its past in float32, or if its present is computed in float32.
    """
    pasts = {value.name: value for value in graph.inputs}
    for index, present in enumerate(graph.outputs):
        name = present.name or ""
        past, maker = pasts.get(name.replace(PRESENT_PREFIX, PAST_PREFIX, 1)), present.producer()
        if not name.startswith(PRESENT_PREFIX) or past is None or past.dtype != ir.DataType.FLOAT:
            continue
        casts = list(dict.fromkeys(node for node, _ in past.uses()))
        if maker is None or maker.op_type != "Cast" or present.uses() or not all(map(_casts_to_half, casts)):
            continue
        state = maker.inputs[0]
        if state is None or state.dtype != _HALF or state.producer() is None or state.is_graph_output():
            continue
        graph.outputs[index] = state
        graph.remove(maker, safe=True)
        state.name = name
        past.type = ir.TensorType(_HALF)
        for cast in casts:
            ir.convenience.replace_all_uses_with(cast.outputs[0], past)
            graph.remove(cast, safe=True)


def _casts_to_half(node: ir.Node) -> bool:
    """Return True for a Cast to float16 whose result is no output of the graph."""
    result = node.outputs[0]
    return node.op_type == "Cast" and result.dtype == _HALF and not result.is_graph_output()
