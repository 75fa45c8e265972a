"""Bounds of dynamic sizes found by an export: obeyed and shown by every command that reads a size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from e2e.in_process import run_here
from winml.modelkit import HTPExporter, WinMLExportConfig
from winml.modelkit.errors import UsageError
from winml.modelkit.onnx.specs import stated_bounds
from winml.modelkit.ort.sessions import Session
from winml.modelkit.transform.pin import pin_model


class Branching(nn.Module):
    """Doubles sequences of up to 64 tokens, and triples longer ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Choose by the length."""
        return self.layer(values) * (2 if values.shape[1] <= 64 else 3)


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export the module with dynamic dimensions."""
    path = tmp_path_factory.mktemp("bounded") / "model.onnx"
    config = WinMLExportConfig(exporter="dynamo", dynamic_axes={"values": {0: "batch_size", 1: "T"}})
    HTPExporter(config).export(Branching(), path, {"values": torch.randn(2, 48, 4)})
    return path


def test_bounds_are_stated_in_the_metadata(bounded: Path) -> None:
    """The sequence dimension has a bound, the batch has none."""
    metadata = Session(bounded).metadata
    assert [{"name": "T", "min": 1, "max": 64}] == json.loads(metadata["winml.io.dimensions"])
    assert ["T"] == [*stated_bounds(metadata)]


def test_session_refuses_a_size_beyond_the_bounds(bounded: Path) -> None:
    """Both ``run`` and ``prepare`` refuse the size; the largest size is accepted."""
    session = Session(bounded)
    assert (1, 64, 4) == session.run({"values": np.zeros((1, 64, 4), np.float32)})["output"].shape
    beyond = {"values": np.zeros((1, 65, 4), np.float32)}
    for run in (session.run, session.prepare):
        with pytest.raises(UsageError, match=r"T 65.* 1 to 64"):
            run(beyond)


@pytest.mark.parametrize(
    "arguments",
    [
        ("export", "-m", "{file}", "-o", "{folder}/fixed.onnx"),
        ("export", "-m", "{file}", "-o", "{folder}/fixed.onnx", "--dry-run"),
        ("perf", "-m", "{file}", "--iterations", "1"),
        ("compare", "{file}", "{file}"),
        ("quantize", "-m", "{file}", "-o", "{folder}/int8.onnx"),
        ("optimize", "-m", "{file}", "-o", "{folder}/fast.onnx", "--level", "basic"),
    ],
    ids=lambda arguments: f"{arguments[0]} {arguments[-1][-9:]}",
)
def test_verb_refuses_a_size_beyond_the_bounds(arguments: tuple[str, ...], bounded: Path, tmp_path: Path) -> None:
    """The refusal has exit code 2 and leaves no file; a size within the bounds is accepted."""
    words = [word.format(file=bounded, folder=tmp_path) for word in arguments]
    refused = run_here(*words, "--shape-config", '{"T": 65}')
    assert (2, True) == (refused.code, "1 to 64" in refused.err)
    assert not list(tmp_path.iterdir())
    assert 0 == run_here(*words, "--shape-config", '{"T": 64}').code


def test_run_refuses_a_tensor_beyond_the_bounds(bounded: Path, tmp_path: Path) -> None:
    """The refusal replaces an output of the wrong branch."""
    np.save(tmp_path / "long.npy", np.zeros((1, 65, 4), np.float32))
    assert 2 == run_here("run", str(bounded), "--input", f"values=@{tmp_path}/long.npy").code


def test_bounds_are_shown(bounded: Path) -> None:
    """Both inspect and the schema of run list the bounds, as text and as JSON."""
    expected: list[dict[str, Any]] = [{"name": "T", "min": 1, "max": 64}]
    for words in (["inspect", "-m", str(bounded)], ["run", str(bounded), "--schema"]):
        assert "T 1 to 64" in run_here(*words).out
        assert expected == json.loads(run_here(*words, "-f", "json").out)["dimensions"]


def test_bounds_of_a_fixed_size_are_dropped(bounded: Path, tmp_path: Path) -> None:
    """Bounds of a size that stays dynamic are kept."""
    pin_model(bounded, tmp_path / "short.onnx", {"T": 8})
    pin_model(bounded, tmp_path / "row.onnx", {"batch_size": 1})
    assert {} == stated_bounds(Session(tmp_path / "short.onnx").metadata)
    assert 64 == stated_bounds(Session(tmp_path / "row.onnx").metadata)["T"].max


@pytest.mark.parametrize(
    "text",
    ["{", "7", '[{"name": "T", "min": -1}]', '[{"name": "T", "min": 9, "max": 8}]', '[{"name": "T", "max": "many"}]'],
)
def test_damaged_bounds_are_noted_by_their_key(text: str, bounded: Path, tmp_path: Path) -> None:
    """The file is read without the damaged bounds."""
    model = onnx.load(bounded)
    next(item for item in model.metadata_props if item.key == "winml.io.dimensions").value = text
    onnx.save(model, tmp_path / "damaged.onnx")
    np.save(tmp_path / "values.npy", np.zeros((1, 8, 4), np.float32))
    for words in (
        ("inspect", "-m", tmp_path / "damaged.onnx"),
        ("perf", tmp_path / "damaged.onnx", "--iterations", "1", "--shape-config", '{"T": 8}'),
        ("run", tmp_path / "damaged.onnx", "--input", f"values=@{tmp_path / 'values.npy'}"),
    ):
        outcome = run_here(*words)
        assert 0 == outcome.code, outcome.err
        assert "winml.io.dimensions of the file is damaged" in " ".join(outcome.out.split()), words


def test_default_size_is_within_the_bounds(tmp_path: Path) -> None:
    """A command that chooses a size takes the nearest valid one; the usual choice is 128 tokens."""

    class Short(Branching):
        pass

    config = WinMLExportConfig(exporter="dynamo", dynamic_axes={"values": {1: "sequence_length"}})
    HTPExporter(config).export(Short(), tmp_path / "model.onnx", {"values": torch.randn(2, 48, 4)})
    answer = run_here("perf", "-m", str(tmp_path / "model.onnx"), "--iterations", "1", "-f", "json")
    assert 0 == answer.code


class CutTable(nn.Module):
    """Adds the first rows of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 24, 4))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """One row for each position."""
        return values + self.table[:, : values.size(1)]


class CountedTable(nn.Module):
    """Adds the vectors of counted positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(24, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """One vector for each position."""
        return values + self.table(torch.arange(values.size(1)))


class MeanOfTable(CutTable):
    """Adds a single row, which exists for every size."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Add the mean of the first rows."""
        return values + self.table[:, : values.size(1)].mean(1, keepdim=True)


class RepeatedTable(CutTable):
    """Reads a larger table for larger sizes, which a trace of small sizes does not contain."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Repeat the table for positions beyond its end."""
        table = self.table if values.size(1) <= 24 else self.table.repeat(1, 1 + values.size(1) // 24, 1)
        return values + table[:, : values.size(1)]


def _largest_size(module: nn.Module, path: Path, exporter: Literal["torchscript", "dynamo"]) -> int | None:
    config = WinMLExportConfig(exporter=exporter, dynamic_axes={"values": {1: "T"}})
    HTPExporter(config).export(module, path, {"values": torch.randn(2, 16, 4)})
    bounds = stated_bounds(Session(path).metadata).get("T")
    return None if bounds is None else bounds.max


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
@pytest.mark.parametrize("kind", [CutTable, CountedTable, RepeatedTable])
def test_table_of_positions_bounds_its_size(
    kind: type[nn.Module], exporter: Literal["torchscript", "dynamo"], tmp_path: Path
) -> None:
    """Both exporters state the rows of the table as the largest size, and commands refuse the next size."""
    path = tmp_path / "model.onnx"
    assert 24 == _largest_size(kind(), path, exporter)
    assert 0 == run_here("perf", path, "--iterations", "1", "--shape-config", '{"T": 24}').code
    assert 2 == run_here("perf", path, "--iterations", "1", "--shape-config", '{"T": 25}').code


def test_table_readable_at_any_size_is_no_bound(tmp_path: Path) -> None:
    """The outputs equal PyTorch's beyond the rows of the table."""
    module, path = MeanOfTable(), tmp_path / "model.onnx"
    assert _largest_size(module, path, "torchscript") is None
    values = torch.randn(2, 200, 4)
    answer = Session(path).run({"values": values.numpy()})["output"]
    np.testing.assert_allclose(answer, module(values).detach(), rtol=1e-5, atol=1e-6)
