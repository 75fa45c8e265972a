"""Verbs with a torch without its TorchScript exporter, which torch will drop."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace

import pytest

from e2e.workplace import Workplace
from evaluation_checkpoints import save_task_checkpoint, sentences, text_tokenizer
from generating import save_decoder

REMOVED = """
import sys
import torch.onnx

GONE = ("torch.onnx._internal.torchscript_exporter", "torch.onnx.utils", "torch.onnx.symbolic_")


class Remover:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(GONE):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


for name in [name for name in sys.modules if name.startswith(GONE)]:
    parent, _, attribute = name.rpartition(".")
    vars(sys.modules.get(parent, sys)).pop(attribute, None)
    del sys.modules[name]
for attribute in [name for name in vars(torch.onnx) if name == "utils" or name.startswith("symbolic_")]:
    delattr(torch.onnx, attribute)
torch.onnx.is_in_onnx_export = lambda: False  # it looks into the exporter that is gone
sys.meta_path.insert(0, Remover())
"""
"""Run by Python at the start of every process: torch as it will be."""

VERBS = (
    ("export", "-m", "model", "-o", "model.onnx", "--format", "json"),
    ("inspect", "model", "-H", "--format", "json"),
    ("config", "-m", "model", "-o", "build.json"),
    ("build", "-m", "model", "-o", "built"),
    ("perf", "model", "--iterations", "1"),
    ("run", "model", "--text", "two words", "--reference"),
    ("eval", "built", "--dataset", "texts.csv", "--baseline", "pytorch"),
    ("tune", "-m", "model", "-o", "tuned", "--only", "dynamic", "--min-sqnr", "5", "--budget", "0.001"),
    ("sweep", "plan.txt", "-o", "swept", "--do", "export", "--jobs", "1"),
    ("build", "-m", "llama", "-o", "decoder"),
    ("generate", "decoder", "-p", "hello", "--max-new-tokens", "3", "--reference"),
    # Verbs on the file need no exporter.
    ("quantize", "-m", "model.onnx", "-o", "int8.onnx"),
    ("optimize", "-m", "model.onnx", "-o", "fast.onnx", "--level", "full"),
    ("compare", "model", "model.onnx"),
)
REFUSED = ("export", "-m", "model", "-o", "other.onnx", "--no-dynamo")


@pytest.fixture
def later(make_workplace: Callable[[], Workplace]) -> Workplace:
    """A workplace with a torch without TorchScript exporter, a classifier, a decoder and texts."""
    workplace = make_workplace()
    site = workplace.root / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(REMOVED, encoding="utf-8")
    paths = (str(site), os.environ.get("PYTHONPATH", ""))
    save_task_checkpoint(
        workplace.folder / "model",
        "bert",
        "BertForSequenceClassification",
        text_tokenizer(),
        labels=["bad", "good"],
        num_hidden_layers=1,
    )
    save_decoder(workplace.folder / "llama", "llama", num_hidden_layers=1)
    rows = [f"{text},{('bad', 'good')[number % 2]}" for number, text in enumerate(sentences(4))]
    (workplace.folder / "texts.csv").write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    (workplace.folder / "plan.txt").write_text("model\n", encoding="utf-8")
    variables = {**workplace.variables, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return replace(workplace, variables=variables)


def test_every_verb_works_without_torchscript_and_a_request_for_torchscript_is_refused(later: Workplace) -> None:
    """The graphs are dynamo's, verified and tagged; the refusal names the missing exporter and a remedy."""
    *outcomes, refused = later.winml_in_turn(*VERBS, REFUSED)
    failed = {command[0]: each.err for command, each in zip(VERBS, outcomes, strict=True) if each.code != 0}
    assert {} == failed
    part = json.loads(outcomes[0].out)
    assert ("dynamo", 100.0) == (part["exporter"], part["coverage"]["percent"])
    assert part["verification"]["is_verified"]
    # The requested exporter is not replaced silently, and no file is written.
    assert 1 == refused.code
    assert "TorchScript" in refused.err
    assert "Without --no-dynamo" in refused.err
    assert not (later.folder / "other.onnx").exists()
