"""Which files of a checkpoint do its tokenizer, its processors and pipelines read?

Goes by the names that transformers and sentence-transformers give their files, so that nothing else of a folder is ever
copied. None of the files is opened, but ``modules.json``, in which sentence-transformers names folders.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winml.modelkit.errors import CheckpointError
from winml.modelkit.file_names import CARD_NAME, is_plain_name
from winml.modelkit.models.checkpoints.weight_files import FORMATS
from winml.modelkit.onnx.files.foreign_files import (
    MODULES_NAME,
    TEMPLATES_FOLDER,
    is_companion_name,
    library_file,
)
from winml.modelkit.onnx.files.foreign_names import name_problem
from winml.modelkit.options import JsonError, read_json_file, read_text_file

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

    Raises:
        CheckpointError: a file is a link that leads out of the folder, a pipe, a device or a socket.
    """
    if not folder.is_dir():
        return {}
    names = [path.name for path in folder.iterdir() if is_companion_name(path.name)]
    if (templates := folder / TEMPLATES_FOLDER).is_dir():
        names += [f"{TEMPLATES_FOLDER}/{path.name}" for path in templates.iterdir() if path.suffix == ".jinja"]
    files = _files_up_to(folder, names, LARGEST_COMPANION)
    if MODULES_NAME in files:
        for place, type_name in _modules(files[MODULES_NAME]):
            files |= _module_files(folder, place, type_name)
    displayed = (name for name in sorted(files) if not files[name].name.startswith("."))
    return {name: files[name] for name in displayed}


def card_files(folder: Path) -> dict[str, Path]:
    """Return card and licence of a checkpoint folder: name → file. Empty for a path that is no folder.

    Raises:
        CheckpointError: a file is a link that leads out of the folder, a pipe, a device or a socket.
    """
    if not folder.is_dir():
        return {}
    names = sorted(path.name for path in folder.iterdir() if CARD_NAME.fullmatch(path.name))
    return _files_up_to(folder, names, _LARGEST_MODULE_FILE)


def _files_up_to(folder: Path, names: Iterable[str], size_bytes: int) -> dict[str, Path]:
    """Return the files of these names that are no larger: name → file."""
    found = ((name, library_file(folder, name, error=CheckpointError)) for name in names)
    return {name: path for name, path in found if path is not None and path.stat().st_size <= size_bytes}


def _modules(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the folders that ``modules.json`` names, each with its class; none where it is missing or damaged."""
    try:
        content: Any = json.loads(read_text_file(path))
    except (OSError, ValueError, RecursionError):
        return
    for entry in content if isinstance(content, list) else ():
        place, type_name = (entry.get("path"), entry.get("type")) if isinstance(entry, dict) else (None, None)
        # "" is the transformer itself. Names that lead out of the folder are nobody's.
        if not isinstance(place, str) or not is_plain_name(place) or place.startswith("."):
            continue
        if name_problem(path.parent, place, kind="folder") is None:
            yield place, type_name.rpartition(".")[2] if isinstance(type_name, str) else ""


def _module_files(folder: Path, place: str, type_name: str) -> dict[str, Path]:
    """Return the files of one folder that ``modules.json`` names."""
    indexes = {index for _, _, index in FORMATS}
    names = {path.name for path in (folder / place).iterdir()} - indexes
    small = [f"{place}/{name}" for name in names if Path(name).suffix in _MODULE_SUFFIXES]
    large = [f"{place}/{name}" for name in names if is_companion_name(name)]
    files = _files_up_to(folder, small, _LARGEST_MODULE_FILE) | _files_up_to(folder, large, LARGEST_COMPANION)
    if type_name in _MODULES_WITH_WEIGHTS:
        weights = _files_up_to(folder, [f"{place}/{single}" for _, single, _ in FORMATS], LARGEST_MODULE_WEIGHTS)
        files |= dict(list(weights.items())[:1])
    return files


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
    tokenizer = _read_json_object(folder, "tokenizer_config.json")
    processor: dict[str, object] = {}
    for name in _IMAGE_FILES:
        content = _read_json_object(folder, name)
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


def _read_json_object(folder: Path, name: str) -> dict[str, object]:
    """Return the JSON object in a file of a folder; ``{}`` if there is no such file.

    Raises:
        CheckpointError: the file is not a JSON object, or is a link that leads out of the folder.
    """
    path = library_file(folder, name, error=CheckpointError)
    if path is None:
        return {}
    try:
        content = read_json_file(path)
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
        name = _read_json_object(folder, file).get(key) if folder is not None else None
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
