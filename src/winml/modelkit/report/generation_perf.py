"""Prints a measured decoder in a terminal: prompts, steps, and memory of the cache."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from winml.modelkit.report.terminal import print_rows
from winml.modelkit.results.generation_perf import GenerationPerf
from winml.modelkit.words import size_words

__all__ = ["print_generation_perf"]


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
