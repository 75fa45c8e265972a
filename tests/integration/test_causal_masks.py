"""Causal masks of exported decoders, for other paddings and tokens than the traced ones.

FACTS: an exporter that freezes the traced mask ends in success, with errors as large as the outputs.
Graphs with a cache: test_generation_graphs.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from checkpoints import build_model, save_checkpoint
from winml.modelkit import HTPExporter
from winml.modelkit.models.inputs.options import ShapeConfig
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.ort.sessions import Session

LENGTH = 9
BATCH = 2
DECODERS = {"gpt2": "input_ids", "llama": "input_ids", "t5": "decoder_input_ids", "bart": "decoder_input_ids"}
"""Architecture → decoder input; its later tokens must not change an output."""

TOLERANCE = 2e-5
"""Share of the largest logit. Chosen ten times above that of correct float32 exports, 2e-6; a wrong mask has 0.9."""

Feeds = dict[str, NDArray[np.int64]]


class Decoder:
    """A small model and its exported file."""

    def __init__(self, architecture: str, folder: Path) -> None:
        checkpoint = save_checkpoint(architecture, folder / "checkpoint")
        request = ModelRequest(
            str(checkpoint),
            cache=False,
            batch_size=BATCH,
            shape_config=ShapeConfig(sequence_length=LENGTH, decoder_sequence_length=LENGTH),
        )
        self.result = HTPExporter().export_checkpoint(request, folder / "model.onnx")
        self.tokens = DECODERS[architecture]
        self.mask = self.tokens.replace("input_ids", "attention_mask")
        self.model = build_model(architecture)
        self.session = Session(self.result.only_part.model_path)

    def feeds(self, seed: int, **masks: NDArray[np.int64]) -> Feeds:
        """Draw tokens, with masks of ones by default."""
        generator = np.random.default_rng(seed)
        drawn = {
            name: np.ones((BATCH, LENGTH), np.int64)
            if name.endswith("mask")
            else generator.integers(3, 120, (BATCH, LENGTH))
            for name in self.session.inputs
        }
        return {**drawn, **masks}

    def torch_logits(self, feeds: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        """Return the logits of PyTorch."""
        with torch.no_grad():
            tensors = {name: torch.from_numpy(value) for name, value in feeds.items()}
            logits: NDArray[np.float32] = self.model(**tensors, use_cache=False).logits.numpy()
        return logits

    def onnx_logits(self, feeds: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        """Return the logits of the exported file."""
        return self.session.run(feeds)["logits"]


@pytest.fixture(scope="module", params=list(DECODERS))
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """An architecture, exported once for this module."""
    return Decoder(request.param, tmp_path_factory.mktemp(request.param))


def padded(*lengths: int) -> NDArray[np.int64]:
    """Return a mask of rows with these lengths, padded on the right."""
    return (np.arange(LENGTH) < np.array(lengths)[:, None]).astype(np.int64)


MASKS = {
    "all ones": padded(LENGTH, LENGTH),
    "short rows": padded(1, 2),
    "half rows": padded(4, 5),
    "one full row": padded(LENGTH, 3),
    "all but one": padded(LENGTH - 1, LENGTH - 1),
}


@pytest.mark.parametrize("name", MASKS)
def test_exported_decoder_equals_pytorch_under_other_paddings(decoder: Decoder, name: str) -> None:
    """The file and PyTorch agree at every position that is not padding, for every mask and other tokens."""
    mask = MASKS[name]
    masked = [each for each in decoder.session.inputs if each.endswith("mask")]
    assert decoder.mask in masked or "attention_mask" in masked
    for seed in (11, 12):
        feeds = decoder.feeds(seed, **dict.fromkeys(masked, mask))
        expected, answered = decoder.torch_logits(feeds), decoder.onnx_logits(feeds)
        kept = mask.astype(bool)
        difference = np.abs(expected - answered)[kept].max()
        assert difference <= TOLERANCE * np.abs(expected[kept]).max()


def test_exported_decoder_outputs_depend_on_the_mask(decoder: Decoder) -> None:
    """A hidden source token changes the output, so the other comparisons are not vacuous."""
    name = "attention_mask"
    full, hidden = decoder.feeds(5), decoder.feeds(5, **{name: padded(4, 4)})
    assert name in full
    last = np.abs(decoder.onnx_logits(full) - decoder.onnx_logits(hidden))[:, -1]
    assert last.max() > 1e-3


@pytest.mark.parametrize("position", [1, 4, LENGTH - 1])
def test_exported_decoder_outputs_are_independent_of_later_tokens(decoder: Decoder, position: int) -> None:
    """A changed token changes the output at its position and after it, and not before it."""
    before = decoder.feeds(7)
    after = {name: value.copy() for name, value in before.items()}
    after[decoder.tokens][:, position] = (after[decoder.tokens][:, position] + 1) % 117 + 3
    difference = np.abs(decoder.onnx_logits(before) - decoder.onnx_logits(after))
    scale = np.abs(decoder.onnx_logits(before)).max()
    assert difference[:, :position].max() <= 1e-6 * scale
    assert difference[:, position].max() > 1e-3 * scale


def test_exported_decoder_takes_exactly_tokens_and_masks(decoder: Decoder) -> None:
    """The graph has no other inputs."""
    assert [spec.name for spec in decoder.result.only_part.inputs] == list(decoder.session.inputs)
    assert {"input_ids", "attention_mask"} <= set(decoder.session.inputs)
    allowed = {"input_ids", "attention_mask", decoder.tokens, decoder.mask}
    assert allowed >= set(decoder.session.inputs)
