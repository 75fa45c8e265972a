"""Describes a model that writes what it hears for onnxruntime-genai: an encoder of recordings, and a decoder.

genai knows one kind, which it calls ``whisper``: thirty seconds of sound in 3000 frames, whose keys and values the
encoder computes once. Any two graphs with these inputs are of it, whatever the model is called.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx

from winml.modelkit.builds.layouts.genai_fields import (
    first_number,
    read_config,
    search_section,
    session_section,
    single,
    token_of,
    value_sizes,
)
from winml.modelkit.errors import UsageError
from winml.modelkit.file_names import AUDIO_PROCESSOR_NAME
from winml.modelkit.graph.files.reading import read_structure

__all__ = ["audio_processor", "speech_config"]

_TYPE = "whisper"
_FEATURES, _STATES, _TOKENS, _LOGITS = "input_features", "last_hidden_state", "input_ids", "logits"
_FRAMES = 3000
"""Specified: the only number of frames that genai's type takes; what is encoded is half as long."""
_OWN = re.compile(r"past_key_values\.\d+\.decoder\.(?:key|value)")
_CROSS = re.compile(r"past_key_values\.\d+\.encoder\.(?:key|value)")
_POSITIONS = ("max_target_positions", "max_position_embeddings")
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_PROCESSOR_FIELDS = ("n_fft", "hop_length", "chunk_length", "feature_size")


def speech_config(
    encoder: tuple[Path, str], decoder: tuple[Path, str], config: Mapping[str, Any], generation: Mapping[str, Any]
) -> dict[str, Any]:
    """Return ``genai_config.json`` of a model that writes what it hears.

    Args:
        encoder: The ONNX file, and its name in the folder.
        decoder: The same of the decoder.
        config: ``config.json`` of the checkpoint.
        generation: ``generation_config.json`` of it; empty where there is none.

    Raises:
        UsageError: onnxruntime-genai has no type for the graphs, or the config does not say how long a text may be;
            names what is in the way.
    """
    graphs = [read_structure(path).graph for path, _ in (encoder, decoder)]
    layers, heads, head_size = _refuse_others(*graphs)
    hidden_size = int(value_sizes(next(value for value in graphs[0].output if value.name == _STATES))[-1])
    vocabulary = value_sizes(next(value for value in graphs[1].output if value.name == _LOGITS))[-1]
    context = first_number(config, _POSITIONS, 0)
    if not context:
        raise UsageError(
            f"--layout genai: the config of the checkpoint has no length of a text; expected {' or '.join(_POSITIONS)}",
            hint="Add the number to config.json, or leave --layout out.",
        )
    shape = {
        "head_size": head_size,
        "hidden_size": hidden_size,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": heads,
    }
    eos = token_of(generation, config, "eos_token_id")
    described = {
        "type": _TYPE,
        "bos_token_id": token_of(generation, config, "bos_token_id", default=single(eos)),
        "eos_token_id": eos,
        "pad_token_id": single(token_of(generation, config, "pad_token_id", default=single(eos))),
        "vocab_size": first_number(config, ("vocab_size",), vocabulary if isinstance(vocabulary, int) else 0),
        "context_length": context,
        "encoder": {
            "session_options": session_section(),
            "filename": encoder[1],
            **shape,
            "inputs": {"audio_features": _FEATURES},
            "outputs": {"encoder_hidden_states": _STATES, **_names("cross_present", "present", "encoder")},
        },
        "decoder": {
            "session_options": session_section(),
            "filename": decoder[1],
            **shape,
            "inputs": {
                "input_ids": _TOKENS,
                **_names("past", "past_key_values", "decoder"),
                **_names("cross_past", "past_key_values", "encoder"),
            },
            "outputs": {"logits": _LOGITS, **_names("present", "present", "decoder")},
        },
    }
    return {"model": described, "search": search_section(generation, context, shares=False)}


def _names(role: str, beginning: str, side: str) -> dict[str, str]:
    """Return how genai is told the names of keys and values, with ``%d`` for the layer."""
    return {f"{role}_{kind}_names": f"{beginning}.%d.{side}.{kind}" for kind in ("key", "value")}


def _refuse_others(encoder: onnx.GraphProto, decoder: onnx.GraphProto) -> tuple[int, int, int]:
    """Refuse graphs that are of another kind; return layers, heads and size of a head.

    Raises:
        UsageError: names what is in the way.
    """
    given = {value.name: value_sizes(value) for value in encoder.input}
    taken = {value.name: value_sizes(value) for value in decoder.input}
    answered = {value.name for value in encoder.output}
    cross = {name: sizes for name, sizes in taken.items() if _CROSS.fullmatch(name)}
    states = {name: sizes for name, sizes in taken.items() if name in cross or _OWN.fullmatch(name)}
    other = [name for name in taken if name not in states and name != _TOKENS]
    shapes = {(sizes[1], sizes[3]) for sizes in states.values()}
    problem = ""
    if set(given) != {_FEATURES}:
        problem = f"an encoder that takes {', '.join(given)}; expected {_FEATURES} alone"
    elif given[_FEATURES][-1] not in (_FRAMES,):
        problem = f"{given[_FEATURES][-1]} frames of sound; expected {_FRAMES}"
    elif other or not cross:
        problem = f"a decoder that takes {', '.join(other or taken)}; expected {_TOKENS}, keys and values by layer"
    elif len(shapes) != 1 or {sizes[2] for sizes in cross.values()} != {_FRAMES // 2}:
        problem = f"caches of several sizes; expected one for all layers, of {_FRAMES // 2} entries at the encoder"
    elif missing := {name.replace("past_key_values", "present") for name in cross} - answered:
        problem = f"an encoder that does not answer {min(missing)}"
    if problem:
        raise UsageError(
            f"--layout genai: onnxruntime-genai has no type for {problem}",
            hint="Leave --layout out: winml generate and WinMLModelForSpeechSeq2Seq run the model.",
        )
    ((heads, head_size),) = shapes
    return len(cross) // 2, int(heads), int(head_size)


def audio_processor(sources: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """Return the description with which genai makes features of recordings, by its name.

    Args:
        sources: Files of the checkpoint that come along: name → file.

    Raises:
        InputError: the config of the feature extractor is damaged.
    """
    found = next((name for name in _PROCESSOR_FILES if name in sources), None)
    if found is None:
        return {}
    record = read_config(sources[found], found)
    record = record.get("feature_extractor", record)
    if not all(isinstance(record.get(field), int) for field in _PROCESSOR_FIELDS):
        return {}
    n_fft, hop, seconds, bins = (record[field] for field in _PROCESSOR_FIELDS)
    operations: tuple[tuple[str, str, dict[str, int]], ...] = (
        ("audio_decoder", "AudioDecoder", {}),
        ("STFT", "STFTNorm", {"n_fft": n_fft, "frame_length": n_fft, "hop_length": hop}),
        (
            "log_mel_spectrogram",
            "LogMelSpectrum",
            {"chunk_size": seconds, "hop_length": hop, "n_fft": n_fft, "n_mel": bins},
        ),
    )
    sequence = [
        {"operation": {"name": name, "type": kind, **({"attrs": settings} if settings else {})}}
        for name, kind, settings in operations
    ]
    return {AUDIO_PROCESSOR_NAME: {"feature_extraction": {"sequence": sequence}}}
