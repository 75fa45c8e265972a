"""Measures the prefill and the decoding of a built model with a cache."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from winml.modelkit.arrays import Array
from winml.modelkit.errors import UsageError, opt
from winml.modelkit.file_names import DECODER, ONLY_PART, files_folder
from winml.modelkit.generate.generation.settings import part_position_limit, position_limit
from winml.modelkit.ort.decoding.decoder import DecoderGraph, GraphCache
from winml.modelkit.ort.decoding.inputs import TOKEN_IDS
from winml.modelkit.ort.decoding.parts import EncoderDecoder, open_decoder
from winml.modelkit.ort.opened_model import RunOptions, values_for
from winml.modelkit.profile.latency import LatencyOptions, measure_latency
from winml.modelkit.profile.records import GenerationPerf, PromptTime, StepTime

_LENGTHS = (16, 64, 256, 1024)
"""Tokens of the prompts, and before the steps, that are measured as far as the model has positions. Chosen: from a
question to a page."""


def measure_generation(files: Mapping[str, Path], options: RunOptions, latency: LatencyOptions) -> GenerationPerf:
    """Measure a decoder with a cache, or an encoder and its decoder.

    With an encoder, the time to the first token includes encoding and the first run of the decoder.

    Args:
        files: Part → ONNX file: a decoder alone, or ``encoder`` and ``decoder``.
        options: Provider, model as written by the user, sizes of the encoder input, and seed of the values.
        latency: Number of measurements per length.

    Raises:
        UsageError: the model has no cache, or a size does not fit.
        InputError: the model does not generate, or the files do not belong together.
        StageError: ONNX Runtime fails.
    """
    started = time.perf_counter()
    graph = open_decoder(files, partial(options.choose_provider().open, threads=options.threads))
    session_ms = (time.perf_counter() - started) * 1000
    if not graph.has_cache:
        raise UsageError(
            f"{opt.generation}: {options.shown} has no KV cache, so every step recomputes the whole text",
            hint=f"Omit {opt.generation}, or build the model again without {opt.no_cache}.",
        )
    folder = files_folder(files.get(DECODER) or files[ONLY_PART])
    encoder_inputs: dict[str, Array] = {}
    notes: tuple[str, ...] = ()
    if isinstance(graph, EncoderDecoder):
        encoder_inputs = dict(values_for(graph.encoder.session, options).feeds)
        lengths = _choose_lengths(part_position_limit(files[DECODER], folder), graph.most_tokens)
        measured = [1]
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in encoder_inputs.items())
        notes = (f"The time to the first token includes the encoder on {shapes} and the decoder on one token.",)
    else:
        lengths = measured = _choose_lengths(position_limit(folder), graph.most_tokens)
    rows = len(next(iter(encoder_inputs.values()))) if encoder_inputs else 1
    tokens = np.repeat(_random_tokens(graph, lengths[-1], options.seed), rows, axis=0)

    def fill_cache(length: int) -> GraphCache:
        cache = graph.start(encoder_inputs, rows)
        graph.run(tokens[:, :length], cache=cache)
        return cache

    caches = {length: fill_cache(length) for length in {*measured, *lengths}}
    prompts = tuple(
        PromptTime(length, _measure_median_ms(partial(fill_cache, length), latency), caches[length].size_bytes())
        for length in measured
    )
    step_times = [_measure_step_ms(graph, caches[length], tokens[:, :1], latency) for length in lengths]
    shortest = caches[lengths[0]]
    longer = copy.copy(shortest)
    graph.run(tokens[:, :1], cache=longer)
    return GenerationPerf(
        options.shown,
        options.choose_provider().provider.name,
        options.threads,
        latency.iterations,
        session_ms,
        prompts,
        tuple(StepTime(length, step_ms, 1000 / step_ms) for length, step_ms in zip(lengths, step_times, strict=True)),
        float(longer.size_bytes() - shortest.size_bytes()),
        notes,
    )


def _choose_lengths(*limits: int | None) -> list[int]:
    """Return the lengths to measure that are below every limit of a text, such as the positions; else ``[1]``."""
    return [length for length in _LENGTHS if all(limit is None or length < limit for limit in limits)] or [1]


def _random_tokens(graph: DecoderGraph, count: int, seed: int) -> Array:
    spec = next(spec for spec in graph.inputs if spec.name == TOKEN_IDS)
    low, high = spec.value_range or (0, 1)
    return np.random.default_rng(seed).integers(int(low), int(high) + 1, (1, count))


def _measure_step_ms(graph: DecoderGraph, cache: GraphCache, token: Array, latency: LatencyOptions) -> float:
    """Measure the time of a step on a copy of a cache."""
    copied = copy.copy(cache)

    def run() -> None:
        copied.rewind(cache)
        graph.run(token, cache=copied)

    return _measure_median_ms(run, latency)


def _measure_median_ms(run: Callable[[], object], latency: LatencyOptions) -> float:
    return median(measure_latency(run, latency).samples_ms)
