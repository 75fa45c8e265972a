"""Generates text with a built model, piece by piece, and measures its prefill and its decoding.

Our own loop chooses the tokens as long as the files ask for nothing else; it needs no torch. Whatever only transformers
knows, such as beams, is left to its loop.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np

from winml.modelkit.arrays import Array
from winml.modelkit.errors import UsageError
from winml.modelkit.file_names import DECODER, ENCODER, files_folder
from winml.modelkit.inference.generation.decoder_prompt import PreparedPrompt
from winml.modelkit.inference.generation.loop import GeneratedToken, generate_tokens
from winml.modelkit.inference.generation.settings import part_position_limit, position_limit, read_settings
from winml.modelkit.inference.generation.text import TimedText, chat_prompt, read_tokenizer
from winml.modelkit.measure.latency import LatencyOptions, measure_latency
from winml.modelkit.progress import count_progress
from winml.modelkit.results.generated_text import GeneratedText
from winml.modelkit.results.perf import GenerationPerf, PromptTime, StepTime
from winml.modelkit.runtime.decoding.decoder import DecoderGraph, GraphCache
from winml.modelkit.runtime.decoding.encoder_decoder import EncoderDecoder
from winml.modelkit.runtime.decoding.inputs import TOKEN_IDS
from winml.modelkit.runtime.decoding.vision_language import VisionLanguageDecoder, VisionLanguageSessions
from winml.modelkit.runtime.devices import ChosenProvider
from winml.modelkit.runtime.opened_model import RunOptions, values_for
from winml.modelkit.runtime.sessions import Session

_NO_CACHE = (
    "This model has no KV cache: every token recomputes the whole text, so generation slows down with its length.",
    "Build it again without --no-cache to get one.",
)


@dataclass
class _Progress:
    """What was written so far."""

    most: int
    """Tokens that may be written."""
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    end: Literal["eos", "stop", "length"] = "length"

    def add(self, entry: GeneratedToken) -> int:
        """Take note of a token and return it."""
        self.tokens.append(entry.token)
        count_progress(len(self.tokens), self.most, f"token {len(self.tokens)} of at most {self.most}")
        self.seconds.append(entry.seconds)
        self.end = entry.end or self.end
        return entry.token

    @property
    def tokens_per_second(self) -> float | None:
        """Of the tokens after the first."""
        return len(self.seconds[1:]) / sum(self.seconds[1:]) if sum(self.seconds[1:]) else None


def prepare_prompt(
    model: Path,
    prompt: str,
    *,
    is_chat: bool,
    system: str | None = None,
    reader: Path | None = None,
    **requested: Any,
) -> PreparedPrompt:
    """Encode a prompt, and settle how the answer is written; the model itself is not opened.

    Args:
        model: The ONNX file; tokenizer and configs are beside it.
        prompt: The text.
        is_chat: Whether it is the message of a user, which the chat template of the model makes a prompt of.
        system: What the chat template is given before it in the role ``system``.
        reader: The ONNX file that reads prompts, where the model is of two graphs of fixed sizes.
        **requested: See :meth:`~winml.modelkit.inference.generation.settings.GenerationSettings.updated`.

    Raises:
        UsageError: the prompt is empty, the model has no chat template, or too few positions.
        InputError: there is no tokenizer, or a file is damaged.
    """
    folder = files_folder(model)
    tokenizer = read_tokenizer(folder)
    settings = read_settings(folder).updated(**requested)
    text = chat_prompt(folder, prompt, system) if is_chat else prompt
    tokens = tuple(tokenizer.encode(text, with_special=not is_chat))
    if not tokens:
        raise UsageError("the prompt is empty, and the tokenizer adds no start token", hint="Pass a text.")
    settings = settings.fitted(len(tokens), position_limit(folder))
    return PreparedPrompt(model, text, tokens, settings, tokenizer, reader=reader)


def write_text(
    prompt: PreparedPrompt,
    provider: ChosenProvider,
    *,
    threads: int | None,
    show: Callable[[str], None],
    adapter: Path | None = None,
) -> GeneratedText:
    """Generate the text after a prompt; see :func:`write_texts`."""
    (result,) = write_texts([prompt], provider, threads=threads, show=show, adapter=adapter)
    return result


def write_texts(
    prompts: Sequence[PreparedPrompt],
    provider: ChosenProvider,
    *,
    threads: int | None,
    show: Callable[[str], None],
    adapter: Path | None = None,
) -> Iterator[GeneratedText]:
    """Yield the text after each prompt. The model is opened once, and each prompt starts with an empty cache.

    Args:
        prompts: Prompts of one model, at least one.
        provider: Where the model runs.
        threads: Threads that share the work of one operator; None: the runtime's own choice.
        show: Called with each piece of the text as soon as it is generated.
        adapter: File of the active adapter; None: the base model answers.

    Raises:
        InputError: the model does not generate.
        UsageError: it does not take as many tokens.
        StageError: ONNX Runtime fails.
    """
    started = time.perf_counter()
    graph, begin = _opened_graphs(prompts[0], partial(_session, provider=provider, threads=threads, adapter=adapter))
    session_ms = (time.perf_counter() - started) * 1000
    fitted = [replace(item, settings=item.settings.fitted(item.decoder_tokens, graph.most_tokens)) for item in prompts]
    for prompt in fitted:
        loop, tokens = begin(prompt)
        yield _written(prompt, graph, loop, tokens, session_ms, show)


def _written(
    prompt: PreparedPrompt,
    graph: DecoderGraph,
    loop: Literal["winml", "transformers"],
    tokens: Iterator[GeneratedToken],
    session_ms: float,
    show: Callable[[str], None],
) -> GeneratedText:
    progress, pieces = _Progress(prompt.settings.max_new_tokens), list[str]()
    for piece in prompt.tokenizer.pieces((progress.add(entry) for entry in tokens), after=prompt.before):
        pieces.append(piece)
        if piece:
            show(piece)
    ends_early = {"stop_strings", "max_time"} & (prompt.settings.for_transformers or {}).keys()
    if progress.end == "length" and ends_early and len(progress.tokens) < prompt.settings.max_new_tokens:
        progress.end = "stop"
    return GeneratedText(
        model=str(prompt.model),
        prompt=prompt.text,
        prompt_tokens=prompt.tokens,
        tokens=tuple(progress.tokens),
        text="".join(pieces),
        end=progress.end,
        loop=loop,
        settings=prompt.settings.as_record(),
        session_ms=session_ms,
        first_token_ms=next(iter(progress.seconds), 0.0) * 1000,
        tokens_per_second=progress.tokens_per_second if prompt.settings.is_stepwise else None,
        cache_bytes=graph.last_cache.size_bytes() if graph.last_cache is not None else None,
        notes=(*prompt.settings.notes, *(() if graph.has_cache else _NO_CACHE)),
        segments=prompt.tokenizer.as_records(prompt.before) if isinstance(prompt.tokenizer, TimedText) else None,
    )


def _session(path: Path, provider: ChosenProvider, threads: int | None, adapter: Path | None) -> Session:
    names, options = provider.names, provider.options
    return Session(path, providers=names, provider_options=options, threads=threads, adapter=adapter)


def _opened_graphs(
    prompt: PreparedPrompt, opened: Callable[[Path], Session]
) -> tuple[DecoderGraph, Callable[[PreparedPrompt], tuple[Literal["winml", "transformers"], Iterator[GeneratedToken]]]]:
    """Return the decoder, and what says whose loop chooses the tokens and begins to yield them."""
    session = opened(prompt.model)
    if prompt.shown is not None:
        from winml.modelkit.inference.generation.vision_language_text import vision_language_tokens

        sessions = VisionLanguageSessions(opened(prompt.shown.vision), opened(prompt.shown.embedding), session)
        displayed = VisionLanguageDecoder(sessions)
        return displayed, partial(vision_language_tokens, displayed)
    if prompt.encoder is not None:
        from winml.modelkit.inference.generation.encoder_decoder_text import encoder_decoder_tokens
        from winml.modelkit.runtime.decoding.encoder_decoder import EncoderDecoder

        graphs = EncoderDecoder(opened(prompt.encoder), session)
        return graphs.decoder, partial(encoder_decoder_tokens, graphs)
    graph = DecoderGraph(session, prompt=None if prompt.reader is None else opened(prompt.reader))
    return graph, partial(_token_source, graph)


def _token_source(
    graph: DecoderGraph, prompt: PreparedPrompt
) -> tuple[Literal["winml", "transformers"], Iterator[GeneratedToken]]:
    """Return whose loop chooses the tokens, and the tokens."""
    if prompt.settings.for_transformers is None:
        return "winml", generate_tokens(graph, prompt.tokens, prompt.settings)
    from winml.modelkit.inference.generation.causal_lm import generate_with_transformers

    return "transformers", generate_with_transformers(graph, files_folder(prompt.model), prompt.tokens, prompt.settings)


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
            f"--generation: {displayed} has no KV cache, so every step recomputes the whole text",
            hint="Omit --generation, or build the model again without --no-cache.",
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
        (f"The time to the first token includes the encoder on {shapes} and the decoder on one token.",),
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
    # The values of the cache itself stay.
    taken = copy.copy(cache)

    def run() -> None:
        taken.rewind(cache)
        graph.run(token, cache=taken)

    step_ms = _median_ms(run, latency)
    return StepTime(cache.length, step_ms, 1000 / step_ms)


def _growth(graph: DecoderGraph, cache: GraphCache, token: Array) -> float:
    longer = copy.copy(cache)
    graph.run(token, cache=longer)
    return float(longer.size_bytes() - cache.size_bytes())


def _median_ms(run: Callable[[], object], latency: LatencyOptions) -> float:
    return median(measure_latency(run, latency).samples_ms)
