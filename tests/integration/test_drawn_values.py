"""Random masks and lengths for inputs without values, and notes if no valid values are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from winml.modelkit import (
    ExportError,
    ExportResult,
    HTPExporter,
    InputTensorSpec,
    WinMLExportConfig,
    export_pytorch,
)


class Attention(nn.Module):
    """Attention between rows that are not hidden."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def attend_full_rows(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Refuse a mask that is narrower than the rows."""
        if hidden.shape[1] != x.shape[1]:
            raise ValueError("the mask is not as wide as the rows")
        return self.attend(x, hidden)

    def attend(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return for each row a mean of the visible rows; NaN if all are hidden."""
        states = self.layer(x)
        scores = states @ states.transpose(1, 2)
        return scores.masked_fill(hidden[:, None, :], -torch.inf).softmax(-1) @ states


class OnesHide(Attention):
    """Takes a mask in which ones hide, as ``torch.nn.Transformer`` does."""

    def forward(self, x: torch.Tensor, padding_mask: torch.Tensor) -> torch.Tensor:
        """Return NaN where all rows are hidden."""
        return self.attend(x, padding_mask)


class OnesHideStrictly(Attention):
    """Takes the same mask, and refuses hidden rows instead of returning NaN."""

    def forward(self, x: torch.Tensor, padding_mask: torch.Tensor) -> torch.Tensor:
        """Refuse a fully hidden row."""
        padding_mask = padding_mask.bool()
        if not torch.jit.is_tracing() and bool(padding_mask.all(1).any()):
            raise ValueError("a row is hidden")
        return self.attend(x, padding_mask)


class OnesHideUnnamed(Attention):
    """Takes the same mask under a name that other flags share."""

    def forward(self, x: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
        """Return NaN where all rows are hidden."""
        return self.attend(x, padded)


class LongestFills(Attention):
    """Takes lengths up to the row length, which one of them reaches, as in speech encoders."""

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Make a mask as wide as the longest row."""
        hidden = torch.arange(int(lengths.max()))[None] >= lengths[:, None]
        return self.attend_full_rows(x, hidden)


class LongestFillsColumns(Attention):
    """Takes such lengths for the last axis, under an uninformative name."""

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        """Make a mask as wide as the longest row."""
        hidden = torch.arange(int(n.max()))[None] >= n[:, None]
        return self.attend_full_rows(x.transpose(1, 2), hidden)


class Sorted(nn.Module):
    """Takes lengths in descending order."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(4, 3, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Read each row up to its length."""
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True, total_length=x.shape[1])[0]


class Probabilities(nn.Module):
    """Takes numbers between 0 and 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Refuse other numbers."""
        if not torch.jit.is_tracing() and bool((x < 0).any() | (x > 1).any()):
            raise ValueError("no probabilities")
        return self.layer(x)


class Never(nn.Module):
    """Refuses every random integer."""

    def forward(self, x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Refuse."""
        if int(key) != 12345:
            raise ValueError("not the key")
        return x * 2


X = InputTensorSpec(name="x", shape=(3, 5, 4), dtype="float32")
COLUMNS = InputTensorSpec(name="x", shape=(3, 4, 5), dtype="float32")
MASK = InputTensorSpec(name="padding_mask", shape=(3, 5), dtype="bool")
LENGTHS = InputTensorSpec(name="lengths", shape=(3,), dtype="int64")

DRAWN: dict[str, tuple[type[nn.Module], tuple[InputTensorSpec, ...]]] = {
    "ones hide": (OnesHide, (X, MASK)),
    "ones hide, else refused": (OnesHideStrictly, (X, MASK)),
    "flags that hide": (OnesHideUnnamed, (X, MASK.model_copy(update={"name": "padded"}))),
    "lengths": (LongestFills, (X, LENGTHS)),
    "lengths along another axis": (LongestFillsColumns, (COLUMNS, LENGTHS.model_copy(update={"name": "n"}))),
    "lengths that fall": (Sorted, (X, LENGTHS)),
}
EXAMPLES: dict[str, tuple[type[nn.Module], dict[str, torch.Tensor]]] = {
    "nothing hidden": (
        OnesHide, {"x": torch.randn(3, 5, 4), "padding_mask": torch.zeros(3, 5, dtype=torch.bool)},
    ),
    "the end hidden": (
        OnesHide, {"x": torch.randn(3, 5, 4), "padding_mask": torch.arange(5)[None] >= torch.tensor([[5], [3], [2]])},
    ),
    "lengths": (LongestFills, {"x": torch.randn(3, 5, 4), "lengths": torch.tensor([5, 3, 2])}),
    "lengths of one row": (LongestFills, {"x": torch.randn(1, 5, 4), "lengths": torch.tensor([5])}),
    "lengths under another name": (LongestFillsColumns, {"x": torch.randn(3, 4, 5), "n": torch.tensor([2, 5, 4])}),
    "lengths that fall": (Sorted, {"x": torch.randn(3, 5, 4), "lengths": torch.tensor([5, 3, 2])}),
    "probabilities": (Probabilities, {"x": torch.rand(3, 4)}),
}  # fmt: skip


def exported(model: nn.Module, folder: Path, inputs: Any, **options: Any) -> ExportResult:
    """Export with TorchScript, and check that values were compared."""
    config = WinMLExportConfig(exporter="torchscript", **options)
    result = export_pytorch(model, folder / "model.onnx", inputs, config=config)
    assert result.only_part.verification is not None
    # Reading lengths in Python agrees on the compared values, and is recorded as an assumption.
    assert result.only_part.verification.agrees
    assert {0} == {item.nan_count for item in result.only_part.verification.comparisons}
    return result


@pytest.mark.parametrize("name", DRAWN)
def test_missing_values_are_drawn_as_the_model_requires(name: str, tmp_path: Path) -> None:
    """No drawn mask hides everything, and no drawn length exceeds the rows."""
    model, specs = DRAWN[name]
    result = exported(model(), tmp_path, None, input_tensors=specs)
    assert result.only_part.verification is not None
    assert () == result.only_part.verification.fixed


@pytest.mark.parametrize("name", EXAMPLES)
def test_second_draw_after_an_example_is_valid_for_the_model(name: str, tmp_path: Path) -> None:
    """The drawn values follow the masks and lengths of the example."""
    model, inputs = EXAMPLES[name]
    result = exported(model(), tmp_path, inputs)
    assert result.only_part.verification is not None
    # PyTorch accepts only the row's own length for a single row.
    assert (["lengths"] if name == "lengths of one row" else []) == [
        v.name for v in result.only_part.verification.fixed
    ]


def test_learned_value_ranges_are_noted(tmp_path: Path) -> None:
    """The note names the input, its distribution, and the reason."""
    mask = MASK.model_copy(update={"dtype": "int64"})
    result = exported(OnesHideStrictly(), tmp_path, None, input_tensors=(X, mask))
    assert "padding_mask" in (" ".join(result.notes))


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
@pytest.mark.parametrize("hidden", [0, 2])
def test_encoder_of_torch_is_verified_with_its_padding_mask(hidden: int, exporter: Any, tmp_path: Path) -> None:
    """Torch's kernels return numbers for fully hidden rows, unlike any other softmax, so no such row is drawn."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
    mask = torch.arange(5)[None] >= torch.tensor([[5], [5 - hidden]])
    result = export_pytorch(
        model,
        tmp_path / "model.onnx",
        {"src": torch.randn(2, 5, 8), "src_key_padding_mask": mask},
        config=WinMLExportConfig(exporter=exporter),
    )
    assert result.only_part.verification is not None
    assert result.only_part.verification.is_verified


def test_open_sizes_are_tried_with_lengths_that_fit(tmp_path: Path) -> None:
    """Lengths are drawn anew for rows of other sizes."""

    class Hiding(Attention):
        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            if not torch.jit.is_tracing() and int(lengths.max()) != x.shape[1]:
                raise ValueError("the longest row is shorter")
            return self.attend(x, torch.arange(x.shape[1])[None] >= lengths[:, None])

    specs = (
        InputTensorSpec(name="x", shape=("batch", "sequence", 4), dtype="float32"),
        InputTensorSpec(name="lengths", shape=("batch",), dtype="int64"),
    )
    result = exported(Hiding(), tmp_path, None, input_tensors=specs)
    assert all(result.only_part.checked_sizes.values())


def test_refusal_of_drawn_values_does_not_blame_the_users_shapes(tmp_path: Path) -> None:
    """The message says that the values were random, and how to set others."""
    specs = (X, InputTensorSpec(name="key", shape=(), dtype="int64", value_range=(0, 9)))
    with pytest.raises(ExportError, match="ValueError: not the key") as caught:
        export_pytorch(Never(), tmp_path / "model.onnx", config=WinMLExportConfig(input_tensors=specs))
    assert "random values" in caught.value.message
    assert "key" in caught.value.hint
    assert "value_range" in caught.value.hint
    assert "example_inputs()" in caught.value.hint


class Bags(nn.Module):
    """Averages rows of a table in bags that begin at offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(50, 8, mode="mean")

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Average them."""
        averages: torch.Tensor = self.bags(ids, offsets)
        return averages


def test_embedding_bag_has_dynamic_sizes(tmp_path: Path) -> None:
    """Offsets are drawn in valid order and compared at various sizes of both inputs."""
    config = WinMLExportConfig(dynamic_axes={"ids": {0: "entries"}, "offsets": {0: "bags"}})
    inputs = {"ids": torch.randint(0, 50, (12,)), "offsets": torch.tensor([0, 4, 7])}
    part = HTPExporter(config).export(Bags(), tmp_path / "model.onnx", inputs).only_part
    assert part.verification is not None
    assert part.verification.is_verified
    assert {"entries", "bags"} == {item.name for item in part.dimensions}
