"""Describes a decoder for onnxruntime-genai: ``genai_config.json``.

Names and sizes are those of the graph; what only the model's files know, such as end tokens, is taken from them. The
type is that of a decoder of any family, which genai feeds by the names given here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from winml.modelkit.errors import InputError, UsageError
from winml.modelkit.file_names import CHECKPOINT_CONFIG_NAME, GENERATION_CONFIG_NAME
from winml.modelkit.graph.files.reading import read_structure
from winml.modelkit.options import JsonError, read_json_file

__all__ = ["genai_config", "genai_config_text"]

_TYPE = "decoder"
"""Specified: onnxruntime-genai's name of a model that takes tokens and a cache of keys and values, of any family."""
_PLAIN_INPUTS = ("input_ids", "attention_mask", "position_ids")
_CACHE = re.compile(r"(.+\.)(\d+)(\.(?:key|value))")
_DEFAULT_CONTEXT = 4096
"""Chosen: for models whose config limits no positions; genai allocates nothing before it is needed."""
_SHARING = "GroupQueryAttention"
"""Specified: the operator that writes new keys and values into the memory of the old ones."""


@dataclass(frozen=True)
class _Caches:
    """The keys and values of a decoder."""

    past_names: Mapping[str, str]
    """``key`` and ``value`` → name with ``%d`` for the layer."""
    present_names: Mapping[str, str]
    layers: int
    heads: int
    head_size: int


def genai_config_text(model: Path, name: str, sources: Mapping[str, Path]) -> str:
    """Return the text of ``genai_config.json``.

    Args:
        model: The ONNX file, wherever it is now.
        name: Its name in the folder.
        sources: Files of the checkpoint that come along: name → file.

    Raises:
        UsageError: onnxruntime-genai has no type for the graph.
        InputError: a config is damaged.
    """
    given = (_read(sources.get(file_name)) for file_name in (CHECKPOINT_CONFIG_NAME, GENERATION_CONFIG_NAME))
    return json.dumps(genai_config(model, name, *given), indent=2) + "\n"


def genai_config(model: Path, name: str, config: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a decoder.

    Args:
        model: The ONNX file.
        name: Its name in the folder.
        config: ``config.json`` of the checkpoint.
        generation: ``generation_config.json`` of it; empty where there is none.

    Raises:
        UsageError: onnxruntime-genai has no type for the graph; names the input that is in the way.
    """
    graph = read_structure(model).graph
    inputs = {value.name: value for value in graph.input}
    caches = _caches(model, inputs, [value.name for value in graph.output])
    text = _text_config(config)
    limit = next((text[key] for key in ("max_position_embeddings", "n_positions", "seq_length") if text.get(key)), None)
    context = int(limit or _DEFAULT_CONTEXT)
    heads = _first(text, ("num_attention_heads", "n_head", "num_heads"), caches.heads)
    decoder = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "filename": name,
        "head_size": caches.head_size,
        "hidden_size": _first(text, ("hidden_size", "n_embd", "d_model"), heads * caches.head_size),
        "inputs": {
            **{name: name for name in _PLAIN_INPUTS if name in inputs},
            "past_key_names": caches.past_names["key"],
            "past_value_names": caches.past_names["value"],
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": caches.present_names["key"],
            "present_value_names": caches.present_names["value"],
        },
        "num_attention_heads": heads,
        "num_hidden_layers": caches.layers,
        "num_key_value_heads": caches.heads,
    }
    eos = _token(generation, config, "eos_token_id")
    described = {
        "type": _TYPE,
        "bos_token_id": _token(generation, config, "bos_token_id", default=_one(eos)),
        "eos_token_id": eos,
        "pad_token_id": _one(_token(generation, config, "pad_token_id", default=_one(eos))),
        "vocab_size": _first(text, ("vocab_size",), _vocabulary(graph)),
        "context_length": context,
        "decoder": decoder,
    }
    return {"model": described, "search": _search(generation, context, shares=_shares_buffers(graph, caches))}


def _caches(model: Path, inputs: Mapping[str, onnx.ValueInfoProto], outputs: list[str]) -> _Caches:
    found = {name: match for name in inputs if (match := _CACHE.fullmatch(name))}
    other = [name for name in inputs if name not in found and name not in _PLAIN_INPUTS]
    if not found or other or "logits" not in outputs:
        problem = f"takes {other[0]!r}" if other else "has no cache" if not found else "gives no logits"
        raise UsageError(
            f"--layout genai: onnxruntime-genai has no type for {model.name}, which {problem}; expected "
            f"{', '.join(_PLAIN_INPUTS)}, keys and values by layer, and logits",
            hint="Leave --layout out: winml generate and WinMLModelForCausalLM run the model.",
        )
    sizes = {name: _sizes(value) for name, value in inputs.items() if name in found}
    shapes = {(size[1], size[3]) for size in sizes.values() if len(size) == 4}
    if len(shapes) != 1 or not all(isinstance(number, int) for number in next(iter(shapes))):
        raise UsageError(
            f"--layout genai: the layers of {model.name} keep caches of different sizes, and onnxruntime-genai takes "
            "one size for all",
            hint="Leave --layout out: winml generate and WinMLModelForCausalLM run the model.",
        )
    heads, head_size = next(iter(shapes))
    past = {match[3][1:]: f"{match[1]}%d{match[3]}" for match in found.values()}
    present = {match[3][1:]: f"{match[1]}%d{match[3]}" for name in outputs if (match := _CACHE.fullmatch(name))}
    layers = len({int(match[2]) for match in found.values()})
    return _Caches(past, present, layers, int(heads), int(head_size))


def _sizes(value: onnx.ValueInfoProto) -> list[int | str]:
    return [dim.dim_value or dim.dim_param for dim in value.type.tensor_type.shape.dim]


def _vocabulary(graph: onnx.GraphProto) -> int:
    logits = next(value for value in graph.output if value.name == "logits")
    size = _sizes(logits)[-1]
    return size if isinstance(size, int) else 0


def _shares_buffers(graph: onnx.GraphProto, caches: _Caches) -> bool:
    """Say whether each cache is read by an operator that writes the new one into its memory, and by nothing else."""
    beginnings = tuple(name.partition("%d")[0] for name in caches.past_names.values())
    readers = [node.op_type for node in graph.node if any(name.startswith(beginnings) for name in node.input)]
    return bool(readers) and set(readers) == {_SHARING}


def _search(generation: Mapping[str, Any], context: int, *, shares: bool) -> dict[str, Any]:
    neutral = {
        "diversity_penalty": 0.0, "do_sample": False, "early_stopping": True, "length_penalty": 1.0, "min_length": 0,
        "no_repeat_ngram_size": 0, "num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1.0,
        "temperature": 1.0, "top_k": 50, "top_p": 1.0,
    }  # fmt: skip
    given = {key: generation[key] for key in neutral if generation.get(key) is not None}
    return {**neutral, **given, "max_length": context, "past_present_share_buffer": shares}


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    section = config.get("text_config")
    return section if isinstance(section, dict) else config


def _first(config: Mapping[str, Any], keys: tuple[str, ...], default: int) -> int:
    return next((int(config[key]) for key in keys if isinstance(config.get(key), int)), default)


def _token(generation: Mapping[str, Any], config: Mapping[str, Any], key: str, default: Any = 0) -> Any:
    value = generation.get(key)
    value = _text_config(config).get(key, config.get(key)) if value is None else value
    return default if value is None else value


def _one(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else value


def _read(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        record = read_json_file(path)
    except JsonError as error:
        raise InputError(f"{path}: {error}", hint=error.hint) from error
    return record if isinstance(record, dict) else {}
