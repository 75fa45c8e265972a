"""Recording of inner values in groups, at most one group in a session."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from winml.modelkit import WinMLExportConfig, compare_models, export_pytorch
from winml.modelkit.compare.by_module import module_comparison, onnx_side
from winml.modelkit.ort.graph_sessions import open_session
from winml.modelkit.ort.sessions import Session

VALUE_BYTES = 2 * 8 * 4


class Layers(torch.nn.Module):
    """Twelve layers with one output value each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call the layers one after the other."""
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of the twelve layers."""
    torch.manual_seed(0)
    path: Path = tmp_path_factory.mktemp("layers") / "net.onnx"
    export_pytorch(Layers(), path, inputs=torch.randn(2, 8), config=WinMLExportConfig(verify=False))
    return path


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of inner values that each executed session held."""
    held: list[int] = []

    def opened(path: Path, *, outputs: Sequence[str], **settings: Any) -> Session:
        session = open_session(path, outputs=outputs, **settings)
        run = session.run

        def recorded(*arguments: object) -> object:
            held.append(len(outputs))
            return run(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(session, "run", recorded)
        return session

    monkeypatch.setattr(onnx_side, "open_session", opened)
    return held


def test_a_small_model_has_one_session(exported: Path, ran: list[int]) -> None:
    """One session declares all values that fit into a group."""
    result = compare_models(exported, exported, by_module=True)
    assert result.modules is not None
    assert 13 == sum(module.fidelity is not None for module in result.modules)
    assert 1 == len(set(ran))
    assert ran[0] > 12


@pytest.mark.parametrize("is_known", [True, False])
def test_no_run_holds_more_than_a_group(
    exported: Path, ran: list[int], monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """No session holds more values of known size than a group.

    Only the first group may hold more values of unknown size.
    """
    monkeypatch.setattr(onnx_side, "GROUP_BYTES", 6 * VALUE_BYTES)
    monkeypatch.setattr(module_comparison, "GROUP_BYTES", 6 * VALUE_BYTES)
    if not is_known:
        monkeypatch.setattr(module_comparison, "FIRST_GROUP", 2)
        monkeypatch.setattr(onnx_side.OnnxSide, "value_bytes", lambda _side, names, _feeds: [None] * len(names))
    result = compare_models(exported, exported, by_module=True)
    assert result.modules is not None
    assert 13 == sum(module.fidelity is not None for module in result.modules)
    assert 3 == max(ran)
