"""Measures a decoder: the time to the first token by the length of the prompt, and of a step by what the cache holds.

Choosing the token and turning it into text is left out; both take microseconds. Values are random tokens: what a run
costs does not depend on them.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

import numpy as np

from winml.modelkit.arrays import Array
from winml.modelkit.errors import UsageError
from winml.modelkit.file_names import DECODER, ENCODER
from winml.modelkit.inference.generation.decoder_prompt import files_folder
from winml.modelkit.inference.generation.settings import part_position_limit, position_limit
from winml.modelkit.measure.latency import LatencyOptions, measure_latency
from winml.modelkit.results.perf import GenerationPerf, PromptTime, StepTime
from winml.modelkit.runtime.decoding.decoder import DecoderGraph, GraphCache
from winml.modelkit.runtime.decoding.encoder_decoder import EncoderDecoder
from winml.modelkit.runtime.decoding.inputs import TOKEN_IDS
from winml.modelkit.runtime.devices import ChosenProvider
from winml.modelkit.runtime.opened_model import RunOptions, values_for
from winml.modelkit.runtime.sessions import Session

__all__ = ["LENGTHS", "measure_encoder_decoder_generation", "measure_generation"]

LENGTHS = (16, 64, 256, 1024)
"""Tokens of the prompts, and before the steps, that are measured as far as the model has positions. Chosen: from a
question to a page."""


def measure_generation(
    path: Path, displayed: str, provider: ChosenProvider, *, threads: int | None, seed: int, latency: LatencyOptions
) -> GenerationPerf:
    """Measure a decoder with a cache.

    Args:
        path: The ONNX file.
        displayed: The model as the user wrote it.
        provider: Where it runs.
        threads: Threads that share the work of one operator; None: the runtime's own choice.
        seed: Of the tokens.
        latency: How often each length is measured.

    Raises:
        UsageError: the model has no cache.
        InputError: it does not generate.
        StageError: ONNX Runtime fails.
    """
    started = time.perf_counter()
    graph = DecoderGraph(Session(path, providers=provider.names, provider_options=provider.options, threads=threads))
    session_ms = (time.perf_counter() - started) * 1000
    if not graph.has_cache:
        raise UsageError(
            f"--generation: {displayed} has no cache, so a step costs what its whole text costs",
            hint="Leave --generation out, or build the model again without --no-cache.",
        )
    limit = position_limit(files_folder(path))
    lengths = [length for length in LENGTHS if limit is None or length < limit] or [1]
    tokens = _random_tokens(graph, lengths[-1], seed)
    caches = {length: _cache_after(graph, tokens[:, :length]) for length in lengths}
    prompts = tuple(
        PromptTime(
            length,
            _median_ms(lambda length=length: _cache_after(graph, tokens[:, :length]), latency),  # type: ignore[misc]
            caches[length].size_bytes(),
        )
        for length in lengths
    )
    steps = tuple(_measured_step(graph, cache, tokens[:, :1], latency) for cache in caches.values())
    per_token = _growth(graph, caches[lengths[0]], tokens[:, :1])
    return GenerationPerf(
        displayed, provider.provider.name, threads, latency.iterations, session_ms, prompts, steps, per_token
    )


def measure_encoder_decoder_generation(
    files: Mapping[str, Path], options: RunOptions, *, latency: LatencyOptions
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
    provider = options.choose_provider()
    started = time.perf_counter()
    encoder, decoder = (
        Session(files[part], providers=provider.names, provider_options=provider.options, threads=options.threads)
        for part in (ENCODER, DECODER)
    )
    graphs = EncoderDecoder(encoder, decoder)
    session_ms = (time.perf_counter() - started) * 1000
    values = values_for(encoder, options)
    passed = dict(values.feeds)
    rows = len(next(iter(passed.values())))
    limit = part_position_limit(files[DECODER], files_folder(files[DECODER]))
    lengths = [length for length in LENGTHS if limit is None or length < limit] or [1]
    tokens = np.repeat(_random_tokens(graphs.decoder, lengths[-1], options.seed), rows, axis=0)

    def begun(count: int) -> GraphCache:
        cache = graphs.start(passed)
        graphs.decoder.run(tokens[:, :count], cache=cache)
        return cache

    first_ms = _median_ms(lambda: begun(1), latency)
    caches = [begun(length) for length in lengths]
    steps = tuple(_measured_step(graphs.decoder, cache, tokens[:, :1], latency) for cache in caches)
    per_token = _growth(graphs.decoder, caches[0], tokens[:, :1])
    shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in passed.items())
    return GenerationPerf(
        options.shown,
        provider.provider.name,
        options.threads,
        latency.iterations,
        session_ms,
        (PromptTime(1, first_ms, begun(1).size_bytes()),),
        steps,
        per_token,
        (f"The first token is that of the encoder on {shapes} and of the decoder on one token.",),
    )


def _random_tokens(graph: DecoderGraph, count: int, seed: int) -> Array:
    item = next(item for item in graph.inputs if item.name == TOKEN_IDS)
    low, high = item.value_range or (0, 1)
    return np.random.default_rng(seed).integers(int(low), int(high) + 1, (1, count))


def _cache_after(graph: DecoderGraph, tokens: Array) -> GraphCache:
    cache = graph.empty_cache(1)
    graph.run(tokens, cache=cache)
    return cache


def _measured_step(graph: DecoderGraph, cache: GraphCache, token: Array, latency: LatencyOptions) -> StepTime:
    # A run replaces what the copy holds; the values of the cache itself stay.
    step_ms = _median_ms(lambda: graph.run(token, cache=copy.copy(cache)), latency)
    return StepTime(cache.length, step_ms, 1000 / step_ms)


def _growth(graph: DecoderGraph, cache: GraphCache, token: Array) -> float:
    longer = copy.copy(cache)
    graph.run(token, cache=longer)
    return float(longer.size_bytes() - cache.size_bytes())


def _median_ms(run: Callable[[], object], latency: LatencyOptions) -> float:
    return median(measure_latency(run, latency).samples_ms)
