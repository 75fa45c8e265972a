"""The prompt of a model, and the forced first and last tokens of an encoder-decoder, from the files of the model.

Positions are counted from the first token, which is fixed. Reads JSON; needs no model library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from winml.modelkit.arrays import Array, Arrays
from winml.modelkit.errors import InputError
from winml.modelkit.file_names import CHECKPOINT_CONFIG_NAME, DECODER, GENERATION_CONFIG_NAME, ONLY_PART, files_folder
from winml.modelkit.generate.generation.settings import (
    GenerationSettings,
    check_kinds,
    read_generation_config,
    read_settings,
    without_none,
)
from winml.modelkit.generate.generation.text import TextTokenizer
from winml.modelkit.onnx.bundle import TextTokens
from winml.modelkit.onnx.files.foreign_files import read_record
from winml.modelkit.samples.media import Recording

_READ_HERE = {
    "forced_bos_token_id", "forced_eos_token_id", "forced_decoder_ids", "suppress_tokens", "begin_suppress_tokens",
    "lang_to_id", "task_to_id", "no_timestamps_token_id", "is_multilingual", "alignment_heads", "median_filter_width",
    "max_initial_timestamp_index", "prev_sot_token_id", "return_timestamps", "language", "task",
}  # fmt: skip
"""Keys of ``generation_config.json`` about first and last tokens, or about timestamps, which are not generated."""

_OF_CONFIG = {
    "forced_bos_token_id", "forced_eos_token_id", "forced_decoder_ids", "suppress_tokens", "begin_suppress_tokens",
}  # fmt: skip
"""Keys that older checkpoints have in ``config.json``."""


@dataclass(frozen=True)
class DecoderPrompt:
    """Constraints on a text before any token is chosen."""

    start: int
    """The first token."""
    prompt_places: int = 0
    """Number of positions for language and task tokens after the first. Like a prompt, these are no new tokens."""
    allowed: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Position → the only allowed tokens."""
    last: int | None = None
    """The token at the greatest length; None: any."""
    suppressed: tuple[int, ...] = ()
    """Tokens that are never allowed."""
    first_suppressed: tuple[int, ...] = ()
    """Tokens that are forbidden as the first freely chosen token."""

    def scores(self, logits: Array, position: int, *, is_last: bool) -> Array:
        """Return the scores of one step with forbidden tokens excluded.

        Args:
            logits: Logits of every token of the vocabulary.
            position: Position of the next token.
            is_last: True if the text reaches its maximum length.

        Raises:
            InputError: a forced token is not in the vocabulary.
        """
        allowed = (self.last,) if is_last and self.last is not None else self.allowed.get(position)
        if allowed is not None:
            masked = np.full_like(logits, -np.inf)
            if outside := [token for token in allowed if not 0 <= token < len(logits)]:
                raise InputError(
                    f"{GENERATION_CONFIG_NAME}: token {outside[0]} is forced at position {position}, but the "
                    f"vocabulary has {len(logits)} tokens",
                    hint="Correct it in this file (forced_bos_token_id, forced_decoder_ids, lang_to_id and the like).",
                )
            masked[list(allowed)] = logits[list(allowed)]
            return masked
        first_free = next((index for index in range(1, position + 1) if index not in self.allowed), position)
        suppressed = (*self.suppressed, *(self.first_suppressed if position == first_free else ()))
        out = [token for token in suppressed if 0 <= token < len(logits)]
        if not out:
            return logits
        masked = logits.copy()
        masked[out] = -np.inf
        return masked


def read_decoder_prompt(folder: Path, text: TextTokens | None = None) -> tuple[DecoderPrompt, GenerationSettings]:
    """Read the forced tokens and the generation settings from the files in the folder of a model.

    Args:
        folder: The folder.
        text: Start and end tokens stated in the graph, which override the files.

    Raises:
        InputError: the files state no start token, or are damaged.
    """
    settings = read_settings(folder)
    generation_config, config = read_generation_config(folder), _read_config(folder)
    decoder = config["decoder"] if isinstance(config.get("decoder"), dict) else {}
    records = (generation_config, config, decoder)
    numbers = (_read_integer(record, key) for key in ("decoder_start_token_id", "bos_token_id") for record in records)
    start = next((value for value in numbers if value is not None), None)
    if text is not None:
        start, settings = text.first, replace(settings, eos_token_ids=text.ends or settings.eos_token_ids)
    if start is None:
        raise InputError(
            f"{folder}: no decoder_start_token_id, the first token of a text",
            hint=f"Add it to {GENERATION_CONFIG_NAME}, or build the model again with its files beside it.",
        )
    forced = generation_config if (folder / GENERATION_CONFIG_NAME).is_file() else config
    prompt = read_prompt(folder)
    allowed = dict(prompt)
    if (first_token := _read_integer(forced, "forced_bos_token_id")) is not None:
        allowed[1] = (first_token,)
    beginning = DecoderPrompt(
        start,
        prompt_places=len(prompt),
        allowed=allowed,
        last=_read_integer(forced, "forced_eos_token_id"),
        suppressed=tuple(forced.get("suppress_tokens") or ()),
        first_suppressed=tuple(forced.get("begin_suppress_tokens") or ()),
    )
    loop_options = {key: value for key, value in (settings.for_transformers or {}).items() if key not in _READ_HERE}
    return beginning, replace(settings, for_transformers=loop_options or None)


def read_prompt(folder: Path, **requested: object) -> dict[int, tuple[int, ...]]:
    """Return position → allowed language or task tokens: a single token, or all languages if none is requested.

    As in transformers' prompt for Whisper.

    Args:
        folder: Folder of the model.
        **requested: ``language`` and ``task``, which override the files; None: as in the files.

    Raises:
        InputError: an unknown language or task, or a request for timestamps.
    """
    config = {**read_generation_config(folder), **without_none(**requested)}
    language, task = config.get("language"), config.get("task")
    if config.get("return_timestamps"):
        raise InputError(
            f"{folder / GENERATION_CONFIG_NAME}: return_timestamps is {config['return_timestamps']}, but text "
            "is generated without timestamps",
            hint="Set it to false.",
        )
    is_named = language is not None or task is not None
    if is_named and config.get("is_multilingual") is False:
        raise InputError(
            f"{folder}: language {language!r} and task {task!r} require a multilingual model",
            hint=f"Remove them from {GENERATION_CONFIG_NAME}.",
        )
    forced = config.get("forced_decoder_ids") or _read_config(folder).get("forced_decoder_ids")
    pairs = () if is_named else forced or ()
    allowed: dict[int, tuple[int, ...]] = {position: (token,) for position, token in pairs if token is not None}
    languages = config.get("lang_to_id") or {}
    if language is not None:
        allowed[1] = (_find_token(language, languages, "language", folder),)
    elif languages and 1 not in allowed:
        allowed[1] = tuple(languages.values())
    tasks = config.get("task_to_id") or {}
    if task is not None or (language is not None and tasks):
        allowed[max(allowed, default=0) + 1] = (_find_token(task or "transcribe", tasks, "task", folder),)
    without_times = _read_integer(config, "no_timestamps_token_id")
    if without_times is not None and (without_times,) not in allowed.values():
        allowed[max(allowed, default=0) + 1] = (without_times,)
    return allowed


def _find_token(name: object, tokens: Mapping[str, int], key: str, folder: Path) -> int:
    """Return the token of a language or a task; a language is a token, code or English name.

    Args:
        name: The language or task.
        tokens: Tokens of the model for these → numbers.
        key: ``language`` or ``task``.
        folder: Folder of the model, for messages.

    Raises:
        InputError: the model has no such token.
    """
    if isinstance(name, (list, tuple)) and len(name) == 1:
        (name,) = name
    names = [str(name).lower()]
    names += [f"<|{names[0]}|>"]
    if key == "language" and not any(candidate in tokens for candidate in names):
        from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

        names += [f"<|{TO_LANGUAGE_CODE.get(names[0])}|>"]
    token = next((tokens[candidate] for candidate in names if candidate in tokens), None)
    if token is None:
        raise InputError(
            f"{folder}: {key} is {name!r}; the model supports {', '.join(list(tokens)[:8]) or 'not named'}",
            hint=f"Use a supported value in {GENERATION_CONFIG_NAME} (lang_to_id, task_to_id).",
        )
    return token


def _read_config(folder: Path) -> dict[str, Any]:
    """Read ``config.json``, which holds the keys of ``generation_config.json`` in older checkpoints."""
    path = folder / CHECKPOINT_CONFIG_NAME
    record = without_none(**read_record(folder, CHECKPOINT_CONFIG_NAME))
    check_kinds({key: record[key] for key in record.keys() & _OF_CONFIG}, path)
    return record


def _read_integer(record: Mapping[str, object], key: str) -> int | None:
    """Return the integer under a key; None if absent or of another type."""
    value = record.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt in the tokens of a model, with the model's files and settings."""

    files: Mapping[str, Path]
    """Part of the model → its ONNX file; tokenizer, processors and configs are in the same folder."""
    text: str
    tokens: tuple[int, ...]
    settings: GenerationSettings
    tokenizer: TextTokenizer
    beginning: DecoderPrompt | None = None
    """Forced tokens at the start of the answer of an encoder-decoder."""
    medium: str = "prompt"
    """Input of the encoder: ``prompt``, a text; ``audio`` and ``image``, the file named by ``text``."""
    recording: Recording | None = None
    """The audio samples of that file, for a recording."""
    inputs: Arrays = field(default_factory=dict)
    """Inputs of a model that takes images, beside the tokens: pixels, kinds and positions of tokens, by name."""

    @property
    def model(self) -> Path:
        """The ONNX file that writes the answer."""
        return self.files.get(DECODER) or self.files[ONLY_PART]

    @property
    def folder(self) -> Path:
        """Folder of tokenizer, processors and configs."""
        return files_folder(self.model)

    @property
    def before(self) -> tuple[int, ...]:
        """Tokens of the prompt that the answer continues."""
        return self.tokens if self.beginning is None else (self.beginning.start,)

    @property
    def decoder_tokens(self) -> int:
        """Number of tokens that the decoder reads before the first new token."""
        return len(self.before) + (0 if self.beginning is None else self.beginning.prompt_places)
