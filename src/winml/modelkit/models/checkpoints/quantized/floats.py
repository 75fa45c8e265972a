"""Reading of weights in small float formats or lookup tables: FP8, MXFP4, NVFP4 and bitsandbytes' 4 bits."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from winml.modelkit.arrays import Array
from winml.modelkit.models.checkpoints.quantized.stored import (
    EXPONENTS,
    FLOATS,
    BlockLayout,
    CodedEntries,
    StoredTensors,
)
from winml.modelkit.onnx.coded_weights import CodedParts, CodedTensor, CodedWeight, CodeKind, stack_weights
from winml.modelkit.words import count_noun

FLOAT8: Mapping[str, CodeKind] = {"float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2"}
"""Name of a stored type → the kind of its codes."""
_NESTED_ABSMAX = "nested_absmax"
_STATE_INFIX = ".quant_state.bitsandbytes__"


def scales_by_rows(values: Array, rows: int, depth: int, block: tuple[int, int] | None) -> Array:
    """Return a scale for each row and group of values of the row.

    Args:
        values: float32: one scale, one per row, one per group of a row, or one per block of rows and columns.
        rows: Output channels.
        depth: Input channels.
        block: Rows and columns of a block if the checkpoint states them.
    """
    if values.size == 1:
        return np.full((rows, 1), values.reshape(-1)[0], np.float32)
    values = values.reshape(len(values), -1)
    high, wide = values.shape
    height = math.ceil(rows / high)
    if block is not None and (high, wide) == (math.ceil(rows / block[0]), math.ceil(depth / block[1])):
        height = block[0]
    scales: Array = np.repeat(values, height, axis=0)[:rows]
    return scales


def small_float(
    stored: StoredTensors, source_format: str, parameter: str, codes: str, scale: str, block: tuple[int, int] | None
) -> CodedTensor:
    """Return a weight of 8-bit floats.

    Args:
        stored: The tensors.
        source_format: Name of the format.
        parameter: Name of the parameter in the float checkpoint.
        codes: Name of the tensor of codes.
        scale: Name of the tensor of scales, which multiply the codes.
        block: Rows and columns that share a scale if the checkpoint states them.

    Raises:
        CheckpointError: the tensors do not fit together.
    """
    entry = stored.entry(codes, tuple(FLOAT8))
    if len(entry.shape) not in (2, 3):
        raise stored.error(codes, f"has {len(entry.shape)} axes, expected 2, or 3 for experts")
    rows, depth = entry.shape[-2:]
    experts = entry.shape[0] if len(entry.shape) == 3 else 1
    scale_entry = stored.entry(scale, (*FLOATS, *EXPONENTS))
    count = math.prod(scale_entry.shape) // experts
    by_block = block is not None and count == math.ceil(rows / block[0]) * math.ceil(depth / block[1])
    is_known = count in (1, rows) or by_block or (count % rows == 0 and depth % (count // rows) == 0)
    if not is_known:
        expected = f"blocks of {block[0]} × {block[1]}" if block else "one, or one for each output channel or group"
        raise stored.error(
            scale, f"has shape {list(scale_entry.shape)} for a weight of {rows} × {depth}, expected {expected}"
        )
    group = block[1] if block is not None and by_block else depth // max(1, count // rows)
    layout = BlockLayout.of(stored, parameter, group, depth)

    def read(expert: int | None) -> CodedParts:
        numbers = stored.read_float(scale, expert if len(scale_entry.shape) > 1 or experts == 1 else None)
        scales = scales_by_rows(np.atleast_1d(numbers), rows, depth, block)
        return layout.parts(stored.read(codes, expert).view(np.uint8), scales)

    kind = FLOAT8[entry.dtype]
    members = [
        CodedWeight(source_format, parameter, (rows, depth), kind, 8, layout.block_size, partial(read, expert))
        for expert in (range(experts) if len(entry.shape) == 3 else [None])
    ]
    weight = members[0] if len(entry.shape) == 2 else stack_weights(members)
    assert weight is not None  # they are alike
    return CodedTensor(weight)


def read_fp8(stored: StoredTensors, config: Mapping[str, Any]) -> CodedEntries:
    """Return the weights of an FP8 checkpoint, with scales by block (DeepSeek, Qwen), by row or by weight.

    Raises:
        CheckpointError: a weight has no scales, or scales of another shape.
    """
    coded = CodedEntries()
    block = block_of(config.get("weight_block_size"))
    for name, entry in stored.entries.items():
        if entry.dtype not in FLOAT8:
            continue
        scale = next((key for key in (f"{name}_scale_inv", f"{name}_scale") if key in stored.entries), None)
        if scale is None:
            raise stored.error(name, f"is {entry.dtype}, and neither {name}_scale_inv nor {name}_scale is there")
        coded.tensors[name] = small_float(stored, "fp8", name, name, scale, block)
        coded.consumed.update((name, scale))
    consume_activation_scales(stored, coded)
    return coded


def block_of(declared: object) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale according to a config; `None` if it declares no block."""
    is_block = (
        isinstance(declared, list)
        and len(declared) == 2
        and all(isinstance(size, int) and size > 0 for size in declared)
    )
    return (declared[0], declared[1]) if is_block else None  # type: ignore[index]  # it is a list of two


def consume_activation_scales(stored: StoredTensors, coded: CodedEntries) -> None:
    """Mark scales of activations as consumed: activations stay float."""
    endings = (".input_scale", ".activation_scale", ".input_global_scale", ".output_scale", ".k_scale", ".v_scale")
    scales = [name for name in stored.entries if name.endswith(endings) and name not in coded.consumed]
    if scales:
        coded.consumed.update(scales)
        coded.notes.append(
            f"{count_noun(len(scales), 'activation scale', 'are')} ignored in the checkpoint: activations remain float."
        )


def read_mxfp4(stored: StoredTensors, config: Mapping[str, Any]) -> CodedEntries:
    """Return the experts of an MXFP4 checkpoint (gpt-oss): blocks of 32 values with an exponent of two.

    A parameter of experts × input channels × output channels is stored as experts × output channels × blocks × bytes.

    Raises:
        CheckpointError: blocks and scales do not fit together.
    """
    del config
    coded = CodedEntries()
    for parameter in stored.modules("_blocks"):
        blocks, scales = f"{parameter}_blocks", f"{parameter}_scales"
        experts, rows, count, width = stored.entry(blocks, ("uint8",), 4).shape
        stored.refuse_other(scales, EXPONENTS, (experts, rows, count), blocks)

        def read(expert: int, blocks: str = blocks, scales: str = scales) -> CodedParts:
            codes = stored.read(blocks, expert)
            return CodedParts(codes.reshape(len(codes), -1), stored.read_float(scales, expert))

        shape = (rows, count * width * 2)
        members = [
            CodedWeight("mxfp4", parameter, shape, "float4_e2m1", 4, width * 2, partial(read, expert))
            for expert in range(experts)
        ]
        weight = stack_weights(members)
        assert weight is not None  # they are alike
        coded.tensors[parameter] = CodedTensor(weight, permutation=(0, 2, 1))
        coded.consumed.update((blocks, scales))
    return coded


def packed_e2m1(
    stored: StoredTensors, source_format: str, module: str, codes: str, scale: str, whole: str | None, *, divides: bool
) -> CodedTensor:
    """Return a weight of 4-bit floats with a scale for each block, and one for the whole weight.

    Args:
        stored: The tensors.
        source_format: Name of the format.
        module: The module.
        codes: Name of the tensor of codes, two per byte.
        scale: Name of the tensor of block scales: E8M0 if they are integers, else floats.
        whole: Name of the tensor with the scale of the whole weight; `None` if there is none.
        divides: True if block scales are divided by the scale of the whole weight instead of multiplied.

    Raises:
        CheckpointError: the tensors do not fit together.
    """
    rows, width = stored.entry(codes, ("uint8",), 2).shape
    scale_entry = stored.entry(scale, (*FLOAT8, *FLOATS, *EXPONENTS), 2)
    stored.refuse_shape(scale, (rows, scale_entry.shape[1]), codes)
    if whole is not None:
        stored.entry(whole, FLOATS)
    layout = BlockLayout.of(stored, module, math.ceil(2 * width / scale_entry.shape[1]), 2 * width)

    def read() -> CodedParts:
        numbers = stored.read_float(scale)
        if whole is not None:
            factor = np.float32(stored.read_float(whole).reshape(-1)[0])
            numbers = numbers / factor if divides else numbers * factor
        return layout.parts(stored.read(codes), numbers)

    weight = CodedWeight(
        source_format, f"{module}.weight", (rows, 2 * width), "float4_e2m1", 4, layout.block_size, read
    )
    return CodedTensor(weight)


def read_modelopt(stored: StoredTensors, config: Mapping[str, Any]) -> CodedEntries:
    """Return the weights of a checkpoint of NVIDIA's ModelOpt: NVFP4, or FP8 with one scale.

    Raises:
        CheckpointError: tensors of a module do not fit together.
    """
    # 8-bit float scales with a second scale belong to 4-bit codes.
    single_scale = {name: entry for name, entry in stored.entries.items() if f"{name}_2" not in stored.entries}
    coded = read_fp8(StoredTensors(single_scale, stored.folder, stored.format), config)
    for module in stored.modules(".weight_scale_2"):
        names = (f"{module}.weight", f"{module}.weight_scale", f"{module}.weight_scale_2")
        coded.tensors[names[0]] = packed_e2m1(stored, "nvfp4", module, *names, divides=False)
        coded.consumed.update(names)
    consume_activation_scales(stored, coded)
    return coded


def read_bitsandbytes(stored: StoredTensors, config: Mapping[str, Any]) -> CodedEntries:
    """Return the weights of a checkpoint of bitsandbytes: NF4 and FP4 in blocks of a flat weight, or 8 bits by row.

    Raises:
        CheckpointError: tensors of a module do not fit together, or a row is not a multiple of the block size.
    """
    del config
    coded = CodedEntries()
    for name in stored.entries:
        parameter, separator, kind = name.partition(_STATE_INFIX)
        if separator:
            coded.tensors[parameter] = _read_four_bits(stored, parameter, name, kind)
            coded.consumed.update(entry_name for entry_name in stored.entries if entry_name.startswith(f"{parameter}."))
            coded.consumed.add(parameter)
    for module in stored.modules(".SCB"):
        weight, scales = f"{module}.weight", f"{module}.SCB"
        rows, depth = stored.entry(weight, ("int8",), 2).shape
        stored.refuse_other(scales, ("float32",), (rows,), weight)
        layout = BlockLayout.of(stored, module, depth, depth)

        def read(weight: str = weight, scales: str = scales, layout: BlockLayout = layout) -> CodedParts:
            codes = stored.read(weight).view(np.uint8) ^ np.uint8(128)
            return layout.parts(codes, (stored.read(scales) / np.float32(127)).reshape(-1, 1))

        weight_8bit = CodedWeight("bitsandbytes", weight, (rows, depth), "integer", 8, layout.block_size, read)
        coded.tensors[weight] = CodedTensor(weight_8bit)
        coded.consumed.update(key for key in (weight, scales, f"{module}.weight_format") if key in stored.entries)
    return coded


def _read_four_bits(stored: StoredTensors, parameter: str, state_name: str, kind: str) -> CodedTensor:
    """Return a weight of NF4 or FP4 codes in blocks; ``kind`` is the ending of its state's name.

    Raises:
        CheckpointError: the state is malformed, or its tensors do not fit together.
    """
    kinds: Mapping[str, CodeKind] = {"nf4": "nf4", "fp4": "bnb_fp4"}
    try:
        state = json.loads(stored.read(state_name).tobytes())
        (rows, depth), block_size = (int(size) for size in state["shape"]), int(state["blocksize"])
        code_kind = kinds[kind]
        offset = float(state.get("nested_offset", 0))
        nested_size = int(state.get("nested_blocksize", 256))
    except (ValueError, KeyError, TypeError) as error:
        raise stored.error(
            state_name, f"is no state of nf4 or fp4 for a matrix ({type(error).__name__}: {error})"
        ) from error
    absmax = f"{parameter}.absmax"
    stored.entry(parameter, ("uint8",))
    if block_size < 16 or depth % block_size or math.prod(stored.entries[parameter].shape) * 2 != rows * depth:
        raise stored.error(
            parameter,
            f"holds {rows} × {depth} values in blocks of {block_size}, and rows that are no whole blocks of 16 or more "
            "have no operator",
        )
    is_nested = f"{parameter}.{_NESTED_ABSMAX}" in stored.entries
    stored.refuse_other(absmax, ("uint8",) if is_nested else ("float32",), (rows * depth // block_size,), state_name)
    if is_nested:
        stored.refuse_other(f"{parameter}.nested_quant_map", ("float32",), (256,), absmax)
        stored.entry(f"{parameter}.{_NESTED_ABSMAX}", ("float32",), 1)
        if nested_size < 1:
            raise stored.error(state_name, f"has nested_blocksize {nested_size}, expected 1 or more")
        count = math.ceil(rows * depth // block_size / nested_size)
        stored.refuse_shape(f"{parameter}.{_NESTED_ABSMAX}", (count,), f"nested_blocksize {nested_size}")

    def read() -> CodedParts:
        scales = stored.read(absmax)
        if is_nested:
            table, nested = stored.read(f"{parameter}.nested_quant_map"), stored.read(f"{parameter}.{_NESTED_ABSMAX}")
            scales = table[scales] * np.repeat(nested, nested_size)[: len(scales)] + np.float32(offset)
        packed = stored.read(parameter).reshape(rows, depth // 2)
        # The first of two codes is in the high half of a byte.
        return CodedParts((packed >> 4) | (packed << 4), scales.astype(np.float32).reshape(rows, -1))

    return CodedTensor(CodedWeight("bitsandbytes", parameter, (rows, depth), code_kind, 4, block_size, read))
