"""Quantized checkpoints packed as each format's own library publishes them, from known codes.

The packers are written from the layouts, code by code, and share no code with the readers.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from generating import save_decoder, save_tokenizer
from winml.modelkit.arrays import Array

SIZES: Mapping[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip


@dataclass(frozen=True)
class CodedLinear:
    """Packed tensors of one weight, with its codes and dequantized values."""

    tensors: dict[str, torch.Tensor]
    """Name ending after the module's name → tensor of the checkpoint."""
    values: Array
    """Dequantized weight: output channels × input channels, float32."""
    codes: Array
    """Output channels × input channels, one code an element, in the format's own numbering."""
    scales: Array | None = None
    zero_points: Array | None = None


@dataclass(frozen=True)
class SavedCheckpoint:
    """A quantized checkpoint, and the float checkpoint of its dequantized weights."""

    folder: Path
    reference: Path
    linears: Mapping[str, CodedLinear] = field(default_factory=dict)
    """Module name → packed weight."""


def save_coded(
    folder: Path,
    record: Mapping[str, Any],
    pack: Callable[[str, Array], CodedLinear | None],
    *,
    model: Any = None,
    coded: tuple[str, ...] = ("_proj.weight",),
    **changes: Any,
) -> SavedCheckpoint:
    """Write a small decoder with packed linear layers, beside a float checkpoint of the same weights.

    Args:
        folder: Parent folder of both checkpoints.
        record: The ``quantization_config``.
        pack: (module name, weight) → packed weight; None keeps the weight in 16 bits.
        model: Model to pack instead of the default decoder.
        coded: Name endings of the weights to pack.
        **changes: Keys of the config.
    """
    if model is None:
        reference = save_decoder(folder / "reference", "llama", **{**SIZES, **changes})
    else:
        reference = folder / "reference"
        model.save_pretrained(reference)
        save_tokenizer(reference)
    tensors = load_file(reference / "model.safetensors")
    floats, packed, linears = {}, {}, {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        packed_linear = pack(module, tensor.float().numpy()) if name.endswith(coded) else None
        if packed_linear is None:
            half = tensor.to(torch.float16)
            floats[name], packed[name] = half.float(), half
            continue
        linears[module] = packed_linear
        floats[name] = torch.from_numpy(np.ascontiguousarray(packed_linear.values, np.float32))
        packed.update({f"{module}{suffix}": value.contiguous() for suffix, value in packed_linear.tensors.items()})
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
    """Quantize groups of input channels; return codes, float16 scales and zero points."""
    rows, depth = weight.shape
    grouped = weight.reshape(rows, -1, group_size if group_size > 0 else depth)
    low, high = np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0)
    most = 2**bits - 1
    scales = np.maximum((high - low) / most, 1e-4).astype(np.float16)
    zeros = np.clip(np.round(-low / scales.astype(np.float32)), smallest_zero, most).astype(np.int64)
    codes = np.round(grouped / scales.astype(np.float32)[..., None]) + zeros[..., None]
    return np.clip(codes, 0, most).astype(np.int64).reshape(rows, depth), scales, zeros


def expanded(values: Array, index: Array) -> Array:
    """Expand values of groups to their input channels."""
    return values[:, index].astype(np.float32)


def pack_words(codes: Array, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack the last axis into int32 words; ``order`` names the code at each position of a word."""
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    rows, count = codes.shape
    words = np.zeros((rows, count // per_word), np.uint64)
    for word in range(count // per_word):
        for place in range(per_word):
            words[:, word] |= codes[:, word * per_word + order[place]].astype(np.uint64) << np.uint64(bits * place)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


def save_gptq(
    folder: Path,
    bits: int = 4,
    group_size: int = 32,
    *,
    act_order: bool = False,
    shares_order: bool = False,
    version: str = "gptq",
    **changes: Any,
) -> SavedCheckpoint:
    """Write a GPTQ checkpoint: codes packed along the input channels, zero points along the output channels.

    With act-order each layer has its own group order; with ``shares_order`` layers of one input size share an order.
    """
    drawn = np.random.default_rng(5)

    def pack(module: str, weight: Array) -> CodedLinear:
        del module
        depth = weight.shape[1]
        size = group_size if group_size > 0 else depth
        index = np.arange(depth) // size
        # Act-order groups channels of similar importance.
        generator = np.random.default_rng(depth) if shares_order else drawn
        order = generator.permutation(depth) if act_order else np.arange(depth)
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


def save_awq(
    folder: Path, group_size: int = 32, *, model: Any = None, experts: tuple[str, ...] = (), **changes: Any
) -> SavedCheckpoint:
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
    return save_coded(folder, record, pack, model=model, coded=(*experts, "_proj.weight"), **changes)


def save_compressed(folder: Path, bits: int = 4, group_size: int = 32, *, symmetric: bool = False) -> SavedCheckpoint:
    """Write compressed-tensors integers: 4 bits packed in words, 8 bits unpacked; signed, so minus the middle."""
    middle = 2 ** (bits - 1)

    def pack(module: str, weight: Array) -> CodedLinear:
        rows, depth = weight.shape
        index = np.arange(depth) // (group_size if group_size > 0 else depth)
        codes, scales, zeros = rounded(weight, bits, group_size)
        if symmetric:
            zeros[:] = middle
            codes = np.clip(np.round(weight / expanded(scales, index)) + middle, 0, 2**bits - 1).astype(np.int64)
        values = (codes - expanded(zeros, index)) * expanded(scales, index)
        scale = {".weight_scale": torch.from_numpy(scales.copy())}
        if bits == 8 and "mlp" in module:
            plain = {".weight": torch.from_numpy((codes - middle).astype(np.int8))}
            points = {".weight_zero_point": torch.from_numpy((zeros - middle).astype(np.int8))}
            return CodedLinear({**plain, **scale, **({} if symmetric else points)}, values, codes, scales, zeros)
        packed = {".weight_packed": pack_words(codes, bits), ".weight_shape": torch.tensor([rows, depth])}
        points = {".weight_zero_point": pack_words(zeros.T, bits).t()}
        return CodedLinear({**packed, **scale, **({} if symmetric else points)}, values, codes, scales, zeros)

    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group_size}
    record = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"],
    }  # fmt: skip
    return save_coded(folder, record, pack)


def save_fp8(folder: Path, block: int = 32, method: str = "fp8") -> SavedCheckpoint:
    """Write 8-bit floats: DeepSeek's with a scale for each square block, other formats with a scale for each row."""
    is_blocked = method == "fp8"

    def pack(module: str, weight: Array) -> CodedLinear:
        del module
        rows, depth = weight.shape
        if is_blocked:
            high, wide = -(-rows // block), -(-depth // block)
            row, column = np.arange(rows) // block, np.arange(depth) // block
            scales = np.zeros((high, wide), np.float32)
            for top in range(high):
                for left in range(wide):
                    tile = weight[row == top][:, column == left]
                    scales[top, left] = np.abs(tile).max() / 448
            whole = scales[row][:, column]
        else:
            scales = (np.abs(weight).max(1, keepdims=True) / 448).astype(np.float32)
            whole = np.repeat(scales, depth, axis=1)
        codes = torch.from_numpy(weight / whole).to(torch.float8_e4m3fn)
        name = ".weight_scale_inv" if is_blocked else ".weight_scale"
        tensors = {".weight": codes, name: torch.from_numpy(scales)}
        return CodedLinear(tensors, codes.float().numpy() * whole, codes.view(torch.uint8).numpy(), scales)

    record: dict[str, Any] = {
        "quant_method": "fp8",
        "weight_block_size": [block, block],
        "activation_scheme": "dynamic",
    }
    if not is_blocked:
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
        record = {
            "quant_method": "compressed-tensors", "format": "float-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": weights}},
        }  # fmt: skip
    if method == "fbgemm_fp8":
        record = {"quant_method": method, "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    return save_coded(folder, record, pack)


def save_auto_round(folder: Path, packing: str) -> SavedCheckpoint:
    """Write an AutoRound checkpoint with the tensor layout named by ``packing``."""
    saved = save_gptq(folder) if packing == "auto_gptq" else save_awq(folder)
    config = json.loads((saved.folder / "config.json").read_text())
    record = {"quant_method": "auto-round", "packing_format": f"auto_round:{packing}", "bits": 4, "group_size": 32,
              "sym": False, "data_type": "int", "autoround_version": "0.9"}  # fmt: skip
    (saved.folder / "config.json").write_text(json.dumps({**config, "quantization_config": record}))
    return saved


NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4_OF_BITSANDBYTES = (0.0, 0.0052083333, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25)


def save_bnb(folder: Path, kind: str = "nf4", *, nested: bool = True, blocksize: int = 32) -> SavedCheckpoint:
    """Write bitsandbytes 4-bit weights: blocks of the flat weight, the first code in the high half of a byte."""
    table = np.array(NF4 if kind == "nf4" else [*FP4_OF_BITSANDBYTES, *(-value for value in FP4_OF_BITSANDBYTES)])
    table = table.astype(np.float32)
    outer_table = np.linspace(-1, 1, 256).astype(np.float32)

    def pack(module: str, weight: Array) -> CodedLinear:
        del module
        flat = weight.reshape(-1, blocksize)
        absmax = np.abs(flat).max(1)
        offset = float(absmax.mean())
        tensors = {}
        if nested:
            outer = np.array([np.abs(part - offset).max() for part in np.split(absmax, range(256, len(absmax), 256))])
            outer = outer.astype(np.float32)
            scaled = (absmax - offset) / np.repeat(outer, 256)[: len(absmax)]
            stored = np.abs(scaled[:, None] - outer_table).argmin(1).astype(np.uint8)
            absmax = outer_table[stored] * np.repeat(outer, 256)[: len(absmax)] + np.float32(offset)
            tensors[".weight.nested_absmax"] = torch.from_numpy(outer)
            tensors[".weight.nested_quant_map"] = torch.from_numpy(outer_table.copy())
            tensors[".weight.absmax"] = torch.from_numpy(stored)
        else:
            tensors[".weight.absmax"] = torch.from_numpy(absmax.astype(np.float32))
        absmax = absmax.astype(np.float32)
        codes = np.abs((flat / absmax[:, None])[..., None] - table).argmin(-1)
        values = (table[codes] * absmax[:, None]).reshape(weight.shape)
        pairs = codes.reshape(-1, 2)
        tensors[".weight"] = torch.from_numpy((pairs[:, :1] << 4 | pairs[:, 1:]).astype(np.uint8))
        tensors[".weight.quant_map"] = torch.from_numpy(table.copy())
        state = {"quant_type": kind, "blocksize": blocksize, "dtype": "float16", "shape": list(weight.shape)}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset} if nested else {}
        text = np.frombuffer(json.dumps(state).encode(), np.uint8)
        tensors[f".weight.quant_state.bitsandbytes__{kind}"] = torch.from_numpy(text.copy())
        return CodedLinear(tensors, values, codes.reshape(weight.shape), absmax)

    record = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind,
              "bnb_4bit_use_double_quant": nested, "llm_int8_skip_modules": ["lm_head"]}  # fmt: skip
    return save_coded(folder, record, pack)


def save_bnb8(folder: Path) -> SavedCheckpoint:
    """Write bitsandbytes 8-bit weights: a scale for each row, times 127."""

    def pack(module: str, weight: Array) -> CodedLinear:
        del module
        largest = np.abs(weight).max(1).astype(np.float32)
        codes = np.round(weight * 127 / largest[:, None]).astype(np.int8)
        tensors = {".weight": torch.from_numpy(codes), ".SCB": torch.from_numpy(largest),
                   ".weight_format": torch.tensor(0, dtype=torch.uint8)}  # fmt: skip
        values = codes.astype(np.float32) * (largest / np.float32(127))[:, None]
        return CodedLinear(tensors, values, codes.astype(np.int64) + 128, largest / 127)

    return save_coded(folder, {"quant_method": "bitsandbytes", "load_in_8bit": True}, pack)


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def save_nvfp4(folder: Path, method: str = "compressed-tensors") -> SavedCheckpoint:
    """Write NVFP4: blocks of 16 with an 8-bit scale, and a scale of the whole weight.

    compressed-tensors divides by the whole weight's scale, ModelOpt multiplies by it.
    """

    def pack(module: str, weight: Array) -> CodedLinear:
        del module
        whole = np.float32(448 * 6 / np.abs(weight).max())
        blocks = weight.reshape(len(weight), -1, 16)
        scales = torch.from_numpy(np.abs(blocks).max(-1) / 6 * whole).to(torch.float8_e4m3fn)
        scale = scales.float().numpy() / whole
        codes = np.abs((blocks / np.maximum(scale, 1e-12)[..., None])[..., None] - np.array(E2M1)).argmin(-1)
        values = np.array(E2M1, np.float32)[codes] * scale[..., None]
        flat = codes.reshape(len(weight), -1)
        tensors = {
            ".weight_packed": torch.from_numpy((flat[:, ::2] | flat[:, 1::2] << 4).astype(np.uint8)),
            ".weight_scale": scales, ".weight_global_scale": torch.tensor([whole]),
        }  # fmt: skip
        if method == "modelopt":
            tensors[".weight"] = tensors.pop(".weight_packed")
            tensors[".weight_scale_2"] = 1 / tensors.pop(".weight_global_scale")[0]
            tensors[".input_scale"] = torch.tensor(1.5)
        return CodedLinear(tensors, values.reshape(weight.shape), flat, scale)

    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    record = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
              "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}  # fmt: skip
    if method == "modelopt":
        record = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"],
                  "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}  # fmt: skip
    return save_coded(folder, record, pack)


def save_mxfp4(folder: Path, **changes: Any) -> SavedCheckpoint:
    """Write experts as in gpt-oss: experts × output channels × blocks of 32 values with an exponent of two."""
    import transformers

    from checkpoints import make_distinct

    sizes = {
        "vocab_size": 120, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
        "max_position_embeddings": 64, "sliding_window": 16, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
    }  # fmt: skip
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**{**sizes, **changes}))
    make_distinct(model)

    def pack(module: str, weight: Array) -> CodedLinear:
        del module
        experts, depth, rows = weight.shape
        blocks = weight.transpose(0, 2, 1).reshape(experts, rows, depth // 32, 32)
        exponents = np.ceil(np.log2(np.abs(blocks).max(-1) / 6))
        scale = (2.0**exponents).astype(np.float32)
        codes = np.abs((blocks / scale[..., None])[..., None] - np.array(E2M1)).argmin(-1)
        values = np.array(E2M1, np.float32)[codes] * scale[..., None]
        tensors = {
            "_blocks": torch.from_numpy((codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)),
            "_scales": torch.from_numpy((exponents + 127).astype(np.uint8)),
        }
        values = values.reshape(experts, rows, depth).transpose(0, 2, 1)
        return CodedLinear(tensors, values, codes.reshape(experts, rows, depth), scale)

    experts = ("experts.gate_up_proj", "experts.down_proj")
    return save_coded(folder, {"quant_method": "mxfp4"}, pack, model=model, coded=experts)


def _random_blocks(rows: int, depth: int, kind: str, scale: float) -> Array:
    """Return the bytes of K-quants with random codes and scales of a similar magnitude."""
    drawn = np.random.default_rng(rows + depth)
    size = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}[kind]
    blocks = drawn.integers(0, 256, (rows * depth // 256, size), dtype=np.uint8)
    halves = np.full(len(blocks), scale / {"Q4_K": 500, "Q5_K": 1000, "Q6_K": 4000}[kind], np.float16).view(np.uint8)
    place = 208 if kind == "Q6_K" else 0
    blocks[:, place : place + 2] = halves.reshape(-1, 2)
    if kind != "Q6_K":
        offsets = np.full(len(blocks), scale / 60, np.float16).view(np.uint8)
        blocks[:, 2:4] = offsets.reshape(-1, 2)
    return blocks.reshape(rows, -1)


GGUF_TYPES = {"attn_q": "Q4_K", "attn_k": "Q8_0", "attn_v": "Q6_K", "attn_output": "Q4_0", "ffn_gate": "Q4_K",
              "ffn_up": "Q6_K", "ffn_down": "Q4_0", "token_embd": "Q6_K"}  # fmt: skip


def save_gguf(folder: Path, types: Mapping[str, str] | None = None) -> SavedCheckpoint:
    """Write a llama as a GGUF file with its tokenizer, beside the float checkpoint of its dequantized weights."""
    import gguf

    kinds = {**GGUF_TYPES, **(types or {})}
    sizes = {**SIZES, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    reference = save_decoder(folder / "reference", "llama", **sizes, tie_word_embeddings=True)
    tensors = load_file(reference / "model.safetensors")
    (folder / "coded").mkdir()
    path = folder / "coded" / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    config = json.loads((reference / "config.json").read_text())
    writer.add_context_length(64)
    writer.add_embedding_length(256)
    writer.add_block_count(1)
    writer.add_feed_forward_length(256)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(64)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    tokenizer = json.loads((reference / "tokenizer.json").read_text())
    _add_tokenizer(writer, tokenizer)
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
             "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
             "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
             "post_attention_layernorm": "ffn_norm"}  # fmt: skip
    floats, linears = {}, {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        part = names.get(module.removeprefix("model.layers.0."), "")
        own = f"blk.0.{part}.weight" if part else {"model.embed_tokens": "token_embd.weight",
                                                   "model.norm": "output_norm.weight"}[module]  # fmt: skip
        weight = tensor.float().numpy()
        if tensor.dim() == 1:
            writer.add_tensor(own, weight)
            floats[name] = tensor.float()
            continue
        kind = gguf.GGMLQuantizationType[kinds[part or "token_embd"]]
        rows, depth = weight.shape
        heads = {"attn_q": 4, "attn_k": 2}.get(part)
        # llama.cpp stores the two values of a rotation beside each other.
        order = np.arange(rows)
        if heads:
            order = order.reshape(heads, 2, rows // heads // 2).swapaxes(1, 2).reshape(-1)
        if kind.name.endswith("_K"):
            data = _random_blocks(rows, depth, kind.name, float(weight.std()))
        else:
            data = gguf.quants.quantize(np.ascontiguousarray(weight[order]), kind)
        values = np.empty_like(weight)
        values[order] = gguf.quants.dequantize(data, kind)
        writer.add_tensor(own, data, raw_dtype=kind)
        floats[name] = torch.from_numpy(values)
        linears[module] = CodedLinear({}, values, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(floats, reference / "model.safetensors", {"format": "pt"})
    return SavedCheckpoint(path, reference, linears)


def _add_tokenizer(writer: Any, tokenizer: Mapping[str, Any]) -> None:
    vocabulary = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token in ("<s>", "</s>") else 1 for token in vocabulary])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def save_gguf_of(folder: Path, architecture: str, *, extra: Mapping[str, Array] | None = None) -> Path:
    """Write a small model of an architecture as a GGUF file in Q8_0, as llama.cpp converts it, and return the file.

    Args:
        folder: Folder of the file.
        architecture: Architecture named in the file; ``mistral`` is a llama under that name.
        extra: Further tensors.
    """
    import gguf
    import transformers

    from checkpoints import make_distinct

    kind = {"gemma3": "gemma3_text"}.get(architecture, architecture)
    # The config of a file has no padding token, and the default of Phi-3 is 32000.
    vocabulary = 32_064 if architecture == "phi3" else 120
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 1, "max_position_embeddings": 64, "vocab_size": vocabulary,
             "head_dim": 128 if architecture == "qwen3" else 32, "sliding_window": 8 if "gemma" in kind else None,
             "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 1}  # fmt: skip
    config = transformers.AutoConfig.for_model(kind, **sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    make_distinct(model)
    own = "llama" if architecture == "mistral" else architecture
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, own)
    writer.add_name(architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(vocabulary)
    if "gemma" in kind:
        writer.add_key_length(32)
        writer.add_sliding_window(8)
    with tempfile.TemporaryDirectory() as other:
        save_tokenizer(Path(other))
        _add_tokenizer(writer, json.loads((Path(other) / "tokenizer.json").read_text()))
    arch = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == own)
    names = gguf.get_tensor_name_map(arch, 2)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        module, _, ending = name.rpartition(".")
        weight = tensor.numpy()
        written = f"{names.get_name(module)}.{ending}"
        if weight.ndim == 1:
            writer.add_tensor(written, weight + np.float32("gemma" in kind and name.endswith("norm.weight")))
            continue
        heads = {"attn_q": 2, "attn_k": 1}.get(written.split(".")[-2]) if own == "llama" else None
        if heads:
            weight = weight.reshape(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)
        writer.add_tensor(
            written,
            gguf.quants.quantize(np.ascontiguousarray(weight), gguf.GGMLQuantizationType.Q8_0),
            raw_dtype=gguf.GGMLQuantizationType.Q8_0,
        )
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
