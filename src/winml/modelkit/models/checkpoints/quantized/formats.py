"""Detection of a quantized checkpoint's format from its config, and lookup of its weights.

A format is declared by its name in ``quantization_config`` and the reader of its tensors. Only headers and small index
tensors are read here; codes are read when a weight is written or compared. No package of a format is needed. Imports no
model library: readers are imported on first use.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winml.modelkit.errors import CheckpointError, opt
from winml.modelkit.file_names import CHECKPOINT_CONFIG_NAME
from winml.modelkit.models.checkpoints.weight_files import StoredEntry
from winml.modelkit.options import JsonError, read_json_file

if TYPE_CHECKING:
    from winml.modelkit.onnx.coded_weights import CodedTensor

_CONFIG_KEYS = ("quantization_config", "compression_config")
"""Specified: key of the record in transformers, and in older versions of compressed-tensors."""
_PACKED_BITS = (2, 4, 8)
"""Bits of packed integers for which ONNX Runtime has operators."""


@dataclass(frozen=True)
class QuantizedFormat:
    """One format of quantized checkpoints."""

    name: str
    """Name in the metadata of nodes: ``source_format``."""
    words: str
    """Description."""
    reader: str
    """``module:function`` of this folder: (tensors of a checkpoint, its ``quantization_config``) → entries."""
    refusal: Callable[[Mapping[str, Any]], str] = lambda _config: ""
    """Config → unsupported property as text; ``""`` if the config is supported."""


def _find_unsupported_gptq(config: Mapping[str, Any]) -> str:
    """Return the unsupported property of a config of GPTQ as text; ``""`` if the config is supported."""
    version = config.get("checkpoint_format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        return f"checkpoint_format {version!r}, expected gptq or gptq_v2"
    return _find_unsupported_bits("bits", config.get("bits"))


def _find_unsupported_bits(key: str, bits: object, readable: Collection[int] = _PACKED_BITS) -> str:
    """Return the error text for declared bits that are not supported; ``""`` otherwise."""
    if bits is None or (type(bits) is int and bits in readable):
        return ""
    return f"{key} {bits!r}, expected {' or '.join(map(str, readable))}"


def _find_unsupported_awq(config: Mapping[str, Any]) -> str:
    """Return the unsupported property of a config of AWQ as text; ``""`` if the config is supported."""
    if (version := str(config.get("version") or "gemm").lower()) != "gemm":
        return f"version {version!r}, expected gemm"
    return _find_unsupported_bits("bits", config.get("bits", config.get("w_bit")), (4,))


def _find_unsupported_compressed(config: Mapping[str, Any]) -> str:
    """Return the unsupported property of a config of compressed-tensors as text; ``""`` if the config is supported."""
    by_name = config.get("config_groups") or {}
    if not isinstance(by_name, Mapping):
        return f"config_groups {by_name!r}, expected an object"
    groups = [group for group in by_name.values() if isinstance(group, Mapping)]
    for name in (config.get("format"), *(group.get("format") for group in groups)):
        if name is not None and name not in _COMPRESSED_FORMATS:
            return f"format {name!r}, expected one of {', '.join(sorted(_COMPRESSED_FORMATS))}"
    for group in groups:
        weights = group.get("weights")
        is_packed = (group.get("format") or config.get("format")) == "pack-quantized"
        bits = weights.get("num_bits") if is_packed and isinstance(weights, Mapping) else None
        if problem := _find_unsupported_bits("num_bits", bits):
            return problem
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format") not in (None, "dense"):
        return f"sparsity_config with format {sparsity['format']!r}, expected dense"
    if isinstance(transforms := config.get("transform_config"), Mapping) and transforms.get("config_groups"):
        return "transform_config, which rotates activations, expected none"
    return ""


_COMPRESSED_FORMATS = frozenset({
    "pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mixed-precision", "dense",
})  # fmt: skip

FORMATS: Mapping[str, QuantizedFormat] = {
    "gptq": QuantizedFormat("gptq", "GPTQ", "integers:read_gptq", _find_unsupported_gptq),
    "awq": QuantizedFormat("awq", "AWQ", "integers:read_awq", _find_unsupported_awq),
    "compressed-tensors": QuantizedFormat(
        "compressed-tensors", "compressed-tensors", "compressed:read_compressed", _find_unsupported_compressed
    ),
    "fp8": QuantizedFormat("fp8", "FP8", "floats:read_fp8"),
    "fbgemm_fp8": QuantizedFormat("fp8", "FP8 of FBGEMM", "floats:read_fp8"),
    "bitsandbytes": QuantizedFormat("bitsandbytes", "bitsandbytes", "floats:read_bitsandbytes"),
    "mxfp4": QuantizedFormat("mxfp4", "MXFP4", "floats:read_mxfp4"),
    "gguf": QuantizedFormat("gguf", "GGUF", "gguf:read_gguf"),
    "modelopt": QuantizedFormat("modelopt", "ModelOpt", "floats:read_modelopt"),
}
"""Value of ``quant_method`` → format."""

_PACKING_FORMATS = {"auto_gptq": "gptq", "auto_awq": "awq"}
"""Specified: last part of ``packing_format`` of AutoRound → the format with this layout.

Others (``auto_round``, ``auto_round:gptqmodel``) store other zero points in tensors of the same names.
"""


def quantization_of(content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the quantization record in the content of a ``config.json``, or in the config of its text model.

    `None` for a float checkpoint.
    """
    text = content.get("text_config")
    for record in (content, text if isinstance(text, Mapping) else {}):
        for key in _CONFIG_KEYS:
            if record.get(key) is not None:
                quantization = record[key]
                return quantization if isinstance(quantization, Mapping) else {"quant_method": quantization}
    return None


def without_quantization(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a ``config.json`` without quantization, as for the float model."""
    float_content = {key: value for key, value in content.items() if key not in _CONFIG_KEYS}
    if isinstance(text := float_content.get("text_config"), Mapping):
        float_content["text_config"] = {key: value for key, value in text.items() if key not in _CONFIG_KEYS}
    return float_content


@dataclass(frozen=True)
class CodedCheckpoint:
    """The quantized weights of a checkpoint."""

    format: QuantizedFormat
    tensors: Mapping[str, CodedTensor]
    """Parameter of the float checkpoint → its quantized weight."""
    consumed: frozenset[str]
    """Names of the tensors in the files that belong to these weights."""
    entries: Mapping[str, StoredEntry]
    """All tensors in the files."""
    notes: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """The format and its bits, for reports: ``GPTQ, 4 bits in blocks of 128 (224 weights)``."""
        counts = Counter((tensor.weight.bits, tensor.weight.block_size) for tensor in self.tensors.values())
        kinds = ", ".join(
            f"{bits} bits in blocks of {size} ({count} weight{'s' if count > 1 else ''})"
            for (bits, size), count in counts.most_common()
        )
        return f"{self.format.words}, {kinds}"


def read_coded_checkpoint(
    record: Mapping[str, Any], entries: Mapping[str, StoredEntry], folder: Path, files: Sequence[Path]
) -> CodedCheckpoint:
    """Find the quantized weights of a checkpoint.

    Args:
        record: Its ``quantization_config``.
        entries: Tensor → its position.
        folder: The checkpoint.
        files: Its weight files.

    Raises:
        CheckpointError: the format or this variant is not supported, or its tensors do not fit together.
    """
    scheme = _find_format(record, folder)
    from winml.modelkit.models.checkpoints.quantized.stored import CodedEntries, StoredTensors

    module, function = scheme.reader.split(":")
    reader = getattr(importlib.import_module(f"{__package__}.{module}"), function)
    stored = StoredTensors(entries, folder, scheme.words, files)
    coded: CodedEntries = reader(stored, record)
    if not coded.tensors:
        source = files[0] if len(files) == 1 else f"{folder} ({len(files)} weight files)"
        raise CheckpointError(
            f"{source}: its config.json has quant_method {record.get('quant_method')!r}, and no tensor has that format",
            hint="Remove quantization_config from config.json if the weights are floats, or download the checkpoint "
            "again.",
        )
    tensors = {name: stored.with_value_checks(tensor) for name, tensor in coded.tensors.items()}
    return CodedCheckpoint(scheme, tensors, frozenset(coded.consumed), {**entries, **coded.plain}, tuple(coded.notes))


def folder_format(folder: Path) -> QuantizedFormat | None:
    """Return the quantization format of the config in a folder; `None` for a float model or an unreadable config.

    Raises:
        CheckpointError: the format or this variant is not supported.
    """
    try:
        content = read_json_file(folder / CHECKPOINT_CONFIG_NAME)
    except (JsonError, OSError):
        return None  # reported when the config is loaded
    record = quantization_of(content) if isinstance(content, dict) else None
    return None if record is None else _find_format(record, folder)


def _find_format(record: Mapping[str, Any], folder: Path) -> QuantizedFormat:
    """Return the format in a ``quantization_config``.

    Raises:
        CheckpointError: the format or this variant is not supported; names the supported ones.
    """
    method = record.get("quant_method")
    if method in ("auto-round", "intel/auto-round"):
        packing = record.get("packing_format")
        if (method := _PACKING_FORMATS.get(str(packing).rpartition(":")[2])) is None:
            raise CheckpointError(
                f"{folder}: its quantization_config (AutoRound) has packing_format {packing!r}, expected "
                f"{' or '.join(f'auto_round:{name}' for name in _PACKING_FORMATS)}",
                hint="Save it from AutoRound again in such a format, or pass the original model and a "
                f"{opt.precision}.",
            )
    name = method if isinstance(method, str) else None
    if name is None and ("load_in_4bit" in record or "load_in_8bit" in record):
        name = "bitsandbytes"  # in configs of bitsandbytes before quant_method
    if name is None or name not in FORMATS:
        raise CheckpointError(
            f"{folder}: its quantization_config has quant_method {method!r}, which is not supported; expected "
            f"{', '.join(FORMATS)}",
            hint=f"Pass a checkpoint in one of these formats, or the original model and a {opt.precision}.",
        )
    scheme = FORMATS[name]
    if problem := scheme.refusal(record):
        raise CheckpointError(
            f"{folder}: its quantization_config ({scheme.words}) has {problem}",
            hint=f"Pass a checkpoint in that form, or the original model and a {opt.precision}.",
        )
    return scheme
