"""Lets a built model go on with a text: prompt in, text out, piece by piece.

Our own loop chooses the tokens as long as the files ask for nothing else; it needs no torch. Whatever only transformers
knows, such as beams, is left to its loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from winml.modelkit.errors import UsageError
from winml.modelkit.inference.generation.decoder_prompt import PreparedPrompt, files_folder
from winml.modelkit.inference.generation.loop import GeneratedToken, generate_tokens
from winml.modelkit.inference.generation.settings import position_limit, read_settings
from winml.modelkit.inference.generation.text import TimedText, chat_prompt, read_tokenizer
from winml.modelkit.results.generated_text import GeneratedText
from winml.modelkit.runtime.decoding.decoder import DecoderGraph
from winml.modelkit.runtime.decoding.vision_language import VisionLanguageDecoder, VisionLanguageSessions
from winml.modelkit.runtime.devices import ChosenProvider
from winml.modelkit.runtime.sessions import Session

__all__ = ["prepare_prompt", "write_text"]

_NO_CACHE = (
    "This model has no cache: every token runs the whole text again, which gets slower with each.",
    "Build it again without --no-cache for one that has.",
)


@dataclass
class _Progress:
    """What was written so far."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    end: Literal["eos", "stop", "length"] = "length"

    def add(self, entry: GeneratedToken) -> int:
        """Take note of a token and return it."""
        self.tokens.append(entry.token)
        self.seconds.append(entry.seconds)
        self.end = entry.end or self.end
        return entry.token

    @property
    def tokens_per_second(self) -> float | None:
        """Of the tokens after the first."""
        return len(self.seconds[1:]) / sum(self.seconds[1:]) if sum(self.seconds[1:]) else None


def prepare_prompt(model: Path, prompt: str, *, is_chat: bool, **requested: Any) -> PreparedPrompt:
    """Encode a prompt, and settle how the answer is written; the model itself is not opened.

    Args:
        model: The ONNX file; tokenizer and configs are beside it.
        prompt: The text.
        is_chat: Whether it is the message of a user, which the chat template of the model makes a prompt of.
        **requested: See :meth:`~winml.modelkit.inference.generation.settings.GenerationSettings.updated`.

    Raises:
        UsageError: the prompt is empty, the model has no chat template, or too few positions.
        InputError: there is no tokenizer, or a file is damaged.
    """
    folder = files_folder(model)
    tokenizer = read_tokenizer(folder)
    settings = read_settings(folder).updated(**requested)
    text = chat_prompt(folder, prompt) if is_chat else prompt
    tokens = tuple(tokenizer.encode(text, with_special=not is_chat))
    if not tokens:
        raise UsageError("the prompt is empty, and this model begins with no token of its own", hint="Give a text.")
    settings = settings.fitted(len(tokens), position_limit(folder))
    return PreparedPrompt(model, text, tokens, settings, tokenizer)


def write_text(
    prompt: PreparedPrompt, provider: ChosenProvider, *, threads: int | None, show: Callable[[str], None]
) -> GeneratedText:
    """Write the text after a prompt.

    Args:
        prompt: What it begins with.
        provider: Where the model runs.
        threads: Threads that share the work of one operator; None: the runtime's own choice.
        show: Given each piece of the text as soon as it is there.

    Raises:
        InputError: the model does not generate.
        UsageError: it does not take as many tokens.
        StageError: ONNX Runtime fails.
    """
    started = time.perf_counter()
    graph, begin = _opened_graphs(prompt, partial(_session, provider=provider, threads=threads))
    session_ms = (time.perf_counter() - started) * 1000
    loop, tokens = begin()
    progress, pieces = _Progress(), list[str]()
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


def _session(path: Path, provider: ChosenProvider, threads: int | None) -> Session:
    return Session(path, providers=provider.names, provider_options=provider.options, threads=threads)


def _opened_graphs(
    prompt: PreparedPrompt, opened: Callable[[Path], Session]
) -> tuple[DecoderGraph, Callable[[], tuple[Literal["winml", "transformers"], Iterator[GeneratedToken]]]]:
    """Return the decoder, and what says whose loop chooses the tokens and begins to yield them."""
    session = opened(prompt.model)
    if prompt.shown is not None:
        from winml.modelkit.inference.generation.vision_language_text import vision_language_tokens

        sessions = VisionLanguageSessions(opened(prompt.shown.vision), opened(prompt.shown.embedding), session)
        displayed = VisionLanguageDecoder(sessions)
        return displayed, partial(vision_language_tokens, displayed, prompt)
    if prompt.encoder is not None:
        from winml.modelkit.inference.generation.encoder_decoder_text import encoder_decoder_tokens
        from winml.modelkit.runtime.decoding.encoder_decoder import EncoderDecoder

        graphs = EncoderDecoder(opened(prompt.encoder), session)
        return graphs.decoder, partial(encoder_decoder_tokens, graphs, prompt)
    graph = DecoderGraph(session)
    return graph, partial(_token_source, graph, prompt)


def _token_source(
    graph: DecoderGraph, prompt: PreparedPrompt
) -> tuple[Literal["winml", "transformers"], Iterator[GeneratedToken]]:
    """Return whose loop chooses the tokens, and the tokens."""
    if prompt.settings.for_transformers is None:
        return "winml", generate_tokens(graph, prompt.tokens, prompt.settings)
    from winml.modelkit.inference.generation.causal_lm import generate_with_transformers

    return "transformers", generate_with_transformers(graph, files_folder(prompt.model), prompt.tokens, prompt.settings)
