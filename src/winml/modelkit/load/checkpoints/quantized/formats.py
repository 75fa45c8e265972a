"""Decides in which format of few bits a checkpoint is, by its config, and finds its weights.

A format is data: its name in ``quantization_config``, and what reads its tensors. Only headers and small index tensors
are read here; codes are read when a weight is written or compared. No package of a format is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winml.modelkit.errors import CheckpointError
from winml.modelkit.graph.coded_weights import CodedTensor
from winml.modelkit.load.checkpoints.quantized.compressed import compressed_refusal, read_compressed
from winml.modelkit.load.checkpoints.quantized.floats import (
    read_bitsandbytes,
    read_fp8,
    read_modelopt,
    read_mxfp4,
)
from winml.modelkit.load.checkpoints.quantized.integers import read_awq, read_gptq
from winml.modelkit.load.checkpoints.quantized.stored import CodedEntries, StoredTensors
from winml.modelkit.load.checkpoints.weight_files import StoredEntry

__all__ = ["FORMATS", "CodedCheckpoint", "QuantizedFormat", "quantization_of", "read_coded_checkpoint", "without_quantization"]

_CONFIG_KEYS = ("quantization_config", "compression_config")
"""Specified: what transformers calls the record, and what older versions of compressed-tensors do."""


@dataclass(frozen=True)
class QuantizedFormat:
    """One format of few bits."""

    name: str
    """As nodes of a graph say it: ``source_format``."""
    words: str
    """For people."""
    read: Callable[[StoredTensors, Mapping[str, Any]], CodedEntries]
    """Takes the tensors of a checkpoint and its ``quantization_config``."""
    refusal: Callable[[Mapping[str, Any]], str] = lambda _config: ""
    """Says what of a config is not read; empty where all is."""


def _gptq_refusal(config: Mapping[str, Any]) -> str:
    version = config.get("checkpoint_format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        return f"checkpoint_format {version!r}, expected gptq or gptq_v2"
    return ""


def _awq_refusal(config: Mapping[str, Any]) -> str:
    if (version := str(config.get("version") or "gemm").lower()) != "gemm":
        return f"version {version!r}, expected gemm"
    if (bits := config.get("bits", config.get("w_bit", 4))) != 4:
        return f"bits {bits!r}, expected 4"
    return ""


FORMATS: Mapping[str, QuantizedFormat] = {
    "gptq": QuantizedFormat("gptq", "GPTQ", read_gptq, _gptq_refusal),
    "awq": QuantizedFormat("awq", "AWQ", read_awq, _awq_refusal),
    "compressed-tensors": QuantizedFormat(
        "compressed-tensors", "compressed-tensors", read_compressed, compressed_refusal
    ),
    "fp8": QuantizedFormat("fp8", "FP8", read_fp8),
    "fbgemm_fp8": QuantizedFormat("fp8", "FP8 of FBGEMM", read_fp8),
    "bitsandbytes": QuantizedFormat("bitsandbytes", "bitsandbytes", read_bitsandbytes),
    "mxfp4": QuantizedFormat("mxfp4", "MXFP4", read_mxfp4),
    "modelopt": QuantizedFormat("modelopt", "ModelOpt", read_modelopt),
}
"""By the value of ``quant_method``."""

_PACKINGS = {"auto_gptq": "gptq", "auto_awq": "awq"}
"""Specified: last part of ``packing_format`` of AutoRound → the format whose layout it is."""


def quantization_of(content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the record of few bits in the content of a ``config.json``, its own or that of its text model."""
    text = content.get("text_config")
    for record in (content, text if isinstance(text, Mapping) else {}):
        for key in _CONFIG_KEYS:
            if record.get(key) is not None:
                found = record[key]
                return found if isinstance(found, Mapping) else {"quant_method": found}
    return None


def without_quantization(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a ``config.json`` as that of the float model."""
    plain = {key: value for key, value in content.items() if key not in _CONFIG_KEYS}
    if isinstance(text := plain.get("text_config"), Mapping):
        plain["text_config"] = {key: value for key, value in text.items() if key not in _CONFIG_KEYS}
    return plain


@dataclass(frozen=True)
class CodedCheckpoint:
    """The weights of a checkpoint that are in few bits."""

    format: QuantizedFormat
    tensors: Mapping[str, CodedTensor]
    """By name of the parameter, as the float checkpoint would call it."""
    consumed: frozenset[str]
    """Names of the tensors in the files that these are made of."""
    notes: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """The format and its bits, for people: ``GPTQ, 4 bits in blocks of 128 (224 weights)``."""
        counts = Counter((item.weight.bits, item.weight.block_size) for item in self.tensors.values())
        kinds = ", ".join(
            f"{bits} bits in blocks of {size} ({count} weight{'s' if count > 1 else ''})"
            for (bits, size), count in counts.most_common()
        )
        return f"{self.format.words}, {kinds}"


def read_coded_checkpoint(
    record: Mapping[str, Any], entries: Mapping[str, StoredEntry], folder: Path, files: Sequence[Path]
) -> CodedCheckpoint:
    """Find the weights of few bits in a checkpoint.

    Args:
        record: Its ``quantization_config``.
        entries: Where its tensors lie.
        folder: The checkpoint.
        files: Its weight files.

    Raises:
        CheckpointError: the format is unknown, or not read in this form; or its tensors do not fit together.
    """
    form = _format_of(record, folder)
    if problem := form.refusal(record):
        raise CheckpointError(
            f"{folder}: its quantization_config ({form.words}) says {problem}",
            hint="Save it in that form, or give the original model and let winml quantize take its bits.",
        )
    found = form.read(StoredTensors(entries, folder, form.words), record)
    if not found.tensors:
        place = files[0] if len(files) == 1 else f"{folder} ({len(files)} weight files)"
        raise CheckpointError(
            f"{place}: its config.json says quant_method {record.get('quant_method')!r}, and no tensor is in this format",
            hint="Take quantization_config out of config.json if the weights are floats, or fetch the checkpoint again.",
        )
    return CodedCheckpoint(form, found.tensors, frozenset(found.consumed), tuple(found.notes))


def _format_of(record: Mapping[str, Any], folder: Path) -> QuantizedFormat:
    method = record.get("quant_method")
    if method == "auto-round" or method == "intel/auto-round":
        method = _PACKINGS.get(str(record.get("packing_format")).rpartition(":")[2], method)
    name = method if isinstance(method, str) else None
    if name is None and ("load_in_4bit" in record or "load_in_8bit" in record):
        name = "bitsandbytes"  # as its own versions before quant_method wrote it
    if name not in FORMATS:
        raise CheckpointError(
            f"{folder}: its quantization_config says quant_method {method!r}, which is not read; expected "
            f"{', '.join(FORMATS)}",
            hint="Give the original model and let winml quantize take its bits, or a checkpoint in one of these formats.",
        )
    return FORMATS[name]
