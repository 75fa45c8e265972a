"""Reading of GGUF files: config and tokenizer as written by transformers, and weights by reference.

``gguf_header.py`` reads the header; values are read on demand by plain reads. Blocks with offsets that are no multiples
of the step (Q4_K) get float zero points. Types without an exact integer representation, such as Q5_K, are dequantized
and written in the nearest precision.
"""

from __future__ import annotations

import atexit
import json
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from winml.modelkit.arrays import Array
from winml.modelkit.errors import CheckpointError
from winml.modelkit.file_names import CHECKPOINT_CONFIG_NAME
from winml.modelkit.models.checkpoints.quantized.gguf_header import GgufHeader, GgufTensor, read_header
from winml.modelkit.models.checkpoints.quantized.stored import CodedEntries, StoredTensors
from winml.modelkit.models.checkpoints.weight_files import StoredEntry
from winml.modelkit.onnx.coded_weights import CodedParts, CodedTensor, CodedWeight, pack_codes
from winml.modelkit.onnx.files.foreign_files import foreign_parser
from winml.modelkit.onnx.files.foreign_numbers import refuse_absurd_sizes
from winml.modelkit.onnx.files.moving import remove_file
from winml.modelkit.onnx.files.recovery import temporary_folder
from winml.modelkit.options import read_json_file
from winml.modelkit.ort.foreign_libraries import library_folder, local_libraries, quiet_libraries

_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")
"""Supported architectures: generated text was compared with transformers on the same file.

Others merge or rescale tensors differently. Files of Mistral have the architecture llama.
"""
_OFFSET_NORMS = ("gemma2", "gemma3")
"""Architectures of a file with normalization weights stored plus one."""
_INTERLEAVED = "llama"
"""Architecture of a file that interleaves the rotary pairs of queries and keys; transformers stores halves."""
_ROPE_PREFIX = "rope_"
"""Prefix of tensors that scale the angles of RoPE; transformers does not read them either."""
_NORMS_NAME = "norms.bin"
_FLOAT_TYPES = {"F32": ("float32", 32), "F16": ("float16", 16), "BF16": ("bfloat16", 16)}
_FLOAT16 = np.dtype("<f2")

_COUNT_KEYS = (
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
)  # fmt: skip
"""Keys of positive integers, after the name of the architecture."""

_FOLDERS: dict[tuple[str, int, int], Path] = {}
"""Path, size and time of a file → its folder in this process."""


def gguf_folder(path: Path) -> Path:
    """Return a folder with the config and the tokenizer of a GGUF file; it is removed when the process ends.

    Raises:
        UsageError: the package that reads such files is missing.
        CheckpointError: the file is damaged, split, or of an unsupported architecture.
    """
    status = path.stat()
    key = (str(path.absolute()), status.st_size, status.st_mtime_ns)
    if key not in _FOLDERS:
        config = _derive_config(path, read_header(path))
        folder = _temporary_folder()
        record: dict[str, Any] = {"quant_method": "gguf"}
        try:
            _save_tokenizer(path, folder)
        except CheckpointError as error:
            record["tokenizer_problem"] = error.message.replace(str(folder), path.name)
            for file in folder.glob("*.json"):
                remove_file(file)
        text = json.dumps({**config, "quantization_config": record}, indent=2)
        (folder / CHECKPOINT_CONFIG_NAME).write_text(text, encoding="utf-8", newline="\n")
        _FOLDERS[key] = folder
    return _FOLDERS[key]


def _temporary_folder() -> Path:
    """Return a new folder that is removed when the process ends, or by a later command after a kill."""
    folders = ExitStack()
    atexit.register(folders.close)
    return folders.enter_context(temporary_folder())


def _derive_config(path: Path, header: GgufHeader) -> dict[str, Any]:
    """Return the config of the float model, as transformers derives it from the header.

    Raises:
        CheckpointError: the file is one of several, its architecture is not supported, or its header is damaged.
    """
    architecture = header.metadata.get("general.architecture")
    if (count := header.metadata.get("split.count", 1)) not in (0, 1):
        raise CheckpointError(
            f"{path}: is one of {count!r} files of a model, and one file is read", hint="Merge them with gguf-split."
        )
    if architecture not in _ARCHITECTURES:
        raise CheckpointError(
            f"{path}: architecture {architecture!r} is not supported from GGUF; expected {', '.join(_ARCHITECTURES)}",
            hint="Pass the transformers checkpoint that the file was converted from.",
        )
    _refuse_absurd_values(path, architecture, header.metadata)
    failure = f"{path}: transformers cannot read the header"
    with local_libraries(), foreign_parser(failure, error=CheckpointError, hint=_DOWNLOAD_HINT):
        from transformers import AutoConfig
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        config: dict[str, Any] = load_gguf_checkpoint(str(path), return_tensors=False)["config"]
        values = {key: value.item() if isinstance(value, np.generic) else value for key, value in config.items()}
        refuse_absurd_sizes(values, path)
        kind = values["model_type"]
        # Errors are raised here, where the file is known: the config is written to a temporary folder.
        AutoConfig.for_model(**values)
        return {**values, "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]], "dtype": "float32"}


def _refuse_absurd_values(path: Path, architecture: str, metadata: Mapping[str, Any]) -> None:
    """Refuse counts that are no positive integers, and numbers that are not finite.

    Raises:
        CheckpointError: names the key and its value.
    """
    for key, value in metadata.items():
        name = key.removeprefix(f"{architecture}.")
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if name != key and name in _COUNT_KEYS and not (is_integer and 0 < value < _COUNT_LIMIT):
            value_text = "an array" if value is None else repr(value)
            raise CheckpointError(
                f"{path}: {key} is {value_text}, expected an integer from 1 to {_COUNT_LIMIT - 1}", hint=_DOWNLOAD_HINT
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise CheckpointError(f"{path}: {key} is {value}, expected a finite number", hint=_DOWNLOAD_HINT)


_COUNT_LIMIT = 2**31
"""Chosen: twice the largest size that a config may name."""
_DOWNLOAD_HINT = "Download the file again."


def _save_tokenizer(path: Path, folder: Path) -> None:
    """Save the tokenizer of a file, without reading neighbouring files.

    Raises:
        CheckpointError: transformers cannot convert the tokenizer.
    """
    with quiet_libraries(), library_folder(folder, "", error=CheckpointError):
        from transformers import AutoTokenizer

        # The absolute path of the file overrides the folder.
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=str(path.absolute()))
        tokenizer.save_pretrained(folder)


@dataclass(frozen=True)
class _BlockType:
    """Storage of the values of a block in a type of GGUF."""

    values: int
    """Values of a block."""
    size_bytes: int
    bits: int
    """Bits of the integers that hold the codes."""
    scale_size: int
    """Values that share a scale."""
    decode: Callable[[Array], tuple[Array, Array, Array | None]]
    """(blocks × bytes) → codes, one per byte; scales; zero points as floats, or `None`."""


def _read_float16(blocks: Array, offset: int) -> Array:
    """Return the 16-bit float at a byte offset of each block, as float32."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view(_FLOAT16).astype(np.float32)


def _decode_q8_0(blocks: Array) -> tuple[Array, Array, Array | None]:
    return blocks[:, 2:] ^ np.uint8(128), _read_float16(blocks, 0), None


def _decode_q4_0(blocks: Array) -> tuple[Array, Array, Array | None]:
    return np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1), _read_float16(blocks, 0), None


def _decode_k_scales(blocks: Array) -> tuple[Array, Array]:
    """Return the scales and offsets of the eight groups of a block of Q4_K, six bits each in twelve bytes."""
    packed = blocks[:, 4:16]
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=1)
    offsets = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=1)
    return scales * _read_float16(blocks, 0), offsets * _read_float16(blocks, 2)


def _decode_q4_k(blocks: Array) -> tuple[Array, Array, Array | None]:
    scales, offsets = _decode_k_scales(blocks)
    # A scale of zero represents the offset alone: a step small enough to vanish beside the offset.
    steps = np.where(scales == 0, np.maximum(np.abs(offsets), np.float32(1e-30)) * np.float32(1e-6), scales)
    pairs = blocks[:, 16:144].reshape(len(blocks), 4, 32)
    codes = np.stack([pairs & 15, pairs >> 4], axis=2).reshape(len(blocks), 256)
    return codes, steps.astype(np.float32), (offsets / steps).astype(np.float32)


def _decode_q6_k(blocks: Array) -> tuple[Array, Array, Array | None]:
    low = blocks[:, :128].reshape(len(blocks), 2, 64)
    high = blocks[:, 128:192].reshape(len(blocks), 2, 32)
    nibbles = np.concatenate([low & 15, low >> 4], axis=2).reshape(len(blocks), 2, 4, 32)
    upper = np.stack([(high >> shift) & 3 for shift in (0, 2, 4, 6)], axis=2)
    codes = (nibbles | upper << 4).reshape(len(blocks), 256) + np.uint8(128 - 32)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8) * _read_float16(blocks, 208)
    return codes, scales.astype(np.float32), None


_INTEGER_TYPES = {
    "Q4_0": _BlockType(32, 18, 4, 32, _decode_q4_0),
    "Q8_0": _BlockType(32, 34, 8, 32, _decode_q8_0),
    "Q4_K": _BlockType(256, 144, 4, 32, _decode_q4_k),
    "Q6_K": _BlockType(256, 210, 8, 16, _decode_q6_k),
}
"""Types that integers represent exactly."""


def read_gguf(stored: StoredTensors, config: Mapping[str, Any]) -> CodedEntries:
    """Return the weights of a GGUF file, under the names of transformers.

    Raises:
        CheckpointError: the file is damaged, or a tensor has an unsupported type or name.
    """
    (path,) = stored.files
    header = read_header(path)
    architecture = header.metadata.get("general.architecture")
    heads = header.metadata.get(f"{architecture}.attention.head_count", 0)
    groups = {"attn_q": heads, "attn_k": header.metadata.get(f"{architecture}.attention.head_count_kv", heads)}
    coded = CodedEntries()
    if problem := config.get("tokenizer_problem"):
        coded.notes.append(f"The tokenizer of the file cannot be converted ({problem}): the result has none.")
    names = _map_parameters(path, stored.folder, architecture)
    norms = _NormFile(path)
    ignored = []
    for tensor in header.tensors:
        if tensor.name not in names:
            if not tensor.name.startswith(_ROPE_PREFIX):
                raise stored.error(tensor.name, f"has no place in a {architecture} of transformers")
            ignored.append(tensor.name)
            continue
        name, shape, kind = names[tensor.name], tensor.shape, tensor.type_name
        layer_name = tensor.name.split(".")[-2]
        count = groups.get(layer_name) if architecture == _INTERLEAVED else None
        if count is not None and (not isinstance(count, int) or count <= 0 or shape[0] % (2 * count)):
            raise stored.error(tensor.name, f"has {shape[0]} rows, which are no pairs of {count!r} heads")
        order = None if count is None else _order_halves(shape[0], count)
        if architecture in _OFFSET_NORMS and name.endswith("norm.weight"):
            coded.plain[name] = norms.append_lowered(tensor)
        elif kind in _FLOAT_TYPES and order is None:
            dtype, bits = _FLOAT_TYPES[kind]
            coded.plain[name] = StoredEntry(path, tensor.offset, dtype, shape, bits)
        else:
            coded.tensors[name] = CodedTensor(_coded_weight(stored, path, tensor, order, name))
    if ignored:
        coded.notes.append(
            f"{', '.join(ignored)} of the file, which scale RoPE by position, are ignored, as in transformers: "
            "long texts may differ from those of llama.cpp."
        )
    return coded


def _map_parameters(path: Path, folder: Path, architecture: object) -> dict[str, str]:
    """Return name in the file → parameter of the model, by the map of the package gguf."""
    import torch
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
    from transformers import AutoConfig, AutoModelForCausalLM

    with foreign_parser(f"{path}: the model of its config cannot be built", error=CheckpointError, hint=_DOWNLOAD_HINT):
        config = read_json_file(folder / CHECKPOINT_CONFIG_NAME)
        config.pop("quantization_config", None)
        kind = config.pop("model_type")
        with torch.device("meta"), local_libraries():
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config))
        architecture_id = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
        name_map = get_tensor_name_map(architecture_id, model.config.num_hidden_layers)
    names = {}
    for parameter in model.state_dict():
        module, _, ending = parameter.rpartition(".")
        if (name := name_map.get_name(module)) is not None:
            names[f"{name}.{ending}"] = parameter
    return names


class _NormFile:
    """A temporary file with normalization weights in the convention of transformers."""

    def __init__(self, source: Path) -> None:
        self._source = source
        self._file: Path | None = None

    def append_lowered(self, tensor: GgufTensor) -> StoredEntry:
        """Write a weight minus one, and return its position."""
        if self._file is None:
            self._file = _temporary_folder() / _NORMS_NAME
            self._file.touch()
        values = _dequantize_tensor(tensor, _read_bytes(self._source, tensor)) - np.float32(1)
        offset = self._file.stat().st_size
        with self._file.open("ab") as file:
            file.write(values.tobytes())
        return StoredEntry(self._file, offset, "float32", tensor.shape, 32)


def _read_bytes(path: Path, tensor: GgufTensor) -> Array:
    """Return the bytes of a tensor.

    Raises:
        CheckpointError: the file became shorter.
    """
    content: Array = np.fromfile(path, np.uint8, tensor.size_bytes, offset=tensor.offset)
    if len(content) < tensor.size_bytes:
        raise CheckpointError(f"{path}: truncated: tensor {tensor.name} ends behind it", hint="Download it again.")
    return content


def _dequantize_tensor(tensor: GgufTensor, content: Array) -> Array:
    """Return the values of a tensor from its bytes, as float32."""
    from gguf import GGMLQuantizationType, quants

    rows = content.reshape(math.prod(tensor.shape[:-1]), -1)
    values: Array = quants.dequantize(rows, GGMLQuantizationType[tensor.type_name])
    return np.asarray(values, np.float32).reshape(tensor.shape)


def _order_halves(rows: int, heads: int) -> Array:
    """Return row in transformers' order → row in the file, where halves of a head are interleaved."""
    order: Array = np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
    return order


def _coded_weight(stored: StoredTensors, path: Path, tensor: GgufTensor, order: Array | None, name: str) -> CodedWeight:
    """Return a weight as codes that are read on demand, or as floats if integers cannot represent its type exactly.

    Raises:
        CheckpointError: the tensor is no matrix, or its type cannot be read.
    """
    kind, shape = tensor.type_name, tensor.shape
    if len(shape) != 2:
        raise stored.error(tensor.name, f"is {kind} with {len(shape)} axes, expected 2")
    block_type = _INTEGER_TYPES.get(kind)

    def read_raw() -> Array:
        return _read_bytes(path, tensor)

    def reorder(values: Array) -> Array:
        return np.ascontiguousarray(values if order is None else values[order])

    if block_type is None or shape[1] % block_type.values:
        return _float_weight(stored, tensor, read_raw, reorder, name)

    def read() -> CodedParts:
        codes, scales, points = block_type.decode(read_raw().reshape(-1, block_type.size_bytes))
        rows = shape[0]
        packed = pack_codes(np.ascontiguousarray(codes).reshape(rows, -1), block_type.bits)
        by_row = reorder(scales.reshape(rows, -1))
        return CodedParts(reorder(packed), by_row, None if points is None else reorder(points.reshape(rows, -1)))

    return CodedWeight(
        "gguf", name, shape, "integer", block_type.bits, block_type.scale_size, read,
        has_zero_points=kind == "Q4_K", has_float_zero_points=kind == "Q4_K", stored_type=kind,
    )  # fmt: skip


def _float_weight(
    stored: StoredTensors,
    tensor: GgufTensor,
    read_raw: Callable[[], Array],
    reorder: Callable[[Array], Array],
    name: str,
) -> CodedWeight:
    """Return a weight without an exact integer representation, as float values for the nearest precision.

    Args:
        stored: The stored tensors, for messages.
        tensor: The tensor in the file.
        read_raw: Reads its bytes.
        reorder: Restores the order of rows that transformers expects.
        name: Name of the weight in the model.

    Raises:
        CheckpointError: the package gguf does not dequantize the type.
    """
    kind, (rows, depth) = tensor.type_name, tensor.shape
    row_bytes = tensor.size_bytes // rows
    try:
        # Probe one row: the package may lack a function for the type.
        _dequantize_tensor(replace(tensor, shape=(1, depth)), np.zeros(row_bytes, np.uint8))
    except (NotImplementedError, KeyError):
        raise stored.error(tensor.name, f"is {kind}, which the package gguf does not dequantize") from None

    def read_floats() -> Array:
        return reorder(_dequantize_tensor(tensor, read_raw()))

    def read() -> CodedParts:
        return CodedParts(read_floats().view(np.uint8), np.ones((rows, 1), np.float32))

    bits = max(1, round(8 * row_bytes / depth))
    return CodedWeight("gguf", name, (rows, depth), "number", bits, depth, read, stored_type=kind)
