"""Which files of a checkpoint do its tokenizer, its processors and pipelines read?

Goes by the names that transformers and sentence-transformers give their files, so that nothing else of a folder is ever
copied. None of the files is opened, but ``modules.json``, in which sentence-transformers names folders.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winml.modelkit.errors import CheckpointError
from winml.modelkit.file_names import is_plain_name
from winml.modelkit.graph.files.foreign_names import name_problem
from winml.modelkit.load.checkpoints.weight_files import FORMATS
from winml.modelkit.options import JsonError, read_json_file

__all__ = [
    "COMPANION_NAMES",
    "LARGEST_COMPANION",
    "LARGEST_MODULE_WEIGHTS",
    "MODULES_NAME",
    "ProcessorClass",
    "ProcessorInfo",
    "card_files",
    "companion_files",
    "find_processor_classes",
    "read_json_object",
    "read_processor_files",
]


MODULES_NAME = "modules.json"
"""Names the modules of a sentence-transformers checkpoint and the folders they are in."""
_VOCABULARY_NAMES = frozenset(
    {
        "bpe.codes",
        "byte_maps.json",
        "dict.txt",
        "emoji.json",
        "entity_vocab.json",
        "merges.txt",
        "normalizer.json",
        "prophetnet.tokenizer",
        "sentencepiece.bpe.model",
        "sentencepiece.model",
        "source.spm",
        "spiece.model",
        "spm.model",
        "spm_char.model",
        "target.spm",
        "target_vocab.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab-src.json",
        "vocab-tgt.json",
        "vocab.json",
        "vocab.txt",
        "word_pronunciation.json",
        "word_shape.json",
    }
)
"""Every file name in ``vocab_files_names`` of transformers' tokenizers; a test compares them with those installed."""
_TRANSFORMERS_NAMES = frozenset(
    {
        "added_tokens.json",
        "audio_tokenizer_config.json",
        "chat_template.jinja",
        "chat_template.json",
        "config.json",
        "generation_config.json",
        "preprocessor_config.json",
        "processor_config.json",
        "special_tokens_map.json",
        "video_preprocessor_config.json",
    }
)
"""Constants in ``transformers.utils`` and ``transformers.tokenization_utils_base``; image processors and feature
extractors share a name."""
_SENTENCE_TRANSFORMERS_NAMES = frozenset(
    {
        MODULES_NAME,
        "config_sentence_transformers.json",
        "sentence_albert_config.json",
        "sentence_bert_config.json",
        "sentence_camembert_config.json",
        "sentence_distilbert_config.json",
        "sentence_roberta_config.json",
        "sentence_xlm-roberta_config.json",
        "sentence_xlnet_config.json",
    }
)
COMPANION_NAMES = _VOCABULARY_NAMES | _TRANSFORMERS_NAMES | _SENTENCE_TRANSFORMERS_NAMES
"""Names of files at the top of a checkpoint that go beside its ONNX file."""
_OF_A_VERSION = re.compile(r"(config|tokenizer)\.\d+(\.\d+)*\.json")
"""What transformers from that version on reads instead."""
_OF_CARD = re.compile(r"(README|LICEN[SC]E|NOTICE|USE_POLICY|COPYING)([._-].*)?", re.IGNORECASE)
"""How the Hub's checkpoints name their card, licence and what goes with it."""
_TEMPLATES_FOLDER = "additional_chat_templates"
_MODULES_WITH_WEIGHTS = frozenset({"CNN", "Dense", "LSTM", "LayerNorm", "WeightedLayerPooling"})
"""Classes of sentence-transformers that work on what the model returns, and so are no part of the ONNX file."""
_MODULE_SUFFIXES = frozenset({".json", ".txt"})
LARGEST_COMPANION = 200_000_000
"""Bytes. Chosen: vocabularies of 40 MB are usual, weights and data sets begin above."""
LARGEST_MODULE_WEIGHTS = 100_000_000
"""Bytes. Chosen: those of a layer on top of a model have a few millions."""
_LARGEST_MODULE_FILE = 10_000_000
"""Bytes. Chosen: configs, and the weights of words by name."""


def companion_files(folder: Path) -> dict[str, Path]:
    """Return the files of a checkpoint folder that go beside its ONNX file: name, ``/`` between parts → file.

    Besides those at the top, these are the files of the folders that ``modules.json`` names, such as
    ``1_Pooling/config.json``. Files of other names, of more than 200 MB, and hidden ones stay behind. Empty for a path
    that is no folder.
    """
    if not folder.is_dir():
        return {}
    files = [path for path in folder.iterdir() if _is_companion(path)]
    templates = folder / _TEMPLATES_FOLDER
    if templates.is_dir():
        files += (
            path for path in templates.iterdir() if path.suffix == ".jinja" and _is_up_to(path, LARGEST_COMPANION)
        )
    for place, type_name in _modules(folder / MODULES_NAME):
        files += _module_files(folder / place, type_name)
    displayed = (path for path in sorted(set(files)) if not path.name.startswith("."))
    return {path.relative_to(folder).as_posix(): path for path in displayed}


def card_files(folder: Path) -> dict[str, Path]:
    """Return card and licence of a checkpoint folder: name → file. Empty for a path that is no folder."""
    if not folder.is_dir():
        return {}
    return {path.name: path for path in sorted(folder.iterdir()) if _OF_CARD.fullmatch(path.name) and _is_small(path)}


def _is_small(path: Path) -> bool:
    return _is_up_to(path, _LARGEST_MODULE_FILE)


def _is_companion(path: Path) -> bool:
    is_known = path.name in COMPANION_NAMES or _OF_A_VERSION.fullmatch(path.name)
    return bool(is_known) and _is_up_to(path, LARGEST_COMPANION)


def _is_up_to(path: Path, size_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size <= size_bytes


def _modules(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the folders that ``modules.json`` names, each with its class; none where it is missing or damaged."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return
    for entry in content if isinstance(content, list) else ():
        place, type_name = (entry.get("path"), entry.get("type")) if isinstance(entry, dict) else (None, None)
        # "" is the transformer itself. Names that lead out of the folder are nobody's.
        if not isinstance(place, str) or not is_plain_name(place) or place.startswith("."):
            continue
        if name_problem(path.parent, place, kind="folder") is None:
            yield place, type_name.rpartition(".")[2] if isinstance(type_name, str) else ""


def _module_files(folder: Path, type_name: str) -> Iterator[Path]:
    indexes = {index for _, _, index in FORMATS}
    for path in folder.iterdir():
        is_small = path.suffix in _MODULE_SUFFIXES and _is_up_to(path, _LARGEST_MODULE_FILE)
        if path.name not in indexes and (is_small or _is_companion(path)):
            yield path
    if type_name in _MODULES_WITH_WEIGHTS:
        weights = (folder / single for _, single, _ in FORMATS)
        yield from [path for path in weights if _is_up_to(path, LARGEST_MODULE_WEIGHTS)][:1]


# --- Reads what the files of the tokenizer and the processors say about the inputs.
#
# Reads ``tokenizer_config.json``, ``preprocessor_config.json`` and ``processor_config.json`` as JSON. No tokenizer or
# processor is built: they may need packages that are not here, and nothing but a few numbers is asked of them.


_IMAGE_FILES = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class ProcessorInfo:
    """The little that inputs depend on; None where no file says so."""

    text_inputs: tuple[str, ...] | None = None
    """Names the tokenizer makes (``model_input_names``)."""
    max_tokens: int | None = None
    """Longest row the tokenizer makes."""
    image_size: tuple[int, int] | None = None
    """Height and width of the images the processor makes, in pixels."""
    sampling_rate_hz: int | None = None
    """Samples of audio per second."""
    window_seconds: float | None = None
    """How long a recording is that the model reads at once."""
    makes_audio_mask: bool | None = None
    """Whether the feature extractor hands an attention mask to the model."""


def read_processor_files(folder: Path | None) -> ProcessorInfo:
    """Read the files of a checkpoint folder; without a folder nothing is known.

    Raises:
        CheckpointError: a file is there and is not a JSON object.
    """
    if folder is None:
        return ProcessorInfo()
    tokenizer = read_json_object(folder / "tokenizer_config.json")
    processor: dict[str, object] = {}
    for name in _IMAGE_FILES:
        content = read_json_object(folder / name)
        # Newer processors nest their parts in one file.
        for part in ("image_processor", "feature_extractor", "video_processor"):
            nested = content.get(part)
            processor = {**(nested if isinstance(nested, dict) else {}), **processor}
        processor = {**content, **processor}
    return ProcessorInfo(
        text_inputs=_input_names(tokenizer.get("model_input_names")),
        max_tokens=_positive_int(tokenizer.get("model_max_length")),
        image_size=_image_size(processor),
        sampling_rate_hz=_positive_int(processor.get("sampling_rate")),
        window_seconds=_positive_number(processor.get("chunk_length")),
        makes_audio_mask=_truth_value(processor.get("return_attention_mask")),
    )


def read_json_object(path: Path) -> dict[str, object]:
    """Return the JSON object in a file; empty where there is no such file.

    Raises:
        CheckpointError: it is there and is not a JSON object.
    """
    try:
        content = read_json_file(path)
    except FileNotFoundError:
        return {}
    except JsonError as error:
        raise CheckpointError(
            f"{path}: {error}", hint="Correct the file, or delete it to determine the inputs from the config only."
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(content).__name__}", hint="Correct the file.")
    return content


def _image_size(processor: dict[str, object]) -> tuple[int, int] | None:
    """Return the size after resizing and cropping: the crop where there is one, else the resize."""
    crops = processor.get("do_center_crop") is not False and "crop_size" in processor
    return _size_of(processor["crop_size"] if crops else processor.get("size"))


def _size_of(value: object) -> tuple[int, int] | None:
    if isinstance(value, dict):
        edge = value.get("shortest_edge")
        value = [value.get("height", edge), value.get("width", edge)]
    elif not isinstance(value, list):
        value = [value, value]
    sizes = [_positive_int(entry) for entry in value]
    if len(sizes) == 2 and sizes[0] is not None and sizes[1] is not None:
        return sizes[0], sizes[1]
    return None


_NO_LIMIT = 10**9
"""Tokenizers write 1e30 for "no limit"."""


def _positive_int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < _NO_LIMIT else None


def _positive_number(value: object) -> float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 else None


def _input_names(value: object) -> tuple[str, ...] | None:
    return tuple(map(str, value)) if isinstance(value, list) else None


def _truth_value(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


# --- Which classes prepare the inputs: tokenizer, image processor, feature extractor?
#
# Read from the JSON files beside the config, else from transformers' own tables by model type. Nothing is built, and
# nothing is fetched.


_TABLE = "transformers' table"

_FILES = (
    ("processor", "processor_config.json", "processor_class"),
    ("processor", "preprocessor_config.json", "processor_class"),
    ("processor", "tokenizer_config.json", "processor_class"),
    ("tokenizer", "tokenizer_config.json", "tokenizer_class"),
    ("image processor", "preprocessor_config.json", "image_processor_type"),
    ("feature extractor", "preprocessor_config.json", "feature_extractor_type"),
)
"""Role, file, and the key that names the class. Roles are looked up in this order."""

_TABLES = {
    "tokenizer": ("tokenization_auto", "TOKENIZER_MAPPING_NAMES"),
    "image processor": ("image_processing_auto", "IMAGE_PROCESSOR_MAPPING_NAMES"),
    "feature extractor": ("feature_extraction_auto", "FEATURE_EXTRACTOR_MAPPING_NAMES"),
}

_IMAGE_INPUTS = {"pixel_values"}
_AUDIO_INPUTS = {"input_values", "input_features"}
_TEXT_INPUTS = {"input_ids"}


@dataclass(frozen=True)
class ProcessorClass:
    """A class that makes inputs for the model."""

    role: str
    """``tokenizer``, ``image processor``, ``feature extractor``, or ``processor``, which joins several."""
    class_name: str
    origin: str
    """File that names it, or the table it was looked up in."""


def find_processor_classes(
    folder: Path | None, model_type: str, input_names: Iterable[str]
) -> tuple[ProcessorClass, ...]:
    """Return the classes that prepare the inputs, those the files name first.

    Args:
        folder: Checkpoint folder; None where there is none.
        model_type: transformers' model type.
        input_names: Inputs of the model, by which the roles it needs are known.

    Raises:
        CheckpointError: a file is there and is not a JSON object.
    """
    classes: dict[str, ProcessorClass] = {}
    for role, file, key in _FILES:
        name = read_json_object(folder / file).get(key) if folder is not None else None
        if isinstance(name, str) and name and role not in classes:
            classes[role] = ProcessorClass(role, name, file)
    for role in _roles_for(set(input_names)):
        if role not in classes and (name := _class_in_table(role, model_type)):
            classes[role] = ProcessorClass(role, name, _TABLE)
    return tuple(classes.values())


def _roles_for(inputs: set[str]) -> list[str]:
    inputs_by_role = [
        ("tokenizer", _TEXT_INPUTS),
        ("image processor", _IMAGE_INPUTS),
        ("feature extractor", _AUDIO_INPUTS),
    ]
    return [role for role, names in inputs_by_role if inputs & names]


def _class_in_table(role: str, model_type: str) -> str | None:
    module, table = _TABLES[role]
    # By its full name: asked of the package, the module is a dummy where Pillow is missing.
    names: Any = getattr(importlib.import_module(f"transformers.models.auto.{module}"), table)
    entry = names.get(model_type)
    # A table names one class, or several by the library they are made with.
    entries = entry.values() if isinstance(entry, dict) else entry if isinstance(entry, (list, tuple)) else (entry,)
    return next((name for name in reversed(list(entries)) if isinstance(name, str)), None)
