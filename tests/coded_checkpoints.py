"""Checkpoints in few bits, packed as each format's own library publishes them, from codes that are known.

The packers are written from the layouts, code by code, and share nothing with what reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from generating import save_decoder
from winml.modelkit.arrays import Array

__all__ = ["CodedLinear", "SavedCheckpoint", "pack_words", "save_awq", "save_coded", "save_gptq"]

SIZES: Mapping[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip
_LINEAR = ("_proj.weight",)


@dataclass(frozen=True)
class CodedLinear:
    """What a packer made of one weight."""

    tensors: dict[str, torch.Tensor]
    """Tensors of the checkpoint, by what follows the name of the module."""
    values: Array
    """The numbers that they stand for: output channels × input channels, float32."""
    codes: Array
    """Output channels × input channels, one in each element, as the format counts them."""
    scales: Array | None = None
    zero_points: Array | None = None


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint in few bits, and the float checkpoint with the numbers that it stands for."""

    folder: Path
    reference: Path
    linears: Mapping[str, CodedLinear] = field(default_factory=dict)
    """By name of the module."""


def save_coded(
    folder: Path, record: Mapping[str, Any], pack: Callable[[str, Array], CodedLinear | None], **changes: Any
) -> SavedCheckpoint:
    """Write a small decoder whose linear layers are in few bits, beside the same with floats.

    Args:
        folder: Where both go.
        record: The ``quantization_config``.
        pack: Takes the name of a module and its weight; None leaves it as it is, in 16 bits.
        **changes: Keys of the config.
    """
    reference = save_decoder(folder / "reference", "llama", **{**SIZES, **changes})
    tensors = load_file(reference / "model.safetensors")
    floats, packed, linears = {}, {}, {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        coded = pack(module, tensor.float().numpy()) if name.endswith(_LINEAR) else None
        if coded is None:
            half = tensor.to(torch.float16)
            floats[name], packed[name] = half.float(), half
            continue
        linears[module] = coded
        floats[name] = torch.from_numpy(np.ascontiguousarray(coded.values, np.float32))
        packed.update({f"{module}{suffix}": value.contiguous() for suffix, value in coded.tensors.items()})
    save_file(floats, reference / "model.safetensors", {"format": "pt"})
    saved = folder / "coded"
    saved.mkdir()
    save_file(packed, saved / "model.safetensors", {"format": "pt"})
    for file in reference.iterdir():
        if file.name != "model.safetensors":
            (saved / file.name).write_bytes(file.read_bytes())
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**config, "dtype": "float16", "quantization_config": record}))
    return SavedCheckpoint(saved, reference, linears)


def rounded(weight: Array, bits: int, group_size: int, *, smallest_zero: int = 0) -> tuple[Array, Array, Array]:
    """Return codes, float16 scales and zero points of groups of input channels."""
    rows, depth = weight.shape
    grouped = weight.reshape(rows, -1, group_size if group_size > 0 else depth)
    low, high = np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0)
    most = 2**bits - 1
    scales = np.maximum((high - low) / most, 1e-4).astype(np.float16)
    zeros = np.clip(np.round(-low / scales.astype(np.float32)), smallest_zero, most).astype(np.int64)
    codes = np.round(grouped / scales.astype(np.float32)[..., None]) + zeros[..., None]
    return np.clip(codes, 0, most).astype(np.int64).reshape(rows, depth), scales, zeros


def expanded(values: Array, index: Array) -> Array:
    """Return the value of each input channel's group."""
    return values[:, index].astype(np.float32)


def pack_words(codes: Array, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack the last axis into int32 words; ``order`` names the code that each place of a word holds."""
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    rows, count = codes.shape
    words = np.zeros((rows, count // per_word), np.uint64)
    for word in range(count // per_word):
        for place in range(per_word):
            words[:, word] |= codes[:, word * per_word + order[place]].astype(np.uint64) << np.uint64(bits * place)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


def save_gptq(
    folder: Path, bits: int = 4, group_size: int = 32, *, act_order: bool = False, version: str = "gptq", **changes: Any
) -> SavedCheckpoint:
    """Write a GPTQ checkpoint: codes packed along the input channels, zero points along the output channels."""
    drawn = np.random.default_rng(5)

    def pack(module: str, weight: Array) -> CodedLinear:
        del module
        depth = weight.shape[1]
        size = group_size if group_size > 0 else depth
        index = np.arange(depth) // size
        # Act-order: the channels of a group are those that mattered about as much.
        order = drawn.permutation(depth) if act_order else np.arange(depth)
        codes = np.empty(weight.shape, np.int64)
        smallest = 1 if version == "gptq" else 0
        codes[:, order], scales, zeros = rounded(weight[:, order], bits, size, smallest_zero=smallest)
        g_idx = np.empty(depth, np.int32)
        g_idx[order] = index
        values = (codes - expanded(zeros, g_idx)) * expanded(scales, g_idx)
        stored_zeros = zeros - (1 if version == "gptq" else 0)
        tensors = {
            ".qweight": pack_words(codes, bits).t(),
            ".qzeros": pack_words(stored_zeros.T, bits),
            ".scales": torch.from_numpy(scales.T.copy()),
            ".g_idx": torch.from_numpy(g_idx),
        }
        return CodedLinear(tensors, values, codes, scales, zeros)

    record = {
        "quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": act_order, "sym": False,
        "checkpoint_format": version,
    }  # fmt: skip
    return save_coded(folder, record, pack, **changes)


def save_awq(folder: Path, group_size: int = 32, **changes: Any) -> SavedCheckpoint:
    """Write an AWQ checkpoint in the layout ``gemm``: all packed along the output channels, in AutoAWQ's order."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def pack(module: str, weight: Array) -> CodedLinear:
        del module
        index = np.arange(weight.shape[1]) // group_size
        codes, scales, zeros = rounded(weight, 4, group_size)
        tensors = {
            ".qweight": pack_words(codes.T, 4, order),
            ".qzeros": pack_words(zeros.T, 4, order),
            ".scales": torch.from_numpy(scales.T.copy()),
        }
        return CodedLinear(tensors, (codes - expanded(zeros, index)) * expanded(scales, index), codes, scales, zeros)

    record = {
        "quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": None,
    }  # fmt: skip
    return save_coded(folder, record, pack, **changes)
