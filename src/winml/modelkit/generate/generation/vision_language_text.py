"""Prepares a text and the pictures it is about, for a language model that is shown images.

Tokens and pixels are made together by transformers' processor beside the model: it knows which tokens stand for a
picture, and how many. A text without pictures needs the tokenizer only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from winml.modelkit.arrays import Array
from winml.modelkit.errors import InputError, UsageError
from winml.modelkit.file_names import DECODER, EMBEDDING, VISION, files_folder
from winml.modelkit.generate.generation.decoder_prompt import PreparedPrompt
from winml.modelkit.generate.generation.loop import GeneratedToken, TokenSource, generate_tokens
from winml.modelkit.generate.generation.settings import part_position_limit, read_settings
from winml.modelkit.generate.generation.text import read_tokenizer, rendered_chat
from winml.modelkit.onnx.files.foreign_files import foreign_parser
from winml.modelkit.ort.decoding.inputs import POSITIONS, TOKEN_TYPES
from winml.modelkit.ort.decoding.vision_language import PIXEL_MASK, VisionLanguageDecoder, VisionLanguageFiles
from winml.modelkit.ort.foreign_libraries import library_folder
from winml.modelkit.samples.media import Unreadable, open_image
from winml.modelkit.samples.processors import tokenizer_call

_VIDEO_HALF = "video_processor"
"""Specified by transformers: part of a processor, which needs torchvision."""


def prepare_vision_language(
    files: Mapping[str, Path],
    text: str,
    pictures: Sequence[str],
    *,
    is_chat: bool,
    system: str | None = None,
    **requested: Any,
) -> PreparedPrompt:
    """Make tokens and pixels, and settle how the answer is written; no graph is opened.

    Args:
        files: The ONNX files by part; tokenizer, processor and configs are beside them.
        text: What is asked. Where it names no place for the pictures, they come before it.
        pictures: Their paths.
        is_chat: Whether the text is the message of a user, which the chat template of the model makes a prompt of.
        system: What the chat template is given before it in the role ``system``.
        **requested: See :meth:`~winml.modelkit.generate.generation.settings.GenerationSettings.updated`.

    Raises:
        UsageError: the prompt is empty, there is no such picture or no chat template, or there are too few positions.
        InputError: a picture does not open, there is no processor or tokenizer, or a file is damaged.
    """
    folder = files_folder(files[DECODER])
    images = [_opened_image(path) for path in pictures]
    tokenizer = read_tokenizer(folder)
    settings = read_settings(folder).updated(**requested)
    created: dict[str, Array] = {}
    if images or is_chat:
        text, tokens, created = _processed(files, folder, text, images, is_chat=is_chat, system=system)
    else:
        tokens = tuple(tokenizer.encode(text))
    if not tokens:
        raise UsageError("the prompt is empty, and the tokenizer adds no start token", hint="Pass a text.")
    settings = settings.fitted(len(tokens), part_position_limit(files[DECODER], folder))
    kinds, positions = created.pop(TOKEN_TYPES, None), created.pop(POSITIONS, None)
    displayed = VisionLanguageFiles(files[VISION], files[EMBEDDING], created if images else {}, kinds, positions)
    return PreparedPrompt(files[DECODER], text, tokens, settings, tokenizer, shown=displayed)


def vision_language_tokens(graph: VisionLanguageDecoder, prompt: PreparedPrompt) -> TokenSource:
    """Let the model see, and return the loop that chooses the tokens, and the tokens.

    Raises:
        UsageError: the graphs do not take what is given.
        StageError: ONNX Runtime fails.
    """
    assert prompt.shown is not None  # prepared for such a model
    if prompt.settings.for_transformers is None:
        return "winml", _tokens_after_seeing(graph, prompt, prompt.shown)
    import torch

    from winml.modelkit.generate.generation.causal_lm import generated_by
    from winml.modelkit.generate.generation.vision_language_model import VisionLanguageModel

    model = VisionLanguageModel.of_graph(graph, files_folder(prompt.model))
    beside = {TOKEN_TYPES: prompt.shown.kinds, POSITIONS: prompt.shown.positions}
    arrays = {**prompt.shown.pixels, **{name: array for name, array in beside.items() if array is not None}}
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    passed = {"inputs": torch.tensor([list(prompt.tokens)]), **tensors}
    return "transformers", generated_by(model, passed, len(prompt.tokens), prompt.settings)


def _tokens_after_seeing(
    graph: VisionLanguageDecoder, prompt: PreparedPrompt, displayed: VisionLanguageFiles
) -> Iterator[GeneratedToken]:
    """Yield the tokens; the time of the first is that of seeing, too."""
    started = time.perf_counter()
    seen = graph.embedder.see(displayed.pixels) if displayed.pixels else {}
    if displayed.kinds is not None:
        seen[TOKEN_TYPES] = displayed.kinds
    seconds = time.perf_counter() - started
    for entry in generate_tokens(graph, prompt.tokens, prompt.settings, encoded=seen, positions=displayed.positions):
        yield replace(entry, seconds=entry.seconds + seconds)
        seconds = 0.0


def _opened_image(path: str) -> Any:
    if not Path(path).is_file():
        raise UsageError(f"--image {path}: no such file", hint="Pass the path of an existing image.")
    image = open_image(path, None, path)
    if isinstance(image, Unreadable):
        raise InputError(
            f"--image {path}: cannot be opened: {image.reason}", hint="Pass an image, such as PNG or JPEG."
        )
    return image.convert("RGB")


def _processed(
    files: Mapping[str, Path], folder: Path, text: str, images: Sequence[object], *, is_chat: bool, system: str | None
) -> tuple[str, tuple[int, ...], dict[str, Array]]:
    """Return the text with places for the pictures, its tokens, and what the graphs take besides."""
    from winml.modelkit.onnx.files.reading import read_structure

    processor = _open_processor(folder)
    count = len(images)
    text = _chat_text(processor, folder, text, count, system) if is_chat else _placed_text(processor, text, count)
    hint = "Pass one image for each image placeholder in the prompt."
    with foreign_parser(f"--image: the processor in {folder} failed", hint=hint), tokenizer_call(folder, text):
        created = processor(
            images=list(images) or None, text=[text], add_special_tokens=not is_chat, return_tensors="pt"
        )
    arrays = {name: np.asarray(value) for name, value in created.items()}
    names = [value.name for value in read_structure(files[VISION]).graph.input]
    requested = {value.name: value for value in read_structure(files[DECODER]).graph.input}
    names += [PIXEL_MASK, *(name for name in requested if name == TOKEN_TYPES)]
    tokens = tuple(int(token) for token in arrays["input_ids"][0])
    retained = {name: arrays[name] for name in names if name in arrays}
    several: Any = requested[POSITIONS].type.tensor_type.shape.dim if POSITIONS in requested else ()
    if images and len(several) > 2:
        retained[POSITIONS] = _positions_with_images(folder, several[0].dim_value, created)
    return text, tokens, retained


def _positions_with_images(folder: Path, rows: int, created: Mapping[str, Any]) -> Array:
    """Return the positions of the tokens of a text with pictures."""
    from winml.modelkit.generate.generation.vision_language_model import ImagePositions
    from winml.modelkit.samples.processors import open_config

    positions = ImagePositions(open_config(folder), rows)
    return np.asarray(positions.of_prompt(created["input_ids"], created))


def _open_processor(folder: Path) -> Any:
    with library_folder(folder, f"{folder}: its processor cannot be read", hint=_COPY_HINT), tokenizer_call(folder):
        processor = _processor_class(folder).from_pretrained(folder)
    if not hasattr(processor, "image_processor"):
        raise InputError(f"{folder}: no processor for images and text", hint=_COPY_HINT)
    return processor


def _processor_class(folder: Path) -> Any:
    """Return what opens the processor in a folder: without its half for videos, where a package for that is missing."""
    import transformers
    from transformers.models.auto import processing_auto
    from transformers.utils.import_utils import is_torchvision_available

    from winml.modelkit.models.checkpoints.processor_files import find_processor_classes

    make: Any = transformers.AutoProcessor
    class_of_name: Any = processing_auto.processor_class_from_name
    named = next((item for item in find_processor_classes(folder, "", ()) if item.role == "processor"), None)
    found: Any = None if named is None else class_of_name(named.class_name)
    if is_torchvision_available() or found is None or _VIDEO_HALF not in found.get_attributes():
        return make
    halves = [name for name in found.get_attributes() if name != _VIDEO_HALF]
    return type(found.__name__, (found,), {"get_attributes": classmethod(lambda _class: halves)})


_COPY_HINT = "Copy the processor files of the checkpoint there (processor_config.json), or build the model again."


def _placed_text(processor: object, text: str, count: int) -> str:
    """Return a text that holds a place for each picture: before it, where it names none itself.

    A token that is more than its text is one that a processor puts before texts itself.
    """
    place = getattr(processor, "image_token", None)
    return text if not isinstance(place, str) or not place or place in text else place * count + text


def _chat_text(processor: Any, folder: Path, text: str, count: int, system: str | None) -> str:
    """Return what the chat template makes of a message with pictures.

    Raises:
        UsageError: there is no template.
        InputError: it fails.
    """
    content = [*({"type": "image"} for _ in range(count)), {"type": "text", "text": text}]
    templates = (getattr(holder, "chat_template", None) for holder in (processor, processor.tokenizer))
    template = next((one.get("default") if isinstance(one, dict) else one for one in templates if one), None)
    if not template:
        raise UsageError(
            f"{folder}: no chat template", hint="Omit --chat: without it, the model continues the text as it is."
        )
    messages = [{"role": "user", "content": content}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": [{"type": "text", "text": system}]})
    return rendered_chat(folder, template, messages, processor.tokenizer.special_tokens_map)
