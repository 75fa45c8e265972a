"""Encoder-decoders of few bits: built, and compared as a whole with PyTorch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from encoded import save_encoder_decoder
from winml.modelkit import build_hf_model
from winml.modelkit.compare.fidelity import FidelityInfo, OutputFidelity
from winml.modelkit.compare.words import fidelity_words
from winml.modelkit.inference.generation.seq2seq import EncodedModel

CONFIG = {"export": {"exporter": "torchscript"}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BART."""
    return save_encoder_decoder(tmp_path_factory.mktemp("bart") / "checkpoint", "bart")


def test_parts_in_int4_are_compared_together(checkpoint: Path, tmp_path: Path) -> None:
    """What the decoder makes of what the encoder answered, token by token; both hold packed weights, and write."""
    import torch

    result = build_hf_model(checkpoint, tmp_path / "built", config=CONFIG, precision="int4")
    encoder, decoder = (part.stage("quantize") for part in result.manifest.parts)
    assert encoder is not None
    assert decoder is not None
    assert "all parts together SQNR" in decoder.summary
    assert "for logits of 32 tokens (least 5.0 dB)" in decoder.summary
    # What came of both is said where both were run.
    assert "compared without the other parts" in encoder.summary
    for path in result.part_paths.values():
        assert "MatMulNBits" in {node.op_type for node in onnx.load(path, load_external_data=False).graph.node}
    model = EncodedModel(*result.part_paths.values())
    written = model.generate(input_ids=torch.tensor([[5, 6, 7]]), max_new_tokens=4, min_new_tokens=4)
    assert (1, 5) == tuple(written.shape)


def test_parts_in_int8_are_compared_together(checkpoint: Path, tmp_path: Path) -> None:
    """Though each is made of a file: once all are there. What is used again is not compared a second time."""
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


def test_errors_of_two_parts_add_up() -> None:
    """Each part may have an error of the least ratio; twice its power is three decibels less."""
    near = OutputFidelity("y", 9.0, 1.0, 0.1, 0.1)
    for sqnr_db, is_verified in ((5.1, True), (4.9, False)):
        text = OutputFidelity("logits", sqnr_db, 1.0, 0.1, 0.1)
        fidelity = FidelityInfo((near,), 8.0, has_signal=True, draws=1, together=text)
        assert is_verified == fidelity.are_verified_together == fidelity.as_record()["is_verified"]
        assert "; all parts together SQNR" in fidelity_words(fidelity)
        alone = replace(fidelity, has_encoder_of_source=True)
        assert "; after the encoder of the source SQNR" in fidelity_words(alone)
        assert "all parts" not in fidelity_words(alone)
