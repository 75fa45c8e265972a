"""Evaluation of architectures: export, checks, stored results and resumption."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import architecture_eval

TYPES = ("bert", "detr", "time_series_transformer")
"""A working architecture, an architecture that needs a missing package, and a default config that makes no model."""


@pytest.fixture
def _restored_handler() -> Iterator[None]:
    """Restore the handler of SIGTERM after the script."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.usefixtures("_restored_handler")
def test_evaluation_exports_once_and_lists_reasons_of_skipped_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second run repeats nothing: the recorded times stay."""
    command = ["architecture_eval.py", *TYPES, "--jobs", "1", "--output", str(tmp_path), "--exporters", "auto"]
    monkeypatch.setattr(sys, "argv", command)
    # The script sets these variables for its processes.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def evaluate() -> tuple[str, dict[str, Any]]:
        assert 0 == architecture_eval.main()
        content = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
        return capsys.readouterr().out, {cell["model"]: cell for cell in content["cells"]}

    printed, kept = evaluate()
    assert "auto: 1 of 1 attempted exported and verified (100.0 %)" in printed
    assert "2 not built" in printed
    cell = kept["random:bert"]
    assert "done" == cell["state"]
    assert 100.0 == cell["measures"]["coverage_percent"]
    assert "/BertModel/BertEmbeddings" in cell["details"]["attempt"]["tags"]
    assert cell["peak_bytes"] > 0
    assert ("failed", "model") == (kept["random:detr"]["state"], kept["random:detr"]["step"])
    assert "prediction_length" in kept["random:time_series_transformer"]["problem"]
    assert ">random:bert</td>" in (tmp_path / "results.html").read_text(encoding="utf-8")
    assert (printed, kept) == evaluate()
    assert [] == list(tmp_path.rglob("*.onnx"))
