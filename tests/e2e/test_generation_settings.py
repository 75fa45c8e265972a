"""Values of generation_config.json: they decide the text, change nothing, or are refused by key."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GenerationConfig

from e2e.in_process import run_here
from e2e.workplace import Outcome
from encoder_decoder import save_encoder_decoder
from generating import PROMPT, build_decoder
from winml.modelkit import WinMLModelForCausalLM
from winml.modelkit.errors import InputError
from winml.modelkit.generate.generation import settings
from winml.modelkit.generate.generation.decoder_prompt import DecoderPrompt, read_decoder_prompt
from winml.modelkit.generate.generation.settings import read_settings

SETTINGS = "generation_config.json"
OF_A_MODEL_TYPE = {
    "forced_decoder_ids", "lang_to_id", "task_to_id", "no_timestamps_token_id", "is_multilingual", "return_timestamps",
    "language", "task",
}  # fmt: skip
"""Keys that transformers reads for Whisper only."""


def configure(folder: Path, **values: Any) -> Path:
    """Add values to the settings in a folder, and return the folder."""
    path = folder / SETTINGS
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return folder


def generated(folder: Path, *arguments: str) -> Outcome:
    """Generate eight tokens after the prompt as JSON."""
    return run_here("generate", folder, "-p", PROMPT, "--max-new-tokens", "8", "-f", "json", *arguments)


def record(folder: Path, *arguments: str) -> dict[str, Any]:
    """Return the JSON of a generated text."""
    outcome = generated(folder, *arguments)
    assert 0 == outcome.code, outcome.err
    answer: dict[str, Any] = json.loads(outcome.out)
    return answer


@pytest.mark.parametrize("as_list", [False, True])
def test_stop_strings_end_a_text(llama_copy: Path, as_list: bool) -> None:
    """The last token completes the string, as in PyTorch; the record has the reason of the end."""
    whole = record(llama_copy)
    stop = whole["text"][-3:]
    ended = record(configure(llama_copy, stop_strings=[stop, "%%"] if as_list else stop), "--reference")
    assert whole["text"][: whole["text"].index(stop)] in ended["text"]
    assert stop in ended["text"]
    assert ended["tokens"] == ended["reference"]["tokens"]
    first = record(configure(llama_copy, stop_strings=[whole["text"][1]]))
    assert ("stop", "transformers") == (first["end"], first["loop"])
    assert first["tokens"] == whole["tokens"][: len(first["tokens"])]
    assert len(first["tokens"]) < len(whole["tokens"])


def test_stop_strings_end_a_text_from_python(llama_copy: Path) -> None:
    """The tokenizer that transformers' loop needs is not passed to the graph."""
    model: Any = WinMLModelForCausalLM.from_pretrained(llama_copy)
    tokenizer = AutoTokenizer.from_pretrained(llama_copy)
    tokens = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    whole = model.generate(tokens, max_new_tokens=8)
    stop = tokenizer.decode(whole[0, tokens.shape[1]])[0]
    ended = model.generate(tokens, max_new_tokens=8, stop_strings=[stop], tokenizer=tokenizer)
    assert whole[:, : tokens.shape[1] + 1].tolist() == ended.tolist()


def test_stop_strings_end_a_text_of_an_encoder_decoder(tmp_path: Path) -> None:
    """The stop string works with two graphs."""
    folder = build_decoder(save_encoder_decoder(tmp_path / "checkpoint", "t5"), tmp_path / "built")
    drawn = ("--temperature", "9", "--seed", "2")
    whole = record(configure(folder, max_time=1000), *drawn)
    stop = next(letter for letter in whole["text"] if letter.isalpha())
    ended = record(configure(folder, stop_strings=[stop]), *drawn)
    assert ended["tokens"] == whole["tokens"][: len(ended["tokens"])]
    assert ("stop", "transformers") == (ended["end"], ended["loop"])


@pytest.mark.parametrize(
    "values",
    [
        {"prompt_lookup_num_tokens": 3},
        {"prompt_lookup_num_tokens": 3, "no_repeat_ngram_size": 20},
        {"cache_implementation": "static", "compile_config": {"mode": "x"}, "min_length": 1},
        {"penalty_alpha": 0, "num_beam_groups": 1, "token_healing": False, "constraints": None, "stop_strings": []},
        {"do_sample": True, "temperature": 0},
    ],
    ids=str,
)
def test_settings_that_change_no_token_are_ignored(llama: Path, llama_copy: Path, values: dict[str, Any]) -> None:
    """Neither our loop nor that of transformers uses them; a note names a setting of another generation mode."""
    answer = record(configure(llama_copy, **values))
    assert record(llama)["tokens"] == answer["tokens"]
    assert ("prompt_lookup_num_tokens" in values) == any("prompt_lookup_num_tokens" in note for note in answer["notes"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("penalty_alpha", 0.6),
        ("dola_layers", "high"),
        ("num_beam_groups", 2),
        ("diversity_penalty", 0.5),
        ("constraints", [1]),
        ("force_words_ids", [[1]]),
        ("token_healing", True),
    ],
)
def test_unsupported_way_to_choose_tokens_is_wrong_usage(llama_copy: Path, key: str, value: Any) -> None:
    """The setting is refused by its key, not ignored."""
    outcome = generated(configure(llama_copy, **{key: value}))
    assert 2 == outcome.code
    assert f"{SETTINGS}: {key} is {value!r}" in outcome.err
    assert 2 == len(outcome.complaint)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "hot"), ("temperature", -1), ("temperature", math.nan), ("temperature", True),
        ("top_k", "a"), ("top_k", -1), ("top_k", 2.5), ("top_p", [1]), ("top_p", 2), ("min_p", "a"),
        ("repetition_penalty", 0), ("repetition_penalty", {}), ("max_new_tokens", "a"), ("max_new_tokens", -5),
        ("max_new_tokens", 10**30), ("eos_token_id", "a"), ("eos_token_id", [[1]]), ("eos_token_id", 10**30),
        ("do_sample", "yes"), ("num_beams", "a"), ("num_beams", 0), ("no_repeat_ngram_size", -1),
        ("bad_words_ids", [1]), ("suppress_tokens", "a"), ("stop_strings", 5), ("stop_strings", [""]),
        ("exponential_decay_length_penalty", [1]), ("sequence_bias", {"a": 1}), ("max_time", "a"),
        ("watermarking_config", "a"), ("watermarking_config", {"unknown": 1}),
    ],
)  # fmt: skip
def test_value_of_the_wrong_kind_is_named(llama_copy: Path, key: str, value: Any) -> None:
    """The message names file and key, in two lines."""
    outcome = generated(configure(llama_copy, **{key: value}))
    assert (1, 2) == (outcome.code, len(outcome.complaint)), outcome.err
    assert str(llama_copy / SETTINGS) in outcome.err
    assert "unknown" in outcome.err or f" {key}" in outcome.err


def test_conflicting_settings_are_refused_in_words(llama_copy: Path) -> None:
    """The message has the words of transformers' loop, and the file."""
    outcome = generated(configure(llama_copy, num_beams=2, num_return_sequences=5))
    assert 1 == outcome.code
    assert SETTINGS in outcome.err
    assert "num_return_sequences" in outcome.err


def test_every_key_of_transformers_is_known() -> None:
    """A key that a new transformers adds has to be examined before it is passed to its loop."""
    own = {key for key in vars(GenerationConfig()) if not key.startswith("_")}
    kinds = set(settings._GenerationConfig.model_fields)
    without_effect = {
        "transformers_version", "use_cache", "output_attentions", "output_hidden_states", "output_scores",
        "output_logits", "return_dict_in_generate",
    }  # fmt: skip
    known = kinds | settings.SPEED_ONLY | settings.UNSUPPORTED.keys() | without_effect
    assert set() == own - known
    assert OF_A_MODEL_TYPE == kinds - own


def test_token_outside_the_vocabulary_is_refused() -> None:
    """The token is an error as the only allowed one at a position, and has no effect among suppressed tokens."""
    import numpy as np

    logits = np.arange(4.0)
    assert [0, 1, 2, -math.inf] == DecoderPrompt(0, suppressed=(3, -1, 9)).scores(logits, 1, is_last=False).tolist()
    with pytest.raises(InputError, match=r"token 9.*position 1.*4 tokens"):
        DecoderPrompt(0, allowed={1: (9,)}).scores(logits, 1, is_last=False)


def test_config_of_an_older_checkpoint_is_checked_as_well(tmp_path: Path) -> None:
    """A decoder that is no object has no tokens; a wrong list of tokens is an error with its key."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"decoder": "none", "decoder_start_token_id": 3, "suppress_tokens": [7]}))
    assert ((7,), 3) == (read_decoder_prompt(tmp_path)[0].suppressed, read_decoder_prompt(tmp_path)[0].start)
    assert () == read_settings(tmp_path).eos_token_ids
    config.write_text(json.dumps({"decoder_start_token_id": 3, "suppress_tokens": "7"}))
    with pytest.raises(InputError, match=r"config\.json: suppress_tokens"):
        read_decoder_prompt(tmp_path)
