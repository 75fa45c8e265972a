"""Runs of a model with streamed weights, with the outputs of one that holds its weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints import build_model
from winml.modelkit.compare.verification import streamed_reference
from winml.modelkit.compare.verification.input_draws import InputDraws
from winml.modelkit.compare.verification.reference_run import PreparedPart, prepared_part, run_reference, with_values
from winml.modelkit.compare.verification.sizes import Draw
from winml.modelkit.compare.verification.streamed_reference import (
    MAX_RESIDENT_BYTES,
    WeightRequest,
    asking,
    stream_parameters,
    streamed_outputs,
    streamed_slices,
    with_streamed_values,
)
from winml.modelkit.errors import CheckpointError, ExportError
from winml.modelkit.export.loading import load_weightless
from winml.modelkit.models.parts import ModelPart
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.models.resolution import resolve_model

_ROWS = 700
"""Size of the vocabulary; tables and products with it exceed the weights that are kept."""
_WIDTH = MAX_RESIDENT_BYTES // _ROWS // 4 // 8 * 8 + 32


def _checkpoint(architecture: str, folder: Path, **changes: Any) -> Path:
    build_model(architecture, **changes).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in bfloat16 with matrices too large to be kept."""
    sizes = {"vocab_size": _ROWS, "hidden_size": _WIDTH, "intermediate_size": _ROWS, "tie_word_embeddings": False}
    return _checkpoint("llama", tmp_path_factory.mktemp("llama"), **sizes)


def _weightless(folder: Path) -> ModelPart:
    request = ModelRequest(str(folder), dtype="fp32")
    return load_weightless(resolve_model(request, needs_weights=True), request).only_part


def _draws(prepared: PreparedPart) -> list[Draw]:
    """Return three draws of the same sizes, and one of other sizes."""
    drawing = InputDraws(prepared.part, 0)
    sizes = {name: size + 1 for name, size in prepared.part.trace_sizes.items()}
    inputs = [*(drawing.draw(number) for number in (1, 2, 3)), drawing.draw(4, sizes)]
    run_reference(prepared, inputs[0])  # names the outputs
    return [Draw(tensors, {}, {}) for tensors in inputs]


def _largest_difference(folder: Path) -> float:
    """Return the largest relative difference of any output between held and streamed weights."""
    differences = []
    with prepared_part(_weightless(folder)) as prepared:
        draws = _draws(prepared)
        streamed = streamed_outputs(prepared, draws)
        with with_values(prepared) as weighted:
            for draw, answered in zip(draws, streamed, strict=True):
                held = run_reference(weighted, draw.inputs)
                assert list(held) == list(answered.reference)
                for name, value in held.items():
                    difference = np.abs(value - answered.reference[name]).max(initial=0.0)
                    differences.append(float(difference / np.abs(value).max(initial=1e-9)))
    return max(differences)


TOLERANCE = 2e-6
"""Ten roundings of float32: products of several draws at once add up in another order."""


def test_large_matrices_equal_matrices_in_memory(llama: Path) -> None:
    """Tables are read by rows, and products are computed by pieces, for all draws at once."""
    assert _largest_difference(llama) < TOLERANCE


@pytest.mark.parametrize("architecture", ["gpt2", "bert"])
def test_other_operations_equal_weights_in_memory(architecture: str, tmp_path: Path) -> None:
    """The models have weights that are not transposed, or no cache."""
    assert _largest_difference(_checkpoint(architecture, tmp_path / "checkpoint")) < TOLERANCE


@pytest.mark.parametrize("piece_bytes", [1, 100_000])
def test_weight_larger_than_a_piece_is_multiplied_in_pieces_of_its_rows(
    llama: Path, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is the same for single rows and for a shorter last piece."""
    monkeypatch.setattr(streamed_reference, "_PIECE_BYTES", piece_bytes)
    part = _weightless(llama)
    assert part.with_references is not None
    assert part.with_weights is not None
    model = part.with_references()
    stream_parameters(model)
    matrix = torch.randn(3, 5, _WIDTH)
    with torch.no_grad():
        expected = part.with_weights().get_submodule("lm_head")(matrix)
        answer = model.get_submodule("lm_head")(matrix)
    torch.testing.assert_close(answer, expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_product_reads_a_whole_matrix(llama: Path, mode: Any) -> None:
    """Weights are read by rows, also under inference_mode, where a layer's product is one operator.

    A view that swaps no axes is not a transposed weight.
    """
    part = _weightless(llama)
    assert part.with_references is not None
    assert part.with_weights is not None
    model, held = part.with_references(), part.with_weights().get_parameter("lm_head.weight")
    stream_parameters(model)
    weight, matrix, asked = model.get_parameter("lm_head.weight"), torch.randn(3, 5, _WIDTH), list[WeightRequest]()

    def ask(request: WeightRequest) -> torch.Tensor:
        asked.append(request)
        return streamed_slices([request])[0]

    with mode(), asking(ask):
        product = torch.nn.functional.linear(matrix, weight, torch.ones(_ROWS)) - 1
    assert [True] == [request.rows is not None for request in asked]
    torch.testing.assert_close(product, matrix @ held.t())
    with torch.no_grad():
        upright = torch.ones(2, _ROWS) @ weight.transpose(1, -1)
    torch.testing.assert_close(upright, held.sum(0).expand(2, -1))


def test_forward_that_writes_into_a_parameter_is_refused(llama: Path) -> None:
    """The written values would be lost with the streamed ones."""
    part = _weightless(llama)
    assert part.with_references is not None
    model = part.with_references()
    stream_parameters(model)
    weight = model.get_parameter("model.norm.weight")
    with pytest.raises(Exception, match=r"add_\.Tensor"), torch.no_grad():
        weight.add_(1.0)


def test_shortened_checkpoint_is_reported(llama: Path, tmp_path: Path) -> None:
    """A draw does not wait for missing values for ever."""
    folder = tmp_path / "copy"
    shutil.copytree(llama, folder)
    with prepared_part(_weightless(folder)) as prepared:
        draws = _draws(prepared)
        (file,) = folder.glob("*.safetensors")
        with file.open("r+b") as opened:
            opened.truncate(file.stat().st_size - 10_000)
        with pytest.raises((CheckpointError, ExportError), match="inside tensor"):
            streamed_outputs(prepared, draws)


def test_part_with_values_is_used_unchanged() -> None:
    """Held values are not streamed."""
    part = ModelPart(torch.nn.Linear(2, 2), inputs=())
    prepared = PreparedPart(part, None)  # type: ignore[arg-type]  # nothing is run
    with with_streamed_values(prepared) as same:
        assert same is prepared
