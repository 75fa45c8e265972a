"""Measures the prefill and the decoding of a built model with a cache."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from winml.modelkit.arrays import Array
from winml.modelkit.errors import UsageError
from winml.modelkit.file_names import DECODER, ENCODER, files_folder
from winml.modelkit.generate.generation.settings import part_position_limit, position_limit
from winml.modelkit.ort.decoding.decoder import DecoderGraph, GraphCache
from winml.modelkit.ort.decoding.encoder_decoder import EncoderDecoder
from winml.modelkit.ort.decoding.inputs import TOKEN_IDS
from winml.modelkit.ort.opened_model import RunOptions, values_for
from winml.modelkit.ort.sessions import Session
from winml.modelkit.profile.latency import LatencyOptions, measure_latency
from winml.modelkit.profile.records import GenerationPerf, PromptTime, StepTime

_LENGTHS = (16, 64, 256, 1024)
"""Tokens of the prompts, and before the steps, that are measured as far as the model has positions. Chosen: from a
question to a page."""


def measure_generation(path: Path, options: RunOptions, latency: LatencyOptions) -> GenerationPerf:
    """Measure a decoder with a cache.

    Args:
        path: The ONNX file.
        options: Where it runs, the model as the user wrote it, and the seed of the tokens.
        latency: How often each length is measured.

    Raises:
        UsageError: the model has no cache.
        InputError: it does not generate.
        StageError: ONNX Runtime fails.
    """
    started = time.perf_counter()
    graph = DecoderGraph(_open_session(path, options))
    session_ms = (time.perf_counter() - started) * 1000
    if not graph.has_cache:
        raise UsageError(
            f"--generation: {options.shown} has no KV cache, so every step recomputes the whole text",
            hint="Omit --generation, or build the model again without --no-cache.",
        )
    lengths = _measured_lengths(position_limit(files_folder(path)))
    tokens = _random_tokens(graph, lengths[-1], options.seed)

    def begun(length: int) -> GraphCache:
        cache = graph.empty_cache(1)
        graph.run(tokens[:, :length], cache=cache)
        return cache

    caches = [begun(length) for length in lengths]
    prompts = tuple(
        PromptTime(length, _median_ms(lambda length=length: begun(length), latency), cache.size_bytes())  # type: ignore[misc]
        for length, cache in zip(lengths, caches, strict=True)
    )
    return _measure_steps(graph, caches, tokens[:, :1], prompts, session_ms, options, latency)


def measure_encoder_decoder_generation(
    files: Mapping[str, Path], options: RunOptions, latency: LatencyOptions
) -> GenerationPerf:
    """Measure an encoder and its decoder: the time to the first token holds encoding and the first run of the decoder.

    Args:
        files: The ONNX files of ``encoder`` and ``decoder``.
        options: Where they run, sizes of what is encoded, and the seed of its values.
        latency: How often each length is measured.

    Raises:
        UsageError: a size does not fit.
        InputError: the files do not belong together.
        StageError: ONNX Runtime fails.
    """
    started = time.perf_counter()
    encoder, decoder = (_open_session(files[part], options) for part in (ENCODER, DECODER))
    graphs = EncoderDecoder(encoder, decoder)
    session_ms = (time.perf_counter() - started) * 1000
    passed = dict(values_for(encoder, options).feeds)
    rows = len(next(iter(passed.values())))
    lengths = _measured_lengths(part_position_limit(files[DECODER], files_folder(files[DECODER])))
    tokens = np.repeat(_random_tokens(graphs.decoder, lengths[-1], options.seed), rows, axis=0)

    def begun(length: int) -> GraphCache:
        cache = graphs.start(passed)
        graphs.decoder.run(tokens[:, :length], cache=cache)
        return cache

    prompts = (PromptTime(1, _median_ms(lambda: begun(1), latency), begun(1).size_bytes()),)
    caches = [begun(length) for length in lengths]
    shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in passed.items())
    note = f"The time to the first token includes the encoder on {shapes} and the decoder on one token."
    return _measure_steps(graphs.decoder, caches, tokens[:, :1], prompts, session_ms, options, latency, notes=(note,))


def _open_session(path: Path, options: RunOptions) -> Session:
    provider = options.choose_provider()
    return Session(path, providers=provider.names, provider_options=provider.options, threads=options.threads)


def _measured_lengths(positions: int | None) -> list[int]:
    return [length for length in _LENGTHS if positions is None or length < positions] or [1]


def _random_tokens(graph: DecoderGraph, count: int, seed: int) -> Array:
    item = next(item for item in graph.inputs if item.name == TOKEN_IDS)
    low, high = item.value_range or (0, 1)
    return np.random.default_rng(seed).integers(int(low), int(high) + 1, (1, count))


def _measure_steps(
    graph: DecoderGraph,
    caches: Sequence[GraphCache],
    token: Array,
    prompts: tuple[PromptTime, ...],
    session_ms: float,
    options: RunOptions,
    latency: LatencyOptions,
    notes: tuple[str, ...] = (),
) -> GenerationPerf:
    """Measure a step after each cache, and return the record with the prompts that were measured before."""
    steps = []
    for cache in caches:
        # The values of the cache itself stay.
        taken = copy.copy(cache)

        def run(cache: GraphCache = cache, taken: GraphCache = taken) -> None:
            taken.rewind(cache)
            graph.run(token, cache=taken)

        step_ms = _median_ms(run, latency)
        steps.append(StepTime(cache.length, step_ms, 1000 / step_ms))
    longer = copy.copy(caches[0])
    graph.run(token, cache=longer)
    return GenerationPerf(
        options.shown,
        options.choose_provider().provider.name,
        options.threads,
        latency.iterations,
        session_ms,
        prompts,
        tuple(steps),
        float(longer.size_bytes() - caches[0].size_bytes()),
        notes,
    )


def _median_ms(run: Callable[[], object], latency: LatencyOptions) -> float:
    return median(measure_latency(run, latency).samples_ms)
