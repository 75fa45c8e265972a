"""Reading of the tokenizer and processor files of a checkpoint.

The files state sizes of inputs and name the classes that prepare inputs; a class that no file names is looked up in
transformers' tables by model type. No tokenizer or processor is built: its packages may be missing.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winml.modelkit.errors import CheckpointError
from winml.modelkit.onnx.files.foreign_files import library_file
from winml.modelkit.options import JsonError, read_json_file

_IMAGE_FILES = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class ProcessorInfo:
    """Properties of inputs in the processor files; `None` if no file states the property."""

    text_inputs: tuple[str, ...] | None = None
    """Names of the tokenizer's outputs (``model_input_names``)."""
    max_tokens: int | None = None
    """Maximum row length of the tokenizer."""
    image_size: tuple[int, int] | None = None
    """Height and width of the processor's images, in pixels."""
    sampling_rate_hz: int | None = None
    """Samples of audio per second."""
    window_seconds: float | None = None
    """Length of a recording that the model reads at once."""
    audio_frames: int | None = None
    """Frames of the spectrogram of the longest recording (``for: CLAP``)."""
    makes_audio_mask: bool | None = None
    """True if the feature extractor returns an attention mask for the model."""


def read_processor_files(folder: Path | None) -> ProcessorInfo:
    """Read the files of a checkpoint folder; without a folder, all properties are unknown.

    Raises:
        CheckpointError: a file exists and is not a JSON object.
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
    # The size after resizing and cropping.
    crops = processor.get("do_center_crop") is not False and "crop_size" in processor
    names = tokenizer.get("model_input_names")
    makes_mask = processor.get("return_attention_mask")
    seconds: Any = processor.get("chunk_length")
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    samples, hop = _positive_int(processor.get("nb_max_samples")), _positive_int(processor.get("hop_length"))
    return ProcessorInfo(
        text_inputs=tuple(map(str, names)) if isinstance(names, list) else None,
        max_tokens=_positive_int(tokenizer.get("model_max_length")),
        image_size=_parse_size(processor.get("crop_size" if crops else "size")),
        sampling_rate_hz=_positive_int(processor.get("sampling_rate")),
        window_seconds=seconds if is_number and seconds > 0 else None,
        audio_frames=None if samples is None or hop is None else samples // hop + 1,
        makes_audio_mask=makes_mask if isinstance(makes_mask, bool) else None,
    )


def _read_json_object(folder: Path, name: str) -> dict[str, object]:
    """Return the JSON object in a file of a folder; ``{}`` if the file is missing.

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


def _parse_size(value: object) -> tuple[int, int] | None:
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
"""Numbers from here on mean "no limit"; tokenizers write 1e30."""


def _positive_int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < _NO_LIMIT else None


_TABLE_ORIGIN = "transformers' table"

_CLASS_FILES = (
    ("processor", "processor_config.json", "processor_class"),
    ("processor", "preprocessor_config.json", "processor_class"),
    ("processor", "tokenizer_config.json", "processor_class"),
    ("tokenizer", "tokenizer_config.json", "tokenizer_class"),
    ("image processor", "preprocessor_config.json", "image_processor_type"),
    ("feature extractor", "preprocessor_config.json", "feature_extractor_type"),
)
"""Role, file, and the key that names the class. Roles are looked up in this order."""

_CLASS_TABLES = {
    "tokenizer": ("tokenization_auto", "TOKENIZER_MAPPING_NAMES"),
    "image processor": ("image_processing_auto", "IMAGE_PROCESSOR_MAPPING_NAMES"),
    "feature extractor": ("feature_extraction_auto", "FEATURE_EXTRACTOR_MAPPING_NAMES"),
}

_ROLE_INPUTS = {
    "tokenizer": {"input_ids"},
    "image processor": {"pixel_values"},
    "feature extractor": {"input_values", "input_features"},
}
"""Role → inputs of a model that require it."""


@dataclass(frozen=True)
class ProcessorClass:
    """A class that prepares inputs for the model."""

    role: str
    """``tokenizer``, ``image processor``, ``feature extractor``, or ``processor``, which joins several."""
    class_name: str
    origin: str
    """File that names the class, or the table of the lookup."""


def find_processor_classes(
    folder: Path | None, model_type: str, input_names: Iterable[str]
) -> tuple[ProcessorClass, ...]:
    """Return the classes that prepare the inputs; classes named in files come first.

    Args:
        folder: Checkpoint folder; `None` if there is none.
        model_type: transformers' model type.
        input_names: Inputs of the model, which determine the required roles.

    Raises:
        CheckpointError: a file exists and is not a JSON object.
    """
    classes: dict[str, ProcessorClass] = {}
    for role, file, key in _CLASS_FILES:
        name = _read_json_object(folder, file).get(key) if folder is not None else None
        if isinstance(name, str) and name and role not in classes:
            classes[role] = ProcessorClass(role, name, file)
    names = set(input_names)
    for role, inputs in _ROLE_INPUTS.items():
        if inputs & names and role not in classes and (name := _look_up_class(role, model_type)):
            classes[role] = ProcessorClass(role, name, _TABLE_ORIGIN)
    return tuple(classes.values())


def _look_up_class(role: str, model_type: str) -> str | None:
    module, table = _CLASS_TABLES[role]
    # By its full module name: as an attribute of the package, the module is a dummy if Pillow is missing.
    names: Any = getattr(importlib.import_module(f"transformers.models.auto.{module}"), table)
    entry = names.get(model_type)
    # A table names one class, or several classes by backend.
    entries = entry.values() if isinstance(entry, dict) else entry if isinstance(entry, (list, tuple)) else (entry,)
    return next((name for name in reversed(list(entries)) if isinstance(name, str)), None)
