"""Reading of integer weights with scales: GPTQ, AWQ, and shared helpers for compressed-tensors.

Codes are rearranged, never changed: from the order of the format to rows of output channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from winml.modelkit.arrays import Array
from winml.modelkit.models.checkpoints.quantized.stored import FLOATS, BlockLayout, CodedEntries, StoredTensors
from winml.modelkit.onnx.coded_weights import CodedParts, CodedTensor, CodedWeight, pack_codes, unpack_codes

WORD = 32
"""Specified: GPTQ, AWQ and compressed-tensors pack codes into int32."""
_BITS = (2, 4, 8)
"""Bits for which ONNX Runtime has operators."""

_LOW_HALVES = 0x0F0F0F0F
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Specified by AutoAWQ: nibbles of an int32, from the lowest, with the output channels 0 to 7.

The output channels are packed in the order 0, 2, 4, 6, 1, 3, 5, 7.
"""


def read_gptq(stored: StoredTensors, config: Mapping[str, Any]) -> CodedEntries:
    """Return the weights of a GPTQ checkpoint.

    ``qweight`` is packed along the input channels, ``qzeros`` along the output channels. ``g_idx`` maps an input
    channel to its group; with act-order, groups are not consecutive. Checkpoints of version 1 store zero points minus
    one.

    Raises:
        CheckpointError: tensors of a module do not fit together, or its bits have no operator.
    """
    offset = 0 if config.get("checkpoint_format", config.get("packing_format")) == "gptq_v2" else 1
    coded = CodedEntries()
    for module in stored.modules(".qweight"):
        names = {part: f"{module}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")}
        packed = stored.entry(names["qweight"], ("int32",), 2)
        groups, rows = stored.entry(names["scales"], FLOATS, 2).shape
        has_index = names["g_idx"] in stored.entries
        if config.get("desc_act") and not has_index:
            raise stored.error(
                names["g_idx"], "is missing, and quantization_config has desc_act: the order of the groups is unknown"
            )
        if has_index:
            depth = stored.entry(names["g_idx"], ("int32", "int64"), 1).shape[0]
        else:
            depth = packed.shape[0] * WORD // _require_declared_bits(stored, module, config)
        bits = _check_bits(stored, names["qweight"], packed.shape[0] * WORD / depth)
        stored.refuse_shape(names["qweight"], (depth * bits // WORD, rows), f"{module}.scales")
        stored.refuse_other(names["qzeros"], ("int32",), (groups, rows * bits // WORD), f"{module}.scales")
        group_size = math.ceil(depth / groups)
        _check_declared_sizes(stored, module, config, bits, group_size, depth)
        order = group_order(stored, names["g_idx"], group_size) if has_index else None
        layout = BlockLayout.of(stored, module, group_size, depth)

        def read(names: Mapping[str, str] = names, bits: int = bits, blocks: BlockLayout = layout) -> CodedParts:
            packed_words = torch.from_numpy(stored.read(names["qweight"])).t().contiguous().numpy()
            codes = packed_words.view(np.uint8)
            zero_points = unpack_codes(stored.read(names["qzeros"]).view(np.uint8), bits, 1 << 62)
            zero_points = (zero_points + np.uint8(offset)) & np.uint8((1 << bits) - 1)
            return blocks.parts(codes, stored.read_float(names["scales"]).T, zero_points.T)

        reading = reorder_codes(read, order, bits, depth)
        weight = CodedWeight(
            "gptq", f"{module}.weight", (rows, depth), "integer", bits, layout.block_size, reading,
            has_zero_points=True, read_order=None if order is None else partial(_return_order, order),
        )  # fmt: skip
        coded.tensors[weight.key] = CodedTensor(weight)
        coded.consumed.update(name for name in names.values() if name in stored.entries)
    return coded


def group_order(stored: StoredTensors, name: str, group_size: int) -> Array | None:
    """Return the input channels in the order of groups; `None` if already in order.

    Raises:
        CheckpointError: a group does not exist, or has more or fewer members than the others.
    """
    index = stored.read(name).astype(np.int64)
    regular = np.arange(len(index)) // group_size
    groups = int(regular[-1]) + 1
    if outside := index[(index < 0) | (index >= groups)].tolist():
        raise stored.error(name, f"names group {outside[0]}, expected groups from 0 to {groups - 1}")
    if np.array_equal(index, regular):
        return None
    order = np.argsort(index, kind="stable")
    if not np.array_equal(index[order], regular):
        sizes = np.bincount(index, minlength=groups)
        odd = next((group for group, size in enumerate(sizes) if size != group_size), 0)
        raise stored.error(name, f"group {odd} has {sizes[odd]} input channels, expected {group_size} in each group")
    return order


def _return_order(order: Array) -> Array:
    return order


def reorder_codes(
    read: Callable[[], CodedParts], order: Array | None, bits: int, depth: int
) -> Callable[[], CodedParts]:
    """Return a reader that permutes the input channels in the codes of each row.

    Args:
        read: Reader of the codes, scales and zero points.
        order: New order of the channels; `None`: ``read`` is returned.
        bits: Bits of a code.
        depth: Number of channels.
    """
    if order is None:
        return read

    def read_in_order() -> CodedParts:
        parts = read()
        codes = torch.from_numpy(np.ascontiguousarray(unpack_codes(parts.codes, bits, depth)))
        ordered = codes.index_select(1, torch.from_numpy(order)).numpy()
        return CodedParts(pack_codes(ordered, bits), parts.scales, parts.zero_points)

    return read_in_order


def read_awq(stored: StoredTensors, config: Mapping[str, Any]) -> CodedEntries:
    """Return the weights of an AWQ checkpoint in the layout ``gemm``: all tensors are packed along the output channels.

    Raises:
        CheckpointError: tensors of a module do not fit together, or have another layout.
    """
    bits = 4
    coded = CodedEntries()
    for module in stored.modules(".qweight"):
        names = {part: f"{module}.{part}" for part in ("qweight", "qzeros", "scales")}
        depth, word_count = stored.entry(names["qweight"], ("int32",), 2).shape
        rows = word_count * WORD // bits
        groups = stored.entry(names["scales"], FLOATS, 2).shape[0]
        stored.refuse_shape(names["scales"], (groups, rows), f"{module}.qweight in the layout gemm, 4 bits")
        has_zero_points = names["qzeros"] in stored.entries
        if has_zero_points or config.get("zero_point", True):
            stored.refuse_other(names["qzeros"], ("int32",), (groups, word_count), f"{module}.qweight")
        group_size = math.ceil(depth / groups)
        _check_declared_sizes(stored, module, config, bits, group_size, depth)
        layout = BlockLayout.of(stored, module, group_size, depth)

        def read(
            names: Mapping[str, str] = names,
            blocks: BlockLayout = layout,
            has_zero_points: bool = has_zero_points,
        ) -> CodedParts:
            zero_points = _unpack_awq_codes(stored.read(names["qzeros"])).T if has_zero_points else None
            scales = stored.read_float(names["scales"]).T
            return blocks.parts(_transpose_awq_rows(stored.read(names["qweight"])), scales, zero_points)

        weight = CodedWeight(
            "awq", f"{module}.weight", (rows, depth), "integer", bits, layout.block_size, read,
            has_zero_points=has_zero_points,
        )  # fmt: skip
        coded.tensors[weight.key] = CodedTensor(weight)
        coded.consumed.update(name for name in names.values() if name in stored.entries)
    return coded


def _unpack_awq_codes(packed_words: Array) -> Array:
    """Unpack int32 words to one code per byte, in the order of the output channels."""
    nibbles = unpack_codes(packed_words.view(np.uint8), 4, 1 << 62).reshape(len(packed_words), -1, 8)
    return np.ascontiguousarray(nibbles[:, :, _AWQ_ORDER]).reshape(len(packed_words), -1)


def _transpose_awq_rows(packed_words: Array) -> Array:
    """Convert words of shape [depth, words] to rows of output channels, packed along the depth.

    Whole words are transposed, four bytes at a time. The low halves of all bytes of two neighbours in the depth become
    four bytes, and so do the high halves. Measured, 4096 × 14336: 0.1 s, and 0.4 s if single bytes are transposed.
    """
    depth, width = packed_words.shape
    if depth % 2:
        return pack_codes(np.ascontiguousarray(_unpack_awq_codes(packed_words).T), 4)
    columns = torch.from_numpy(packed_words).t().contiguous()
    even, odd = columns[:, ::2], columns[:, 1::2]
    low = (even & _LOW_HALVES) | ((odd & _LOW_HALVES) << 4)
    high = ((even >> 4) & _LOW_HALVES) | (odd & ~_LOW_HALVES)
    # Nibble p of a word is in byte p // 2, in the low half for an even p.
    halves = [half.view(torch.uint8).reshape(width, depth // 2, 4) for half in (low, high)]
    rows = torch.empty((width, 8, depth // 2), dtype=torch.uint8)
    for channel, position in enumerate(_AWQ_ORDER):
        rows[:, channel] = halves[position % 2][:, :, position // 2]
    return rows.reshape(width * 8, depth // 2).numpy()


_MODULE_KEYS = ("dynamic", "extra_config")
"""Specified: keys under which GPTQModel and AutoRound declare other bits and groups for some modules."""


def _check_declared_sizes(
    stored: StoredTensors, module: str, config: Mapping[str, Any], bits: int, group_size: int, depth: int
) -> None:
    """Refuse bits or groups of a module that differ from the config: tensors and config belong to two checkpoints.

    Args:
        stored: The stored tensors, for messages.
        module: Path of the module.
        config: Declarations of the config.
        bits: Bits of a code, by the tensors.
        group_size: Input channels with a common scale, by the tensors.
        depth: Number of input channels.

    Raises:
        CheckpointError: names both values.
    """
    if any(config.get(key) for key in _MODULE_KEYS):
        return
    declared_bits = config.get("bits", config.get("w_bit"))
    if declared_bits is not None and declared_bits != bits:
        raise stored.error(module, f"has {bits} bits a code, and quantization_config has bits {declared_bits!r}")
    size = config.get("group_size", config.get("q_group_size"))
    is_whole = size == -1 or (isinstance(size, int) and size >= depth)
    if size is not None and size != group_size and not (is_whole and group_size == depth):
        raise stored.error(
            module, f"has groups of {group_size} input channels, and quantization_config has group_size {size!r}"
        )


def _require_declared_bits(stored: StoredTensors, module: str, config: Mapping[str, Any]) -> int:
    bits = config.get("bits")
    if not isinstance(bits, int) or bits not in _BITS:
        raise stored.error(module, f"quantization_config has bits {bits!r}, expected 2, 4 or 8")
    return bits


def _check_bits(stored: StoredTensors, name: str, bits: float) -> int:
    if bits not in _BITS:
        raise stored.error(name, f"has {bits:g} bits a code, and ONNX Runtime has operators for 2, 4 and 8")
    return int(bits)
