"""The layout of optimum, and the layout of transformers.js with a file name for each precision.

sentence-transformers opens the layout of optimum as well. Besides names, a layout has a tokenizer that earlier
transformers read, and a note if the empty cache of optimum does not fit the graph.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from winml.modelkit.builds.layouts import layout
from winml.modelkit.builds.layouts.transformers_js_dtypes import DTYPES
from winml.modelkit.builds.layouts.transformers_js_types import TYPES
from winml.modelkit.builds.layouts.usage import optimum_usage, transformers_js_usage
from winml.modelkit.errors import InputError, UsageError, opt
from winml.modelkit.file_names import CHECKPOINT_CONFIG_NAME, TOKENIZER_CONFIG_NAME, numbered_data_path
from winml.modelkit.onnx.specs import PAST_PREFIX
from winml.modelkit.options import JsonError, read_json_file
from winml.modelkit.quantize.precisions import PRECISIONS

TASKS = frozenset(
    {
        "feature-extraction", "fill-mask", "text-classification", "token-classification", "question-answering",
        "multiple-choice", "image-classification", "image-segmentation", "object-detection", "depth-estimation",
        "zero-shot-image-classification", "audio-classification", "automatic-speech-recognition", "image-to-image",
        "text-generation", "text2text-generation", "image-to-text", "sentence-similarity",
        "zero-shot-object-detection", "zero-shot-audio-classification", "image-feature-extraction", "text-to-audio",
        "audio-frame-classification", "audio-xvector", "document-question-answering", "visual-question-answering",
        "keypoint-detection", "mask-generation", "zero-shot-classification",
    }
)  # fmt: skip
"""Specified: tasks of optimum's ``ORTModelFor…`` classes and of transformers.js' pipelines and ``AutoModelFor…``. For
``image-text-to-text``, see :func:`_unknown_to_both`."""

_STEMS: Mapping[str, str] = {
    "model": "model", "encoder": "encoder_model", "decoder": "decoder_model_merged", "vision": "vision_encoder",
    "embedding": "embed_tokens", "text": "text_model",
}  # fmt: skip
"""Specified: part → file name in transformers.js; optimum has the same names for encoders and decoders."""


def _model_stem(part: str, of_several: bool) -> str:
    """Return the file name of a part, without its suffix."""
    return _STEMS.get(part, part) if of_several else "model"


_WITH_HEAD_SIZE = frozenset({"gemma", "gemma3_text", "gemma3", "gpt_oss", "nemotron"})
_WITH_KEY_HEADS = frozenset(
    {
        "arcee", "cohere", "gemma", "gemma3", "gemma3_text", "glm", "granite", "gpt_oss", "helium", "mistral", "llama",
        "nemotron", "qwen2", "qwen3", "qwen3_moe", "smollm3", "stablelm",
    }
)  # fmt: skip
"""Specified by optimum-onnx 0.1: model types with ``head_dim``, and with ``num_key_value_heads``, in its list."""
_SPECIAL_TYPES = frozenset({"deepseek_v3", "bloom", "gpt_bigcode", "falcon"})
"""Specified by optimum-onnx 0.1: model types with a rule of their own."""
_WIDTHS, _HEADS = ("hidden_size", "d_model", "n_embd"), (
    "num_attention_heads", "num_heads", "n_head", "encoder_attention_heads",
)  # fmt: skip
"""Specified by transformers: config keys of the width of a model, and of its number of heads."""
_SECTIONS = ("decoder", "text_config")


def unfit_cache_words(config: Path, inputs: Mapping[str, Sequence[int | str | None]]) -> str:
    """Describe a difference between the empty cache of optimum and the cache inputs of a graph; ``""`` if none is
    known.

    Before the first token, optimum passes keys and values of length zero to a decoder. It reads the number and size of
    heads from ``config.json``; a fixed list in optimum has the model types with ``head_dim``.

    Args:
        config: ``config.json`` of the checkpoint.
        inputs: Name → sizes of the graph inputs.
    """
    try:
        record = read_json_file(config)
    except (OSError, JsonError):
        return ""
    shapes = [shape for name, shape in inputs.items() if name.startswith(PAST_PREFIX) and name.endswith(".key")]
    if not isinstance(record, dict) or not shapes or len(shapes[0]) != 4 or record.get("model_type") in _SPECIAL_TYPES:
        return ""
    is_encoded = any(".encoder." in name for name in inputs)
    empty = _optimum_heads(record, is_encoded=is_encoded)
    heads, size = shapes[0][1], shapes[0][3]
    if empty is None or not isinstance(heads, int) or not isinstance(size, int) or empty == (heads, size):
        return ""
    decoder = "model.decoder" if is_encoded else "model"
    names = f"{decoder}.{'num_attention_heads' if is_encoded else 'num_key_value_heads'}"
    return (
        f"optimum-onnx 0.1 makes an empty cache of {empty[0]} heads of {empty[1]} values from {config.name}, and the "
        f"graph takes {heads} heads of {size}: its generate() fails. After loading, set {names} = {heads} and "
        f"{decoder}.embed_size_per_head = {size}; or generate with WinMLAutoModel."
    )


def _optimum_heads(record: Mapping[str, Any], *, is_encoded: bool) -> tuple[int, int] | None:
    """Return number and size of the heads in the empty cache of optimum; ``None`` if missing in the config."""
    model_type = record.get("model_type")
    section = next((record[name] for name in _SECTIONS if isinstance(record.get(name), dict)), record)
    width, heads = (_first_number(section, keys) for keys in (_WIDTHS, _HEADS))
    if width is None or not heads:
        return None
    if is_encoded:
        return heads, width // heads
    size = _first_number(section, ("head_dim",)) if model_type in _WITH_HEAD_SIZE else None
    key_heads = _first_number(section, ("num_key_value_heads",)) if model_type in _WITH_KEY_HEADS else None
    return key_heads or heads, size or width // heads


def _first_number(record: Mapping[str, Any], keys: Iterable[str]) -> int | None:
    """Return the first integer among some entries of a config, or ``None``."""
    return next((record[key] for key in keys if isinstance(record.get(key), int)), None)


_CLASS = "tokenizer_class"
_NEW_CLASS, _OLD_CLASS = "TokenizersBackend", "PreTrainedTokenizerFast"
"""Specified: class that reads ``tokenizer.json``: its name in transformers 5, and a name for all versions."""

_EXTRA, _OLD_EXTRA = "extra_special_tokens", "additional_special_tokens"
"""Specified: key of special tokens without a role: in transformers 5, and a key that all versions read.
"""


def _use_older_names(record: Mapping[str, Any]) -> dict[str, object]:
    """Return a tokenizer config with the names that all versions of transformers read."""
    new_record = {**record, **({_CLASS: _OLD_CLASS} if record.get(_CLASS) == _NEW_CLASS else {})}
    if isinstance(new_record.get(_EXTRA), list):
        # Only a list: in an object, which all versions read, keys name the roles of tokens.
        new_record[_OLD_EXTRA] = [*(new_record.get(_OLD_EXTRA) or ()), *new_record.pop(_EXTRA)]
    return new_record


_PREPROCESSOR_NAME, _PROCESSOR_NAME = "preprocessor_config.json", "processor_config.json"
"""Specified: file that both readers expect, and file that contains it as a section if transformers 5 wrote it."""
_PROCESSOR_SECTIONS = ("feature_extractor", "image_processor")


def _preprocessor_text(sources: Mapping[str, Path]) -> dict[str, str]:
    """Return ``preprocessor_config.json`` of a checkpoint with ``processor_config.json`` alone; ``{}`` for others.

    Raises:
        InputError: the file of the checkpoint is damaged.
    """
    path = sources.get(_PROCESSOR_NAME)
    if path is None or _PREPROCESSOR_NAME in sources:
        return {}
    record = layout.read_source(path)
    sections = [record[name] for name in _PROCESSOR_SECTIONS if isinstance(record, dict) and name in record]
    settings = {key: value for section in sections if isinstance(section, dict) for key, value in section.items()}
    if not settings:
        return {}
    if "processor_class" in record:
        settings["processor_class"] = record["processor_class"]
    return {_PREPROCESSOR_NAME: json.dumps(settings, indent=2, ensure_ascii=False) + "\n"}


_RECURRENT = "a decoder with recurrent states, of which a graph reads one token in each run"


def _unknown_to_optimum(config: Mapping[str, Any], task: str | None, has_cache: bool) -> str:
    """Return the kind of a model without a class in optimum, or ``""``."""
    if layout.is_vision_language(config, task) or task == "image-text-to-text":
        return "a vision-language model in three graphs"
    return _unknown_to_both(config, task, has_cache)


def _unknown_to_both(config: Mapping[str, Any], task: str | None, has_cache: bool) -> str:
    """Return the kind of a model without a class in optimum and transformers.js, or ``""``."""
    is_decoder = has_cache and task in (None, "text-generation")
    return _RECURRENT if is_decoder and layout.has_recurrent_layers(config) else ""


def _unknown_to_transformers_js(config: Mapping[str, Any], task: str | None, has_cache: bool) -> str:
    """Return the kind of a model without a class in transformers.js, or ``""``."""
    model_type, classes = config.get("model_type"), config.get("architectures")
    name = str(classes[0]) if isinstance(classes, list) and classes else ""
    if unknown := _unknown_to_both(config, task, has_cache):
        return unknown
    if layout.is_vision_language(config, task):
        task = "image-text-to-text"
        if not has_cache:
            return "a vision-language model without a cache"
    if task is None and name.endswith(("ForCausalLM", "LMHeadModel")):
        task = "text-generation"
    if not isinstance(model_type, str):
        return ""
    if task is not None:
        types = TYPES.get(task)
        return f"{task} of model type {model_type}" if types is not None and model_type not in types else ""
    # A model without a head is opened regardless of its type.
    is_known = not name or name.endswith("Model") or any(model_type in types for types in TYPES.values())
    return "" if is_known else f"model type {model_type}"


_UNKNOWN_INPUTS: Mapping[str, str] = {
    "past_recurrent.": _RECURRENT,
    "image_features": "a vision-language model whose embedding graph takes the vectors of images",
}
"""Prefix of the name of a graph input → kind of model that neither reader has a class for."""


OPTIMUM = layout.Layout(
    "optimum",
    lambda part, of_several, _precision: f"{_model_stem(part, of_several)}.onnx",
    readers="optimum and sentence-transformers",
    tasks=TASKS,
    unknown=_unknown_to_optimum,
    unknown_inputs=_UNKNOWN_INPUTS,
    cross_keys="decoder",
    rewritten=(TOKENIZER_CONFIG_NAME, _PREPROCESSOR_NAME),
    rewrite=lambda sources: {
        **layout.rewritten_tokenizer(sources, _use_older_names),
        **_preprocessor_text(sources),
    },
    note=unfit_cache_words,
    usage=optimum_usage,
)
"""Layout for ``ORTModelFor…``."""


def _model_name(part: str, of_several: bool, precision: str) -> str:
    """Return the path of a part for transformers.js; raises UsageError for a precision without a suffix."""
    suffixes = {name: entry.transformers_js_suffix for name, entry in PRECISIONS.items()}
    if (suffix := suffixes.get(precision)) is None:
        supported = ", ".join(name for name, known_suffix in suffixes.items() if known_suffix is not None)
        raise UsageError(
            f"{opt.layout} transformers.js has no name for precision {precision}", hint=f"It knows {supported}."
        )
    return f"onnx/{_model_stem(part, of_several)}{suffix}.onnx"


_SECTION, _COUNTS, _CACHES = "transformers.js_config", "use_external_data_format", "kv_cache_dtype"
"""Specified: section of transformers.js in the config; its keys with model file → number of its data files, and with
dtype → type of the KV cache, which transformers.js 3 reads. Later versions read the type from the graph."""


_SHARED_CACHE = "multi_query"
"""Specified by transformers.js: config key; if true, a decoder takes ``past_key_values.N.key_value``."""


def _config_of_files(source: Path, counts: Mapping[str, int], caches: Mapping[str, str], *, has_keys: bool) -> str:
    """Return the text of a config with the number of data files of each model, which a browser then fetches.

    The text is that of the checkpoint if all weights are inside the models, all caches are in float32, and the cache
    inputs have the names that transformers.js derives from it.

    Args:
        source: ``config.json`` of the checkpoint.
        counts: Name of each model file → number of its data files.
        caches: Dtype → type of its KV cache, if other than float32.
        has_keys: True if keys and values are separate inputs of the decoder.

    Raises:
        InputError: the config is damaged.
    """
    record = layout.read_source(source)
    outside = {name: count for name, count in counts.items() if count}
    if not isinstance(record, dict) or not isinstance(record.get(_SECTION, {}), dict):
        raise InputError(f"{source}: is no config: {_SECTION!r} or the whole is no JSON object")
    section = {key: value for key, value in record.get(_SECTION, {}).items() if key not in (_COUNTS, _CACHES)}
    if outside:
        section[_COUNTS] = outside
    if caches:
        section[_CACHES] = dict(caches)
    new_record = {**record, **({_SECTION: section} if section or _SECTION in record else {})}
    if has_keys and record.get(_SHARED_CACHE):
        new_record[_SHARED_CACHE] = False
    if new_record == record:
        return source.read_text(encoding="utf-8")
    return json.dumps(new_record, indent=2, ensure_ascii=False) + "\n"


def _describe_data(files: layout.LayoutFiles) -> dict[str, str]:
    """Return ``config.json`` with data files and cache types of the models; ``{}`` without a config."""
    import onnx

    config = files.sources.get(CHECKPOINT_CONFIG_NAME)
    if config is None:
        return {}
    placed = {name for names in files.data.values() for name in names}
    counts = {Path(name).name: _count_data(name, placed) for name in files.dtypes}
    types = _cache_types(files.dtypes)
    half = {dtype: "float16" for dtype, inputs in types.items() if onnx.TensorProto.FLOAT16 in inputs.values()}
    has_keys = any(name.endswith(".key") for inputs in types.values() for name in inputs)
    return {CHECKPOINT_CONFIG_NAME: _config_of_files(config, counts, half, has_keys=has_keys)}


def _count_data(model: str, names: Collection[str]) -> int:
    """Return the number of data files of a model among the names of placed files."""
    numbers = itertools.count()
    return sum(
        1 for _ in itertools.takewhile(lambda n: numbered_data_path(Path(model), n).as_posix() in names, numbers)
    )


def _cache_types(models: Mapping[str, Path]) -> dict[str, dict[str, int]]:
    """Return dtype → name → element type of the cache inputs of a decoder; files that do not exist are skipped."""
    from winml.modelkit.onnx.files.reading import read_structure

    caches = {}
    for name, path in models.items():
        inputs = read_structure(path).graph.input if path.is_file() else ()
        if types := {
            value.name: value.type.tensor_type.elem_type for value in inputs if value.name.startswith(PAST_PREFIX)
        }:
            ends = {dtype: entry.suffix for dtype, entry in DTYPES.items() if Path(name).stem.endswith(entry.suffix)}
            caches[max(ends, key=lambda dtype: len(ends[dtype]))] = types
    return caches


TRANSFORMERS_JS = layout.Layout(
    "transformers.js",
    _model_name,
    readers="transformers.js",
    tasks=TASKS | {"image-text-to-text"},
    unknown=_unknown_to_transformers_js,
    unknown_inputs=_UNKNOWN_INPUTS,
    cross_keys="decoder",
    embedding_of="tokens",
    described=(CHECKPOINT_CONFIG_NAME,),
    describe=_describe_data,
    rewritten=(_PREPROCESSOR_NAME,),
    rewrite=_preprocessor_text,
    unread=("vocab.txt", TOKENIZER_CONFIG_NAME),
    numbers_data=True,
    for_browsers=True,  # measured: onnxruntime-web 1.31 in WebAssembly
    dtypes=DTYPES,
    usage=transformers_js_usage,
    language="js",
)
"""Layout for browsers and Node.js."""
