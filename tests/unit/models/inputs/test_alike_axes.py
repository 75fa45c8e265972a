"""Axes opened beside the requested ones in models with inputs known only by shape."""

from __future__ import annotations

import pytest
import torch

from winml.modelkit.errors import ConfigError, UsageError
from winml.modelkit.export.config import WinMLExportConfig
from winml.modelkit.models.inputs.axis_names import accepts_shapes
from winml.modelkit.models.inputs.decision import InputDecision
from winml.modelkit.models.inputs.dynamic_axes import open_axes
from winml.modelkit.onnx.specs import DynamicRequest, InputTensorSpec, OutputAxis, parse_dynamic_axes

Shape = tuple[int | str, ...]


class Masked(torch.nn.Module):
    """A model of tokens and a mask of one size; records its calls and its last tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(9, 4)
        self.register_buffer("calls", torch.zeros(1))
        self.seen: object = None

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Multiply the embeddings by the mask."""
        self.calls += 1
        self.seen = ids
        return self.table(ids) * mask[..., None]


class Apart(torch.nn.Module):
    """Two inputs of which neither depends on the other's rows."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Compare every row with every other."""
        return ids.float() @ mask.float().T


def opened(model: torch.nn.Module, axes: object, ids: Shape, mask: Shape) -> InputDecision:
    """Open axes of two inputs."""
    specs = tuple(
        InputTensorSpec(name=name, shape=shape, dtype="int64") for name, shape in (("ids", ids), ("mask", mask))
    )
    request = WinMLExportConfig(dynamic_axes=axes).dynamic
    return open_axes(InputDecision(specs), request, are_sizes_firm=True, accepts=accepts_shapes(model, None))


def shapes(decision: InputDecision) -> list[Shape]:
    """Return the shape of every input."""
    return [spec.shape for spec in decision.inputs]


def test_mask_of_the_token_size_becomes_dynamic() -> None:
    """The model takes other sizes only together; the note says which axes."""
    model = Masked()
    decision = opened(model, {"ids": {0: "batch", 1: "sequence"}}, (2, 7), (2, 7))
    assert [("batch", "sequence")] * 2 == shapes(decision)
    assert "Also sequence, which has the same size: axis 1 of mask." in decision.notes
    assert 0.0 == float(model.calls)
    assert model.seen is None


def test_axis_of_the_same_size_that_varies_alone_is_left() -> None:
    """The model accepts the request unchanged, so no other axis is opened."""
    assert [("batch", 7), (2, 7)] == shapes(opened(Apart(), {"ids": {0: "batch"}}, (2, 7), (2, 7)))


def test_mask_axis_of_1_becomes_dynamic_although_it_would_be_broadcast() -> None:
    """A file that broadcasts one row of a mask over many rows of tokens is of no use."""
    assert [("batch", 7)] * 2 == shapes(opened(Masked(), {"ids": {0: "batch"}}, (1, 7), (1, 7)))


def test_no_axis_is_added_if_the_model_accepts_one_size_only() -> None:
    """The export reports the refusal; names are the requested ones."""

    class Fixed(torch.nn.Module):
        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            if ids.shape[0] != 2:
                raise OSError("two rows")
            return ids + mask

    assert [("batch", 7), (2, 7)] == shapes(opened(Fixed(), {"ids": {0: "batch"}}, (2, 7), (2, 7)))


@pytest.mark.parametrize(
    ("axes", "ids", "mask", "expected"),
    [
        ({"ids": [0, 1], "mask": [0, 1]}, (2, 7), (2, 7), [("batch_size", "dim_1")] * 2),
        ({"ids": [0, 1], "mask": {0: "rows", 1: "tokens"}}, (2, 7), (2, 7), [("rows", "tokens")] * 2),
        ({"ids": [1], "mask": (1,)}, (2, 7), (2, 8), [(2, "dim_1"), (2, "mask_dim_1")]),
        ({"ids": {1: None}}, (7, 7), (3, 4), [(7, "dim_1"), (3, 4)]),
        ({}, (-1, -1), (-1, -1), [("batch_size", "dim_1")] * 2),
        ({}, ("rows", -1), (-1, 5), [("rows", "dim_1"), ("rows", 5)]),
    ],
    ids=["lists", "list beside names", "other sizes", "null", "minus one", "minus one beside a name"],
)
def test_open_axes_without_names_get_a_name(axes: object, ids: Shape, mask: Shape, expected: list[Shape]) -> None:
    """An axis may be open without a name in torch's own schema; alike axes share a name."""
    assert expected == shapes(opened(Apart(), axes, ids, mask))


def test_axes_of_outputs_are_stored_for_the_export() -> None:
    """The outputs are known only after the model ran."""
    decision = opened(Apart(), {"ids": {0: "batch"}, "scores": {0: "batch"}, "other": [1]}, (2, 7), (3, 7))
    expected = (OutputAxis("scores", 0, "batch", "dynamic_axes"), OutputAxis("other", 1, "", "dynamic_axes"))
    assert expected == decision.output_axes


@pytest.mark.parametrize(
    ("dynamic", "words"),
    [
        (DynamicRequest(axes={"idz": {0: "batch"}}), "--dynamic-axes: the model has no input 'idz'"),
        (DynamicRequest(axes={"scores": {0: "b"}}), "--dynamic-axes: the model has no input 'scores'"),
        (WinMLExportConfig(dynamic_axes={"ids": {2: "b"}}).dynamic, "dynamic_axes: ids has no axis 2"),
        (
            WinMLExportConfig(dynamic_axes={"ids": [2]}).dynamic.requested_by("export.{}"),
            "export.dynamic_axes: ids has no axis 2",
        ),
        (
            WinMLExportConfig(dynamic_sequence=True).dynamic,
            "dynamic_sequence: the inputs of this model have no sequence",
        ),
        (
            DynamicRequest(axes={"ids": {0: "a"}}).joined(
                WinMLExportConfig(dynamic_axes={"mask": {3: "b"}}).dynamic.requested_by("{} of --export-config")
            ),
            "dynamic_axes of --export-config: mask has no axis 3",
        ),
    ],
)
def test_error_names_the_used_option(dynamic: DynamicRequest, words: str) -> None:
    """A key of a config is no option of the command."""
    specs = tuple(InputTensorSpec(name=name, shape=(2, 7), dtype="int64") for name in ("ids", "mask"))
    with pytest.raises(UsageError) as caught:
        open_axes(InputDecision(specs), dynamic)
    assert caught.value.message.startswith(words)


def test_dynamic_axes_option_accepts_lists_and_rejects_other_values() -> None:
    """The option accepts the JSON form of the argument of torch.onnx.export."""
    assert {"ids": {0: "", 1: ""}, "x.0": {2: "w"}} == parse_dynamic_axes(['{"ids": [0, 1], "x.0": {"2": "w"}}'])
    assert {"ids": {0: "batch"}} == parse_dynamic_axes(['{"ids": [0]}', "ids:0=batch"])
    for text in ('{"ids": [true]}', '{"ids": ["batch"]}', "ids:0="):
        with pytest.raises(ConfigError):
            parse_dynamic_axes([text])
