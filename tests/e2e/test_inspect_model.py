"""``winml inspect`` on checkpoints: facts of a future export as table and JSON, and refusals of bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from e2e.workplace import Workplace

LLAMA_68B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 24576, "num_hidden_layers": 8,
    "num_attention_heads": 192, "num_key_value_heads": 24, "intermediate_size": 86016, "vocab_size": 128256,
    "dtype": "bfloat16",
}  # fmt: skip


def write_config(folder: Path, content: dict[str, Any] | str) -> Path:
    """Write a folder with a config alone."""
    folder.mkdir()
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder


def test_inspect_bert_tiny_in_both_forms(workplace: Workplace, bert_tiny: Path) -> None:
    """The table shows the tree; the JSON is one object, and stdout holds nothing else."""
    table = workplace.winml("inspect", "-m", bert_tiny, "-H")
    assert (0, "") == (table.code, table.err)
    assert "BertSelfAttention encoder.layer.1.attention.self" in table.out
    told = workplace.winml("inspect", "-m", bert_tiny, "-H", "--format", "json")
    assert (0, "") == (told.code, told.err)
    record = json.loads(told.out)
    assert "BertModel" == record["model"]["class"]
    assert 18 == len(record["hierarchy"]["modules"])


def test_inspect_minilm_equals_its_export(workplace: Workplace, minilm_folder: Path) -> None:
    """The tokenizer of a published checkpoint is found by its files."""
    told = workplace.winml("inspect", "-m", minilm_folder, "--format", "json")
    assert 0 == told.code, told.err
    record = json.loads(told.out)
    assert 22_713_216 == record["parameters"]["count"]
    assert [1, 128, 384] == record["export"]["outputs"][0]["shape"]
    assert {"tokenizer_config.json"} == {item["origin"] for item in record["processors"]}


def test_inspect_a_68b_config_shows_its_tree(workplace: Workplace, tmp_path: Path) -> None:
    """Eight layers and 68 billion parameters are shown without creating one."""
    told = workplace.winml("inspect", "-m", write_config(tmp_path / "llama", LLAMA_68B), "-H", "--format", "json")
    assert (0, "") == (told.code, told.err)
    record = json.loads(told.out)
    assert 67_910_393_856 == record["parameters"]["count"]
    assert 52 == len(record["hierarchy"]["modules"])


@pytest.mark.parametrize("model_type", ["vit", "whisper"])
def test_inspect_model_type_needs_no_checkpoint(workplace: Workplace, model_type: str) -> None:
    """A model type has tasks, inputs and outputs."""
    told = workplace.winml("inspect", "--model-type", model_type, "-H", "--format", "json")
    assert (0, "") == (told.code, told.err)
    record = json.loads(told.out)
    assert record["export"]["outputs"]
    assert record["hierarchy"]["modules"][0]["calls"] == 1
    tasks = workplace.winml("inspect", "--model-type", model_type, "--list-tasks", "--format", "json")
    assert record["tasks"] == json.loads(tasks.out)["tasks"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"model_type": "bert", "num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"model_type": "qwen2", "num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"model_type": "bert", "hidden_size": -8}, "negative number"),
        ({"model_type": "bert", "hidden_size": 130, "num_attention_heads": 4}, "a multiple"),
        ({"model_type": "bert", "hidden_size": "768"}, "hidden_size"),
        ({"model_type": "llama", "num_attention_heads": 0}, "LlamaConfig"),
        ({"model_type": "bert", "vocab_size": 10**9, "hidden_size": 12 * 10**7}, "8e+17"),
        (
            {
                "model_type": "encoder-decoder",
                "encoder": {"model_type": "encoder-decoder"},
                "decoder": {"model_type": "t5"},
            },
            "be built",
        ),
        ('{"text_config":' * 20_000 + "1" + "}" * 20_000, "too deep"),
        ('{"model_type": "bert", "hidden_size": 1' + "0" * 5000 + "}", "config.json"),
        ("[]", "JSON object"),
        (
            {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Model"}},
            "custom code",
        ),
    ],
)
def test_inspect_bad_config_is_refused_in_one_sentence(
    workplace: Workplace, tmp_path: Path, content: dict[str, Any] | str, words: str
) -> None:
    """The command ends with an error and a remedy, without a traceback or output on stdout."""
    refused = workplace.winml("inspect", "-m", write_config(tmp_path / "bad", content), "-H", "--format", "json")
    assert (1, "") == (refused.code, refused.out)
    assert words in refused.err
    assert "Traceback" not in refused.err
    assert "internal error" not in refused.err
    assert 2 == len(refused.complaint), refused.complaint


def test_inspect_of_a_value_dependent_config_has_a_note(workplace: Workplace, tmp_path: Path) -> None:
    """A small model gets random weights if the forward cannot run without values, and a note says so."""
    content = {
        "model_type": "longformer", "architectures": ["LongformerModel"], "vocab_size": 120, "hidden_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48, "attention_window": 8,
    }  # fmt: skip
    told = workplace.winml("inspect", "-m", write_config(tmp_path / "longformer", content), "-H")
    assert (0, "") == (told.code, told.err)
    assert "without values" in told.out
    assert "LongformerSelfAttention" in told.out
