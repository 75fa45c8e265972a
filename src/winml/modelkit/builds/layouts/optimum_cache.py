"""Does optimum make an empty cache of the sizes that a graph takes?

Before the first token, optimum gives a decoder keys and values of no token. Their number of heads and the size of one
come from ``config.json``, by a rule of optimum's own: models whose heads have a size of their own are a list of types
there. Reads JSON and the inputs of graphs only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from winml.modelkit.options import JsonError, read_json_file

__all__ = ["unfit_cache_words"]

_WITH_HEAD_SIZE = frozenset({"gemma", "gemma3_text", "gemma3", "gpt_oss", "nemotron"})
_WITH_KEY_HEADS = frozenset(
    {
        "arcee", "cohere", "gemma", "gemma3", "gemma3_text", "glm", "granite", "gpt_oss", "helium", "mistral", "llama",
        "nemotron", "qwen2", "qwen3", "qwen3_moe", "smollm3", "stablelm",
    }
)  # fmt: skip
"""Specified by optimum-onnx 0.1: model types of which it reads ``head_dim`` and ``num_key_value_heads``."""
_OF_ITS_OWN = frozenset({"deepseek_v3", "bloom", "gpt_bigcode", "falcon"})
"""Specified by the same: types with a rule for themselves."""
_WIDTHS, _HEADS = ("hidden_size", "d_model", "n_embd"), (
    "num_attention_heads", "num_heads", "n_head", "encoder_attention_heads",
)  # fmt: skip
"""Specified by transformers: how configs call the width of a model, and its number of heads."""
_SECTIONS = ("decoder", "text_config")


def unfit_cache_words(config: Path, inputs: Mapping[str, Sequence[int | str | None]]) -> str:
    """Say which cache optimum gives and which one a graph takes; empty where both are the same, or nobody knows.

    Args:
        config: ``config.json`` of the checkpoint.
        inputs: Name → sizes of what the graphs take.
    """
    try:
        record = read_json_file(config)
    except (OSError, JsonError):
        return ""
    shapes = [shape for name, shape in inputs.items() if name.startswith("past_key_values.") and name.endswith(".key")]
    if not isinstance(record, dict) or not shapes or len(shapes[0]) != 4 or record.get("model_type") in _OF_ITS_OWN:
        return ""
    is_encoded = any(".encoder." in name for name in inputs)
    given = _given_by_optimum(record, is_encoded=is_encoded)
    heads, size = shapes[0][1], shapes[0][3]
    if given is None or not isinstance(heads, int) or not isinstance(size, int) or given == (heads, size):
        return ""
    decoder = "model.decoder" if is_encoded else "model"
    names = f"{decoder}.{'num_attention_heads' if is_encoded else 'num_key_value_heads'}"
    return (
        f"optimum-onnx 0.1 makes an empty cache of {given[0]} heads of {given[1]} values from {config.name}, and the "
        f"graph takes {heads} heads of {size}: its generate() fails. After loading, set {names} = {heads} and "
        f"{decoder}.embed_size_per_head = {size}; or generate with WinMLAutoModel."
    )


def _given_by_optimum(record: Mapping[str, Any], *, is_encoded: bool) -> tuple[int, int] | None:
    """Return the heads and their size in the cache that it makes; None where the config does not say it."""
    model_type = record.get("model_type")
    section = next((record[name] for name in _SECTIONS if isinstance(record.get(name), dict)), record)
    width, heads = (_first(section, keys) for keys in (_WIDTHS, _HEADS))
    if width is None or not heads:
        return None
    if is_encoded:
        return heads, width // heads
    size = _first(section, ("head_dim",)) if model_type in _WITH_HEAD_SIZE else None
    key_heads = _first(section, ("num_key_value_heads",)) if model_type in _WITH_KEY_HEADS else None
    return key_heads or heads, size or width // heads


def _first(record: Mapping[str, Any], keys: Iterable[str]) -> int | None:
    return next((record[key] for key in keys if isinstance(record.get(key), int)), None)
