"""Traces of loops with a number of rounds that depends on values."""

from __future__ import annotations

import io
import warnings
from typing import Any

import onnxruntime
import pytest
import torch
from torch import nn

from expert_loops import Experts, Slip
from winml.modelkit.export.torchscript.tracing import TracedLoops


class Fixed(nn.Module):
    """A model that loops over fixed positions, which no input decides."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.tensor([True, False, True]))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Add the number of each kept position."""
        for places in self.kept.nonzero():
            rows = rows + places
        return rows


traces: list[nn.Module] = []
"""One entry for each trace of the last export."""


def written(model: nn.Module, rows: torch.Tensor, loops: TracedLoops | None = None) -> bytes:
    """Export a model as the product does, with weights as inputs of the trace."""
    loops = loops or TracedLoops(1)
    traces.clear()

    def export() -> bytes:
        traces.append(model)
        buffer = io.BytesIO()
        with loops.in_trace(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporter uses deprecated functions of torch
            torch.onnx.export(model, (rows,), buffer, opset_version=17, dynamo=False)  # type: ignore[arg-type]
        return buffer.getvalue()

    return loops.call(export)


def answer(file: bytes, rows: torch.Tensor) -> torch.Tensor:
    """Run a graph with one input and one output."""
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: rows.numpy()})[0])


@pytest.mark.parametrize("model", [Experts(3), Experts(3, skips=True), Experts(5)], ids=["all", "skipping", "too many"])
def test_loop_over_chosen_experts_has_a_round_for_each(model: nn.Module) -> None:
    """Rows that choose other experts than those of the trace are computed as in PyTorch.

    The mask may have positions beyond the experts, which no row chooses.
    """
    rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    chosen = (rows @ model.router).argmax(-1)
    traced = rows[:1].expand(6, 4).contiguous()
    assert len(set(chosen.tolist())) > 1
    # float32 sums of four products: rounding is below 1e-6.
    torch.testing.assert_close(model(rows), answer(written(model, traced), rows), rtol=1e-5, atol=1e-6)


def test_each_loop_has_the_rounds_of_its_own_experts() -> None:
    """One of several loops over equally many positions has fewer experts; a note tells it."""
    rows = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    model = nn.Sequential(Experts(5), Experts(5, experts=5), Experts(5))
    assert 4 in (model[0](rows) @ model[1].router).argmax(-1).tolist()
    loops = TracedLoops(1)
    file = written(model, rows[:1].expand(12, 4).contiguous(), loops)
    # float32 sums of products of three matrices: rounding is below 1e-5 of answers up to 100.
    torch.testing.assert_close(model(rows), answer(file, rows), rtol=1e-4, atol=1e-4)
    assert len(traces) == 3
    (note,) = loops.notes
    assert "5 positions has 3" in note


def test_model_error_within_a_loop_is_raised_unchanged() -> None:
    """The error leaves no round out, and nothing is traced again."""
    loops = TracedLoops(1)
    with pytest.raises(IndexError, match="index 7"):
        written(Slip(3), torch.ones(2, 4), loops)
    assert (1, ()) == (len(traces), loops.notes)


class Keyword(nn.Module):
    """A model that names the arguments of the functions that find positions."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Sum the rows with a positive first value, found by two functions."""
        is_kept = rows[:, 0] > 0
        (found,) = torch.where(condition=is_kept)
        return rows[torch.nonzero(input=is_kept)[:, 0]].sum(0) + rows[found].sum(0)


def test_positions_passed_by_keyword_are_read() -> None:
    """The arguments are bound as torch binds them."""
    rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    # Sums of a few float32 values around 1.
    torch.testing.assert_close(Keyword()(rows), answer(written(Keyword(), rows.abs()), rows), rtol=1e-5, atol=1e-6)


def test_loop_over_constant_positions_is_unchanged() -> None:
    """No input decides these positions: they are the same in every run."""
    rows = torch.arange(4.0).reshape(2, 2)
    assert torch.equal(rows + 2, answer(written(Fixed().eval(), rows), rows))


def test_index_past_the_end_outside_a_loop_is_an_error() -> None:
    """Afterwards torch is unpatched."""
    before: list[Any] = [torch.where, torch.Tensor.numel, torch.Tensor.__iter__]

    class Outside(nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return rows[7]

    with pytest.raises(IndexError):
        written(Outside(), torch.zeros(2, 2))
    assert before == [torch.where, torch.Tensor.numel, torch.Tensor.__iter__]
