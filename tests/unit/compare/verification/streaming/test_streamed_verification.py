"""Comparison of a file with PyTorch, with a piece of the weights in memory on each side."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx.numpy_helper
import pytest
import torch

from checkpoints import build_model
from winml.modelkit.compare.outputs import VerificationInfo
from winml.modelkit.compare.verification.input_draws import InputDraws
from winml.modelkit.compare.verification.reference_run import prepared_part, run_reference
from winml.modelkit.compare.verification.sizes import Draw, DynamicProof, WrittenGraph
from winml.modelkit.compare.verification.written_file import verify_written_file
from winml.modelkit.errors import VerificationError
from winml.modelkit.export.config import WinMLExportConfig
from winml.modelkit.export.exporting import HTPExporter
from winml.modelkit.export.loading import load_weightless
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.models.resolution import resolve_model
from winml.modelkit.onnx.files.graph_reading import load_by_reference


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama checkpoint in bfloat16, and its graph with a cache and dynamic sizes."""
    folder = tmp_path_factory.mktemp("llama")
    build_model("llama", class_name="LlamaForCausalLM").to(torch.bfloat16).save_pretrained(folder)
    exporter = HTPExporter(WinMLExportConfig(verify=False))
    exporter.export_checkpoint(ModelRequest(str(folder)), folder / "model.onnx")
    return folder


def _verified(checkpoint: Path, model: Path) -> tuple[VerificationInfo, list[str]]:
    """Compare a file with the checkpoint at the traced sizes and at others, and return the notes as well."""
    request = ModelRequest(str(checkpoint))
    part = load_weightless(resolve_model(request, needs_weights=True), request).only_part
    inputs = InputDraws(part, 0)
    with prepared_part(part) as prepared:
        traced = Draw(inputs.draw(1), {}, part.trace_sizes)
        run_reference(prepared, traced.inputs)  # names the outputs
        sizes = {name: size + 3 for name, size in part.trace_sizes.items()}
        proof = DynamicProof((Draw(inputs.draw(4, sizes), {}, sizes),))
        written = WrittenGraph(model, load_by_reference(model), part.inputs, traced, proof)
        return verify_written_file(written, prepared, inputs, is_streamed=True), inputs.notes


def test_correct_file_is_verified_at_several_sizes(checkpoint: Path) -> None:
    """The comparison is in float32, since the checkpoint is bfloat16; a note says that no text was generated."""
    verification, notes = _verified(checkpoint, checkpoint / "model.onnx")
    assert verification.is_verified
    assert (True, True) == (verification.is_streamed, verification.in_float32)
    assert {1, 2, 3} == {item.draw for item in verification.comparisons}
    assert verification.generation is None
    assert ["Text generation was not compared: the weights are read piece by piece."] == notes


def test_wrong_weight_is_detected(checkpoint: Path, tmp_path: Path) -> None:
    """One matrix of one layer is halved."""
    proto = onnx.load(checkpoint / "model.onnx")
    weight = [item for item in proto.graph.initializer if len(item.dims) == 2][-1]
    values = onnx.numpy_helper.to_array(weight)
    weight.CopyFrom(onnx.numpy_helper.from_array(values / values.dtype.type(2), weight.name))
    onnx.save(proto, tmp_path / "model.onnx")
    with pytest.raises(VerificationError) as caught:
        _verified(checkpoint, tmp_path / "model.onnx")
    assert caught.value.unchecked is None
