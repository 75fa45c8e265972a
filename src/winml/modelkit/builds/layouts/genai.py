"""Describes a model for onnxruntime-genai: ``genai_config.json``, and what stands beside it.

Names and sizes are those of the graph; what only the model's files know, such as end tokens, is taken from them. The
type is that of a decoder of any family, which genai feeds by the names given here; two graphs are described in
``genai_speech.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from winml.modelkit.builds.layouts.genai_fields import (
    first_number,
    read_config,
    search_section,
    session_section,
    single,
    text_section,
    token_of,
    value_sizes,
)
from winml.modelkit.builds.layouts.genai_speech import audio_processor, speech_config
from winml.modelkit.errors import UsageError
from winml.modelkit.file_names import (
    CHECKPOINT_CONFIG_NAME,
    DECODER,
    ENCODER,
    GENAI_CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    ONLY_PART,
)
from winml.modelkit.graph.files.reading import read_structure

__all__ = ["genai_config", "genai_texts"]

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


def genai_texts(models: Mapping[str, tuple[Path, str]], sources: Mapping[str, Path]) -> dict[str, str]:
    """Return the files that tell onnxruntime-genai what a folder holds: name → text.

    Args:
        models: Part → its ONNX file, wherever it is now, and its name in the folder.
        sources: Files of the checkpoint that come along: name → file.

    Raises:
        UsageError: onnxruntime-genai has no type for the graphs.
        InputError: a config is damaged.
    """
    config, generation = (
        read_config(sources.get(name), name) for name in (CHECKPOINT_CONFIG_NAME, GENERATION_CONFIG_NAME)
    )
    if set(models) == {ENCODER, DECODER}:
        described = speech_config(models[ENCODER], models[DECODER], config, generation)
        texts = {GENAI_CONFIG_NAME: described, **audio_processor(sources)}
    elif set(models) == {ONLY_PART}:
        texts = {GENAI_CONFIG_NAME: genai_config(*models[ONLY_PART], config, generation)}
    else:
        raise UsageError(
            f"--layout genai: onnxruntime-genai has no type for a model of {', '.join(models)}; expected one graph, or "
            f"{ENCODER} and {DECODER}",
            hint="Leave --layout out, or --submodel.",
        )
    return {name: json.dumps(record, indent=2) + "\n" for name, record in texts.items()}


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
    text = text_section(config)
    limit = next((text[key] for key in ("max_position_embeddings", "n_positions", "seq_length") if text.get(key)), None)
    context = int(limit or _DEFAULT_CONTEXT)
    heads = first_number(text, ("num_attention_heads", "n_head", "num_heads"), caches.heads)
    decoder = {
        "session_options": session_section(),
        "filename": name,
        "head_size": caches.head_size,
        "hidden_size": first_number(text, ("hidden_size", "n_embd", "d_model"), heads * caches.head_size),
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
    eos = token_of(generation, config, "eos_token_id")
    described = {
        "type": _TYPE,
        "bos_token_id": token_of(generation, config, "bos_token_id", default=single(eos)),
        "eos_token_id": eos,
        "pad_token_id": single(token_of(generation, config, "pad_token_id", default=single(eos))),
        "vocab_size": first_number(text, ("vocab_size",), _vocabulary(graph)),
        "context_length": context,
        "decoder": decoder,
    }
    return {"model": described, "search": search_section(generation, context, shares=_shares_buffers(graph, caches))}


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
    sizes = {name: value_sizes(value) for name, value in inputs.items() if name in found}
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


def _vocabulary(graph: onnx.GraphProto) -> int:
    logits = next(value for value in graph.output if value.name == "logits")
    size = value_sizes(logits)[-1]
    return size if isinstance(size, int) else 0


def _shares_buffers(graph: onnx.GraphProto, caches: _Caches) -> bool:
    """Say whether each cache is read by an operator that writes the new one into its memory, and by nothing else."""
    beginnings = tuple(name.partition("%d")[0] for name in caches.past_names.values())
    readers = [node.op_type for node in graph.node if any(name.startswith(beginnings) for name in node.input)]
    return bool(readers) and set(readers) == {_SHARING}
