"""Lets PyTorch go on with the same prompt, and finds the first token that differs.

PyTorch runs the checkpoint with transformers' own loop and its own cache.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from winml.modelkit.arrays import Array
from winml.modelkit.errors import UsageError
from winml.modelkit.file_names import DECODER, ENCODER
from winml.modelkit.inference.generation.causal_lm import generation_call, generation_config_beside
from winml.modelkit.inference.generation.prompt import PreparedPrompt, files_folder
from winml.modelkit.inference.generation.settings import part_position_limit, position_limit
from winml.modelkit.inference.generation.text import TextTokenizer
from winml.modelkit.load.model import load_model
from winml.modelkit.load.request import ModelRequest
from winml.modelkit.measure.latency import LatencyOptions, measure_latency
from winml.modelkit.results.generated_text import GeneratedText, ReferenceText, TokenDifference
from winml.modelkit.results.perf import GenerationPerf, PromptTime, StepTime
from winml.modelkit.runtime.decoding.decoder import DecoderGraph, GraphCache
from winml.modelkit.runtime.decoding.encoder_decoder import EncoderDecoder
from winml.modelkit.runtime.decoding.inputs import TOKEN_IDS
from winml.modelkit.runtime.devices import ChosenProvider
from winml.modelkit.runtime.opened_model import RunOptions, values_for
from winml.modelkit.runtime.sessions import Session

__all__ = ["compare_with_pytorch", "measure_encoder_decoder_generation", "measure_generation"]

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


def compare_with_pytorch(result: GeneratedText, prompt: PreparedPrompt, name: str) -> GeneratedText:
    """Return a result with what PyTorch writes after the same prompt.

    Args:
        result: What ONNX Runtime wrote, greedily.
        prompt: What it began with.
        name: Hub id or folder of the checkpoint.

    Raises:
        UsageError: it does not generate.
        WinMLError: the checkpoint cannot be loaded.
    """
    tokens, scores = _pytorch_tokens(name, prompt)
    difference = _first_difference(result.tokens, tokens, scores, prompt)
    text = _text_of(prompt.tokenizer, tokens, prompt.before)
    return replace(result, reference=ReferenceText(name, tuple(tokens), text, difference))


def _pytorch_tokens(name: str, prompt: PreparedPrompt) -> tuple[list[int], Sequence[torch.Tensor]]:
    """Return the tokens PyTorch writes, and the scores of all tokens at each step."""
    task = "text-generation" if prompt.encoder is None else "text2text-generation"
    model: Any = load_model(ModelRequest(name, task=task)).model
    if not hasattr(model, "generate"):
        raise UsageError(
            f"--reference {name}: {type(model).__name__} does not generate",
            hint="Name a checkpoint for text-generation.",
        )
    model.generation_config = generation_config_beside(files_folder(prompt.model), model.config, has_cache=True)
    model.tokenizer_folder = files_folder(prompt.model)
    output = generation_call(
        model,
        inputs=torch.tensor([list(prompt.tokens)]),
        max_new_tokens=prompt.settings.max_new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    return output.sequences[0, len(prompt.before) :].tolist(), output.scores


def _first_difference(
    ours: Sequence[int], theirs: Sequence[int], scores: Sequence[torch.Tensor], prompt: PreparedPrompt
) -> TokenDifference | None:
    longest = max(len(ours), len(theirs))
    pairs = [(_at(ours, index), _at(theirs, index)) for index in range(longest)]
    index = next((index for index, (one, other) in enumerate(pairs) if one != other), None)
    if index is None:
        return None
    token, reference_token = pairs[index]
    margin = None
    if token is not None and reference_token is not None:
        margin = float(scores[index][0, reference_token] - scores[index][0, token])
    before = [*prompt.before, *ours[:index]]

    def text(value: int | None) -> str:
        return "" if value is None else _text_of(prompt.tokenizer, [value], before)

    return TokenDifference(index, token, text(token), reference_token, text(reference_token), margin)


def _at(tokens: Sequence[int], index: int) -> int | None:
    return tokens[index] if index < len(tokens) else None


def _text_of(tokenizer: TextTokenizer, tokens: Sequence[int], before: Sequence[int]) -> str:
    return "".join(tokenizer.pieces(tokens, after=before))
