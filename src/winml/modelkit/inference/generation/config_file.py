"""Reads ``generation_config.json`` and checks the kind of every value that decides a token.

The keys are those of transformers' ``GenerationConfig``; a test compares them. Does not know what a key does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import pydantic

from winml.modelkit.errors import ConfigError, InputError, UsageError
from winml.modelkit.file_names import GENERATION_CONFIG_NAME
from winml.modelkit.options import JsonError, Options, parse_options, read_json_file

__all__ = ["SPEED_ONLY", "UNSUPPORTED", "check_kinds", "read_generation_config", "read_record"]

SPEED_ONLY: Final = frozenset({
    "prompt_lookup_num_tokens", "use_mtp", "speculation_type", "assistant_early_exit", "assistant_ensemble_weight",
    "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size", "cache_implementation", "cache_config",
    "max_cache_len", "compile_config", "disable_compile", "prefill_chunk_size", "continuous_batching_config",
    "low_memory",
})  # fmt: skip
"""Keys that make transformers faster or smaller and change no token: speculative decoding, caches, compilation."""
UNSUPPORTED: Final[Mapping[str, Any]] = {
    "penalty_alpha": 0, "dola_layers": None, "num_beam_groups": 1, "diversity_penalty": 0, "constraints": None,
    "force_words_ids": None, "token_healing": False,
}  # fmt: skip
"""Keys of decoding methods that are not offered → the value with which the key has no effect. All but the last left
transformers in version 5 for repositories of code on the Hub."""

_LARGEST_INT = 2**63 - 1
"""Specified: what an int64 tensor holds."""
_Token = Annotated[int, pydantic.Field(ge=-_LARGEST_INT - 1, le=_LARGEST_INT)]
_Count = Annotated[int, pydantic.Field(ge=0, le=_LARGEST_INT)]
_Positive = Annotated[int, pydantic.Field(ge=1, le=_LARGEST_INT)]
_Number = Annotated[float, pydantic.Field(ge=0)]
_Factor = Annotated[float, pydantic.Field(gt=0)]
_Share = Annotated[float, pydantic.Field(ge=0, le=1)]
_Tokens = Annotated[tuple[_Token, ...], pydantic.Field(min_length=1)]
_Text = Annotated[str, pydantic.Field(min_length=1)]


class _GenerationConfig(Options):
    """The keys whose values decide a token, with the ranges that transformers' logits processors take."""

    model_config = pydantic.ConfigDict(extra="allow", allow_inf_nan=False)

    max_length: _Positive | None = None
    max_new_tokens: _Positive | None = None
    min_length: _Count | None = None
    min_new_tokens: _Count | None = None
    max_time: _Number | None = None
    early_stopping: bool | Literal["never"] | None = None
    stop_strings: _Text | Annotated[tuple[_Text, ...], pydantic.Field(min_length=1)] | None = None
    do_sample: bool | None = None
    num_beams: _Positive | None = None
    num_return_sequences: _Positive | None = None
    temperature: _Number | None = None
    top_k: _Count | None = None
    top_p: _Share | None = None
    min_p: _Share | None = None
    top_h: _Share | None = None
    typical_p: _Share | None = None
    epsilon_cutoff: _Share | None = None
    eta_cutoff: _Share | None = None
    repetition_penalty: _Factor | None = None
    encoder_repetition_penalty: _Factor | None = None
    length_penalty: float | None = None
    no_repeat_ngram_size: _Count | None = None
    encoder_no_repeat_ngram_size: _Count | None = None
    bad_words_ids: tuple[_Tokens, ...] | None = None
    renormalize_logits: bool | None = None
    remove_invalid_values: bool | None = None
    exponential_decay_length_penalty: tuple[_Count, float] | None = None
    sequence_bias: tuple[tuple[_Tokens, float], ...] | None = None
    guidance_scale: _Number | None = None
    watermarking_config: dict[str, object] | None = None
    pad_token_id: _Token | None = None
    bos_token_id: _Token | tuple[_Token, ...] | None = None
    eos_token_id: _Token | tuple[_Token, ...] | None = None
    decoder_start_token_id: _Token | tuple[_Token, ...] | None = None
    forced_bos_token_id: _Token | None = None
    forced_eos_token_id: _Token | tuple[_Token, ...] | None = None
    forced_decoder_ids: tuple[tuple[_Positive, _Token | None], ...] | None = None
    suppress_tokens: tuple[_Token, ...] | None = None
    begin_suppress_tokens: tuple[_Token, ...] | None = None
    lang_to_id: dict[str, _Token] | None = None
    task_to_id: dict[str, _Token] | None = None
    no_timestamps_token_id: _Token | None = None
    is_multilingual: bool | None = None
    return_timestamps: bool | Literal["char", "word"] | None = None
    language: str | tuple[str, ...] | None = None
    task: str | tuple[str, ...] | None = None


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Return what ``generation_config.json`` in a folder says, without nulls and empty lists; empty without one.

    Raises:
        InputError: the file is damaged, or a value is of the wrong kind.
        UsageError: it asks for a way to choose tokens that is not offered.
    """
    path = folder / GENERATION_CONFIG_NAME
    record = {key: value for key, value in read_record(path).items() if value not in (None, [])}
    check_kinds(record, path)
    for key, neutral in UNSUPPORTED.items():
        if key in record and record[key] != neutral:
            raise UsageError(
                f"{path}: {key} is {record[key]!r}, and this way to choose tokens is not supported",
                hint=f"Remove {key} from the file.",
            )
    return record


def check_kinds(record: Mapping[str, object], path: Path) -> None:
    """Refuse a value of the wrong kind under a key of generation.

    Raises:
        InputError: names the file, the key and the value.
    """
    try:
        parse_options(_GenerationConfig, dict(record), str(path))
    except ConfigError as error:
        raise InputError(error.message, hint="Correct it there, or remove the key.") from None


def read_record(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file beside a model; empty where there is no such file.

    Raises:
        InputError: it is damaged.
    """
    if not path.is_file():
        return {}
    try:
        record = read_json_file(path)
    except JsonError as error:
        raise InputError(f"{path}: {error}", hint=error.hint or "Build the model again.") from error
    if not isinstance(record, dict):
        raise InputError(f"{path}: is no JSON object", hint="Build the model again.")
    return record
