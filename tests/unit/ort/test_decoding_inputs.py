"""Inputs of a decoder with a cache, for a prompt and for a step, by their names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from winml.modelkit.errors import UsageError
from winml.modelkit.onnx.specs import InputTensorSpec, graph_input
from winml.modelkit.ort.decoding.inputs import (
    DecoderRun,
    decoder_feeds,
    decoder_run,
    decoder_tokens,
    inputs_of_file,
    next_feeds,
)

STATE = ("past_key_values.0.key", "float32", ("batch", 2, "past", 8))


def decoder(mask: str, positions: int | None = 63) -> tuple[InputTensorSpec, ...]:
    """Return inputs as other exporters name them, without sums."""
    inputs = (
        graph_input("input_ids", "int64", ("batch", "tokens"), {"value_range": (0, 9)}),
        graph_input("attention_mask", "int64", ("batch", mask)),
        graph_input(*STATE, record={"cache": {"kind": "key"}}),
    )
    if positions is None:
        return inputs
    return (*inputs, graph_input("position_ids", "int64", ("batch", "tokens"), {"value_range": (0, positions)}))


def test_step_is_fed_one_token_and_its_past() -> None:
    """No position is masked, and the position is the next one."""
    feeds, _ = decoder_feeds(decoder("past + tokens"), DecoderRun(1, 5), {}, batch_size=2, seed=0)
    assert [(2, 1), (2, 6), (2, 2, 5, 8), (2, 1)] == [array.shape for array in feeds.values()]
    assert (feeds["attention_mask"] == 1).all()
    assert (feeds["position_ids"] == 5).all()
    feeds, _ = decoder_feeds(decoder("past + tokens"), DecoderRun(4, 0), {}, batch_size=None, seed=0)
    assert (1, 2, 0, 8) == feeds[STATE[0]].shape
    np.testing.assert_array_equal([[0, 1, 2, 3]], feeds["position_ids"])


@pytest.mark.parametrize(
    ("given", "run", "named"),
    [
        ({}, DecoderRun(8, 0), "batch 1, tokens 8"),
        ({}, DecoderRun(1, 8), "batch 1, past 8"),
        ({"tokens": 8}, DecoderRun(8, 0), "batch 1"),
        ({"batch": 2, "past": 8}, DecoderRun(1, 8), ""),
    ],
    ids=str,
)
def test_note_names_every_chosen_size(given: dict[str, int], run: DecoderRun, named: str) -> None:
    """The chosen length of a prompt or cache is named, too; a size that follows from given ones is not."""
    _, notes = decoder_feeds(decoder("past + tokens"), run, given, batch_size=None, seed=0)
    assert [named] * bool(named) == [note.removeprefix("default sizes: ").partition(" (")[0] for note in notes]


@pytest.mark.parametrize(
    ("given", "tokens", "run"),
    [
        ({}, 63, DecoderRun(1, 63)),
        ({"tokens": 7}, 7, DecoderRun(7, 0)),
        ({"past": 9}, 9, DecoderRun(1, 9)),
        ({"tokens": 7, "past": 9}, None, None),
    ],
    ids=str,
)
def test_lengths_follow_the_user_or_fit_the_positions(
    given: dict[str, int], tokens: int | None, run: DecoderRun | None
) -> None:
    """Given sizes are taken and others fit the positions; both sizes together are neither a prompt nor a step."""
    inputs = decoder("past + tokens")
    assert (tokens, run) == (decoder_tokens(inputs, given), decoder_run(inputs, given))


def test_lengths_without_positions_are_the_defaults() -> None:
    """No input has the number of positions."""
    assert 128 == decoder_tokens(decoder("total", None), {})
    assert 1000 == decoder_tokens(decoder("total", None), {"past": 1000})


def test_prompt_beyond_the_positions_is_refused() -> None:
    """The message has the number that fits."""
    with pytest.raises(UsageError, match=r"past 64: .* 65"):
        decoder_tokens(decoder("total"), {"past": 64})


@pytest.mark.parametrize(
    "inputs",
    [
        (graph_input("input_ids", "int64", ("batch", "tokens")),),
        (graph_input("input_ids", "int64", (1, 1)), graph_input(*STATE, record={"cache": {"kind": "key"}})),
        (
            graph_input("input_ids", "int64", (1, "tokens")),
            graph_input("past", "float32", (1, 2, 16, 8), {"cache": {"kind": "key"}}),
        ),
    ],
    ids=["no cache", "fixed tokens", "fixed cache"],
)
def test_other_graphs_have_no_prompt_and_no_step(inputs: tuple[InputTensorSpec, ...]) -> None:
    """Such graphs are measured as any model."""
    assert decoder_tokens(inputs, {}) is None
    assert decoder_run(inputs, {}) is None


def test_recurrent_state_has_a_prompt_and_a_step(tmp_path: Path) -> None:
    """The size of a state does not depend on the tokens; its metadata is read without a session."""
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17],
         metadata_props: ["winml.io.inputs": "[{\\"name\\": \\"state\\", \\"cache\\": {\\"kind\\": \\"recurrent\\"}}]"]>
        recurrent (int64[batch, tokens] input_ids, float[batch, 4] state) => (float[batch, 4] next) {
            next = Identity (state)
        }""")
    onnx.save(model, tmp_path / "recurrent.onnx")
    inputs = inputs_of_file(tmp_path / "recurrent.onnx")
    assert [None, "recurrent"] == [item.cache and item.cache.kind for item in inputs]
    assert DecoderRun(1, 128) == decoder_run(inputs, {})


def test_next_step_lengthens_only_inputs_of_the_token_axis() -> None:
    """The mask of an encoder stays, however many entries it has by chance; segments get one for the new token."""
    shapes = {
        "input_ids": ("batch", "tokens"),
        "token_type_ids": ("batch", "tokens"),
        "encoder_attention_mask": ("batch", "encoded"),
    }
    feeds = {name: np.ones((1, 3), np.int64) for name in shapes}
    scores = np.zeros((1, 3, 5), np.float32)
    scores[0, -1, 4] = 1
    following = next_feeds(feeds, {"logits": scores}, {}, shapes)
    assert [[[4]], [[0]], [[1, 1, 1]]] == [array.tolist() for array in following.values()]
