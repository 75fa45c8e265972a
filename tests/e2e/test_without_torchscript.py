"""torch will drop its TorchScript exporter: every verb works where it is gone, and says so where it was requested."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from e2e.workplace import Workplace
from generating import save_decoder

REMOVED = """
import sys
import torch.onnx
for name in [name for name in sys.modules if name.startswith("torch.onnx._internal.torchscript_exporter")]:
    sys.modules[name] = None
"""
"""Run by Python before the command: torch as it will be."""


@pytest.fixture(scope="module")
def later(make_workplace: Callable[[], Workplace]) -> Workplace:
    """A place whose torch has no TorchScript exporter."""
    workplace = make_workplace()
    folder = workplace.root / "later"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(REMOVED, encoding="utf-8")
    return replace(workplace, variables={**workplace.variables, "PYTHONPATH": str(folder)})


def test_export_quantize_and_compare_take_the_other_exporter(later: Workplace, bert_tiny: Path) -> None:
    """The graph is dynamo's, verified and tagged as before; the verbs behind it read the file."""
    done = later.export("-m", bert_tiny, "-o", "model.onnx", "--format", "json")
    assert 0 == done.code, done.err
    part = json.loads(done.out)
    assert ("dynamo", 100.0) == (part["exporter"], part["coverage"]["percent"])
    assert part["verification"]["is_verified"]
    for arguments in (
        ("quantize", "-m", "model.onnx", "-o", "int8.onnx"),
        ("optimize", "-m", "model.onnx", "-o", "fast.onnx", "--level", "full"),
        ("compare", str(bert_tiny), "model.onnx"),
        ("run", "model.onnx", "--input", "input_ids=[[2,5,3]]"),
    ):
        done = later.winml(*arguments)
        assert 0 == done.code, done.err


def test_exporter_that_is_gone_is_named_with_the_way_out(later: Workplace, bert_tiny: Path) -> None:
    """What was requested is not replaced in silence, and nothing is written."""
    before = later.files()
    done = later.export("-m", bert_tiny, "-o", "other.onnx", "--no-dynamo")
    assert 1 == done.code
    assert "torchscript_exporter" in done.err
    assert "--dynamo" in done.err
    assert before == later.files()


def test_decoder_is_built_with_its_cache_and_generates(later: Workplace) -> None:
    """A cache, open sizes and the fusions of a decoder need no trace."""
    save_decoder(later.folder / "llama", "llama")
    done = later.winml("build", "-m", "llama", "-o", "built")
    assert 0 == done.code, done.err
    done = later.winml("generate", "built", "-p", "hello", "--max-new-tokens", "3", "--format", "json")
    assert 0 == done.code, done.err
