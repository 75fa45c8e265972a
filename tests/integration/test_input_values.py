"""Verification of values that a trace may freeze: constants are found, and graphs that follow the value pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional

from winml.modelkit import (
    ExportError,
    InputTensorSpec,
    VerificationError,
    WinMLExportConfig,
    export_pytorch,
)

Forward = Callable[..., Any]
Exporter = Literal["torchscript", "dynamo"]


class Around(nn.Module):
    """A layer with weights, then a function of its output and the other input."""

    def __init__(self, function: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.table = nn.Embedding(6, 4)
        self.function = function

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        """Apply layer and function."""
        return self.function(self, self.layer(x), n)


@dataclass(frozen=True)
class Case:
    """A forward function of two inputs, and values to try for the second."""

    function: Forward
    example: torch.Tensor
    others: Sequence[Any]
    """Values that PyTorch accepts, apart from the example."""


def whole(value: Any) -> torch.Tensor:
    """Return an integer tensor."""
    return torch.tensor(value, dtype=torch.int64)


def repeated(model: Around, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """Apply the layer n times."""
    for _ in range(int(n)):
        x = torch.tanh(model.layer(x))
    return x


def longest_rows(_model: Around, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """Hide positions beyond the longest row, computed in Python."""
    hidden = torch.arange(x.shape[1]) >= n.max().item()
    return x.masked_fill(hidden[None, :, None], 0.0)


def checked(values: torch.Tensor) -> torch.Tensor:
    """Read the values in an assertion."""
    assert values.max() < 1e6
    return values


FROZEN: dict[str, Case] = {
    "count of a loop": Case(repeated, whole(3), [1, 2, 4]),
    "a slice": Case(lambda _, x, n: x[:, : int(n)] * 2, whole(3), [1, 2, 4]),
    "a slice by a row of one": Case(lambda _, x, n: x[:, : int(n[0])] * 2, whole([3]), [[1], [2], [4]]),
    "an if on a flag": Case(lambda _, x, n: x * 2 if n else x - 1, torch.tensor(True), [False]),
    "an if on a whole number": Case(lambda _, x, n: x * 2 if n > 3 else x - 1, whole(3), [4, 5]),
    "an if on a float": Case(lambda _, x, n: x * 2 if n > 0 else x - 1, torch.tensor(0.5), [-0.5, -2.0]),
    "a float as a number": Case(lambda _, x, n: x / float(n), torch.tensor(0.7), [0.5, 2.0]),
    "the longest row": Case(longest_rows, whole([3, 2]), [[2, 1], [4, 2]]),
    "sizes": Case(
        lambda _, x, n: functional.interpolate(x[None], (int(n[0]), int(n[1]))), whole([6, 8]), [[5, 8], [6, 9]]
    ),
    "sign of a sum": Case(lambda _, x, n: x * 2 if n.sum() > 0 else x - 1, torch.ones(3), [[-1.0, -2.0, 0.0]]),
    "largest of many": Case(lambda _, x, n: x * 2 if n.max() > 0 else x - 1, torch.ones(3, 4), [[[-1.0] * 4] * 3]),
    "whether there is any": Case(lambda _, x, n: x * 2 if n.any() else x - 1, torch.ones(3, 4), [[[0.0] * 4] * 3]),
    "a count that ends": Case(lambda _, x, n: [x, x * 2, x * 4][min(int(n), 2)], whole(4), [0, 1]),
    "a threshold beyond the next number": Case(lambda _, x, n: (x * 2 if n > 5 else x) + n, whole(3), [6]),
    "a threshold of a float far away": Case(lambda _, x, n: (x * 2 if n > 10 else x) * n, torch.tensor(3.0), [11.0]),
    "the sign of a whole number": Case(lambda _, x, n: x[..., : 3 if n.item() >= 0 else 2] * n, whole(1), [-1]),
    "a number that no graph reads": Case(lambda _, x, n: x * 2 if n > 10**6 else x, whole(3), [2 * 10**6]),
    "flags in two dimensions": Case(
        lambda _, x, n: x * 2 if n[0, 0] else x, torch.tensor([[True, False]]), [[[False, False]]]
    ),
    "two flags that differ": Case(
        lambda _, x, n: x * 2 if n[0] and not n[1] else x, torch.tensor([True, True]), [[True, False]]
    ),
    "kinds that are all alike": Case(
        lambda _, x, n: x * 2 if n.sum() > 0 else x - 1, whole([[0] * 6] * 4), [[[1] * 6] * 4]
    ),
}
"""Cases that read the second input in Python."""

RIGHT: dict[str, Case] = {
    "a number that is added": Case(lambda _, x, n: x + n, whole(3), [0, 2, 5, -4]),
    "a mask by comparison": Case(lambda _, x, n: x * (torch.arange(5) < n)[None, :, None], whole(3), [1, 2, 5, 9]),
    "a mask by lengths": Case(
        lambda _, x, n: x * (torch.arange(5)[None] < n[:, None])[..., None], whole([5, 3]), [[1, 5], [4, 4]]
    ),
    "a class": Case(lambda model, x, n: x + model.table(n), whole(5), [0, 4]),
    "classes": Case(lambda model, x, n: x + model.table(n)[:, None], whole([0, 5]), [[1, 1], [5, 0]]),
    "a flag by where": Case(lambda _, x, n: torch.where(n, x * 2, x - 1), torch.tensor(False), [True]),
    "a temperature": Case(lambda _, x, n: torch.softmax(x / n, -1), torch.tensor(0.7), [0.5, 2.0, -1.0]),
    "a threshold": Case(lambda _, x, n: x * (x > n), torch.tensor(0.1), [0.0, -0.3, 0.7]),
    "an index": Case(lambda _, x, n: x.index_select(1, n), whole([4]), [[0], [2]]),
    "a number nobody reads": Case(lambda _, x, _n: torch.tanh(x), whole(3), [1, 4]),
    "a root": Case(lambda _, x, n: x + n.sqrt().sum(), torch.rand(3) + 0.1, [[0.5, 4.0, 9.0]]),
    "probabilities": Case(lambda _, x, n: x + torch.logit(n).sum(), torch.rand(3) * 0.8 + 0.1, [[0.5, 0.2, 0.9]]),
    "ranks of values that tie": Case(
        lambda _, x, n: x[:, :4] + n.argsort(-1)[:2, None],
        torch.tensor([[1.0, -1.0, 0.5, -0.5]] * 2),
        [[[3.0, 1, 2, 4]] * 2],
    ),
    "a factor of one": Case(lambda _, x, n: x * n, whole(1), [2, 7]),
    "quotient and remainder": Case(lambda _, x, n: x * (n // 2) + n % 3, whole(7), [0, 1, 9]),
    "a step of time": Case(
        lambda _, x, n: x + torch.cos(n[:, None].float() * torch.arange(4))[:, None],
        whole([999, 3]),
        [[0, 0], [5, 998]],
    ),
    "values of which the norm is 1": Case(lambda _, x, n: x + (n / n.norm()).sum(), torch.randn(3), [[1.0, 2.0, -3.0]]),
    "a mask of floats": Case(
        lambda _, x, n: x + torch.softmax(n.log(), -1).sum(-1, keepdim=True)[:1, :1],
        torch.tensor([[1.0, 0.0, 1.0, 1.0]]),
        [[[1.0, 1.0, 1.0, 0.0]]],
    ),
    "whole numbers of 32 bits": Case(lambda _, x, n: x + n, torch.tensor(3, dtype=torch.int32), [0, 9]),
    "bytes": Case(lambda _, x, n: x + n.float().mean(), torch.full((2, 3), 255, dtype=torch.uint8), [[[1, 2, 3]] * 2]),
}
"""Cases in which the graph follows the second input."""


# Values are varied independently of the exporter: dynamo runs only the cases that it captures differently.
ALSO_BY_DYNAMO = (
    "count of a loop", "a slice", "an if on a flag", "a float as a number", "sizes", "whether there is any",
    "a mask by comparison", "a class", "a flag by where", "an index", "quotient and remainder", "bytes",
)  # fmt: skip


def pair_with_exporters(cases: Iterable[str]) -> list[tuple[str, Exporter]]:
    """Pair each case with TorchScript, and some with dynamo as well."""
    names = list(cases)
    return [(name, "torchscript") for name in names] + [(name, "dynamo") for name in names if name in ALSO_BY_DYNAMO]


def example_of(case: Case) -> dict[str, torch.Tensor]:
    """Return both example inputs."""
    return {"x": torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1)), "n": case.example}


def follows(model: nn.Module, path: Path, case: Case) -> bool:
    """Return True if a file agrees with the model at the other values, by ONNX Runtime and PyTorch alone."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for value in case.others:
        inputs = {**example_of(case), "n": torch.tensor(value, dtype=case.example.dtype)}
        with torch.no_grad():
            expected = model.eval()(**inputs).numpy()
        (answer,) = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
        if expected.shape != answer.shape or not np.allclose(expected, answer, atol=1e-4):
            return False
    return True


@pytest.mark.parametrize(("name", "exporter"), pair_with_exporters(FROZEN))
def test_value_fixed_by_the_trace_fails_the_verification(name: str, exporter: Exporter, tmp_path: Path) -> None:
    """Dynamo refuses the model or follows the value; TorchScript's error names the input and the line that read it."""
    case, path = FROZEN[name], tmp_path / "model.onnx"
    model = Around(case.function)
    config = WinMLExportConfig(exporter=exporter)
    if exporter == "dynamo":
        with suppress(ExportError, VerificationError):
            export_pytorch(model, path, example_of(case), config=config)
        assert not path.exists() or follows(model, path, case)
        return
    with pytest.raises(VerificationError) as caught:
        export_pytorch(model, path, example_of(case), config=config)
    assert caught.value.is_graph_wrong
    assert " n" in caught.value.message
    assert "test_input_values.py:" in caught.value.message
    assert not path.exists()


@pytest.mark.parametrize(("name", "exporter"), pair_with_exporters(RIGHT))
def test_graph_that_follows_its_values_is_verified(name: str, exporter: Exporter, tmp_path: Path) -> None:
    """Every tried value agrees, and no input counts as fixed."""
    case, path = RIGHT[name], tmp_path / "model.onnx"
    model = Around(case.function)
    result = export_pytorch(model, path, example_of(case), config=WinMLExportConfig(exporter=exporter))
    assert result.only_part.verification is not None
    assert result.only_part.verification.is_verified
    assert () == result.only_part.verification.fixed
    assert follows(model, path, case)


@pytest.mark.parametrize("seed", range(4))
def test_value_range_is_left_to_no_luck(seed: int, tmp_path: Path) -> None:
    """A loop with a frozen count is found for every seed of the range."""
    specs = (
        InputTensorSpec(name="x", shape=(2, 5, 4), dtype="float32"),
        InputTensorSpec(name="n", shape=(), dtype="int64", value_range=(1, 6)),
    )
    config = WinMLExportConfig(exporter="torchscript", input_tensors=specs)
    with pytest.raises(VerificationError, match=r"\bn\b"):
        export_pytorch(Around(repeated), tmp_path / "model.onnx", config=config, seed=seed)


@pytest.mark.parametrize("seed", range(4))
def test_declared_row_of_sizes_is_left_to_no_luck(seed: int, tmp_path: Path) -> None:
    """Small integers in two dimensions are varied as single numbers are."""
    specs = (
        InputTensorSpec(name="x", shape=(2, 5, 4), dtype="float32"),
        InputTensorSpec(name="n", shape=(1, 2), dtype="int64", value_range=(1, 6)),
    )
    model = Around(lambda _, x, n: repeated(_, x, n[0, 0]))
    config = WinMLExportConfig(exporter="torchscript", input_tensors=specs)
    with pytest.raises(VerificationError, match=r"\bn\b"):
        export_pytorch(model, tmp_path / "model.onnx", config=config, seed=seed)


def test_ranks_of_tied_results_speak_against_no_file(tmp_path: Path) -> None:
    """Layers without a bias return equal values for zeros; their order depends on the runtime."""

    class Best(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.convolution = nn.Conv2d(3, 4, 3, padding=1, bias=False)
            self.norm = nn.BatchNorm2d(4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            scores = torch.sigmoid(self.norm(self.convolution(checked(x)))).flatten(1)
            best = scores.topk(10)
            return best.values, best.indices

    inputs = {"x": torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))}
    config = WinMLExportConfig(exporter="torchscript")
    result = export_pytorch(Best(), tmp_path / "model.onnx", inputs, config=config)
    assert result.only_part.verification is not None
    assert result.only_part.verification.is_verified


def test_declared_value_is_reported_as_fixed(tmp_path: Path) -> None:
    """A range of one value allows a constant; summary, record, sidecar and report state the value."""
    specs = (
        InputTensorSpec(name="x", shape=(2, 5, 4), dtype="float32"),
        InputTensorSpec(name="n", shape=(), dtype="int64", value_range=(3, 3)),
    )
    path = tmp_path / "model.onnx"
    result = export_pytorch(Around(repeated), path, config=WinMLExportConfig(input_tensors=specs), with_report=True)
    assert result.only_part.verification is not None
    assert [("n", "3")] == [(value.name, value.traced) for value in result.only_part.verification.fixed]
    assert {"name": "n", "traced": "3", "compared": [], "refused": [], "is_fixed": True} in (
        result.as_record()["verification"]["values"]
    )
    report = (tmp_path / "model_htp_export_report.md").read_text(encoding="utf-8")
    assert "n fixed to 3" in report
    assert any(note.startswith("Input n is fixed to 3") for note in result.notes)


def test_asserted_value_is_no_assumption(tmp_path: Path) -> None:
    """An assertion has no effect on the graph, unless it stores its value."""

    def checked(_model: Around, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        assert bool((n > 0).all()), "positive it must be"
        return x + 1

    def stored_value(_model: Around, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        assert (count := int(n.sum())) > 0  # noqa: RUF018 - what this is about
        return x if count < 9 else -x

    inputs = {"x": torch.randn(2, 5, 4), "n": whole([3, 2])}
    config = WinMLExportConfig(exporter="torchscript")
    result = export_pytorch(Around(checked), tmp_path / "checked.onnx", inputs, config=config)
    assert result.only_part.verification is not None
    assert result.only_part.verification.is_verified
    assert any("Input n " in note for note in result.notes), result.notes
    assert not any("reads the value of a tensor" in note for note in result.notes)
    with pytest.raises(VerificationError, match="fixed n"):
        export_pytorch(Around(stored_value), tmp_path / "kept.onnx", inputs, config=config)


def test_value_refused_by_pytorch_is_reported(tmp_path: Path) -> None:
    """The input counts as fixed if PyTorch refuses every other value; else the refused values are named."""

    def strict(_model: Around, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        if int(n) != 3:
            raise ValueError("three it must be")
        return x * n

    result = export_pytorch(Around(strict), tmp_path / "strict.onnx", {"x": torch.randn(2, 5, 4), "n": whole(3)})
    assert result.only_part.verification is not None
    (value,) = result.only_part.verification.fixed
    assert ("4 (ValueError: three it must be)", "2 (ValueError: three it must be)") == value.refused
    result = export_pytorch(
        Around(RIGHT["a class"].function), tmp_path / "class.onnx", {"x": torch.randn(2, 5, 4), "n": whole(5)}
    )
    assert result.only_part.verification is not None
    (value,) = result.only_part.verification.values
    assert (("4",), False) == (value.compared, value.is_fixed)
    assert value.refused[0].startswith("6 (IndexError")
    assert any("PyTorch rejects 6" in note for note in result.notes)


@pytest.mark.parametrize("seed", range(4))
def test_single_number_is_varied_regardless_of_the_draw(seed: int, tmp_path: Path) -> None:
    """Two draws of equal values by chance do not prevent the verdict on a correct graph."""

    class Row(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(2, 4)

        def forward(self, n: torch.Tensor) -> torch.Tensor:
            return self.table(n)

    specs = (InputTensorSpec(name="n", shape=(), dtype="int64", value_range=(0, 1)),)
    config = WinMLExportConfig(exporter="torchscript", input_tensors=specs)
    result = export_pytorch(Row(), tmp_path / "model.onnx", config=config, seed=seed)
    assert result.only_part.verification is not None
    assert result.only_part.verification.is_verified
    assert () == result.only_part.verification.fixed


def test_float_branch_names_the_inputs_and_the_line(tmp_path: Path) -> None:
    """The input that decides the branch by its sign is named, although both inputs change in a random draw."""

    class Branch(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x * 2 + y if y.sum() > 0 else x - y

    inputs = {"x": torch.randn(3, 4), "y": torch.ones(3, 4)}
    for seed in range(3):
        with pytest.raises(VerificationError, match=r"\by\b.*test_input_values.py:\d+") as caught:
            export_pytorch(
                Branch(), tmp_path / "model.onnx", inputs, config=WinMLExportConfig(exporter="torchscript"), seed=seed
            )
        assert any(words in caught.value.hint for words in ("torch.where", "branches on tensor values"))
