"""Preparation of prompts with images or recordings, and of texts for an encoder.

transformers' processors next to the model compute pixels and features. For a vision-language model, the processor makes
tokens and pixels together: it defines the placeholder tokens of an image and their number. A text without images needs
the tokenizer only, and no torch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from winml.modelkit.arrays import Array
from winml.modelkit.errors import InputError, UsageError, opt, spell
from winml.modelkit.file_names import (
    CHECKPOINT_CONFIG_NAME,
    DECODER,
    ENCODER,
    GENERATION_CONFIG_NAME,
    VISION,
    files_folder,
)
from winml.modelkit.generate.generation.decoder_prompt import PreparedPrompt, read_decoder_prompt
from winml.modelkit.generate.generation.loop import GeneratedToken
from winml.modelkit.generate.generation.settings import part_position_limit, read_generation_config
from winml.modelkit.generate.generation.text import TextSegment, TimedText, read_tokenizer
from winml.modelkit.models.checkpoints.processor_files import find_processor_classes, read_processor_files
from winml.modelkit.onnx.bundle import read_part_description
from winml.modelkit.onnx.files.foreign_files import foreign_parser
from winml.modelkit.onnx.files.reading import read_structure
from winml.modelkit.ort.decoding.inputs import POSITIONS, TOKEN_TYPES, inputs_of_file
from winml.modelkit.ort.decoding.parts import PIXEL_MASK, Encoder, EncoderDecoder
from winml.modelkit.ort.foreign_libraries import library_folder
from winml.modelkit.samples.chat_templates import rendered_chat
from winml.modelkit.samples.media import Unreadable, fit_to_grid, open_image, open_recording, resampled
from winml.modelkit.samples.processors import open_config, tokenizer_call

if TYPE_CHECKING:
    from PIL.Image import Image

_VIDEO_HALF = "video_processor"
"""Specified by transformers: part of a processor, which needs torchvision."""


def open_picture(path: str) -> Any:
    """Open an image file, converted to RGB.

    Raises:
        UsageError: there is no such file.
        InputError: the image does not open.
    """
    if not Path(path).is_file():
        raise UsageError(f"{opt.image} {path}: no such file", hint="Pass the path of an existing image.")
    image = open_image(path, None, path)
    if isinstance(image, Unreadable):
        raise InputError(
            f"{opt.image} {path}: cannot be opened: {image.reason}", hint="Pass an image, such as PNG or JPEG."
        )
    return image.convert("RGB")


def process_text(
    files: Mapping[str, Path], folder: Path, text: str, images: Sequence[Image], *, is_chat: bool, system: str | None
) -> tuple[str, tuple[int, ...], dict[str, Array]]:
    """Return the text with image placeholders, its tokens, and the other inputs of the graphs by name.

    Args:
        files: The ONNX files by part.
        folder: Folder of the processor.
        text: The text. Without placeholders, images are placed before it.
        images: The images.
        is_chat: True if the text is a user message for the chat template of the model.
        system: Message in the role ``system`` before it, or None.

    Raises:
        UsageError: the model has no chat template.
        InputError: the processor is missing, or fails.
    """
    processor = _open_processor(folder)
    count = len(images)
    text = _chat_text(processor, folder, text, count, system) if is_chat else _place_images(processor, text, count)
    hint = "Pass one image for each image placeholder in the prompt."
    specs = inputs_of_file(files[VISION])
    with foreign_parser(f"{opt.image}: the processor in {folder} failed", hint=hint), tokenizer_call(folder, text):
        fitted = [fit_to_grid(image, specs, processor.image_processor) for image in images]
        created = processor(images=fitted or None, text=[text], add_special_tokens=not is_chat, return_tensors="pt")
    arrays = {name: np.asarray(value) for name, value in created.items()}
    names = [spec.name for spec in specs]
    requested = {value.name: value for value in read_structure(files[DECODER]).graph.input}
    names += [PIXEL_MASK, *(name for name in requested if name == TOKEN_TYPES)]
    tokens = tuple(int(token) for token in arrays["input_ids"][0])
    inputs = {name: arrays[name] for name in names if name in arrays}
    several: Any = requested[POSITIONS].type.tensor_type.shape.dim if POSITIONS in requested else ()
    if images and len(several) > 2:
        inputs[POSITIONS] = _positions_with_images(folder, several[0].dim_value, created)
    return text, tokens, {name: array for name, array in inputs.items() if images or name == TOKEN_TYPES}


def _positions_with_images(folder: Path, rows: int, created: Mapping[str, Any]) -> Array:
    """Return the positions of the tokens of a text with pictures."""
    from winml.modelkit.generate.generation.transformers_loop import ImagePositions

    positions = ImagePositions(open_config(folder), rows)
    return np.asarray(positions.of_prompt(created["input_ids"], created))


def _open_processor(folder: Path) -> Any:
    """Open the processor for images and text in a folder.

    Raises:
        InputError: the processor cannot be read, or takes no images.
    """
    with library_folder(folder, f"{folder}: its processor cannot be read", hint=_COPY_HINT), tokenizer_call(folder):
        processor = _processor_class(folder).from_pretrained(folder)
    if not hasattr(processor, "image_processor"):
        raise InputError(f"{folder}: no processor for images and text", hint=_COPY_HINT)
    return processor


def _processor_class(folder: Path) -> Any:
    """Return the class of the processor in a folder; without its video processor if a package for it is missing."""
    import transformers
    from transformers.models.auto import processing_auto
    from transformers.utils.import_utils import is_torchvision_available

    make: Any = transformers.AutoProcessor
    class_of_name: Any = processing_auto.processor_class_from_name
    file_class = next((entry for entry in find_processor_classes(folder, "", ()) if entry.role == "processor"), None)
    processor_class: Any = None if file_class is None else class_of_name(file_class.class_name)
    if is_torchvision_available() or processor_class is None or _VIDEO_HALF not in processor_class.get_attributes():
        return make
    halves = [name for name in processor_class.get_attributes() if name != _VIDEO_HALF]
    return type(processor_class.__name__, (processor_class,), {"get_attributes": classmethod(lambda _class: halves)})


_COPY_HINT = "Copy the processor files of the checkpoint there (processor_config.json), or build the model again."


def _place_images(processor: object, text: str, count: int) -> str:
    """Return a text with image placeholders, added before it if it has none.

    An image token that is no text is added by the processor itself.
    """
    token = getattr(processor, "image_token", None)
    return text if not isinstance(token, str) or not token or token in text else token * count + text


def _chat_text(processor: Any, folder: Path, text: str, count: int, system: str | None) -> str:
    """Render the chat template for a message with images.

    Raises:
        UsageError: the model has no chat template.
        InputError: the template fails.
    """
    content = [*({"type": "image"} for _ in range(count)), {"type": "text", "text": text}]
    templates = (getattr(holder, "chat_template", None) for holder in (processor, processor.tokenizer))
    template = next((entry.get("default") if isinstance(entry, dict) else entry for entry in templates if entry), None)
    if not template:
        raise UsageError(
            f"{folder}: no chat template", hint=f"Omit {opt.chat}: without it, the model continues the text as it is."
        )
    messages = [{"role": "user", "content": content}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": [{"type": "text", "text": system}]})
    return rendered_chat(folder, template, messages, processor.tokenizer.special_tokens_map)


def _open_recording_prompt(prompt: PreparedPrompt, *, with_times: bool) -> PreparedPrompt:
    """Open the recording of a prompt; segment by segment if it is long, or if timestamps are requested.

    Args:
        prompt: Prompt of a recording in one piece.
        with_times: True if the text contains the times of each segment.

    Raises:
        UsageError: a model without timestamps gets a long recording, or a request for timestamps.
        InputError: the recording cannot be opened, or is empty.
    """
    folder = prompt.folder
    seconds = read_processor_files(folder).window_seconds
    recording = open_recording(prompt.text, None, prompt.text)
    if isinstance(recording, Unreadable):
        raise InputError(
            f"{opt.audio} {Path(prompt.text)}: cannot be opened: {recording.reason}",
            hint="Pass an audio file, such as WAV.",
        )
    if not len(recording.samples):
        raise InputError(
            f"{opt.audio} {Path(prompt.text)}: contains no samples", hint="Pass an audio file, such as WAV."
        )
    is_long = seconds is not None and len(recording.samples) > seconds * recording.rate_hz
    prompt = replace(prompt, recording=recording)
    if not (with_times or is_long):
        return prompt
    from winml.modelkit.generate.generation.transformers_loop import own_loop

    config = open_config(folder)
    has_times = read_generation_config(folder).get("no_timestamps_token_id") is not None
    if own_loop(config) is None or not has_times:
        requested = opt.timestamps if with_times else f"{opt.audio} {Path(prompt.text)} is longer than {seconds:g} s"
        raise UsageError(
            f"{requested}: the model in {folder} does not generate timestamps (requires no_timestamps_token_id "
            f"in {GENERATION_CONFIG_NAME}, and a model type with a loop for them in {CHECKPOINT_CONFIG_NAME})",
            hint=f"Omit {opt.timestamps}." if with_times else "Split it into files of at most this length.",
        )
    return replace(prompt, tokenizer=TimedText(prompt.tokenizer, with_times=with_times))


def recorded_tokens(graph: EncoderDecoder, prompt: PreparedPrompt, timed: TimedText) -> Iterator[GeneratedToken]:
    """Yield the tokens of a whole recording, all at the end; ``timed`` gets the segments before the first token.

    Raises:
        InputError: transformers' loop refuses the configs of the model.
        WinMLError: a run of the graphs fails.
    """
    from transformers import AutoFeatureExtractor, set_seed

    from winml.modelkit.generate.generation.transformers_loop import EncoderDecoderModel, generation_call

    started = time.perf_counter()
    folder = prompt.folder
    model: Any = EncoderDecoderModel.of_graph(graph, folder)
    make: Any = AutoFeatureExtractor
    failure = f"the feature extractor in {folder} cannot be used"
    with library_folder(folder, failure, hint="Correct or replace its files."):
        extractor = make.from_pretrained(folder)
    assert prompt.recording is not None  # opened by _open_recording_prompt
    with foreign_parser(failure, hint="Correct or replace its files."):
        samples = resampled(prompt.recording, int(extractor.sampling_rate))
        is_long = len(samples) > extractor.n_samples
        whole_options = {"truncation": False, "padding": "longest", "return_attention_mask": True} if is_long else {}
        features = extractor(samples, sampling_rate=extractor.sampling_rate, return_tensors="pt", **whole_options)
    settings = prompt.settings
    requested: dict[str, object] = {} if settings.is_default_length else {"max_new_tokens": settings.max_new_tokens}
    drawn = {"temperature": settings.temperature, "top_p": settings.top_p} if settings.is_sampled else {}
    set_seed(settings.seed)
    requested |= {"return_timestamps": True, "return_segments": True, "do_sample": settings.is_sampled}
    output = generation_call(model, **features, **requested, **drawn)
    first_time = int(model.generation_config.no_timestamps_token_id) + 1
    timed.segments = tuple(
        TextSegment(
            float(segment["start"]),
            float(segment["end"]),
            tuple(token for token in segment["tokens"].tolist() if token < first_time),
        )
        for segment in output["segments"][0]
    )
    tokens = output["sequences"][0].tolist()
    for number, token in enumerate(tokens):
        seconds = time.perf_counter() - started if number == 0 else 0.0
        yield GeneratedToken(token, seconds, "eos" if number + 1 == len(tokens) else "")


_OPTIONS: Mapping[str, str] = {
    "input_ids": "prompt", "input_features": "audio", "input_values": "audio", "pixel_values": "image",
}  # fmt: skip
"""Specified: transformers' name of the content input → the option that provides it."""


def prepare_encoder_decoder(
    files: Mapping[str, Path], values: Mapping[str, str | None], *, with_times: bool = False, **requested: Any
) -> PreparedPrompt:
    """Prepare the input of an encoder-decoder and its generation settings; no graph is opened.

    Args:
        files: The ONNX files of ``encoder`` and ``decoder``; tokenizer, processors and configs are in the same folder.
        values: ``prompt``: a text; ``audio``, ``image``: paths; None if not passed.
        with_times: True if the text of a recording contains times.
        **requested: See :meth:`~winml.modelkit.generate.generation.settings.GenerationSettings.updated`.

    Raises:
        UsageError: the model takes another kind of input, or has no timestamps.
        InputError: the tokenizer is missing, a file is damaged, or a recording cannot be opened.
    """
    encoder, decoder = files[ENCODER], files[DECODER]
    names = [value.name for value in read_structure(encoder).graph.input]
    medium_option = next((_OPTIONS[name] for name in names if name in _OPTIONS), None)
    content = values.get(medium_option or "")
    if medium_option is None or content is None or any(value for key, value in values.items() if key != medium_option):
        extra = next((spell(key) for key, value in values.items() if value and key != medium_option), "nothing")
        advice = "Run the parts with WinMLAutoModel."
        if medium_option is not None:
            advice = f"Use {spell(medium_option)}." if content is None else f"Omit {extra}."
        raise UsageError(f"{extra} does not apply: {encoder.name} takes {', '.join(names)}", hint=advice)
    folder = files_folder(decoder)
    tokenizer = read_tokenizer(folder)
    described = read_part_description(decoder)
    beginning, settings = read_decoder_prompt(folder, described.text if described is not None else None)
    prompt_tokens = 1 + beginning.prompt_places
    settings = settings.updated(**requested).fitted(prompt_tokens, part_position_limit(decoder, folder))
    tokens = tuple(tokenizer.encode(content)) if medium_option == "prompt" else ()
    if medium_option == "prompt" and not tokens:
        raise UsageError("the prompt is empty", hint="Pass a text.")
    limit = part_position_limit(encoder, folder, ENCODER)
    if limit is not None and len(tokens) > limit:
        raise UsageError(
            f"the prompt has {len(tokens)} tokens, but the encoder has {limit} positions", hint="Shorten it."
        )
    if medium_option != "prompt" and not Path(content).is_file():
        raise UsageError(f"{spell(medium_option)} {content}: no such file", hint="Pass the path of an existing file.")
    prompt = PreparedPrompt(files, content, tokens, settings, tokenizer, beginning=beginning, medium=medium_option)
    return _open_recording_prompt(prompt, with_times=with_times) if medium_option == "audio" else prompt


def encoder_arrays(encoder: Encoder, prompt: PreparedPrompt) -> dict[str, Array]:
    """Compute the inputs of an encoder from the prompt, by name.

    Raises:
        UsageError: the graph does not take the input.
        InputError: the input file cannot be opened.
    """
    inputs = encoder.unpadded_inputs if prompt.medium == "audio" else encoder.inputs
    if prompt.medium == "prompt":
        tokens = np.array([prompt.tokens], np.int64)
        arrays = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
        return {spec.name: arrays[spec.name] for spec in inputs if spec.name in arrays}
    from winml.modelkit.samples.preprocessing import Preprocessor

    opened: Any = prompt.recording or open_image(prompt.text, None, prompt.text)
    if isinstance(opened, Unreadable):
        raise InputError(f"{spell(prompt.medium)} {prompt.text}: cannot be opened: {opened.reason}")
    preprocessor = Preprocessor.of(prompt.folder, inputs, option=prompt.medium)
    (batch,) = preprocessor.batches([{str(prompt.medium): opened}])
    return dict(batch.feeds)
