"""Tags and operators per tag, compared between the exporters."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import nn

import unknown_decoder
from checkpoints import FAMILIES, build_model, make_distinct, one_layer, save_checkpoint
from oracle import OPERATOR_FAMILY
from tag_checks import COUNTED
from winml.modelkit import HTPExporter, WinMLExportConfig
from winml.modelkit.export.capture import Capture, CaptureOptions, NodeTagger
from winml.modelkit.export.dynamo.capturing import capture_dynamo
from winml.modelkit.export.torchscript.capturing import capture_torchscript
from winml.modelkit.models.live_module import loaded_from_module
from winml.modelkit.models.preparation import prepared_for_export
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.models.tensors import to_torch
from winml.modelkit.normalize.pipeline import normalize
from winml.modelkit.ort.feeds import make_feeds
from winml.modelkit.tags.tagging import measure_coverage, read_tag
from winml.modelkit.tags.torch_modules import record_calls
from winml.modelkit.tags.tree import ModuleTree, build_tree

Work = Counter[tuple[str, str]]
"""``(tag, operator family)`` → number of nodes."""


def work_of(capture: Capture, tree: ModuleTree) -> Work:
    """Tag and normalize a captured graph, as an export does, and count the operators under each tag."""
    NodeTagger(tree).tag_nodes(capture.scopes)
    model = normalize(capture.model).model
    assert measure_coverage(model).is_complete
    work: Work = Counter()
    for node in model.graph.all_nodes():
        tag = read_tag(node)
        assert tag is not None
        work[tag.tag, OPERATOR_FAMILY.get(node.op_type, node.op_type)] += 1
    return work


def work_by_exporter(model: nn.Module, torch_modules: tuple[str, ...] = ()) -> list[Work]:
    """Capture a transformers model with both exporters."""
    loaded = loaded_from_module(model, None)
    tensors = {name: to_torch(value) for name, value in make_feeds(loaded.only_part.inputs, seed=1).items()}
    with prepared_for_export(model, list(tensors), loaded.only_part.forward_kwargs) as forward:
        with record_calls(model) as trace:
            model(*tensors.values())
        tree = build_tree(trace, torch_modules)
        captures: tuple[Callable[[], Capture], ...] = (
            lambda: capture_torchscript(model, tensors, forward, tree, CaptureOptions(opset_version=18)),
            lambda: capture_dynamo(model, tensors, forward, tree, CaptureOptions()),
        )
        return [work_of(capture(), tree) for capture in captures]


_OF_TWO_LAYERS = {"bert", "t5", "resnet", "yolos"}
"""Architectures with two layers: their layers must differ or have positions in between; others have one."""


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [*FAMILIES, "yolos"])
def test_exporters_give_the_same_tags_with_the_same_work(architecture: str) -> None:
    """The sets of tags are equal, and the numbers of products, convolutions and normalizations per tag.

    ``scripts/architecture_eval.py`` compares the tags of many more architectures.
    """
    sizes = {} if architecture in _OF_TWO_LAYERS else one_layer(architecture)
    torchscript, dynamo = work_by_exporter(build_model(architecture, **sizes))
    assert {tag for tag, _ in torchscript} == {tag for tag, _ in dynamo}
    weighty = [Counter({key: n for key, n in work.items() if key[1] in COUNTED}) for work in (torchscript, dynamo)]
    assert weighty[0] == weighty[1]
    assert weighty[0]


def test_exporters_agree_on_requested_torch_modules() -> None:
    """Plain layers requested by ``torch_module`` get equal tags too."""
    torchscript, dynamo = work_by_exporter(build_model("bert", num_hidden_layers=1), ("all",))
    assert {tag for tag, _ in torchscript} == {tag for tag, _ in dynamo}
    assert any(tag.endswith("/Linear.query") for tag, _ in dynamo)


def whisper() -> nn.Module:
    """Build Whisper; torch's TorchScript exporter cannot convert ``diff`` in its attention mask."""
    import transformers

    text = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.WhisperConfig(
        vocab_size=120, d_model=32, encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=50,
        max_target_positions=32, num_mel_bins=16, pad_token_id=1, bos_token_id=2, eos_token_id=3,
        decoder_start_token_id=4, suppress_tokens=[], begin_suppress_tokens=[], **text,
    )  # fmt: skip
    torch.manual_seed(0)
    model: nn.Module = transformers.WhisperForConditionalGeneration(config)
    make_distinct(model)
    return model.eval()


def export(folder: Path, **options: Any) -> Any:
    """Export a checkpoint folder."""
    exporter = HTPExporter(WinMLExportConfig(**options))
    return exporter.export_checkpoint(ModelRequest(str(folder), cache=False), folder.parent / "model.onnx")


@pytest.mark.parametrize("exporter", ["auto", "dynamo"])
def test_whisper_is_exported_and_verified(exporter: str, tmp_path: Path) -> None:
    """Our TorchScript conversion handles the differences of positions; the graph also takes the decoder's inputs."""
    whisper().save_pretrained(tmp_path / "whisper")  # type: ignore[operator]
    result = export(tmp_path / "whisper", exporter=exporter)
    assert {"auto": "torchscript"}.get(exporter, exporter) == result.only_part.exporter
    assert ["input_features", "decoder_input_ids"] == [spec.name for spec in result.only_part.inputs]
    assert result.only_part.verification.is_verified
    assert 100.0 == result.only_part.coverage.percent


@pytest.mark.parametrize(("architecture", "options"), [("t5", {}), ("bert", {"dynamic_batch": True})])
def test_checkpoint_is_exported_without_weights_and_verified_with_weights(
    architecture: str, options: Mapping[str, Any], tmp_path: Path
) -> None:
    """The file is built on parameters without values and equals PyTorch; opset 17 is written on request."""
    folder = save_checkpoint(architecture, tmp_path / "checkpoint", **one_layer(architecture))
    result = export(folder, exporter="dynamo", opset_version=17, **options)
    assert result.only_part.verification.is_verified
    assert ("dynamo", 17, 17) == (
        result.only_part.exporter,
        result.only_part.opset_requested,
        result.only_part.opset_produced,
    )
    model = ir.load(tmp_path / "model.onnx")
    assert "dynamo" == json.loads(model.metadata_props["winml.export"])["exporter"]
    assert not any("File " in value for node in model.graph for value in node.metadata_props.values())


@pytest.mark.slow
def test_decoder_that_no_library_knows_is_the_same_of_both_exporters(tmp_path: Path) -> None:
    """Both exporters follow its cache, sliding window and loop over experts, with equal names and tags."""
    shutil.copy(unknown_decoder.__file__, tmp_path / "unknown_decoder.py")
    model = unknown_decoder.UnknownForCausalLM(unknown_decoder.UnknownConfig())
    make_distinct(model)
    model.config.auto_map = {
        "AutoConfig": "unknown_decoder.UnknownConfig",
        "AutoModelForCausalLM": "unknown_decoder.UnknownForCausalLM",
    }
    model.save_pretrained(tmp_path / "unknown")
    (tmp_path / "unknown_decoder.py").rename(tmp_path / "unknown" / "unknown_decoder.py")
    request = ModelRequest(str(tmp_path / "unknown"), task="text-generation", trust_remote_code=True)
    found = {}
    for name in ("torchscript", "dynamo"):
        exporter = HTPExporter(WinMLExportConfig(exporter=name))
        part = exporter.export_checkpoint(request, tmp_path / name / "model.onnx").only_part
        assert part.verification.is_verified, [item.place for item in part.verification.assumed]
        assert part.verification.generation is not None
        assert 100.0 == part.coverage.percent
        graph = ir.load(part.model_path).graph
        tags = {tag.tag for node in graph if (tag := read_tag(node)) is not None}
        found[name] = ([value.name for value in graph.inputs], [value.name for value in graph.outputs], tags)
    assert found["torchscript"] == found["dynamo"]
    assert {"past_key_values.0.key", "present.1.value"} <= {*found["dynamo"][0], *found["dynamo"][1]}


def test_large_checkpoint_is_traced_without_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file equals that of the small path byte by byte, and is verified."""
    folder = save_checkpoint("llama", tmp_path / "checkpoint", num_hidden_layers=1)
    small = export(folder)
    written = (tmp_path / "model.onnx").read_bytes()
    monkeypatch.setattr("winml.modelkit.export.loading.LARGE_WEIGHTS_BYTES", 0)
    for file in tmp_path.glob("model*"):
        file.unlink()
    large = export(folder)
    assert ("torchscript", "torchscript") == (small.only_part.exporter, large.only_part.exporter)
    assert large.only_part.verification.is_verified
    assert written == (tmp_path / "model.onnx").read_bytes()


def test_state_of_a_large_checkpoint_is_an_assumption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A counter of calls is found although the trace has no weights."""

    def counting(pooler: Any, hidden: torch.Tensor) -> torch.Tensor:
        pooler.counted = getattr(pooler, "counted", 0) + 1
        return pooler.dense(hidden[:, 0]) * pooler.counted

    monkeypatch.setattr("winml.modelkit.export.loading.LARGE_WEIGHTS_BYTES", 0)
    monkeypatch.setattr("transformers.models.bert.modeling_bert.BertPooler.forward", counting)
    result = export(save_checkpoint("bert", tmp_path / "checkpoint", **one_layer("bert")))
    assert ["first_call"] == [assumption.kind for assumption in result.only_part.assumed]


def test_large_checkpoint_with_convolutions_is_exported_without_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TorchScript records the convolutions without a second capture, and weights are loaded for the comparison only."""
    monkeypatch.setattr("winml.modelkit.export.loading.LARGE_WEIGHTS_BYTES", 0)
    result = export(save_checkpoint("resnet", tmp_path / "checkpoint", **one_layer("resnet")))
    assert ("torchscript", "") == (result.only_part.exporter, result.only_part.exporter_reason)
    assert result.only_part.verification.is_verified
