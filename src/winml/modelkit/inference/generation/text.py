"""Turns text into tokens and back, with the files beside a model.

A tokenizer that is whole in ``tokenizer.json`` is read by the ``tokenizers`` library, which starts in no time; any
other by transformers, which brings in torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from winml.modelkit.errors import InputError
from winml.modelkit.evaluate.processors import UNREADABLE
from winml.modelkit.evaluate.tokenizer_calls import tokenizer_call
from winml.modelkit.file_names import CHECKPOINT_CONFIG_NAME, TOKENIZER_CONFIG_NAME, TOKENIZER_NAME

__all__ = ["TextSegment", "TextTokenizer", "TimedText", "open_tokenizer", "read_tokenizer"]

_BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What stands for bytes of a character that is not whole yet."""


class TextTokenizer(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str, *, with_special: bool = True) -> list[int]:
        """Return the tokens of a text.

        Args:
            text: The text.
            with_special: Add what the model expects around it, such as a first token.
        """

    def pieces(self, tokens: Iterable[int], *, after: Sequence[int]) -> Iterator[str]:
        """Yield the text of each token as soon as its characters are whole; special tokens have none.

        Args:
            tokens: The tokens.
            after: Those of the text before, which decide whether a space stands between.
        """


@dataclass(frozen=True)
class TextSegment:
    """What is said in a part of a recording."""

    start_s: float
    end_s: float
    tokens: tuple[int, ...]
    """Without those that stand for times."""


class TimedText:
    """Turns the segments of a recording into text, with their times where these are asked for.

    Attributes:
        segments: What was heard; known once the first token is.
    """

    def __init__(self, tokenizer: TextTokenizer, *, with_times: bool) -> None:
        """Write with a tokenizer."""
        self._tokenizer = tokenizer
        self._with_times = with_times
        self.segments: tuple[TextSegment, ...] = ()

    def encode(self, text: str, *, with_special: bool = True) -> list[int]:
        """Return the tokens of a text."""
        return self._tokenizer.encode(text, with_special=with_special)

    def pieces(self, tokens: Iterable[int], *, after: Sequence[int]) -> Iterator[str]:
        """Yield the text of each segment once all tokens are known, on a line of its own where it has times."""
        for _ in tokens:
            yield ""
        for segment in self.segments:
            text = self._text(segment, after)
            yield f"[{segment.start_s:.2f} → {segment.end_s:.2f}] {text.strip()}\n" if self._with_times else text

    def as_records(self, after: Sequence[int]) -> tuple[dict[str, object], ...] | None:
        """Return the segments as JSON values; None where no times were asked for."""
        if not self._with_times:
            return None
        return tuple(
            {"start_s": item.start_s, "end_s": item.end_s, "text": self._text(item, after).strip()}
            for item in self.segments
        )

    def _text(self, segment: TextSegment, after: Sequence[int]) -> str:
        return "".join(self._tokenizer.pieces(segment.tokens, after=after))


def read_tokenizer(folder: Path) -> TextTokenizer:
    """Return the tokenizer in the folder of a model.

    Raises:
        InputError: there is none, or it cannot be read.
    """
    path = folder / TOKENIZER_NAME
    if path.is_file():
        return _TokenizerOfFile(path)
    names = {CHECKPOINT_CONFIG_NAME, TOKENIZER_CONFIG_NAME, "vocab.json", "tokenizer.model", "spiece.model"}
    if not any((folder / name).is_file() for name in names - {CHECKPOINT_CONFIG_NAME}):
        raise InputError(
            f"{folder}: holds no tokenizer ({TOKENIZER_NAME})",
            hint="Copy the tokenizer files of the checkpoint there, or build the model again without --no-tokenizer.",
        )
    return _TokenizerOfTransformers(folder)


class _TokenizerOfFile:
    """``tokenizer.json``, read by the library that wrote it."""

    def __init__(self, path: Path) -> None:
        import tokenizers

        self._folder = path.parent
        with tokenizer_call(self._folder):
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        # What a training needed: a prompt is neither cut nor filled up.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str, *, with_special: bool = True) -> list[int]:
        with tokenizer_call(self._folder, text):
            return list(self._tokenizer.encode(text, add_special_tokens=with_special).ids)

    def pieces(self, tokens: Iterable[int], *, after: Sequence[int]) -> Iterator[str]:
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(ids=list(after), skip_special_tokens=True)
        for token in tokens:
            with tokenizer_call(self._folder):
                piece = stream.step(self._tokenizer, token)
            yield piece or ""


def open_tokenizer(folder: Path) -> Any:
    """Return transformers' tokenizer in a folder.

    Raises:
        InputError: it cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        with tokenizer_call(folder):
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except UNREADABLE as error:
        raise InputError(
            f"{folder}: its tokenizer cannot be read: {' '.join(str(error).split())}", hint="Build the model again."
        ) from error


class _TokenizerOfTransformers:
    """Any tokenizer transformers can read from a folder."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = open_tokenizer(folder)

    def encode(self, text: str, *, with_special: bool = True) -> list[int]:
        with tokenizer_call(self._tokenizer, text):
            return list(self._tokenizer.encode(text, add_special_tokens=with_special))

    def pieces(self, tokens: Iterable[int], *, after: Sequence[int]) -> Iterator[str]:
        written = list(after)
        reported = self._decoded(written)
        for token in tokens:
            written.append(token)
            text = self._decoded(written)
            if text.endswith(_BROKEN):
                yield ""
                continue
            yield text[len(reported) :]
            reported = text

    def _decoded(self, tokens: Sequence[int]) -> str:
        with tokenizer_call(self._tokenizer):
            return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))
