"""Folders written by the exporters of transformers (``ExportedModel.save_pretrained``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
import transformers

from e2e.in_process import run_here
from generating import save_decoder
from graphs import parse
from winml.modelkit.builds.found_models import onnx_file
from winml.modelkit.errors import ModelPathError

pytestmark = pytest.mark.usefixtures("libraries_may_warn")
exporter_onnx = pytest.importorskip("transformers.exporters.exporter_onnx")
NEW_TOKENS = 8


@pytest.mark.skipif(
    not hasattr(pytest.importorskip("transformers.exporters.base"), "ExportedModel"),
    reason="transformers before 5.24 writes no folder",
)
def test_decoder_generates_the_text_of_pytorch(tmp_path: Path) -> None:
    """The component ``decode`` is opened, its cache is found by name, and its modules are those of torch."""
    checkpoint = save_decoder(tmp_path / "checkpoint", num_hidden_layers=1)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    prompt = tokenizer(" ".join(tokenizer.convert_ids_to_tokens([20, 31, 42])), return_tensors="pt")["input_ids"]
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    exported = exporter_onnx.OnnxExporter().export_for_generation(
        model, inputs, exporter_onnx.OnnxConfig(dynamic=True), multi_token_decode=True
    )
    folder = tmp_path / "exported"
    exported.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    assert folder / "decode.onnx" == onnx_file(str(folder))
    asked = ("-p", tokenizer.decode(prompt[0]), "--max-new-tokens", str(NEW_TOKENS), "-f", "json")
    outcomes = [run_here("generate", "-m", path, *asked) for path in (folder, checkpoint)]
    assert [0, 0] == [outcome.code for outcome in outcomes], outcomes[0].err
    texts = [json.loads(outcome.out)["text"] for outcome in outcomes]
    assert texts[0] == texts[1] != ""
    described = run_here("inspect", "-m", folder, "-f", "json")
    assert 0 == described.code, described.err
    assert "pkg.torch.onnx metadata" in described.out


@pytest.mark.parametrize(("output", "task"), [("logits", "image-classification"), ("last_hidden_state", None)])
def test_task_is_that_of_the_architecture(output: str, task: str | None, tmp_path: Path) -> None:
    """The files of transformers state no task; a graph without a head does not have that of the checkpoint."""
    ir.save(
        parse(
            f"g (float[1, 3, 8, 8] pixel_values) => (float[1, 3, 8, 8] {output}) {{ {output} = Relu (pixel_values) }}"
        ),
        tmp_path / "model.onnx",
    )
    config = {"model_type": "swin", "architectures": ["SwinForImageClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    described = run_here("run", tmp_path / "model.onnx", "--schema", "-f", "json")
    assert 0 == described.code, described.err
    assert task == json.loads(described.out)["task"]


@pytest.mark.parametrize(
    ("export_format", "components", "words"),
    [
        ("openvino", ("model",), "openvino"),
        ("onnx", ("image_encoder", "language_model", "decode"), "image_encoder, language_model, decode"),
    ],
)
def test_export_without_a_whole_model_in_onnx_is_refused(
    export_format: str, components: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    for name in components:
        (tmp_path / f"{name}.onnx").write_bytes(b"")
    entries = {name: {"file": f"{name}.onnx"} for name in components}
    record = {"schema_version": 1, "export_format": export_format, "components": entries}
    (tmp_path / "export.json").write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(ModelPathError, match=words):
        onnx_file(str(tmp_path))
