"""Describes a generated text and how it compares with the text of PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

from winml.modelkit.generate.text_records import GeneratedText, ReferenceText
from winml.modelkit.words import size_words

_ENDS = {
    "eos": "ended by the model",
    "stop": "ended by {}",
    "length": "at the maximum",
}


def generated_lines(result: GeneratedText, number: int | None = None) -> Iterator[str]:
    """Yield a line for times and memory, one for each note, and what PyTorch wrote.

    Args:
        result: The text.
        number: Of the prompt, where there are several of one model.
    """
    rate = result.tokens_per_second
    count = len(result.prompt_tokens)
    names = {"stop_strings": "a stop string", "max_time": "max_time"}
    ended_by = " or ".join(words for name, words in names.items() if name in result.settings)
    words = [
        *([f"prompt {number}"] if number is not None else []),
        f"{len(result.tokens)} new tokens ({_ENDS[result.end].format(ended_by)}) after {count} of the prompt",
        *([f"session {result.session_ms / 1000:.2f} s"] if number in {None, 1} else []),
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
    quantized = " (the model is quantized)" if reference.is_of_quantized else ""
    yield (
        f"PyTorch ({reference.model}) differs at token {difference.index + 1}: "
        f"{_token_words(difference.reference_token, difference.reference_text)} instead of "
        f"{_token_words(difference.token, difference.text)}{scored}; {reference.equal_tokens} of "
        f"{max(count, len(reference.tokens))} tokens are equal{quantized}"
    )


def _token_words(token: int | None, text: str) -> str:
    return "its end" if token is None else f"{token} ({text!r})"
