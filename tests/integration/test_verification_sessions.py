"""Memory of verification: ONNX Runtime holds the weights of a written file once."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import nn

from winml.modelkit import WinMLExportConfig, export_pytorch
from winml.modelkit.ort.graph_sessions import newest_ir_version


def test_other_sizes_are_compared_in_the_open_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No two sessions are open at the same time."""
    newest_ir_version()  # known once in a process, from sessions of small models
    opened: weakref.WeakSet[Any] = weakref.WeakSet()
    counts: list[int] = []

    class Counted(onnxruntime.InferenceSession):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            opened.add(self)
            counts.append(len(opened))

    monkeypatch.setattr(onnxruntime, "InferenceSession", Counted)
    config = WinMLExportConfig(exporter="torchscript", dynamic_axes={"input": {0: "batch"}})
    result = export_pytorch(nn.Linear(4, 4), tmp_path / "model.onnx", {"input": torch.randn(2, 4)}, config=config)
    assert result.only_part.verification is not None
    assert result.only_part.verification.is_verified
    assert [1] == counts
