"""First and last tokens that an encoder-decoder may generate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from winml.modelkit.errors import InputError
from winml.modelkit.generate.generation.decoder_prompt import DecoderPrompt, read_decoder_prompt
from winml.modelkit.generate.generation.settings import position_limit
from winml.modelkit.onnx.bundle import TextTokens


def folder(path: Path, generation: dict[str, Any], config: dict[str, Any] | None = None) -> Path:
    """Write the config files beside a model."""
    (path / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    (path / "config.json").write_text(json.dumps(config or {}), encoding="utf-8")
    return path


def chosen(beginning: DecoderPrompt, position: int, *, is_last: bool = False) -> set[int]:
    """Return the allowed tokens of six at a position."""
    scores = beginning.scores(np.zeros(6, np.float32), position, is_last=is_last)
    return {int(token) for token in np.flatnonzero(np.isfinite(scores))}


def test_forced_tokens_of_a_translator_are_the_first_and_the_last(tmp_path: Path) -> None:
    """The first token is the language; the longest text still ends with the last token."""
    written = {"decoder_start_token_id": 2, "forced_bos_token_id": 4, "forced_eos_token_id": 1}
    beginning, settings = read_decoder_prompt(folder(tmp_path, written))
    assert (2, {4}, {1}) == (beginning.start, chosen(beginning, 1), chosen(beginning, 9, is_last=True))
    # A forced token counts as a new one.
    assert 0 == beginning.prompt_places
    assert {0, 1, 2, 3, 4, 5} == chosen(beginning, 2)
    assert settings.for_transformers is None


def test_unnamed_language_is_chosen_among_languages(tmp_path: Path) -> None:
    """Whisper begins with a language, the task and no timestamps.

    Then suppressed tokens are never allowed, and others not at first.
    """
    written = {
        "decoder_start_token_id": 0,
        "forced_decoder_ids": [[1, None], [2, 3]],
        "lang_to_id": {"<|en|>": 1, "<|de|>": 2},
        "no_timestamps_token_id": 4,
        "suppress_tokens": [5],
        "begin_suppress_tokens": [1, 2],
    }
    beginning, settings = read_decoder_prompt(folder(tmp_path, written))
    assert [{1, 2}, {3}, {4}, {0, 3, 4}] == [chosen(beginning, place) for place in (1, 2, 3, 4)]
    assert 3 == beginning.prompt_places
    assert {0, 1, 2, 3, 4} == chosen(beginning, 5)
    assert settings.for_transformers is None


def test_settings_of_transformers_only_use_the_loop_of_transformers(tmp_path: Path) -> None:
    """Beam search is left to transformers; the first token may be in config.json alone."""
    beginning, settings = read_decoder_prompt(folder(tmp_path, {"num_beams": 4}, {"decoder_start_token_id": 7}))
    assert 7 == beginning.start
    assert {"num_beams": 4} == settings.for_transformers


def test_graph_metadata_overrides_the_files(tmp_path: Path) -> None:
    """First token and end tokens of the graph's metadata win; without an end token the files decide."""
    path = folder(tmp_path, {"bos_token_id": 7, "eos_token_id": 8})
    beginning, settings = read_decoder_prompt(path, TextTokens(3, (4, 5)))
    assert (3, (4, 5)) == (beginning.start, settings.eos_token_ids)
    assert (8,) == read_decoder_prompt(path, TextTokens(3))[1].eos_token_ids


def test_folder_that_names_no_first_token_is_refused(tmp_path: Path) -> None:
    """A guessed first token would give another text."""
    with pytest.raises(InputError, match="decoder_start_token_id"):
        read_decoder_prompt(folder(tmp_path, {}))


WHISPER: dict[str, Any] = {
    "decoder_start_token_id": 0,
    "lang_to_id": {"<|en|>": 1, "<|de|>": 2},
    "task_to_id": {"transcribe": 3, "translate": 5},
    "no_timestamps_token_id": 4,
}


@pytest.mark.parametrize(
    ("told", "config", "expected"),
    [
        ({"language": "german", "task": "transcribe"}, {}, [{2}, {3}, {4}]),
        ({"language": "<|en|>"}, {}, [{1}, {3}, {4}]),
        ({"task": "translate"}, {}, [{1, 2}, {5}, {4}]),
        ({}, {"forced_decoder_ids": [[1, 2], [2, 5]]}, [{2}, {5}, {4}]),
        ({"language": "de", "forced_decoder_ids": [[1, 1], [2, 5]]}, {}, [{2}, {3}, {4}]),
    ],
    ids=str,
)
def test_language_and_task_come_from_the_files(
    tmp_path: Path, told: dict[str, Any], config: dict[str, Any], expected: list[set[int]]
) -> None:
    """The tokens are those that transformers forces for Whisper; forced tokens of the files count without a request."""
    beginning, _ = read_decoder_prompt(folder(tmp_path, {**WHISPER, **told}, config))
    assert expected == [chosen(beginning, place) for place in (1, 2, 3)]


@pytest.mark.parametrize(
    "told",
    [
        {"language": "french"},
        {"task": "sing"},
        {"return_timestamps": True},
        {"language": "de", "is_multilingual": False},
    ],
    ids=str,
)
def test_beginning_that_cannot_be_written_is_refused(tmp_path: Path, told: dict[str, Any]) -> None:
    """Without the language or task the text would be another one."""
    with pytest.raises(InputError, match=next(iter(told))):
        read_decoder_prompt(folder(tmp_path, {**WHISPER, **told}))


def test_forced_tokens_are_read_from_the_config_as_a_last_resort(tmp_path: Path) -> None:
    """A forced token of an older checkpoint is read from config.json, as in transformers."""
    path = folder(tmp_path, {}, {"decoder_start_token_id": 2, "forced_bos_token_id": 4, "forced_eos_token_id": 1})
    (path / "generation_config.json").unlink()
    beginning, _ = read_decoder_prompt(path)
    assert ({4}, {1}) == (chosen(beginning, 1), chosen(beginning, 9, is_last=True))


@pytest.mark.parametrize(
    ("config", "limits"),
    [
        ({"n_positions": 512, "relative_attention_num_buckets": 32}, (None, None)),
        ({"max_position_embeddings": 64}, (64, 64)),
        ({"max_encoder_position_embeddings": 96, "max_decoder_position_embeddings": 48}, (96, 48)),
        ({"encoder": {"n_positions": 7}, "decoder": {"max_position_embeddings": 9}}, (7, 9)),
    ],
    ids=str,
)
def test_positions_have_the_limits_of_encoder_and_decoder(
    tmp_path: Path, config: dict[str, Any], limits: tuple[int | None, int | None]
) -> None:
    """Relative positions set no limit."""
    path = folder(tmp_path, {}, config)
    assert limits == (position_limit(path, "encoder"), position_limit(path))
