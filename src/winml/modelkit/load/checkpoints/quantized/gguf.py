"""Reads GGUF files: their config and tokenizer as transformers writes them, and their weights by reference.

The package ``gguf`` reads the header; values are read by plain reads when they are needed. Blocks whose offsets are no
whole steps (Q4_K) get zero points between the steps. What integers do not hold exactly, such as Q5_K, keeps its numbers
and is written in the nearest form.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from winml.modelkit.arrays import Array
from winml.modelkit.errors import CheckpointError, UsageError, first_line
from winml.modelkit.file_names import CHECKPOINT_CONFIG_NAME
from winml.modelkit.graph.coded_weights import CodedParts, CodedTensor, CodedWeight, pack_codes
from winml.modelkit.load.checkpoints.quantized.stored import CodedEntries, StoredTensors
from winml.modelkit.load.checkpoints.weight_files import StoredEntry

__all__ = ["gguf_folder", "read_gguf"]

_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")
"""Of files. Those whose text was compared with the one that transformers generates of the file; others merge or rescale
tensors in ways of their own. Files of Mistral say llama."""
_RAISED = ("gemma2", "gemma3")
"""Architectures of a file whose weights of norms have one added."""
_PERMUTED = "llama"
"""Architecture of a file whose queries and keys have pairs of a rotation beside each other, where transformers has
halves."""
_ROTATIONS = "rope_"
"""Beginning of the names of tensors that scale the angles of rotations; transformers does not read them either."""
_NORMS_NAME = "norms.bin"
_FLOATS = {"F32": ("float32", 32), "F16": ("float16", 16), "BF16": ("bfloat16", 16)}
_HALF = np.dtype("<f2")

_FOLDERS: dict[tuple[str, int, int], Path] = {}
"""Path, size and time of a file → the folder that stands for it in this process."""


def gguf_folder(path: Path) -> Path:
    """Return a folder with the config and the tokenizer of a GGUF file, which refers to it; gone when the process ends.

    Raises:
        UsageError: the package is missing that reads such files.
        CheckpointError: the file is damaged, split, or of an architecture that is not read.
    """
    status = path.stat()
    key = (str(path.absolute()), status.st_size, status.st_mtime_ns)
    if key not in _FOLDERS:
        reader = _reader(path)
        config = _config_of(path, reader)
        temporary = tempfile.TemporaryDirectory(prefix="winml-gguf-")
        atexit.register(temporary.cleanup)
        folder = Path(temporary.name)
        record: dict[str, Any] = {"quant_method": "gguf"}
        try:
            _save_tokenizer(path, folder)
        except (ValueError, KeyError, TypeError, OSError, ImportError, AttributeError, IndexError) as error:
            record["tokenizer_problem"] = f"{type(error).__name__}: {first_line(error)}"
        text = json.dumps({**config, "quantization_config": record}, indent=2)
        (folder / CHECKPOINT_CONFIG_NAME).write_text(text, encoding="utf-8")
        target = folder / path.name
        try:
            target.symlink_to(path.absolute())
        except OSError:  # Windows lets administrators alone make them
            os.link(path, target)
        _FOLDERS[key] = folder
    return _FOLDERS[key]


def _reader(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UsageError(
            f"{path}: reading a GGUF file needs the package gguf, which is not installed",
            hint="pip install 'winml-modelkit[gguf]'",
        ) from error
    try:
        return GGUFReader(path)
    except (ValueError, KeyError, IndexError, OSError, TypeError) as error:
        raise CheckpointError(
            f"{path}: not a GGUF file, or a damaged one: {first_line(error)}", hint="Download the file again."
        ) from error


def _field(reader: Any, key: str, default: Any = None) -> Any:
    field = reader.get_field(key)
    return default if field is None else field.contents()


def _config_of(path: Path, reader: Any) -> dict[str, Any]:
    """Return the config of the float model, as transformers derives it from the header."""
    architecture = _field(reader, "general.architecture")
    if (count := _field(reader, "split.count", 1)) > 1:
        raise CheckpointError(
            f"{path}: is one of {count} files of a model, and one file is read", hint="Merge them with gguf-split."
        )
    if architecture not in _ARCHITECTURES:
        raise CheckpointError(
            f"{path}: architecture {architecture!r} is not supported from GGUF; expected {', '.join(_ARCHITECTURES)}",
            hint="Pass the transformers checkpoint that the file was converted from.",
        )
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    try:
        config: dict[str, Any] = load_gguf_checkpoint(str(path), return_tensors=False)["config"]
    except (ValueError, KeyError, TypeError, IndexError, ImportError) as error:
        raise CheckpointError(
            f"{path}: transformers cannot read the header: {type(error).__name__}: {first_line(error)}",
            hint="Download the file again.",
        ) from error
    plain = {key: value.item() if isinstance(value, np.generic) else value for key, value in config.items()}
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[plain["model_type"]]
    return {**plain, "architectures": [architecture], "dtype": "float32"}


def _save_tokenizer(path: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(
        str(path.absolute().parent), gguf_file=path.name, local_files_only=True
    )
    tokenizer.save_pretrained(folder)


@dataclass(frozen=True)
class _BlockType:
    """How a type of GGUF stores the values of a block."""

    values: int
    """Of a block."""
    size_bytes: int
    bits: int
    """Of the integers that hold its codes."""
    scale_size: int
    """Values that share a scale."""
    decode: Callable[[Array], tuple[Array, Array, Array | None]]
    """Takes blocks × bytes; returns codes one in each byte, scales, and zero points between the steps."""


def _floats(blocks: Array, place: int) -> Array:
    """Return the 16-bit float at a place of each block, float32."""
    return np.ascontiguousarray(blocks[:, place : place + 2]).view(_HALF).astype(np.float32)


def _q8_0(blocks: Array) -> tuple[Array, Array, Array | None]:
    return blocks[:, 2:] ^ np.uint8(128), _floats(blocks, 0), None


def _q4_0(blocks: Array) -> tuple[Array, Array, Array | None]:
    return np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1), _floats(blocks, 0), None


def _k_scales(blocks: Array) -> tuple[Array, Array]:
    """Return the scales and offsets of the eight groups of a block of Q4_K, six bits each in twelve bytes."""
    packed = blocks[:, 4:16]
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=1)
    offsets = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=1)
    return scales * _floats(blocks, 0), offsets * _floats(blocks, 2)


def _q4_k(blocks: Array) -> tuple[Array, Array, Array | None]:
    scales, offsets = _k_scales(blocks)
    # A scale of zero leaves the offset alone: steps so small that they vanish beside it.
    steps = np.where(scales == 0, np.maximum(np.abs(offsets), np.float32(1e-30)) * np.float32(1e-6), scales)
    pairs = blocks[:, 16:144].reshape(len(blocks), 4, 32)
    codes = np.stack([pairs & 15, pairs >> 4], axis=2).reshape(len(blocks), 256)
    return codes, steps.astype(np.float32), (offsets / steps).astype(np.float32)


def _q6_k(blocks: Array) -> tuple[Array, Array, Array | None]:
    low = blocks[:, :128].reshape(len(blocks), 2, 64)
    high = blocks[:, 128:192].reshape(len(blocks), 2, 32)
    nibbles = np.concatenate([low & 15, low >> 4], axis=2).reshape(len(blocks), 2, 4, 32)
    upper = np.stack([(high >> shift) & 3 for shift in (0, 2, 4, 6)], axis=2)
    codes = (nibbles | upper << 4).reshape(len(blocks), 256) + np.uint8(128 - 32)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8) * _floats(blocks, 208)
    return codes, scales.astype(np.float32), None


_TYPES = {
    "Q4_0": _BlockType(32, 18, 4, 32, _q4_0),
    "Q8_0": _BlockType(32, 34, 8, 32, _q8_0),
    "Q4_K": _BlockType(256, 144, 4, 32, _q4_k),
    "Q6_K": _BlockType(256, 210, 8, 16, _q6_k),
}
"""Types that integers hold exactly."""


def read_gguf(stored: StoredTensors, config: Mapping[str, Any]) -> CodedEntries:
    """Return the weights of a GGUF file, under the names of transformers.

    Raises:
        CheckpointError: the file is damaged, or a tensor has a type or name that is not read.
    """
    (path,) = stored.files
    reader = _reader(path)
    architecture = _field(reader, "general.architecture")
    heads = _field(reader, f"{architecture}.attention.head_count", 0)
    groups = {"attn_q": heads, "attn_k": _field(reader, f"{architecture}.attention.head_count_kv", heads)}
    found = CodedEntries()
    if problem := config.get("tokenizer_problem"):
        found.notes.append(f"The tokenizer of the file cannot be converted ({problem}): the result has none.")
    names = _names_of_model(stored.folder, reader)
    norms = _Norms(stored.folder / _NORMS_NAME)
    ignored = []
    for tensor in reader.tensors:
        part = tensor.name.split(".")[-2]
        if tensor.name not in names:
            if not tensor.name.startswith(_ROTATIONS):
                raise stored.error(tensor.name, f"has no place in a {architecture} of transformers")
            ignored.append(tensor.name)
            continue
        name = names[tensor.name]
        shape = tuple(int(size) for size in reversed(tensor.shape))
        count = groups.get(part) if architecture == _PERMUTED else None
        order = None if count is None else _halves(shape[0], count)
        kind, offset = tensor.tensor_type.name, int(tensor.data_offset)
        if architecture in _RAISED and name.endswith("norm.weight"):
            found.plain[name] = norms.lowered(tensor)
        elif kind in _FLOATS and order is None:
            dtype, bits = _FLOATS[kind]
            found.plain[name] = StoredEntry(path, offset, dtype, shape, bits)
        else:
            found.tensors[name] = CodedTensor(_weight(stored, path, tensor, shape, order, name))
    if ignored:
        found.notes.append(
            f"{', '.join(ignored)} of the file, which scale RoPE by position, are ignored, as in transformers: "
            "long texts may differ from those of llama.cpp."
        )
    return found


def _names_of_model(folder: Path, reader: Any) -> dict[str, str]:
    """Return name in the file → parameter of the model, by the map of the package gguf."""
    import torch
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
    from transformers import AutoConfig, AutoModelForCausalLM

    config = json.loads((folder / CHECKPOINT_CONFIG_NAME).read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    kind = config.pop("model_type")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config))
    architecture = _field(reader, "general.architecture")
    number = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    known = get_tensor_name_map(number, model.config.num_hidden_layers)
    names = {}
    for parameter in model.state_dict():
        module, _, ending = parameter.rpartition(".")
        if (name := known.get_name(module)) is not None:
            names[f"{name}.{ending}"] = parameter
    return names


class _Norms:
    """A file beside the config with weights of norms as transformers has them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.write_bytes(b"")

    def lowered(self, tensor: Any) -> StoredEntry:
        """Write a weight less one, and return where it is."""
        from gguf import quants

        values = np.asarray(quants.dequantize(tensor.data, tensor.tensor_type), np.float32) - np.float32(1)
        offset = self._path.stat().st_size
        with self._path.open("ab") as file:
            file.write(values.tobytes())
        return StoredEntry(self._path, offset, "float32", tuple(values.shape), 32)


def _halves(rows: int, heads: int) -> Array:
    """Return for each row of transformers' order its place in the file, where halves of a head are interleaved."""
    places: Array = np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
    return places


def _weight(
    stored: StoredTensors, path: Path, tensor: Any, shape: tuple[int, ...], order: Array | None, name: str
) -> CodedWeight:
    kind, start, size = tensor.tensor_type.name, int(tensor.data_offset), int(tensor.n_bytes)
    if len(shape) != 2:
        raise stored.error(tensor.name, f"is {kind} with {len(shape)} axes, expected 2")
    form = _TYPES.get(kind)

    def raw() -> Array:
        content: Array = np.fromfile(path, np.uint8, size, offset=start)
        if len(content) < size:
            raise CheckpointError(f"{path}: truncated: tensor {tensor.name} ends behind it", hint="Download it again.")
        return content

    def ordered(values: Array) -> Array:
        return np.ascontiguousarray(values if order is None else values[order])

    if form is None or shape[1] % form.values:
        return _as_numbers(stored, tensor, shape, raw, ordered, name)

    def read() -> CodedParts:
        codes, scales, points = form.decode(raw().reshape(-1, form.size_bytes))
        rows = shape[0]
        packed = pack_codes(np.ascontiguousarray(codes).reshape(rows, -1), form.bits)
        by_row = ordered(scales.reshape(rows, -1))
        return CodedParts(ordered(packed), by_row, None if points is None else ordered(points.reshape(rows, -1)))

    return CodedWeight(
        "gguf", name, shape, "integer", form.bits, form.scale_size, read,
        has_zero_points=kind == "Q4_K", has_float_zero_points=kind == "Q4_K", stored_type=kind,
    )  # fmt: skip


def _as_numbers(
    stored: StoredTensors,
    tensor: Any,
    shape: tuple[int, ...],
    raw: Callable[[], Array],
    ordered: Callable[[Array], Array],
    name: str,
) -> CodedWeight:
    """Return a weight whose codes no integers hold exactly: its numbers, to be written in the nearest form."""
    from gguf import quants

    kind = tensor.tensor_type
    with contextlib.suppress(NotImplementedError, KeyError):
        rows, row_bytes = shape[0], int(tensor.n_bytes) // shape[0]
        quants.dequantize(np.zeros((1, row_bytes), np.uint8), kind)  # is there a way to read the type at all?

        def numbers() -> Array:
            values: Array = quants.dequantize(raw().reshape(rows, row_bytes), kind).astype(np.float32)
            return ordered(values)

        def read() -> CodedParts:
            return CodedParts(numbers().view(np.uint8), np.ones((rows, 1), np.float32))

        bits = max(1, round(8 * row_bytes / shape[1]))
        return CodedWeight("gguf", name, shape, "number", bits, shape[1], read, stored_type=kind.name)
    raise stored.error(tensor.name, f"is {kind.name}, which the package gguf does not dequantize")
