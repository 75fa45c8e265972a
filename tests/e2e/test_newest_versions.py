"""The way from a checkpoint to a measured file with the versions that ``pip install`` resolves to today."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from e2e.other_environment import run_elsewhere
from evaluation_checkpoints import WORDS, save_task_checkpoint, text_tokenizer
from readers import python_of

READER = "newest"
COMMANDS = (
    ["--help"],
    ["sys", "-f", "json"],
    ["export", "-m", "bert", "-o", "exported/model.onnx", "--proof"],
    ["build", "-m", "bert", "-o", "built", "-p", "int8", "--proof"],
    ["quantize", "-m", "exported/model.onnx", "-o", "w8a8.onnx", "-p", "w8a8"],
    ["inspect", "exported/model.onnx", "-H"],
    ["run", "exported/model.onnx", "--text", " ".join(WORDS[:4])],
    ["compare", "bert", "exported/model.onnx", "--by-module"],
    ["perf", "exported/model.onnx", "--iterations", "2", "--by-module"],
    ["verify", "exported", "-f", "json"],
    ["verify", "built", "-o", "before.json"],
    ["verify", "built", "--baseline", "before.json", "-f", "json"],
)


@pytest.mark.reader(READER)
def test_verbs_work_with_the_newest_versions(tmp_path: Path) -> None:
    """Deprecation warnings are allowed: the tests with pinned versions refuse them."""
    name = "BertForSequenceClassification"
    save_task_checkpoint(tmp_path / "bert", "bert", name, text_tokenizer(), labels=("a", "b"), num_hidden_layers=1)
    done = run_elsewhere(python_of(READER), tmp_path, list(COMMANDS))
    assert [] == [(command, messages) for command, (code, _, messages) in zip(COMMANDS, done, strict=True) if code]
    versions = json.loads(done[1][1])["versions"]
    assert None not in {versions[name] for name in ("torch", "transformers", "onnxruntime")}
    record = json.loads(done[-1][1])
    assert ({}, True) == (record["upgrade"]["versions"], record["is_within"])
