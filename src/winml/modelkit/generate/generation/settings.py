"""Generation settings: choice of the next token and end of the text, from files next to a model and user options.

Reads ``generation_config.json`` and ``config.json`` as JSON; needs no model library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import pydantic

from winml.modelkit.errors import ConfigError, InputError, UsageError, opt
from winml.modelkit.file_names import CHECKPOINT_CONFIG_NAME, DECODER, GENERATION_CONFIG_NAME
from winml.modelkit.onnx.files.foreign_files import read_record
from winml.modelkit.options import Options, parse_options

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
"""Specified: maximum of an int64 tensor."""
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
    """Read ``generation_config.json`` in a folder, without nulls and empty lists; ``{}`` without such a file.

    Raises:
        InputError: the file is damaged, or a value is of the wrong kind.
        UsageError: an unsupported decoding strategy is requested.
    """
    path = folder / GENERATION_CONFIG_NAME
    record = {
        key: value for key, value in read_record(folder, GENERATION_CONFIG_NAME).items() if value not in (None, [])
    }
    check_kinds(record, path)
    for key, neutral in UNSUPPORTED.items():
        if key in record and record[key] != neutral:
            raise UsageError(
                f"{path}: {key} is {record[key]!r}, a decoding strategy that is not supported",
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
        raise InputError(error.message, hint="Correct or remove this key.") from None


_DEFAULT_NEW_TOKENS: Final = 256
"""Chosen: a long answer. transformers' own default is 20."""
_DEFAULT_TOP_K = 50
"""Specified: default of transformers' sampling."""

_POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_sequence_length", "seq_length")
"""Specified: how the configs of transformers call the number of positions."""
_RELATIVE_KEY = "relative_attention_num_buckets"
"""Specified: key in configs of models with relative positions. ``n_positions`` is no limit then: it is the text length
of the training.
"""
_TEXT_CONFIGS = ("text_config", "decoder", "llm_config")
"""Specified: sections of the config of a model of several parts that are about its text."""

_OF_STEPS = {"do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
_OF_ENDS = {"max_new_tokens", "max_length", "eos_token_id"}
_WITHOUT_EFFECT = {
    "bos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version", "use_cache", "_from_model_config",
    "num_return_sequences", "length_penalty", "early_stopping", "output_attentions", "output_hidden_states",
    "output_scores", "output_logits", "return_dict_in_generate", "_name_or_path", "chat_format", "max_window_size",
}  # fmt: skip
"""Keys that change no token of one text that is written without beams and without a second model."""
_NEUTRAL: Mapping[str, Any] = {
    "num_beams": 1, "typical_p": 1.0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "min_length": 0,
    "min_new_tokens": 0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "encoder_repetition_penalty": 1.0,
    "guidance_scale": 1, "remove_invalid_values": False, "renormalize_logits": False,
}  # fmt: skip
"""Specified: values with which a key changes nothing."""

_NOTED = {"prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp"}
"""Keys of ``SPEED_ONLY`` that enable another generation method; the remaining keys configure it or a cache."""


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of the text generation."""

    is_sampled: bool = False
    """Sample the next token; otherwise use the token with the highest score."""
    temperature: float = 1.0
    """Scores are divided by it."""
    top_k: int = 0
    """Draw from that many of the highest scores; 0: from all."""
    top_p: float = 1.0
    """Sample from the fewest tokens whose probabilities reach this sum."""
    min_p: float | None = None
    """Sample from tokens with at least this share of the largest probability."""
    repetition_penalty: float = 1.0
    """Divides positive scores of tokens that occurred, and multiplies negative ones."""
    max_new_tokens: int = _DEFAULT_NEW_TOKENS
    is_default_length: bool = True
    """True if the length is a default, which may be reduced to the positions of the model."""
    max_length: int | None = None
    """Limit of the files for prompt and answer together; None without such a limit."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end it."""
    seed: int = 0
    for_transformers: Mapping[str, Any] | None = None
    """Keys of the files that only transformers' generation loop supports; None without such keys."""
    notes: tuple[str, ...] = ()
    """Ignored settings of the files, one sentence each."""

    @property
    def drawn(self) -> dict[str, Any]:
        """Sampling parameters by their names in transformers; `{}` without sampling."""
        values = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        return values if self.is_sampled else {}

    @property
    def is_stepwise(self) -> bool:
        """True if each token is known as soon as it is chosen; with beams, all are known at the end."""
        return bool((self.for_transformers or {}).get("num_beams", 1) == 1)

    def as_record(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return {
            "do_sample": self.is_sampled,
            **(self.drawn | {"seed": self.seed} if self.is_sampled else {}),
            "repetition_penalty": self.repetition_penalty,
            "max_new_tokens": self.max_new_tokens,
            "eos_token_ids": list(self.eos_token_ids),
            **(self.for_transformers or {}),
        }

    def updated(
        self,
        *,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        num_beams: int | None = None,
        stop: Sequence[str] = (),
        seed: int = 0,
    ) -> GenerationSettings:
        """Return the settings updated by user options; None: as in the files.

        Args:
            max_new_tokens: Maximum number of new tokens.
            temperature: Divisor of the scores for sampling; 0 selects the token with the highest score.
            top_k: Number of highest scores to sample from; 0: all.
            top_p: Sample from the fewest tokens whose probabilities reach this sum.
            min_p: Sample from tokens with at least this share of the largest probability.
            repetition_penalty: Divides positive scores of earlier tokens, and multiplies negative scores.
            num_beams: Number of beams, with transformers' loop; 1: no beam search.
            stop: Strings that end the text, with transformers' loop.
            seed: Seed of the sampling.
        """
        drawn = without_none(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        changed = without_none(repetition_penalty=repetition_penalty)
        if temperature == 0:
            changed["is_sampled"] = False
        elif drawn:
            changed |= {"is_sampled": True, **drawn}
        loop_options = {**(self.for_transformers or {}), **({"stop_strings": list(stop)} if stop else {})}
        if num_beams is not None:
            loop_options.pop("num_beams", None)
            loop_options |= {"num_beams": num_beams} if num_beams > 1 else {}
        updated_settings = replace(self, **changed, seed=seed, for_transformers=loop_options or None)
        if max_new_tokens is None:
            return updated_settings
        return replace(updated_settings, max_new_tokens=max_new_tokens, max_length=None, is_default_length=False)

    def fitted(self, prompt_tokens: int, positions: int | None) -> GenerationSettings:
        """Return the settings with a length that fits the positions of the model.

        Args:
            prompt_tokens: Tokens of the prompt.
            positions: Maximum number of positions of the model; None: no limit.

        Raises:
            UsageError: the prompt fills them, or the requested length does not fit.
        """
        if self.max_length is not None:
            if prompt_tokens >= self.max_length:
                raise UsageError(
                    f"the prompt has {prompt_tokens} tokens, but max_length in {GENERATION_CONFIG_NAME} is "
                    f"{self.max_length}, which includes the prompt",
                    hint=f"Set {opt.max_new_tokens}, which overrides it, or shorten the prompt.",
                )
            limited = replace(self, max_new_tokens=self.max_length - prompt_tokens, max_length=None)
            return limited.fitted(prompt_tokens, positions)
        if positions is None:
            return self
        room = positions - prompt_tokens
        if room < 1:
            raise UsageError(
                f"the prompt has {prompt_tokens} tokens, but the model has {positions} positions",
                hint="Shorten it to leave at least one position for the generated text.",
            )
        if self.max_new_tokens <= room:
            return self
        if not self.is_default_length:
            raise UsageError(
                f"{opt.max_new_tokens} {self.max_new_tokens}: with a prompt of {prompt_tokens} the text may have "
                f"{prompt_tokens + self.max_new_tokens} tokens, but the model has {positions} positions",
                hint=f"Set it to {room} or fewer.",
            )
        return replace(self, max_new_tokens=room)


def read_settings(folder: Path) -> GenerationSettings:
    """Read the generation settings from the files in the folder of a model.

    Raises:
        InputError: a file is damaged, or a value is of the wrong kind.
        UsageError: an unsupported decoding strategy is requested.
    """
    config = read_record(folder, CHECKPOINT_CONFIG_NAME)
    generation_config = read_generation_config(folder)
    eos = generation_config.get("eos_token_id", _find_first_value(config, ("eos_token_id",)))
    ids = eos if isinstance(eos, list) else [eos]
    read_here = _OF_STEPS | _OF_ENDS | _WITHOUT_EFFECT | SPEED_ONLY | UNSUPPORTED.keys()
    loop_options = {
        key: value
        for key, value in generation_config.items()
        if key not in read_here and (key not in _NEUTRAL or value != _NEUTRAL[key])
    }
    temperature = float(generation_config.get("temperature", 1.0))
    return GenerationSettings(
        # As --temperature 0 does: the token with the highest score.
        is_sampled=generation_config.get("do_sample", False) and temperature > 0,
        temperature=temperature or 1.0,
        top_k=generation_config.get("top_k", _DEFAULT_TOP_K),
        top_p=float(generation_config.get("top_p", 1.0)),
        min_p=generation_config.get("min_p"),
        repetition_penalty=float(generation_config.get("repetition_penalty", 1.0)),
        max_new_tokens=generation_config.get("max_new_tokens", _DEFAULT_NEW_TOKENS),
        max_length=None if "max_new_tokens" in generation_config else generation_config.get("max_length"),
        eos_token_ids=tuple(token for token in ids if isinstance(token, int) and not isinstance(token, bool)),
        for_transformers=loop_options or None,
        notes=tuple(
            f"{folder / GENERATION_CONFIG_NAME}: {key} is ignored: it does not affect the generated tokens"
            for key in sorted(generation_config.keys() & _NOTED)
        ),
    )


def position_limit(folder: Path, part: str = DECODER) -> int | None:
    """Return the maximum number of positions in the config of a model; None: no limit.

    Args:
        folder: Folder of the config.
        part: ``encoder`` or ``decoder``, for an encoder-decoder.

    Raises:
        InputError: the config is damaged.
    """
    config = read_record(folder, CHECKPOINT_CONFIG_NAME)
    keys: tuple[str, ...] = (f"max_{part}_position_embeddings", *_POSITION_KEYS)
    if isinstance(config.get(part), dict):
        config = config[part]
    if _find_first_value(config, (_RELATIVE_KEY,)) is not None:
        keys = tuple(key for key in keys if key != "n_positions")
    limit = _find_first_value(config, keys)
    return limit if isinstance(limit, int) and limit > 0 else None


def part_position_limit(model: Path, folder: Path, part: str = DECODER) -> int | None:
    """Return the maximum number of positions of a part, from its file or else from the config.

    Args:
        model: The file of the part.
        folder: Folder of the config.
        part: ``encoder`` or ``decoder``, for an encoder-decoder.

    Raises:
        InputError: a file is damaged.
    """
    from winml.modelkit.onnx.bundle import read_part_description

    described = read_part_description(model)
    limit = None if described is None else described.positions
    return position_limit(folder, part) if limit is None else limit


def without_none(**values: Any) -> dict[str, Any]:
    """Return the values that are not None."""
    return {key: value for key, value in values.items() if value is not None}


def _find_first_value(config: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    """Return the first value under the keys, in a config or its section about the text; None without a value."""
    sections = (config, *(config[name] for name in _TEXT_CONFIGS if isinstance(config.get(name), dict)))
    values = (section[key] for section in sections for key in keys if section.get(key) is not None)
    return next(values, None)
