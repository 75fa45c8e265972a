"""Prepares what an encoder reads – a text, a recording or a picture – and writes the text its decoder answers.

Our own loop chooses the tokens as long as the files ask for nothing else; a text then needs no torch. Recordings and
pictures are prepared by transformers' processors beside the model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from winml.modelkit.arrays import Array
from winml.modelkit.errors import InputError, UsageError
from winml.modelkit.file_names import CHECKPOINT_CONFIG_NAME, DECODER, ENCODER, GENERATION_CONFIG_NAME, files_folder
from winml.modelkit.generate.generation.decoder_prompt import PreparedPrompt, read_decoder_prompt
from winml.modelkit.generate.generation.loop import GeneratedToken, TokenSource, generate_tokens
from winml.modelkit.generate.generation.settings import part_position_limit, read_generation_config
from winml.modelkit.generate.generation.text import TextSegment, TimedText, read_tokenizer
from winml.modelkit.models.checkpoints.processor_files import read_processor_files
from winml.modelkit.onnx.files.foreign_files import foreign_parser
from winml.modelkit.ort.decoding.encoder_decoder import EncoderDecoder
from winml.modelkit.ort.foreign_libraries import library_folder
from winml.modelkit.ort.graph_inputs import GraphInput
from winml.modelkit.samples.media import Unreadable, open_image, open_recording, resampled


def _recorded_prompt(prompt: PreparedPrompt, *, with_times: bool) -> PreparedPrompt:
    """Return what is to be written of a recording, opened: segment by segment where it is long, or times are asked for.

    Args:
        prompt: A recording, as it would be written in one piece.
        with_times: Whether the text says when each segment is spoken.

    Raises:
        UsageError: times are asked of a model that tells none, or a long recording is given to one.
        InputError: the recording does not open, or is empty.
    """
    folder = files_folder(prompt.model)
    seconds = read_processor_files(folder).window_seconds
    recording = open_recording(prompt.text, None, prompt.text)
    if isinstance(recording, Unreadable):
        raise InputError(
            f"--audio {Path(prompt.text)}: cannot be opened: {recording.reason}",
            hint="Pass an audio file, such as WAV.",
        )
    if not len(recording.samples):
        raise InputError(f"--audio {Path(prompt.text)}: contains no samples", hint="Pass an audio file, such as WAV.")
    is_long = seconds is not None and len(recording.samples) > seconds * recording.rate_hz
    prompt = replace(prompt, recording=recording)
    if not (with_times or is_long):
        return prompt
    from winml.modelkit.generate.generation.seq2seq import own_loop
    from winml.modelkit.samples.processors import open_config

    config = open_config(folder)
    has_times = read_generation_config(folder).get("no_timestamps_token_id") is not None
    if own_loop(config) is None or not has_times:
        requested = "--timestamps" if with_times else f"--audio {Path(prompt.text)} is longer than {seconds:g} s"
        raise UsageError(
            f"{requested}: the model in {folder} does not generate timestamps (requires no_timestamps_token_id "
            f"in {GENERATION_CONFIG_NAME}, and a model type with a loop for them in {CHECKPOINT_CONFIG_NAME})",
            hint="Omit --timestamps." if with_times else "Split it into files of at most this length.",
        )
    return replace(prompt, tokenizer=TimedText(prompt.tokenizer, with_times=with_times))


def _recorded_tokens(graphs: EncoderDecoder, prompt: PreparedPrompt, timed: TimedText) -> Iterator[GeneratedToken]:
    """Yield the tokens of a whole recording, all at the end; the segments are told to ``timed`` before the first.

    Raises:
        InputError: transformers' loop refuses the configs of the model.
        WinMLError: whatever a run of the graphs raises.
    """
    from transformers import AutoFeatureExtractor, set_seed

    from winml.modelkit.generate.generation.causal_lm import generation_call
    from winml.modelkit.generate.generation.seq2seq import EncoderDecoderModel

    started = time.perf_counter()
    folder = files_folder(prompt.model)
    model: Any = EncoderDecoderModel.of_graphs(graphs, folder)
    make: Any = AutoFeatureExtractor
    words = f"the feature extractor in {folder} cannot be used"
    with library_folder(folder, words, hint="Correct or replace its files."):
        extractor = make.from_pretrained(folder)
    assert prompt.recording is not None  # opened by recorded_prompt
    with foreign_parser(words, hint="Correct or replace its files."):
        samples = resampled(prompt.recording, int(extractor.sampling_rate))
        is_long = len(samples) > extractor.n_samples
        complete = {"truncation": False, "padding": "longest", "return_attention_mask": True} if is_long else {}
        passed = extractor(samples, sampling_rate=extractor.sampling_rate, return_tensors="pt", **complete)
    settings = prompt.settings
    requested: dict[str, object] = {} if settings.is_default_length else {"max_new_tokens": settings.max_new_tokens}
    drawn = {"temperature": settings.step.temperature, "top_p": settings.step.top_p} if settings.step.is_sampled else {}
    set_seed(settings.seed)
    requested |= {"return_timestamps": True, "return_segments": True, "do_sample": settings.step.is_sampled}
    output = generation_call(model, **passed, **requested, **drawn)
    first_time = int(model.generation_config.no_timestamps_token_id) + 1
    timed.segments = tuple(
        TextSegment(
            float(item["start"]),
            float(item["end"]),
            tuple(token for token in item["tokens"].tolist() if token < first_time),
        )
        for item in output["segments"][0]
    )
    tokens = output["sequences"][0].tolist()
    for number, token in enumerate(tokens):
        seconds = time.perf_counter() - started if number == 0 else 0.0
        yield GeneratedToken(token, seconds, "eos" if number + 1 == len(tokens) else "")


_OPTIONS: Mapping[str, str] = {
    "input_ids": "prompt", "input_features": "audio", "input_values": "audio", "pixel_values": "image",
}  # fmt: skip
"""Specified: what transformers calls the input that carries the content → the option that gives it."""


def prepare_encoder_decoder(
    files: Mapping[str, Path], passed: Mapping[str, str | None], *, with_times: bool = False, **requested: Any
) -> PreparedPrompt:
    """Encode what is given, and settle how the answer is written; no graph is opened.

    Args:
        files: The ONNX files of ``encoder`` and ``decoder``; tokenizer, processors and configs are beside them.
        passed: ``prompt``: a text; ``audio``, ``image``: paths; None where one was not given.
        with_times: Whether the text is to say when it is spoken, of a recording.
        **requested: See :meth:`~winml.modelkit.generate.generation.settings.GenerationSettings.updated`.

    Raises:
        UsageError: the model reads something else than what is given, or tells no times.
        InputError: there is no tokenizer, a file is damaged, or a recording does not open.
    """
    from winml.modelkit.onnx.bundle import read_part_description
    from winml.modelkit.onnx.files.reading import read_structure

    encoder, decoder = files[ENCODER], files[DECODER]
    names = [value.name for value in read_structure(encoder).graph.input]
    medium_option = next((_OPTIONS[name] for name in names if name in _OPTIONS), None)
    content = passed.get(medium_option or "")
    if medium_option is None or content is None or any(value for key, value in passed.items() if key != medium_option):
        named = next((f"--{key}" for key, value in passed.items() if value and key != medium_option), "nothing")
        advice = "Run the parts with WinMLAutoModel."
        if medium_option is not None:
            advice = f"Use --{medium_option}." if content is None else f"Omit {named}."
        raise UsageError(f"{named} does not apply: {encoder.name} takes {', '.join(names)}", hint=advice)
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
        raise UsageError(f"--{medium_option} {content}: no such file", hint="Pass the path of an existing file.")
    prompt = PreparedPrompt(
        decoder, content, tokens, settings, tokenizer, encoder=encoder, beginning=beginning, medium=medium_option
    )
    return _recorded_prompt(prompt, with_times=with_times) if medium_option == "audio" else prompt


def encoder_decoder_tokens(graphs: EncoderDecoder, prompt: PreparedPrompt) -> TokenSource:
    """Encode, and return the loop that chooses the tokens, and the tokens.

    Raises:
        UsageError: the graphs do not take what is given.
        InputError: what is given does not open.
        StageError: ONNX Runtime fails.
    """
    assert prompt.beginning is not None  # prepared for an encoder
    if isinstance(prompt.tokenizer, TimedText):
        return "transformers", _recorded_tokens(graphs, prompt, prompt.tokenizer)
    arrays = _arrays(graphs.unpadded_inputs if prompt.medium == "audio" else graphs.inputs, prompt)
    if prompt.settings.for_transformers is None:
        encoded = graphs.encode(arrays)
        start = (prompt.beginning.start,)
        return "winml", generate_tokens(
            graphs.decoder, start, prompt.settings, encoded=encoded, beginning=prompt.beginning
        )
    import torch

    from winml.modelkit.generate.generation.causal_lm import generated_by
    from winml.modelkit.generate.generation.seq2seq import EncoderDecoderModel, own_loop

    model = EncoderDecoderModel.of_graphs(graphs, files_folder(prompt.model))
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    passed = 1 if own_loop(model.config) is None else 0
    return "transformers", generated_by(model, tensors, passed, prompt.settings)


def _arrays(inputs: tuple[GraphInput, ...], prompt: PreparedPrompt) -> dict[str, Array]:
    """Return what the encoder is fed."""
    if prompt.medium == "prompt":
        tokens = np.array([prompt.tokens], np.int64)
        passed = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
        return {item.name: passed[item.name] for item in inputs if item.name in passed}
    from winml.modelkit.samples.preprocessing import Preprocessor

    opened: Any = prompt.recording or open_image(prompt.text, None, prompt.text)
    if isinstance(opened, Unreadable):
        raise InputError(f"--{prompt.medium} {prompt.text}: cannot be opened: {opened.reason}")
    preprocessor = Preprocessor.of(files_folder(prompt.model), inputs, option=f"--{prompt.medium}")
    (batch,) = preprocessor.batches([{str(prompt.medium): opened}])
    return dict(batch.feeds)
