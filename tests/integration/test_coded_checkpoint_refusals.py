"""Is a checkpoint in few bits that cannot be read refused in a sentence that says what helps, with nothing written?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import coded_checkpoints
from winml.modelkit import build_hf_model
from winml.modelkit.errors import CheckpointError, ModelPathError, UsageError
from winml.modelkit.export.config import WinMLExportConfig
from winml.modelkit.flows.export.export import HTPExporter
from winml.modelkit.load.request import ModelRequest

Tensors = dict[str, torch.Tensor]
LAYER = "model.layers.0.mlp.up_proj"


def _without(part: str) -> Callable[[Tensors], None]:
    def apply(tensors: Tensors) -> None:
        del tensors[f"{LAYER}.{part}"]

    return apply


def _changed(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    def apply(tensors: Tensors) -> None:
        tensors[f"{LAYER}.{part}"] = change(tensors[f"{LAYER}.{part}"]).contiguous()

    return apply


DAMAGES: dict[str, tuple[Callable[[Tensors], None], tuple[str, ...]]] = {
    "no scales": (_without("scales"), (f"{LAYER}.scales", "missing")),
    "no zero points": (_without("qzeros"), (f"{LAYER}.qzeros", "missing")),
    "scales of another layer": (_changed("scales", lambda value: value[:, :32]), (f"{LAYER}.qweight", "shape")),
    "floats for codes": (_changed("qweight", torch.Tensor.float), (f"{LAYER}.qweight", "float32", "int32")),
    "a group with too many": (_changed("g_idx", torch.zeros_like), (f"{LAYER}.g_idx", "group 0", "64")),
    "three bits": (_changed("qweight", lambda value: value[:6]), (f"{LAYER}.qweight", "3 bits")),
}
"""What is done to the tensors → what the message names."""


def _refused(folder: Path, output: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        HTPExporter(WinMLExportConfig()).export_checkpoint(ModelRequest(model=str(folder)), output / "model.onnx")
    assert not output.exists() or not any(output.iterdir())
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_tensors_are_named(tmp_path: Path, name: str) -> None:
    """The message names the tensor and what is wrong with it."""
    damage, words = DAMAGES[name]
    folder = coded_checkpoints.save_gptq(tmp_path).folder
    tensors = load_file(folder / "model.safetensors")
    damage(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    message = _refused(folder, tmp_path / "out").message
    assert [word for word in words if word not in message] == []


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
        ({"quant_method": "fp8"}, ("fp8", "no tensor")),
    ],
)
def test_unknown_formats_are_named_with_those_that_are_read(
    tmp_path: Path, record: Any, words: tuple[str, ...]
) -> None:
    """What the config says is refused before anything is loaded."""
    folder = coded_checkpoints.save_gptq(tmp_path).folder
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": record}))
    message = _refused(folder, tmp_path / "out").message
    assert [word for word in words if word not in message] == []


def test_fewer_bits_of_few_bits_are_refused_by_the_plan(tmp_path: Path) -> None:
    """A build with a precision would quantize codes again."""
    folder = coded_checkpoints.save_awq(tmp_path).folder
    with pytest.raises(UsageError, match="few bits already"):
        build_hf_model(folder, tmp_path / "built", precision="int4")
    assert not (tmp_path / "built").exists()


def test_random_weights_of_such_a_checkpoint_are_floats(tmp_path: Path) -> None:
    """They stand in for all weights."""
    folder = coded_checkpoints.save_awq(tmp_path).folder
    request = ModelRequest(model=str(folder), random_weights=True)
    result = HTPExporter(WinMLExportConfig(verify=False)).export_checkpoint(request, tmp_path / "model.onnx")
    assert result.model.source_format is None


def test_damaged_gguf_file_is_named(tmp_path: Path) -> None:
    """Bytes that are no header, and a file that is not there."""
    pytest.importorskip("gguf")
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(40))
    assert "model.gguf" in _refused(file, tmp_path / "out").message
    with pytest.raises(ModelPathError):
        HTPExporter(WinMLExportConfig()).export_checkpoint(
            ModelRequest(model=str(tmp_path / "other.gguf")), tmp_path / "out" / "model.onnx"
        )
