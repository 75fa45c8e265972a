"""Reading of compressed-tensors checkpoints: packed and plain integers, small floats with scales."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from winml.modelkit.models.checkpoints.quantized import floats
from winml.modelkit.models.checkpoints.quantized.integers import WORD, group_order, reorder_codes
from winml.modelkit.models.checkpoints.quantized.stored import FLOATS, BlockLayout, CodedEntries, StoredTensors
from winml.modelkit.onnx.coded_weights import CodedParts, CodedTensor, CodedWeight, unpack_codes

SOURCE = "compressed-tensors"


def read_compressed(stored: StoredTensors, config: Mapping[str, Any]) -> CodedEntries:
    """Return the weights of a checkpoint of compressed-tensors.

    The tensors of a module decide the reader: ``weight_packed`` of int32 holds integers, of uint8 4-bit floats;
    ``weight`` of int8 or an 8-bit float with a ``weight_scale`` beside it holds one code per byte.

    Raises:
        CheckpointError: tensors of a module do not fit together, or its bits have no operator.
    """
    coded = CodedEntries()
    declared = (floats.block_of(record.get("block_structure")) for record in _weight_records(config))
    block = next((size for size in declared if size is not None), None)
    for module in stored.modules(".weight_packed"):
        name = f"{module}.weight_packed"
        if stored.entries[name].dtype == "uint8":
            whole = f"{module}.weight_global_scale"
            whole_name = whole if whole in stored.entries else None
            scale = f"{module}.weight_scale"
            coded.tensors[f"{module}.weight"] = floats.packed_e2m1(
                stored, SOURCE, module, name, scale, whole_name, divides=True
            )  # fmt: skip
        else:
            coded.tensors[f"{module}.weight"] = _read_packed(stored, module, config)
        coded.consumed.update(_existing_tensors(stored, module))
    for module in stored.modules(".weight_scale"):
        name = f"{module}.weight"
        dtype = stored.entries[name].dtype if name in stored.entries else ""
        if dtype in floats.FLOAT8:
            coded.tensors[name] = floats.small_float(stored, SOURCE, name, name, f"{name}_scale", block)
        elif dtype == "int8":
            coded.tensors[name] = _read_int8(stored, module, block, config)
        elif name not in coded.tensors:
            raise stored.error(f"{name}_scale", f"belongs to {name}, which is {dtype or 'missing'}")
        coded.consumed.update(_existing_tensors(stored, module))
    floats.consume_activation_scales(stored, coded)
    return coded


def _existing_tensors(stored: StoredTensors, module: str) -> list[str]:
    suffixes = ("", "_packed", "_scale", "_zero_point", "_shape", "_g_idx", "_global_scale")
    return [name for suffix in suffixes if (name := f"{module}.weight{suffix}") in stored.entries]


def _weight_records(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the description of weights in each group of modules in a config."""
    groups = (config.get("config_groups") or {}).values()
    records = (group.get("weights") for group in groups if isinstance(group, Mapping))
    return [record for record in records if isinstance(record, Mapping)]


def _check_declarations(
    stored: StoredTensors, names: Mapping[str, str], config: Mapping[str, Any], bits: int | None
) -> None:
    """Refuse a weight that lacks properties declared for all groups: a missing tensor would otherwise go unnoticed.

    Args:
        stored: The tensors.
        names: Part → name of the weight's tensor.
        config: The ``quantization_config``.
        bits: Bits of its codes; `None`: a byte may contain a code of fewer bits.

    Raises:
        CheckpointError: zero points or the order of the groups are missing, or no group has these bits.
    """
    integers = [record for record in _weight_records(config) if record.get("type", "int") == "int"]
    declared_bits = {record["num_bits"] for record in integers if isinstance(record.get("num_bits"), int)}
    if declared_bits and bits is not None and bits not in declared_bits:
        setting = " or ".join(map(str, sorted(declared_bits)))
        raise stored.error(names["codes"], f"has {bits} bits a code, and quantization_config has num_bits {setting}")
    needed = {
        "zero_point": ("symmetric false", all(record.get("symmetric") is False for record in integers)),
        "g_idx": ("actorder group", all(record.get("actorder") in ("group", True) for record in integers)),
    }
    for part, (setting, is_needed) in needed.items():
        if integers and is_needed and part in names and names[part] not in stored.entries:
            raise stored.error(names[part], f"is missing, and quantization_config has {setting}")


def _refuse_group_size(
    stored: StoredTensors, name: str, config: Mapping[str, Any], group_size: int, depth: int
) -> None:
    """Refuse scales with a group size that the config does not declare: they would apply to the wrong values.

    Raises:
        CheckpointError: names both group sizes.
    """
    groups = stored.entries[name].shape[1]
    declared_sizes = [
        size if record.get("strategy", "group") == "group" and isinstance(size, int) and size > 0 else depth
        for record in _weight_records(config)
        if record.get("type", "int") == "int"
        for size in (record.get("group_size"),)
    ]
    if declared_sizes and not any(size == group_size or (size >= depth and groups == 1) for size in declared_sizes):
        sizes_text = " or ".join(map(str, dict.fromkeys(declared_sizes)))
        raise stored.error(
            name,
            f"has {groups} groups for {depth} input channels, and quantization_config has group_size {sizes_text}",
        )


def _read_packed(stored: StoredTensors, module: str, config: Mapping[str, Any]) -> CodedTensor:
    """Return a weight of integers packed along the input channels, and zero points along the output channels.

    Raises:
        CheckpointError: the tensors of the weight do not fit together, or differ from the config.
    """
    names = {part: f"{module}.weight_{part}" for part in ("packed", "scale", "zero_point", "shape", "g_idx")}
    rows, width = stored.entry(names["packed"], ("int32",), 2).shape
    stored.refuse_other(names["shape"], ("int64", "int32"), (2,), names["packed"])
    height, depth = (int(size) for size in stored.read(names["shape"]))
    bits = next((bits for bits in (2, 4, 8) if math.ceil(depth * bits / WORD) == width), None)
    if height != rows or bits is None:
        raise stored.error(
            names["packed"],
            f"has shape {[rows, width]}, and no 2, 4 or 8 bits make that of the {height} × {depth} of {names['shape']}",
        )
    _check_declarations(stored, {**names, "codes": names["packed"]}, config, bits)
    scales = stored.entry(names["scale"], FLOATS, 2)
    groups = scales.shape[1]
    stored.refuse_shape(names["scale"], (rows, groups), names["packed"])
    has_zero_points = names["zero_point"] in stored.entries
    if has_zero_points:
        shape = (math.ceil(rows * bits / WORD), groups)
        stored.refuse_other(names["zero_point"], ("int32",), shape, names["scale"])
    group_size = math.ceil(depth / groups)
    _refuse_group_size(stored, names["scale"], config, group_size, depth)
    layout = BlockLayout.of(stored, module, group_size, depth)
    order = group_order(stored, names["g_idx"], group_size) if names["g_idx"] in stored.entries else None

    def read() -> CodedParts:
        codes = stored.read(names["packed"]).view(np.uint8)[:, : math.ceil(depth * bits / 8)]
        points = None
        if has_zero_points:
            packed = np.ascontiguousarray(stored.read(names["zero_point"]).T)
            points = unpack_codes(packed.view(np.uint8), bits, rows).T
        return layout.parts(codes, stored.read_float(names["scale"]), points)

    weight = CodedWeight(
        SOURCE, f"{module}.weight", (rows, depth), "integer", bits, layout.block_size,
        reorder_codes(read, order, bits, depth), has_zero_points=has_zero_points,
        read_order=None if order is None else lambda: order,
    )  # fmt: skip
    return CodedTensor(weight)


def _read_int8(
    stored: StoredTensors, module: str, block: tuple[int, int] | None, config: Mapping[str, Any]
) -> CodedTensor:
    """Return a weight of signed 8-bit integers.

    Args:
        stored: The stored tensors.
        module: Path of the module with the weight.
        block: Rows and columns with a common scale, if the config declares blocks.
        config: Declarations of the config.

    Raises:
        CheckpointError: the scales do not fit the weight, or a tensor differs from the config.
    """
    names = {part: f"{module}.weight{part}" for part in ("", "_scale", "_zero_point")}
    rows, depth = stored.entry(names[""], ("int8",), 2).shape
    _check_declarations(stored, {"codes": names[""], "zero_point": names["_zero_point"]}, config, None)
    shape = stored.entry(names["_scale"], FLOATS).shape
    count = math.prod(shape)
    by_block = block is not None and count == math.ceil(rows / block[0]) * math.ceil(depth / block[1])
    if not (count in (1, rows) or by_block or count % rows == 0):
        raise stored.error(names["_scale"], f"has shape {list(shape)} for a weight of {rows} × {depth}")
    group = block[1] if block is not None and by_block else math.ceil(depth / max(1, count // rows))
    layout = BlockLayout.of(stored, module, group, depth)
    has_zero_points = names["_zero_point"] in stored.entries
    if has_zero_points:
        stored.entry(names["_zero_point"], ("int8",))
        stored.refuse_shape(names["_zero_point"], shape, names["_scale"])

    def read() -> CodedParts:
        scales = floats.scales_by_rows(stored.read_float(names["_scale"]), rows, depth, block)
        points = None
        if has_zero_points:
            signed = floats.scales_by_rows(stored.read_float(names["_zero_point"]), rows, depth, block)
            points = (signed + 128).astype(np.uint8)
        return layout.parts(stored.read(names[""]).view(np.uint8) ^ np.uint8(128), scales, points)

    weight = CodedWeight(
        SOURCE, names[""], (rows, depth), "integer", 8, layout.block_size, read, has_zero_points=has_zero_points
    )
    return CodedTensor(weight)
