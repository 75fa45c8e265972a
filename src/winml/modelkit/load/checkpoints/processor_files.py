"""Reads what the files of the tokenizer and the processors say about the inputs.

Reads ``tokenizer_config.json``, ``preprocessor_config.json`` and ``processor_config.json`` as JSON. No tokenizer or
processor is built: they may need packages that are not here, and nothing but a few numbers is asked of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winml.modelkit.errors import CheckpointError
from winml.modelkit.options import JsonError, read_json_file

__all__ = ["ProcessorInfo", "read_json_object", "read_processor_files"]

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
    processor: dict[str, Any] = {}
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


def read_json_object(path: Path) -> dict[str, Any]:
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
            f"{path}: {error}", hint="Mend the file, or delete it to decide the inputs from the config alone."
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(content).__name__}", hint="Mend the file.")
    return content


def _image_size(processor: dict[str, Any]) -> tuple[int, int] | None:
    """Return the size after resizing and cropping: the crop where there is one, else the resize."""
    crops = processor.get("do_center_crop") is not False and "crop_size" in processor
    return _size_of(processor["crop_size"] if crops else processor.get("size"))


def _size_of(value: Any) -> tuple[int, int] | None:
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


def _positive_int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < _NO_LIMIT else None


def _positive_number(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 else None


def _input_names(value: Any) -> tuple[str, ...] | None:
    return tuple(map(str, value)) if isinstance(value, list) else None


def _truth_value(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None
