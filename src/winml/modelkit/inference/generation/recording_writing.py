"""Writes what is said in a long recording, or when it is said: with the loop that transformers has for such a model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from winml.modelkit.errors import InputError, UsageError
from winml.modelkit.evaluate.media import Recording, Unreadable, open_recording, resampled
from winml.modelkit.file_names import CHECKPOINT_CONFIG_NAME, GENERATION_CONFIG_NAME
from winml.modelkit.inference.generation.config_file import read_generation_config
from winml.modelkit.inference.generation.encoded import EncodedDecoder
from winml.modelkit.inference.generation.loop import GeneratedToken
from winml.modelkit.inference.generation.text import TextSegment, TimedText
from winml.modelkit.inference.generation.writing import PreparedPrompt, files_folder
from winml.modelkit.load.checkpoints.processor_files import read_processor_files

__all__ = ["recorded_prompt", "recorded_tokens"]


def recorded_prompt(prompt: PreparedPrompt, *, with_times: bool) -> PreparedPrompt:
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
    recording = _opened(prompt.text)
    if not len(recording.samples):
        raise InputError(f"--audio {Path(prompt.text)}: holds no samples", hint="Give a recording, such as WAV.")
    is_long = seconds is not None and len(recording.samples) > seconds * recording.rate_hz
    prompt = replace(prompt, recording=recording)
    if not (with_times or is_long):
        return prompt
    from winml.modelkit.evaluate.model_config import open_config
    from winml.modelkit.inference.generation.library_loop import own_loop

    config = open_config(folder)
    has_times = read_generation_config(folder).get("no_timestamps_token_id") is not None
    if own_loop(config) is None or not has_times:
        asked = "--timestamps" if with_times else f"--audio {Path(prompt.text)} is longer than {seconds:g} s"
        raise UsageError(
            f"{asked}: {folder} tells no times (no_timestamps_token_id in {GENERATION_CONFIG_NAME}, and a model "
            f"type with a loop for them in {CHECKPOINT_CONFIG_NAME})",
            hint="Leave --timestamps out." if with_times else "Give it in pieces of that length.",
        )
    return replace(prompt, tokenizer=TimedText(prompt.tokenizer, with_times=with_times))


def recorded_tokens(graphs: EncodedDecoder, prompt: PreparedPrompt, timed: TimedText) -> Iterator[GeneratedToken]:
    """Yield the tokens of a whole recording, all at the end; the segments are told to ``timed`` before the first.

    Raises:
        InputError: transformers' loop refuses the configs of the model.
        WinMLError: whatever a run of the graphs raises.
    """
    from transformers import AutoFeatureExtractor, set_seed

    from winml.modelkit.inference.generation.causal_lm import generation_call
    from winml.modelkit.inference.generation.seq2seq import EncodedModel

    started = time.perf_counter()
    folder = files_folder(prompt.model)
    model: Any = EncodedModel.of_graphs(graphs, folder)
    make: Any = AutoFeatureExtractor
    extractor = make.from_pretrained(folder, local_files_only=True)
    assert prompt.recording is not None  # opened by recorded_prompt
    samples = resampled(prompt.recording, int(extractor.sampling_rate))
    is_long = len(samples) > extractor.n_samples
    whole = {"truncation": False, "padding": "longest", "return_attention_mask": True} if is_long else {}
    given = extractor(samples, sampling_rate=extractor.sampling_rate, return_tensors="pt", **whole)
    settings = prompt.settings
    asked: dict[str, Any] = {} if settings.is_default_length else {"max_new_tokens": settings.max_new_tokens}
    drawn = {"temperature": settings.step.temperature, "top_p": settings.step.top_p} if settings.step.is_sampled else {}
    set_seed(settings.seed)
    asked |= {"return_timestamps": True, "return_segments": True, "do_sample": settings.step.is_sampled}
    answer = generation_call(model, **given, **asked, **drawn)
    first_time = int(model.generation_config.no_timestamps_token_id) + 1
    timed.segments = tuple(
        TextSegment(
            float(item["start"]),
            float(item["end"]),
            tuple(token for token in item["tokens"].tolist() if token < first_time),
        )
        for item in answer["segments"][0]
    )
    tokens = answer["sequences"][0].tolist()
    for number, token in enumerate(tokens):
        seconds = time.perf_counter() - started if number == 0 else 0.0
        yield GeneratedToken(token, seconds, "eos" if number + 1 == len(tokens) else "")


def _opened(path: str) -> Recording:
    opened = open_recording(path, None, path)
    if isinstance(opened, Unreadable):
        raise InputError(f"--audio {Path(path)}: does not open: {opened.reason}", hint="Give a recording, such as WAV.")
    return opened
