"""Decoders built for ONNX Runtime alone: fused operators and equal generated text."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import winml.modelkit as winml
from checkpoints import build_model
from generating import save_decoder
from winml.modelkit import build_hf_model
from winml.modelkit.ort.decoding.decoder import DecoderGraph
from winml.modelkit.ort.sessions import Session

NEW_TOKENS = 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small llama with head and layer sizes that suit the fused operators."""
    return save_decoder(tmp_path_factory.mktemp("llama"), num_hidden_layers=1, head_dim=16)


def _operators(folder: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(folder / "model.onnx", load_external_data=False).graph.node)


def _generate(path: Path, tokens: list[int]) -> list[int]:
    """Return the greedy tokens, with the cache passed from step to step."""
    session = Session(path)
    text, held = list(tokens), {}
    for name, shape in session.input_shapes.items():
        if name.startswith("past"):
            held[name] = np.zeros((1, int(shape[1] or 0), 0, int(shape[3] or 0)), np.float32)
    now = tokens
    for _ in range(NEW_TOKENS):
        feeds: dict[str, Any] = {
            "input_ids": np.array([now]),
            "attention_mask": np.ones((1, len(text)), np.int64),
            "position_ids": np.arange(len(text) - len(now), len(text))[None],
        }
        answer = session.run({**feeds, **held})
        held = {name: answer[name.replace("past_key_values", "present")] for name in held}
        now = [int(answer["logits"][0, -1].argmax())]
        text += now
    return text[len(tokens) :]


def test_layout_of_genai_is_fused_and_generates_the_same_text(checkpoint: Path, tmp_path: Path) -> None:
    """The graph computes in float32 and generates PyTorch's tokens."""
    result = build_hf_model(checkpoint, tmp_path / "built", config={"layout": "genai"}, verify=False)
    counts = _operators(result.folder)
    assert (counts["GroupQueryAttention"], counts["Softmax"]) == (1, 0)
    tokens = [3, 7, 5]
    model = build_model("llama", num_hidden_layers=1, head_dim=16, bos_token_id=0, eos_token_id=1, pad_token_id=1)
    with torch.no_grad():
        text = model.generate(
            torch.tensor([tokens]), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
        )
    assert _generate(result.folder / "model.onnx", tokens) == text[0, len(tokens) :].tolist()


def test_layout_of_genai_in_bfloat16_is_verified_and_stays_as_exported(checkpoint: Path, tmp_path: Path) -> None:
    """The file, which the CPU does not run, is compared in float32 after each step."""
    result = build_hf_model(checkpoint, tmp_path / "built", config={"layout": "genai"}, dtype="bf16")
    assert _operators(result.folder)["GroupQueryAttention"] == 0
    assert any("The decoder computes in bfloat16" in note for note in result.notes)


@pytest.mark.parametrize("precision", [None, "int4"])
def test_float16_decoder_is_fused_and_verified(checkpoint: Path, tmp_path: Path, precision: str | None) -> None:
    """Cache and logits are float16, with weights in float16 and in four bits."""
    options = {} if precision is None else {"precision": precision}
    result = build_hf_model(checkpoint, tmp_path / "built", config={"layout": "genai"}, dtype="fp16", **options)
    counts = _operators(result.folder)
    assert (counts["GroupQueryAttention"], counts["Softmax"]) == (1, 0)
    graph = onnx.load(result.folder / "model.onnx", load_external_data=False).graph
    dtypes = {value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}
    assert dtypes == {onnx.TensorProto.INT64, onnx.TensorProto.FLOAT16}


@pytest.mark.parametrize("exclude", [[], ["model.layers.*.self_attn.q_proj"]])
def test_projections_with_one_format_are_packed_and_name_their_modules(
    checkpoint: Path, tmp_path: Path, exclude: list[str]
) -> None:
    """They are quantized one by one; a projection that stays float leaves the three separate."""
    config = {"layout": "genai", "export": {"torch_module": ["Linear"]}, "quant": {"exclude": exclude}}
    result = build_hf_model(checkpoint, tmp_path / "built", config=config, precision="int4", verify=False)
    nodes = onnx.load(result.folder / "model.onnx", load_external_data=False).graph.node
    (attention,) = (node for node in nodes if node.op_type == "GroupQueryAttention")
    products = [
        node for node in nodes if node.op_type in ("MatMul", "MatMulNBits") and node.output[0] in attention.input[:3]
    ]
    keys = [{entry.key: entry.value for entry in node.metadata_props} for node in products]
    if exclude:
        assert ["MatMul", "MatMulNBits", "MatMulNBits"] == sorted(node.op_type for node in products)
    else:
        owners = [f"model.layers.0.self_attn.{name}_proj" for name in "kqv"]
        assert [owners] == [json.loads(entries["winml.hierarchy.modules"]) for entries in keys]
        assert "int4" == json.loads(keys[0]["winml.quantization"])["precision"]
        assert ["", ""] == list(attention.input[1:3])


@pytest.mark.parametrize("precision", [None, "int4"])
def test_texts_padded_on_the_left_have_the_scores_they_have_alone(
    checkpoint: Path, tmp_path: Path, precision: str | None
) -> None:
    """The graph of genai counts the tokens of a row from its start, so the runtime moves padding behind them."""
    options = {} if precision is None else {"precision": precision}
    result = build_hf_model(checkpoint, tmp_path / "built", config={"layout": "genai"}, verify=False, **options)
    (attention,) = (
        node
        for node in onnx.load(result.folder / "model.onnx", load_external_data=False).graph.node
        if node.op_type == "GroupQueryAttention"
    )
    assert len(attention.input) < 10
    graph = DecoderGraph(Session(result.folder / "model.onnx"))
    generator = np.random.default_rng(0)
    tokens, steps = generator.integers(3, 90, (2, 6)), generator.integers(3, 90, (2, 3))
    mask = np.array([[0, 0, 1, 1, 1, 1], [1] * 6])

    def read(rows: slice, start: int) -> list[Any]:
        visible, cache = mask[rows, start:], graph.empty_cache(len(mask[rows]))
        positions = (visible.cumsum(-1) - 1).clip(0)
        scores = [graph.run(tokens[rows, start:], visible, positions, cache)[:, -1]]
        for number, step in enumerate(steps[rows].T, 1):
            visible = np.pad(visible, ((0, 0), (0, 1)), constant_values=1)
            scores.append(graph.run(step[:, None], visible, positions[:, -1:] + number, cache)[:, -1])
        return scores

    together, alone = read(slice(2), 0), [read(slice(0, 1), 2), read(slice(1, 2), 0)]
    for row, expected in enumerate(alone):
        for found, scores in zip(together, expected, strict=True):
            np.testing.assert_allclose(found[row], scores[0], atol=1e-4 * np.abs(scores).max(), rtol=0)


def test_four_bits_are_fused_and_compared_with_pytorch(checkpoint: Path, tmp_path: Path) -> None:
    """Several rows with several tokens after a cache are compared as well, row by row."""
    result = build_hf_model(checkpoint, tmp_path / "built", precision="int4")
    counts = _operators(result.folder)
    assert (counts["GroupQueryAttention"], counts["MatMul"], counts["GatherBlockQuantized"]) == (1, 0, 1)
    assert counts["MatMulNBits"] >= 7
    quantize = result.manifest.parts[0].stage("quantize")
    assert quantize is not None
    assert quantize.coverage.percent == 100
    assert "group_query_attention_fusion 1" in quantize.summary


def test_level_none_keeps_the_plain_operators(checkpoint: Path, tmp_path: Path) -> None:
    """An explicit level turns off the default fusions."""
    config = {"optim": {"level": "none"}}
    result = build_hf_model(checkpoint, tmp_path / "built", config=config, precision="int4", verify=False)
    assert (_operators(result.folder)["GroupQueryAttention"], _operators(result.folder)["Softmax"]) == (0, 1)


def test_written_config_builds_the_same_file_again(checkpoint: Path, tmp_path: Path) -> None:
    """The config of a build states the model, and its inputs with names of their axes."""
    built = winml.build_model(checkpoint, tmp_path / "built", verify=False)
    again = winml.build_model(config=built.folder / "winml_build_config.json", output=tmp_path / "again")
    assert again.model_path.read_bytes() == built.model_path.read_bytes()
