"""What is told of a generated text besides the text itself, as lines for stderr."""

from __future__ import annotations

from collections.abc import Iterator

from winml.modelkit.results.generated_text import GeneratedText, ReferenceText
from winml.modelkit.words import size_words

__all__ = ["generated_lines"]


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
