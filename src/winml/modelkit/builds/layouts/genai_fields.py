"""What descriptions of models for onnxruntime-genai have in common: which entry of a config stands for what."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx

from winml.modelkit.errors import InputError
from winml.modelkit.options import JsonError, read_json_file

__all__ = [
    "first_number",
    "read_config",
    "search_section",
    "session_section",
    "single",
    "text_section",
    "token_of",
    "value_sizes",
]


def value_sizes(value: onnx.ValueInfoProto) -> list[int | str]:
    """Return the sizes of an input or output: numbers, or names of open dimensions."""
    return [dim.dim_value or dim.dim_param for dim in value.type.tensor_type.shape.dim]


def session_section() -> dict[str, Any]:
    """Return how a graph is opened: with ONNX Runtime's defaults."""
    return {"log_id": "onnxruntime-genai", "provider_options": []}


def search_section(generation: Mapping[str, Any], context: int, *, shares: bool) -> dict[str, Any]:
    """Return how tokens are chosen.

    Args:
        generation: ``generation_config.json`` of the checkpoint.
        context: Tokens a text may have.
        shares: Whether new keys and values are written into the memory of the old ones.
    """
    neutral = {
        "diversity_penalty": 0.0, "do_sample": False, "early_stopping": True, "length_penalty": 1.0, "min_length": 0,
        "no_repeat_ngram_size": 0, "num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1.0,
        "temperature": 1.0, "top_k": 50, "top_p": 1.0,
    }  # fmt: skip
    given = {key: generation[key] for key in neutral if generation.get(key) is not None}
    return {**neutral, **given, "max_length": context, "past_present_share_buffer": shares}


def text_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config that describes what writes the text."""
    section = config.get("text_config")
    return section if isinstance(section, dict) else config


def first_number(config: Mapping[str, Any], keys: tuple[str, ...], default: int) -> int:
    """Return the first of several entries that is a number."""
    return next((int(config[key]) for key in keys if isinstance(config.get(key), int)), default)


def token_of(generation: Mapping[str, Any], config: Mapping[str, Any], key: str, default: Any = 0) -> Any:
    """Return a special token: a number, or a list of them."""
    value = generation.get(key)
    value = text_section(config).get(key, config.get(key)) if value is None else value
    return default if value is None else value


def single(value: Any) -> Any:
    """Return the first token of a list, and any other value as it is."""
    return value[0] if isinstance(value, list) and value else value


def read_config(path: Path | None, name: str) -> dict[str, Any]:
    """Return what a config says; nothing where there is none.

    Args:
        path: The file.
        name: What it is called, for the message.

    Raises:
        InputError: it is damaged.
    """
    if path is None:
        return {}
    try:
        record = read_json_file(path)
    except JsonError as error:
        raise InputError(f"{path}: {error}", hint=error.hint) from error
    if not isinstance(record, dict):
        raise InputError(f"{path}: is no {name}: it is no JSON object", hint="Copy that of the checkpoint anew.")
    return record
