"""Prints a generated text, and the times of a measured decoder."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from winml.modelkit.report.terminal import print_rows
from winml.modelkit.results.generated_text import GeneratedText, ReferenceText
from winml.modelkit.results.perf import GenerationPerf
from winml.modelkit.words import size_words

__all__ = [
    "generated_lines",
    "print_generation_perf",
]


# --- Renders what is told of a generated text besides the text itself, as lines for a terminal.


_ENDS = {"eos": "ended by the model", "stop": "ended by stop_strings or max_time", "length": "as long as it may become"}


def generated_lines(result: GeneratedText) -> Iterator[str]:
    """Yield a line for times and memory, one for each note, and what PyTorch wrote."""
    rate = result.tokens_per_second
    words = [
        f"{len(result.tokens)} tokens after {len(result.prompt_tokens)} ({_ENDS[result.end]})",
        f"session {result.session_ms / 1000:.2f} s",
        f"first token {result.first_token_ms:.0f} ms",
        *([f"{rate:.1f} tokens/s"] if rate is not None else []),
        *([f"cache {size_words(result.cache_bytes)}"] if result.cache_bytes is not None else []),
        *(["transformers' loop"] if result.loop == "transformers" else []),
    ]
    yield ", ".join(words)
    yield from (f"note: {note}" for note in result.notes)
    if result.reference is not None:
        yield from _reference_lines(result.reference, len(result.tokens))


def _reference_lines(reference: ReferenceText, count: int) -> Iterator[str]:
    difference = reference.difference
    if difference is None:
        yield f"PyTorch ({reference.model}) writes the same {count} tokens"
        return
    margin = difference.reference_margin
    scored = "" if margin is None else f"; PyTorch scores them {margin:.2e} apart"
    yield (
        f"PyTorch ({reference.model}) differs at token {difference.index + 1}: "
        f"{_token_words(difference.reference_token, difference.reference_text)} instead of "
        f"{_token_words(difference.token, difference.text)}{scored}"
    )


def _token_words(token: int | None, text: str) -> str:
    return "its end" if token is None else f"{token} ({text!r})"


# --- Prints a measured decoder in a terminal: prompts, steps, and memory of the cache.


def print_generation_perf(result: GenerationPerf, console: Console) -> None:
    """Print one row for each length."""
    print_rows(_rows(result), console)


def _rows(result: GenerationPerf) -> Iterator[tuple[str, str]]:
    yield "model", f"{result.model} on {result.provider}, {result.iterations} runs of each"
    yield "session", f"{result.session_ms / 1000:.2f} s"
    for prompt in result.prompts:
        text = f"first token after {prompt.first_token_ms:.1f} ms, cache {size_words(prompt.cache_bytes)}"
        yield f"prompt of {prompt.tokens}", text
    for step in result.steps:
        yield f"step after {step.cached_tokens}", f"{step.step_ms:.2f} ms, {step.tokens_per_second:.1f} tokens/s"
    yield "cache", f"{size_words(round(result.cache_bytes_per_token))} for each token"
    yield from (("note", note) for note in result.notes)
