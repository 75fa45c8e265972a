"""Describes a model for onnxruntime-genai: ``genai_config.json``, and its companion files.

Names and sizes come from the graph; other values, such as end tokens, come from the config files of the model. The type
is a decoder of any family, with input names in the file, an audio encoder with a decoder, or one of the types for
images (``genai_vision.py``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winml.modelkit import file_names
from winml.modelkit.builds.layouts import layout
from winml.modelkit.builds.layouts.genai_vision import VISION_TYPES, VisionType, image_processor
from winml.modelkit.builds.layouts.usage import genai_usage
from winml.modelkit.errors import InputError, UsageError, opt
from winml.modelkit.onnx.specs import PAST_PREFIX, PRESENT_PREFIX

if TYPE_CHECKING:
    import onnx


def _value_sizes(value: onnx.ValueInfoProto) -> list[int | str]:
    """Return the sizes of an input or output: numbers, or names of dynamic dimensions."""
    return [dim.dim_value or dim.dim_param for dim in value.type.tensor_type.shape.dim]


_CPU = "cpu"
_PROVIDER_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "cuda": {"enable_cuda_graph": "0"},
    "dml": {"enable_graph_capture": "0"},
    "webgpu": {"enableGraphCapture": "0", "validationMode": "basic"},
}
"""Specified by the builder of onnxruntime-genai 0.18: provider → its options. Chosen: no capture of the graph, which
requires equal shapes in all runs; for ``dml``, onnxruntime-genai captures unless the option is stated."""


def _session_section(ep: str | None) -> dict[str, object]:
    """Return the session options of a graph: the defaults of ONNX Runtime, with the provider unless it is the CPU's."""
    options = [] if ep in (None, _CPU) else [{ep: dict(_PROVIDER_OPTIONS[ep])}]
    return {"log_id": "onnxruntime-genai", "provider_options": options}


def _search_section(generation: Mapping[str, object], context: int, *, shares: bool) -> dict[str, object]:
    """Return the ``search`` section, which controls the choice of tokens.

    Args:
        generation: ``generation_config.json`` of the checkpoint.
        context: Maximum number of tokens of a text.
        shares: True if new keys and values are written into the memory of the old ones.
    """
    defaults = {
        "diversity_penalty": 0.0, "do_sample": False, "early_stopping": True, "length_penalty": 1.0, "min_length": 0,
        "no_repeat_ngram_size": 0, "num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1.0,
        "temperature": 1.0, "top_k": 50, "top_p": 1.0,
    }  # fmt: skip
    stated_values = {key: generation[key] for key in defaults if generation.get(key) is not None}
    return {**defaults, **stated_values, "max_length": context, "past_present_share_buffer": shares}


def _first_number(config: Mapping[str, Any], keys: tuple[str, ...], default: int) -> int:
    """Return the first number among some entries of a config, or the default."""
    return next((int(config[key]) for key in keys if isinstance(config.get(key), int)), default)


def _special_tokens(generation: Mapping[str, object], config: Mapping[str, object]) -> dict[str, Any]:
    """Return the special tokens: numbers, or a list of end tokens. The first end token replaces missing tokens."""

    def token(key: str, default: object) -> Any:
        value = generation.get(key)
        value = layout.text_section(config).get(key, config.get(key)) if value is None else value
        return default if value is None else value

    end_tokens = token("eos_token_id", 0)
    return {
        "bos_token_id": token("bos_token_id", _first_token(end_tokens)),
        "eos_token_id": end_tokens,
        "pad_token_id": _first_token(token("pad_token_id", _first_token(end_tokens))),
    }


def _first_token(value: object) -> Any:
    """Return the first token of a list; any other value is returned unchanged."""
    return value[0] if isinstance(value, list) and value else value


def _read_config(path: Path | None, name: str) -> dict[str, Any]:
    """Read a config file; ``{}`` for None.

    Args:
        path: The file, or None.
        name: Name of the file, for the message.

    Raises:
        InputError: the file is damaged.
    """
    if path is None:
        return {}
    record = layout.read_source(path)
    if not isinstance(record, dict):
        raise InputError(
            f"{path}: is not a {name}: expected a JSON object", hint="Copy the file of the checkpoint again."
        )
    return record


_SPEECH_TYPE = "whisper"
_FEATURES, _STATES, _TOKENS, _LOGITS = "input_features", "last_hidden_state", "input_ids", "logits"
_FRAMES = 3000
"""Specified: the only number of frames that genai's type supports; the encoder output is half as long."""
_SELF_CACHE = re.compile(rf"{re.escape(PAST_PREFIX)}\d+\.decoder\.(?:key|value)")
_CROSS_CACHE = re.compile(rf"{re.escape(PAST_PREFIX)}\d+\.encoder\.(?:key|value)")
_POSITIONS = ("max_target_positions", "max_position_embeddings")
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_PROCESSOR_FIELDS = ("n_fft", "hop_length", "chunk_length", "feature_size")


def _speech_config(
    encoder: tuple[Path, str],
    decoder: tuple[Path, str],
    config: Mapping[str, object],
    generation: Mapping[str, object],
    ep: str | None,
) -> dict[str, object]:
    """Return ``genai_config.json`` of a speech recognition model: an encoder of recordings, and a decoder.

    genai has a single type for speech, named ``whisper``: thirty seconds of sound in 3000 frames, with keys and values
    computed once by the encoder. The type fits any encoder and decoder with these inputs, independent of the model's
    name.

    Args:
        encoder: The ONNX file of the encoder, and its name in the folder.
        decoder: The ONNX file of the decoder, and its name in the folder.
        config: ``config.json`` of the checkpoint.
        generation: ``generation_config.json`` of the checkpoint; ``{}`` if there is none.
        ep: Short name of the provider that the build is for, if any.

    Raises:
        UsageError: onnxruntime-genai has no type for the graphs, or the config states no context length; names the
            reason.
    """
    from winml.modelkit.onnx.files.reading import read_structure  # imports onnx

    graphs = [read_structure(path).graph for path, _ in (encoder, decoder)]
    layers, heads, head_size = _check_speech_graphs(*graphs)
    hidden_size = int(_value_sizes(next(value for value in graphs[0].output if value.name == _STATES))[-1])
    vocabulary = _value_sizes(next(value for value in graphs[1].output if value.name == _LOGITS))[-1]
    context = _first_number(config, _POSITIONS, 0)
    if not context:
        raise UsageError(
            f"{opt.layout} genai: the config of the checkpoint states no context length; expected "
            f"{' or '.join(_POSITIONS)}",
            hint=f"Add the number to config.json, or remove {opt.layout}.",
        )
    shape = {
        "head_size": head_size,
        "hidden_size": hidden_size,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": heads,
    }
    section = {
        "type": _SPEECH_TYPE,
        **_special_tokens(generation, config),
        "vocab_size": _first_number(config, ("vocab_size",), vocabulary if isinstance(vocabulary, int) else 0),
        "context_length": context,
        "encoder": {
            "session_options": _session_section(ep),
            "filename": encoder[1],
            **shape,
            "inputs": {"audio_features": _FEATURES},
            "outputs": {"encoder_hidden_states": _STATES, **_cache_names("cross_present", PRESENT_PREFIX, "encoder")},
        },
        "decoder": {
            "session_options": _session_section(ep),
            "filename": decoder[1],
            **shape,
            "inputs": {
                "input_ids": _TOKENS,
                **_cache_names("past", PAST_PREFIX, "decoder"),
                **_cache_names("cross_past", PAST_PREFIX, "encoder"),
            },
            "outputs": {"logits": _LOGITS, **_cache_names("present", PRESENT_PREFIX, "decoder")},
        },
    }
    return {"model": section, "search": _search_section(generation, context, shares=False)}


def _cache_names(role: str, prefix: str, part: str) -> dict[str, str]:
    """Return the entries of genai for the names of keys and values, with ``%d`` for the layer."""
    return {f"{role}_{kind}_names": f"{prefix}%d.{part}.{kind}" for kind in ("key", "value")}


def _check_speech_graphs(encoder: onnx.GraphProto, decoder: onnx.GraphProto) -> tuple[int, int, int]:
    """Refuse graphs of another type; return the number of layers, the number of heads and the size of a head.

    Raises:
        UsageError: onnxruntime-genai has no type for the graphs; names the reason.
    """
    encoder_inputs = {value.name: _value_sizes(value) for value in encoder.input}
    inputs = {value.name: _value_sizes(value) for value in decoder.input}
    outputs = {value.name for value in encoder.output}
    cross = {name: sizes for name, sizes in inputs.items() if _CROSS_CACHE.fullmatch(name)}
    states = {name: sizes for name, sizes in inputs.items() if name in cross or _SELF_CACHE.fullmatch(name)}
    extra = [name for name in inputs if name not in states and name != _TOKENS]
    shapes = {(sizes[1], sizes[3]) for sizes in states.values()}
    problem = ""
    if set(encoder_inputs) != {_FEATURES}:
        problem = f"an encoder with inputs {', '.join(encoder_inputs)}; expected {_FEATURES} only"
    elif encoder_inputs[_FEATURES][-1] not in (_FRAMES,):
        problem = f"{encoder_inputs[_FEATURES][-1]} frames of audio; expected {_FRAMES}"
    elif extra or not cross:
        problem = f"a decoder with inputs {', '.join(extra or inputs)}; expected {_TOKENS}, keys and values by layer"
    elif len(shapes) != 1 or {sizes[2] for sizes in cross.values()} != {_FRAMES // 2}:
        problem = f"caches of several sizes; expected one for all layers, of {_FRAMES // 2} entries at the encoder"
    elif missing := {name.replace(PAST_PREFIX, PRESENT_PREFIX, 1) for name in cross} - outputs:
        problem = f"an encoder without output {min(missing)}"
    if problem:
        raise UsageError(
            f"{opt.layout} genai: onnxruntime-genai has no type for {problem}",
            hint=f"Remove {opt.layout}: winml generate and WinMLModelForSpeechSeq2Seq run the model.",
        )
    ((heads, head_size),) = shapes
    return len(cross) // 2, int(heads), int(head_size)


def _processor_settings(sources: Mapping[str, Path], section: str) -> dict[str, Any]:
    """Return the settings of a feature extractor or an image processor; ``{}`` without a file.

    Args:
        sources: Files of the checkpoint to copy: name → file.
        section: Key of the settings in a file that has them for the whole processor.

    Raises:
        InputError: the config is damaged.
    """
    name = next((name for name in _PROCESSOR_FILES if name in sources), "")
    record = _read_config(sources.get(name), name)
    settings: dict[str, Any] = record.get(section, record)
    return settings


def _audio_processor(sources: Mapping[str, Path]) -> dict[str, dict[str, object]]:
    """Return file name → description of the audio features for genai; ``{}`` without a feature extractor."""
    record = _processor_settings(sources, "feature_extractor")
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
    return {file_names.AUDIO_PROCESSOR_NAME: {"feature_extraction": {"sequence": sequence}}}


_VISION_PARTS = {file_names.VISION, file_names.EMBEDDING, file_names.DECODER}
_EMBEDDED, _IMAGE_FEATURES = "inputs_embeds", "image_features"


def _vision_config(
    kind: VisionType,
    models: Mapping[str, tuple[Path, str]],
    config: Mapping[str, Any],
    generation: Mapping[str, object],
    ep: str | None,
) -> dict[str, object]:
    """Return ``genai_config.json`` of a vision-language model.

    Args:
        kind: The type in onnxruntime-genai.
        models: Part → its current ONNX file, and its final name in the folder.
        config: ``config.json`` of the checkpoint.
        generation: ``generation_config.json`` of the checkpoint; ``{}`` if there is none.
        ep: Short name of the provider that the build is for, if any.

    Raises:
        UsageError: a graph has other inputs than the type; names the input.
    """
    from winml.modelkit.onnx.files.reading import read_structure  # imports onnx

    expected = {file_names.VISION: kind.vision_inputs, file_names.EMBEDDING: (_TOKENS, _IMAGE_FEATURES)}
    for part, names in expected.items():
        found = [value.name for value in read_structure(models[part][0]).graph.input]
        if sorted(found) != sorted(names):
            raise UsageError(
                f"{opt.layout} genai: the type {kind.name} of onnxruntime-genai has no input for {models[part][0].name}"
                f", which takes {', '.join(found)}; expected {', '.join(names)}",
                hint=f"Build from the checkpoint, or remove {opt.layout}: winml generate runs the model.",
            )
    whole = genai_config(*models[file_names.DECODER], config, generation, ep, tokens=_EMBEDDED)
    sizes = {key: config["vision_config"][key] for key in kind.sizes if key in config["vision_config"]}
    model: dict[str, object] = {
        **whole["model"],
        "type": kind.name,
        **{key: config[key] for key in kind.tokens if key in config},
        file_names.EMBEDDING: {
            "session_options": _session_section(ep),
            "filename": models[file_names.EMBEDDING][1],
            "inputs": {name: name for name in expected[file_names.EMBEDDING]},
            "outputs": {_EMBEDDED: _EMBEDDED},
        },
        file_names.VISION: {
            "session_options": _session_section(ep),
            "filename": models[file_names.VISION][1],
            "config_filename": file_names.IMAGE_PROCESSOR_NAME,
            **sizes,
            "inputs": {name: name for name in kind.vision_inputs},
            "outputs": {_IMAGE_FEATURES: _IMAGE_FEATURES},
        },
    }
    return {**whole, "model": model}


def _image_processor(kind: VisionType, sources: Mapping[str, Path]) -> dict[str, dict[str, object]]:
    """Return file name → description of the image processor for genai; ``{}`` without an image processor."""
    record = image_processor(kind, _processor_settings(sources, "image_processor"))
    return {file_names.IMAGE_PROCESSOR_NAME: record} if record else {}


_DECODER_TYPE = "decoder"
"""Specified: type in onnxruntime-genai for a model of any family with tokens and a cache of keys and values as
inputs."""
_PLAIN_INPUTS = ("attention_mask", "position_ids")
_CACHE = re.compile(r"(.+\.)(\d+)(\.(?:key|value))")
_DEFAULT_CONTEXT = 4096
"""Chosen: for configs without a limit of positions; genai allocates memory on demand."""
_SHARING_OPERATOR = "GroupQueryAttention"
"""Specified: operator that writes new keys and values into the memory of the old ones."""


@dataclass(frozen=True)
class _Caches:
    """The keys and values of a decoder."""

    past_names: Mapping[str, str]
    """``key`` and ``value`` → name with ``%d`` for the layer."""
    present_names: Mapping[str, str]
    layers: int
    heads: int
    head_size: int


def genai_texts(
    models: Mapping[str, tuple[Path, str]], sources: Mapping[str, Path], ep: str | None = None
) -> dict[str, str]:
    """Return the files that describe a folder to onnxruntime-genai: name → text.

    Args:
        models: Part → its current ONNX file, and its final name in the folder.
        sources: Files of the checkpoint to copy: name → file.
        ep: Short name of the provider that the build is for, if any.

    Raises:
        UsageError: onnxruntime-genai has no type for the graphs.
        InputError: a config is damaged.
    """
    config, generation = (
        _read_config(sources.get(name), name)
        for name in (file_names.CHECKPOINT_CONFIG_NAME, file_names.GENERATION_CONFIG_NAME)
    )
    if set(models) == {file_names.ENCODER, file_names.DECODER}:
        speech_config = _speech_config(models[file_names.ENCODER], models[file_names.DECODER], config, generation, ep)
        texts = {file_names.GENAI_CONFIG_NAME: speech_config, **_audio_processor(sources)}
    elif set(models) == _VISION_PARTS and config.get("model_type") in VISION_TYPES:
        kind = VISION_TYPES[config["model_type"]]
        texts = {
            file_names.GENAI_CONFIG_NAME: _vision_config(kind, models, config, generation, ep),
            **_image_processor(kind, sources),
        }
    elif set(models) == {file_names.ONLY_PART}:
        texts = {file_names.GENAI_CONFIG_NAME: genai_config(*models[file_names.ONLY_PART], config, generation, ep)}
    else:
        raise UsageError(
            f"{opt.layout} genai: onnxruntime-genai has no type for a model of {', '.join(models)}; expected one "
            f"graph, or {file_names.ENCODER} and {file_names.DECODER}",
            hint=f"Remove {opt.layout} or {opt.submodel}.",
        )
    return {name: json.dumps(record, indent=2) + "\n" for name, record in texts.items()}


def _foundry_texts(files: layout.LayoutFiles) -> dict[str, str]:
    """Return the file of a decoder for Foundry Local: name → text; ``{}`` for other models."""
    from winml.modelkit.builds.layouts.foundry import foundry_record  # starts a process for chat templates

    if set(files.models) != {file_names.ONLY_PART}:
        return {}
    config = files.sources.get(file_names.CHECKPOINT_CONFIG_NAME)
    record = foundry_record(files.model, None if config is None else config.parent)
    return {file_names.FOUNDRY_NAME: json.dumps(record, indent=2, ensure_ascii=False) + "\n"}


def genai_config(
    model: Path,
    name: str,
    config: Mapping[str, object],
    generation: Mapping[str, object],
    ep: str | None = None,
    *,
    tokens: str = _TOKENS,
) -> dict[str, Any]:
    """Return the description of a decoder.

    Args:
        model: The ONNX file.
        name: Its name in the folder.
        config: ``config.json`` of the checkpoint.
        generation: ``generation_config.json`` of the checkpoint; ``{}`` if there is none.
        ep: Short name of the provider that the build is for, if any.
        tokens: Input for tokens, or for their embeddings.

    Raises:
        UsageError: onnxruntime-genai has no type for the graph; names the unsupported input.
    """
    from winml.modelkit.onnx.files.reading import read_structure, required_inputs  # imports onnx

    graph = read_structure(model).graph
    inputs = {value.name: value for value in required_inputs(graph)}
    plain_inputs = (tokens, *_PLAIN_INPUTS)
    caches = _read_caches(model, inputs, [value.name for value in graph.output], plain_inputs)
    vocabulary = _value_sizes(next(value for value in graph.output if value.name == "logits"))[-1]
    text = layout.text_section(config)
    limit = next((text[key] for key in ("max_position_embeddings", "n_positions", "seq_length") if text.get(key)), None)
    context = int(limit or _DEFAULT_CONTEXT)
    heads = _first_number(text, ("num_attention_heads", "n_head", "num_heads"), caches.heads)
    hidden_size = _first_number(text, ("hidden_size", "n_embd", "d_model"), heads * caches.head_size)
    if tokens == _EMBEDDED:
        hidden_size = int(_value_sizes(inputs[_EMBEDDED])[-1])  # with the mark of image tokens
    decoder = {
        "session_options": _session_section(ep),
        "filename": name,
        "head_size": caches.head_size,
        "hidden_size": hidden_size,
        "inputs": {
            **{name: name for name in plain_inputs if name in inputs},
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
    section = {
        "type": _DECODER_TYPE,
        **_special_tokens(generation, config),
        "vocab_size": _first_number(text, ("vocab_size",), vocabulary if isinstance(vocabulary, int) else 0),
        "context_length": context,
        "decoder": decoder,
    }
    return {"model": section, "search": _search_section(generation, context, shares=_shares_buffers(graph, caches))}


def _read_caches(
    model: Path, inputs: Mapping[str, onnx.ValueInfoProto], outputs: list[str], plain_inputs: tuple[str, ...]
) -> _Caches:
    """Return names and sizes of the keys and values of a decoder.

    Raises:
        UsageError: other inputs, no cache, no logits, or layers of different sizes.
    """
    caches = {name: match for name in inputs if (match := _CACHE.fullmatch(name))}
    extra = [name for name in inputs if name not in caches and name not in plain_inputs]
    if not caches or extra or "logits" not in outputs:
        problem = f"takes {extra[0]!r}" if extra else "has no cache" if not caches else "has no logits"
        raise UsageError(
            f"{opt.layout} genai: onnxruntime-genai has no type for {model.name}, which {problem}; expected "
            f"{', '.join(plain_inputs)}, keys and values by layer, and logits",
            hint=f"Remove {opt.layout}: winml generate and WinMLModelForCausalLM run the model.",
        )
    sizes = {name: _value_sizes(value) for name, value in inputs.items() if name in caches}
    shapes = {(size[1], size[3]) for size in sizes.values() if len(size) == 4}
    if len(shapes) != 1 or not all(isinstance(number, int) for number in next(iter(shapes))):
        raise UsageError(
            f"{opt.layout} genai: the layers of {model.name} have caches of different sizes, and onnxruntime-genai "
            "supports one size",
            hint=f"Remove {opt.layout}: winml generate and WinMLModelForCausalLM run the model.",
        )
    heads, head_size = next(iter(shapes))
    past = {match[3][1:]: f"{match[1]}%d{match[3]}" for match in caches.values()}
    present = {match[3][1:]: f"{match[1]}%d{match[3]}" for name in outputs if (match := _CACHE.fullmatch(name))}
    layers = len({int(match[2]) for match in caches.values()})
    return _Caches(past, present, layers, int(heads), int(head_size))


def _shares_buffers(graph: onnx.GraphProto, caches: _Caches) -> bool:
    """Return True if only operators that write new keys and values into the same memory read the caches."""
    beginnings = tuple(name.partition("%d")[0] for name in caches.past_names.values())
    readers = [node.op_type for node in graph.node if any(name.startswith(beginnings) for name in node.input)]
    return bool(readers) and set(readers) == {_SHARING_OPERATOR}


_GENERATING_CLASSES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForSpeechSeq2Seq")
"""Specified by transformers: suffixes of the names of classes that generate text."""


def _unknown_kind(config: Mapping[str, Any], task: str | None, has_cache: bool) -> str:
    """Return the kind of a model without a type in onnxruntime-genai; ``""`` without evidence in the config."""
    classes = config.get("architectures")
    name = str(classes[0]) if isinstance(classes, list) and classes else ""
    if layout.is_vision_language(config, task):
        return _unknown_vision_kind(config, has_cache)
    if task is None and "For" in name and not name.endswith(_GENERATING_CLASSES):
        return f"{name}, which generates no text"
    if config.get("is_encoder_decoder") is True and not isinstance(config.get("num_mel_bins"), int):
        return "an encoder-decoder without audio as input"
    is_decoder = has_cache and task in (None, "text-generation")
    return (
        "a decoder with states other than keys and values" if is_decoder and layout.has_recurrent_layers(config) else ""
    )


def _unknown_vision_kind(config: Mapping[str, Any], has_cache: bool) -> str:
    """Return the kind of a vision-language model without a type in onnxruntime-genai; ``""`` if it has a type."""
    kind = VISION_TYPES.get(config.get("model_type", ""))
    if kind is None:
        return f"a vision-language model of model type {config.get('model_type')}"
    if not has_cache:
        return "a vision-language model without a cache"
    unfit = [key for key, number in kind.fixed.items() if config.get(key, number) != number]
    return f"{unfit[0]} {config[unfit[0]]}; expected {kind.fixed[unfit[0]]}" if unfit else ""


GENAI = layout.Layout(
    "genai",
    lambda part, of_several, _precision: file_names.built_part_name(part, of_several=of_several),
    readers="onnxruntime-genai",
    tasks=frozenset({"text-generation", "automatic-speech-recognition", "image-text-to-text"}),
    unknown=_unknown_kind,
    embedding_of="features",
    described=(
        file_names.GENAI_CONFIG_NAME,
        file_names.AUDIO_PROCESSOR_NAME,
        file_names.IMAGE_PROCESSOR_NAME,
        file_names.FOUNDRY_NAME,
    ),
    describe=lambda files: {**genai_texts(files.models, files.sources, files.ep), **_foundry_texts(files)},
    rewritten=(file_names.TOKENIZER_CONFIG_NAME,),
    # onnxruntime-genai expects a string for every key.
    rewrite=lambda sources: layout.rewritten_tokenizer(
        sources, lambda record: {key: value for key, value in record.items() if value is not None}
    ),
    for_onnxruntime=True,
    pads_right=True,
    usage=genai_usage,
    providers=frozenset({_CPU, *_PROVIDER_OPTIONS}),
)
"""Layout for onnxruntime-genai."""
