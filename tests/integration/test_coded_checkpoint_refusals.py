"""Refusals of unreadable quantized checkpoints, by a message with the remedy and without output files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import coded_checkpoints
from e2e.in_process import run_here
from winml.modelkit import build_hf_model
from winml.modelkit.errors import CheckpointError, ModelPathError, UsageError
from winml.modelkit.export.config import WinMLExportConfig
from winml.modelkit.export.exporting import HTPExporter
from winml.modelkit.models.request import ModelRequest

Tensors = dict[str, torch.Tensor]
LAYER = "model.layers.0.mlp.up_proj"


def _remove_tensor(part: str) -> Callable[[Tensors], None]:
    def apply(tensors: Tensors) -> None:
        del tensors[f"{LAYER}.{part}"]

    return apply


def _changed(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    def apply(tensors: Tensors) -> None:
        tensors[f"{LAYER}.{part}"] = change(tensors[f"{LAYER}.{part}"]).contiguous()

    return apply


DAMAGES: dict[str, tuple[Callable[[Tensors], None], tuple[str, ...]]] = {
    "no scales": (_remove_tensor("scales"), (f"{LAYER}.scales", "missing")),
    "no zero points": (_remove_tensor("qzeros"), (f"{LAYER}.qzeros", "missing")),
    "scales of another layer": (_changed("scales", lambda value: value[:, :32]), (f"{LAYER}.qweight", "shape")),
    "floats for codes": (_changed("qweight", torch.Tensor.float), (f"{LAYER}.qweight", "float32", "int32")),
    "a group with too many": (_changed("g_idx", torch.zeros_like), (f"{LAYER}.g_idx", "group 0", "64")),
    "three bits": (_changed("qweight", lambda value: value[:6]), (f"{LAYER}.qweight", "3 bits")),
    "no groups": (_changed("scales", lambda value: value[:0]), (f"{LAYER}.scales", "[0, 128]")),
    "scales that are NaN": (
        _changed("scales", lambda value: value * float("nan")),
        (f"{LAYER}.weight", "scales", "NaN"),
    ),
    "a group that does not exist": (
        _changed("g_idx", lambda value: value.index_fill(0, torch.tensor([3]), 2**31 - 1)),
        (f"{LAYER}.g_idx", "group 2147483647", "from 0 to"),
    ),
    "a negative group": (
        _changed("g_idx", lambda value: value.index_fill(0, torch.tensor([3]), -1)),
        (f"{LAYER}.g_idx", "group -1"),
    ),
    "an empty order": (_changed("g_idx", lambda value: value[:0]), (f"{LAYER}.g_idx", "[0]")),
}
"""Damage → (function on the tensors, words of the message)."""


def _refused(folder: Path, output: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        HTPExporter(WinMLExportConfig()).export_checkpoint(ModelRequest(model=str(folder)), output / "model.onnx")
    assert not output.exists() or not any(output.iterdir())
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_tensors_are_named(tmp_path: Path, name: str) -> None:
    """The message names the tensor and its fault."""
    damage, words = DAMAGES[name]
    folder = coded_checkpoints.save_gptq(tmp_path).folder
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    message = _refused(folder, tmp_path / "out").message
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize("size", [16, 48, 64])
def test_groups_of_another_size_than_declared_are_refused(tmp_path: Path, size: int) -> None:
    """The file has groups of 32, so scales would apply to the wrong weights."""
    saved = coded_checkpoints.save_compressed(tmp_path)
    path = saved.folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = size
    path.write_text(json.dumps(config), encoding="utf-8")
    message = _refused(saved.folder, tmp_path / "out").message
    assert "weight_scale" in message
    assert str(size) in message


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"quant_method": "hqq"}, ("'hqq'", "gptq")),
        ({"quant_method": 4}, ("4", "gptq")),
        ({}, ("None", "gptq")),
        ("nonsense", ("'nonsense'", "gptq")),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, ("marlin", "gptq_v2")),
        ({"quant_method": "awq", "version": "gemv"}, ("gemv", "gemm")),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, ("marlin-24", "pack-quantized")),
        ({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"R1": {}}}}, ("transform",)),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, ("config_groups", "an object")),
        ({"quant_method": "fp8"}, ("fp8", "no tensor")),
        ({"quant_method": "gptq", "bits": 8}, ("4 bits", "bits 8")),
        ({"quant_method": "gptq", "bits": 3}, ("GPTQ", "bits 3", "2 or 4 or 8")),
        ({"quant_method": "gptq", "bits": "4"}, ("GPTQ", "bits '4'")),
        ({"quant_method": "awq", "w_bit": 3}, ("AWQ", "bits 3", "expected 4")),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 3, "type": "int"}}},
            },
            ("num_bits 3", "2 or 4 or 8"),
        ),
        ({"quant_method": "auto-round", "bits": 4}, ("packing_format None", "auto_round:auto_gptq")),
        (
            {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:gptqmodel"},
            ("packing_format 'auto_round:gptqmodel'", "auto_round:auto_awq"),
        ),
        ({"quant_method": "auto-round", "bits": 3, "packing_format": "auto_round:auto_gptq"}, ("bits 3",)),
        ({"quant_method": "gptq", "bits": 4, "group_size": 48}, ("groups of 32", "group_size 48")),
        ({"quant_method": "gptq", "bits": 4, "group_size": "big"}, ("groups of 32", "'big'")),
    ],
)
def test_unknown_formats_are_refused_with_the_supported_formats(
    tmp_path: Path, record: Any, words: tuple[str, ...]
) -> None:
    """The config is checked before any weight is loaded."""
    folder = coded_checkpoints.save_gptq(tmp_path).folder
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": record}))
    message = _refused(folder, tmp_path / "out").message
    assert [word for word in words if word not in message] == []


def test_missing_order_of_groups_is_named(tmp_path: Path) -> None:
    """The product with act-order would silently use scales of other groups."""
    folder = coded_checkpoints.save_gptq(tmp_path, act_order=True).folder
    tensors = load_file(folder / "model.safetensors")
    _remove_tensor("g_idx")(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    message = _refused(folder, tmp_path / "out").message
    assert [word for word in (f"{LAYER}.g_idx", "missing", "desc_act") if word not in message] == []


def _compressed_weights(config: dict[str, Any]) -> dict[str, Any]:
    weights: dict[str, Any] = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    return weights


OTHER_FORMATS: dict[str, tuple[Callable[[Path], Any], Callable[[Tensors], None], dict[str, Any], str]] = {
    "awq without zero points": (coded_checkpoints.save_awq, _remove_tensor("qzeros"), {}, "qzeros"),
    "integers without zero points": (
        coded_checkpoints.save_compressed, _remove_tensor("weight_zero_point"), {}, "symmetric false",
    ),
    "integers without their order": (
        coded_checkpoints.save_compressed, lambda _tensors: None, {"actorder": "group"}, "weight_g_idx",
    ),
    "other bits": (coded_checkpoints.save_compressed, lambda _tensors: None, {"num_bits": 8}, "num_bits 8"),
    "a shape with three sizes": (
        coded_checkpoints.save_compressed, _changed("weight_shape", lambda value: torch.cat([value, value[:1]])), {},
        "weight_shape",
    ),
    "a table of another size": (
        coded_checkpoints.save_bnb, _changed("weight.nested_quant_map", lambda value: value[:16]), {}, "quant_map",
    ),
}  # fmt: skip
"""Damage → (function that saves, change of the tensors, changes of the config, word of the message)."""


@pytest.mark.parametrize("name", OTHER_FORMATS)
def test_missing_parts_of_other_formats_are_named(tmp_path: Path, name: str) -> None:
    """Missing zero points would be read as the middle of the codes, and give wrong weights silently."""
    save, damage, changes, word = OTHER_FORMATS[name]
    folder = save(tmp_path).folder
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if changes:
        config = json.loads((folder / "config.json").read_text())
        _compressed_weights(config).update(changes)
        (folder / "config.json").write_text(json.dumps(config))
    assert word in _refused(folder, tmp_path / "out").message


@pytest.mark.parametrize("size", [[0, 0], [32], "big"])
def test_scales_without_a_block_size_are_refused(tmp_path: Path, size: object) -> None:
    """The shape of scales that match no rows is unknown."""
    folder = coded_checkpoints.save_fp8(tmp_path).folder
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = size
    (folder / "config.json").write_text(json.dumps(config))
    assert "weight_scale_inv" in _refused(folder, tmp_path / "out").message


def test_shortened_weights_are_named_by_a_build(tmp_path: Path) -> None:
    """The command prints one sentence, exits with 1, and leaves no folder."""
    folder = coded_checkpoints.save_awq(tmp_path).folder
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    outcome = run_here("build", "-m", folder, "-o", tmp_path / "built", "-q")
    assert (outcome.code, (tmp_path / "built").exists()) == (1, False)
    assert "truncated" in outcome.err


def test_fewer_bits_of_few_bits_are_refused_by_the_plan(tmp_path: Path) -> None:
    """A build with a precision would quantize the codes again."""
    folder = coded_checkpoints.save_awq(tmp_path).folder
    with pytest.raises(UsageError, match="already quantized"):
        build_hf_model(folder, tmp_path / "built", precision="int4")
    assert not (tmp_path / "built").exists()


def test_random_weights_of_such_a_checkpoint_are_floats(tmp_path: Path) -> None:
    """Random weights replace all weights of the checkpoint."""
    folder = coded_checkpoints.save_awq(tmp_path).folder
    request = ModelRequest(model=str(folder), random_weights=True)
    result = HTPExporter(WinMLExportConfig(verify=False)).export_checkpoint(request, tmp_path / "model.onnx")
    assert result.model.source_format is None


def test_damaged_gguf_file_is_named(tmp_path: Path) -> None:
    """A file without a valid header and a missing file are both refused."""
    pytest.importorskip("gguf")
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(40))
    assert "model.gguf" in _refused(file, tmp_path / "out").message
    with pytest.raises(ModelPathError):
        HTPExporter(WinMLExportConfig()).export_checkpoint(
            ModelRequest(model=str(tmp_path / "other.gguf")), tmp_path / "out" / "model.onnx"
        )


@pytest.mark.parametrize(
    ("tensor", "words"),
    [("blk.0.attn_sinks.weight", ("blk.0.attn_sinks.weight", "qwen2")), ("rope_freqs.weight", ())],
)
def test_tensor_of_a_gguf_file_without_a_place_is_named(tmp_path: Path, tensor: str, words: tuple[str, ...]) -> None:
    """A weight unknown to the model is refused; scales of rotations are left out with a note."""
    pytest.importorskip("gguf")
    file = coded_checkpoints.save_gguf_of(tmp_path, "qwen2", extra={tensor: np.ones(16, np.float32)})
    if words:
        message = _refused(file, tmp_path / "out").message
        assert [word for word in words if word not in message] == []
        return
    config = WinMLExportConfig(verify=False)
    result = HTPExporter(config).export_checkpoint(ModelRequest(model=str(file)), tmp_path / "out" / "model.onnx")
    assert [note for note in (*result.model_notes, *result.notes) if tensor in note]


def test_unknown_gguf_architecture_is_refused_with_the_supported_architectures(tmp_path: Path) -> None:
    """The refusal comes before transformers reads the file."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "starcoder2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    message = _refused(tmp_path / "model.gguf", tmp_path / "out").message
    assert [word for word in ("starcoder2", "gemma3", "phi3") if word not in message] == []
