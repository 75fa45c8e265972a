"""Which classes prepare the inputs: tokenizer, image processor, feature extractor?

Read from the JSON files beside the config, else from transformers' own tables by model type. Nothing is built, and
nothing is fetched.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winml.modelkit.load.checkpoints.processor_files import read_json_object

__all__ = ["ProcessorClass", "find_processor_classes"]

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
