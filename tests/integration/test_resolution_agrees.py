"""Results of inspect and config before any weight is read, compared with an export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import FAMILIES, one_layer, save_checkpoint
from winml.modelkit import HTPExporter
from winml.modelkit.builds.config import WinMLBuildConfig, parse_build_config
from winml.modelkit.builds.config_resolution import resolve_build_config
from winml.modelkit.export.config import WinMLExportConfig
from winml.modelkit.inspect.model_inspection import RANDOM_WEIGHTS, WEIGHTLESS, inspect_checkpoint
from winml.modelkit.models.model import load_model
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.onnx.specs import DynamicRequest
from winml.modelkit.ort.feeds import make_feeds
from winml.modelkit.tags.torch_modules import record_calls
from winml.modelkit.tags.tree import build_tree

pytestmark = pytest.mark.usefixtures("libraries_may_warn")

WHISPER = {
    "model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "vocab_size": 120, "d_model": 32,
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_source_positions": 50, "max_target_positions": 64,
    "num_mel_bins": 20, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
LONGFORMER = {
    "model_type": "longformer", "architectures": ["LongformerModel"], "vocab_size": 120, "hidden_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 66,
    "attention_window": 8,
}  # fmt: skip
"""A model that reads values in its forward."""
MIXTRAL = {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "vocab_size": 120, "hidden_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
    "num_local_experts": 4, "max_position_embeddings": 64,
}  # fmt: skip
"""A model that chooses experts by values."""


def write_config(folder: Path, content: dict[str, Any]) -> Path:
    """Write a folder with a config only."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


_OF_TWO_LAYERS = {"bert", "t5", "resnet"}
"""Architectures with two layers, which must differ: one part, two parts with a cache, stages."""


@pytest.mark.parametrize("architecture", [*FAMILIES, "roberta", "llama", "bart", "segformer"])
def test_inspect_config_and_export_agree(architecture: str, tmp_path: Path) -> None:
    """Task, class, inputs, outputs, parameters and module tree equal the export's, with or without weights."""
    sizes = {} if architecture in _OF_TWO_LAYERS else one_layer(architecture)
    folder = save_checkpoint(architecture, tmp_path / "checkpoint", **sizes)
    request = ModelRequest(str(folder))
    exported = HTPExporter(WinMLExportConfig(verify=False)).export_checkpoint(request, tmp_path / "model.onnx")
    (folder / "model.safetensors").unlink()

    seen = inspect_checkpoint(request, hierarchy=True)
    config = resolve_build_config(WinMLBuildConfig(), request)[0]

    assert (exported.model.task, exported.model.class_name) == (seen.info.task, seen.info.class_name)
    assert config.loader is not None
    assert (exported.model.task, exported.model.class_name) == (config.loader.task, config.loader.model_class)
    assert config.export is not None
    expected_inputs = exported.only_part.inputs if len(exported.parts) == 1 else None
    assert expected_inputs == config.export.input_tensors
    for part, seen_part in zip(exported.parts, seen.parts, strict=True):
        assert (part.name, part.inputs) == (seen_part.name, seen_part.inputs)
        assert seen_part.outputs is not None
        assert [spec.as_record() for spec in part.outputs] == [spec.as_record() for spec in seen_part.outputs]
    assert exported.parts[0].tree.root.parameter_count == seen.parameter_count
    assert WEIGHTLESS == seen.tree_source
    assert seen.tree is not None
    if len(exported.parts) == 1:
        assert exported.only_part.tree.nodes == seen.tree.nodes
    else:
        assert {node.tag for part in exported.parts for node in part.tree} == {node.tag for node in seen.tree}
    assert config == parse_build_config(json.loads(json.dumps(config.as_record())), "written")[0]


@pytest.mark.parametrize(
    ("content", "source"),
    [(WHISPER, WEIGHTLESS), (MIXTRAL, WEIGHTLESS), (LONGFORMER, RANDOM_WEIGHTS)],
    ids=["whisper", "mixtral", "longformer"],
)
def test_inspect_tree_equals_a_real_forward(content: dict[str, Any], source: str, tmp_path: Path) -> None:
    """A forward with random weights is the reference for models without an export here."""
    folder = write_config(tmp_path / "checkpoint", content)
    request = ModelRequest(str(folder), random_weights=True, cache=False)
    loaded = load_model(request)
    part = loaded.only_part
    drawn = make_feeds(part.inputs, seed=1, sizes=part.trace_sizes)
    feeds = {name: torch.from_numpy(value) for name, value in drawn.items()}
    arguments = feeds if part.arguments is None else part.arguments.build(feeds)
    with torch.no_grad(), record_calls(loaded.model) as trace:
        loaded.model(**arguments, **part.forward_kwargs)

    seen = inspect_checkpoint(ModelRequest(str(folder), cache=False), hierarchy=True)

    assert source == seen.tree_source
    assert seen.tree is not None
    assert build_tree(trace).nodes == seen.tree.nodes
    assert loaded.only_part.inputs == seen.inputs
    assert (source == RANDOM_WEIGHTS) == any("without values" in note for note in seen.notes)


@pytest.mark.parametrize(
    ("architecture", "request_"),
    [
        ("bert", {"dynamic": DynamicRequest(batch=True, sequence=True)}),
        ("wav2vec2", {"dynamic": DynamicRequest(batch=True, sequence=True)}),
    ],
)
def test_inspect_config_and_export_agree_on_open_dimensions(
    architecture: str, request_: dict[str, Any], tmp_path: Path
) -> None:
    """Inputs with symbolic sizes, and outputs in terms of them, equal the export's."""
    request = ModelRequest(str(save_checkpoint(architecture, tmp_path / "checkpoint")), **request_)
    exported = HTPExporter(WinMLExportConfig(verify=False)).export_checkpoint(request, tmp_path / "model.onnx")
    seen = inspect_checkpoint(request)
    config = resolve_build_config(WinMLBuildConfig(), request)[0]
    assert exported.only_part.inputs == seen.inputs
    assert config.export is not None
    assert exported.only_part.inputs == config.export.input_tensors
    assert seen.outputs is not None
    assert [spec.as_record() for spec in exported.only_part.outputs] == [spec.as_record() for spec in seen.outputs]


@pytest.mark.parametrize("declares_dtype", [True, False])
def test_inspect_config_and_export_agree_on_half_precision(declares_dtype: bool, tmp_path: Path) -> None:
    """The dtype of inputs is that of the weights, by the config or else by the headers of the weight files."""
    folder = tmp_path / "checkpoint"
    save_checkpoint("vit", folder)
    from safetensors.torch import load_file, save_file

    halves = {name: value.to(torch.float16) for name, value in load_file(folder / "model.safetensors").items()}
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    content.pop("dtype", None)
    if declares_dtype:
        content["dtype"] = "float16"
    write_config(folder, content)

    seen = inspect_checkpoint(ModelRequest(str(folder)))
    loaded = load_model(ModelRequest(str(folder)))

    assert "float16" == seen.inputs[0].dtype
    assert loaded.only_part.inputs == seen.inputs
    assert {torch.float16} == {parameter.dtype for parameter in loaded.model.parameters()}
