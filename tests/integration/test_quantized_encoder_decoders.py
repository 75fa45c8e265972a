"""Encoder-decoders quantized to few bits: builds, and comparison of both parts together with PyTorch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from checkpoints import one_layer
from encoder_decoder import save_encoder_decoder
from winml.modelkit import build_hf_model
from winml.modelkit.compare.fidelity import FidelityInfo, OutputFidelity, output_fidelity
from winml.modelkit.compare.files import refuse_below_minimum_sqnr
from winml.modelkit.compare.verification import parts_together
from winml.modelkit.compare.words import fidelity_words
from winml.modelkit.errors import VerificationError
from winml.modelkit.generate.generation.transformers_loop import EncoderDecoderModel

CONFIG = {"export": {"exporter": "torchscript"}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BART."""
    return save_encoder_decoder(tmp_path_factory.mktemp("bart") / "checkpoint", "bart", **one_layer("bart"))


def test_parts_in_int4_are_compared_together(checkpoint: Path, tmp_path: Path) -> None:
    """The decoder's output after the encoder is compared token by token; both files have packed weights."""
    import torch

    result = build_hf_model(checkpoint, tmp_path / "built", config=CONFIG, precision="int4")
    encoder, decoder = (part.stage("quantize") for part in result.manifest.parts)
    assert encoder is not None
    assert decoder is not None
    assert "all parts together SQNR" in decoder.summary
    assert "minimum 1.0 dB" in decoder.summary
    # The joint result is in the stage that ran both parts.
    assert "compared without the remaining parts" in encoder.summary
    for path in result.part_paths.values():
        assert "MatMulNBits" in {node.op_type for node in onnx.load(path, load_external_data=False).graph.node}
    model = EncoderDecoderModel(result.part_paths)
    written = model.generate(input_ids=torch.tensor([[5, 6, 7]]), max_new_tokens=4, min_new_tokens=4)
    assert (1, 5) == tuple(written.shape)


def test_parts_in_int8_are_compared_together(checkpoint: Path, tmp_path: Path) -> None:
    """Parts made from files are compared once all are written. A reused part is not compared again.

    The comparison is repeated after a refused build, which leaves the result of an earlier build in its manifest.
    """
    folder = tmp_path / "built"
    result = build_hf_model(checkpoint, folder, config=CONFIG, precision="int8")
    encoder, decoder = (part.stage("quantize") for part in result.manifest.parts)
    assert encoder is not None
    assert decoder is not None
    assert decoder.together.startswith("all parts together SQNR")
    assert decoder.summary.endswith(decoder.together)
    assert not encoder.together
    again = build_hf_model(checkpoint, folder, config=CONFIG, precision="int8").manifest.parts[1].stage("quantize")
    assert again is not None
    assert ("reused", decoder.together) == (again.status, again.together)
    manifest = folder / "build_manifest.json"
    left = manifest.read_text("utf-8").replace(decoder.together, "all parts together fine")
    manifest.write_text(left.replace('"status": "done"', '"status": "unfinished"'), encoding="utf-8")
    third = build_hf_model(checkpoint, folder, config=CONFIG, precision="int8").manifest.parts[1].stage("quantize")
    assert third is not None
    assert ("reused", decoder.together, decoder.summary) == (third.status, third.together, third.summary)


def test_errors_of_two_parts_add_up() -> None:
    """Each part may reach the minimum SQNR; double the noise power is three decibels less."""
    near = OutputFidelity("y", 9.0, 1.0, 0.1, 0.1)
    for sqnr_db, is_verified in ((5.1, True), (4.9, False)):
        text = OutputFidelity("logits", sqnr_db, 1.0, 0.1, 0.1)
        fidelity = FidelityInfo((near,), 8.0, has_signal=True, draws=1, together=text)
        assert is_verified == fidelity.are_verified_together == fidelity.as_record()["is_verified"]
        assert "; all parts together SQNR" in fidelity_words(fidelity)
        alone = replace(fidelity, has_encoder_of_source=True)
        assert "; after the encoder of the source SQNR" in fidelity_words(alone)
        assert "all parts" not in fidelity_words(alone)


def test_text_of_three_parts_may_have_three_errors() -> None:
    """The joint comparison decides alone; zeros, which any file might return, prove nothing."""
    expected = [np.ones(8)]
    text = output_fidelity("logits", expected, [np.ones(8) * 1.5])
    accepted = FidelityInfo((), 10.5, text.has_signal, draws=1, together=text, parts=3)
    assert 10.5 - 4.77 == pytest.approx(accepted.least_together_db, abs=0.01)
    refuse_below_minimum_sqnr(accepted, "the model", {})
    assert "all parts together SQNR 6.0 dB, cosine 1.0000 for logits (minimum 5.7 dB)" == fidelity_words(accepted)
    with pytest.raises(VerificationError, match=r"6.2 dB\)"):
        refuse_below_minimum_sqnr(replace(accepted, least_sqnr_db=11.0), "the model", {})
    zeros = output_fidelity("logits", [np.zeros(8)], expected)
    silent = FidelityInfo((), 11.0, zeros.has_signal, draws=1, together=zeros, parts=3, silent=("zeros",))
    refuse_below_minimum_sqnr(silent, "the model", {})
    assert "not checked:" in fidelity_words(silent)


def test_files_beyond_a_size_are_not_run_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit applies to the total size of the files."""
    paths = [save_small(tmp_path / name) for name in ("a.onnx", "b.onnx")]
    size = sum(path.stat().st_size for path in paths)
    monkeypatch.setattr(parts_together, "MOST_WHOLE_BYTES", size)
    assert "" == parts_together.beyond_memory(paths)
    monkeypatch.setattr(parts_together, "MOST_WHOLE_BYTES", size - 1)
    assert parts_together.beyond_memory(paths).startswith("the files")


def save_small(path: Path) -> Path:
    """Write a graph of one node."""
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy"]
    node = onnx.helper.make_node("Relu", ["x"], ["y"])
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph([node], "g", values[:1], values[1:])), path)
    return path
