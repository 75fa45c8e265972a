"""Tokenization and detokenization of text and chat messages, with the files of a model.

A tokenizer that is complete in ``tokenizer.json`` is read by the ``tokenizers`` library, which loads fast; any other
tokenizer by transformers, which imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from winml.modelkit.errors import InputError, opt
from winml.modelkit.file_names import CHECKPOINT_CONFIG_NAME, TOKENIZER_CONFIG_NAME, TOKENIZER_NAME
from winml.modelkit.onnx.files.foreign_files import foreign_parser, library_file
from winml.modelkit.ort.foreign_libraries import library_folder
from winml.modelkit.samples.processors import tokenizer_call

_REBUILD = "Build the model again."
_BROKEN = "\N{REPLACEMENT CHARACTER}"
"""Placeholder for bytes of an incomplete character."""


class TextTokenizer(Protocol):
    """Protocol of the required functions of a tokenizer."""

    def encode(self, text: str, *, with_special: bool = True) -> list[int]:
        """Tokenize a text.

        Args:
            text: The text.
            with_special: Add the model's special tokens, such as a first token.
        """

    def pieces(self, tokens: Iterable[int], *, after: Sequence[int]) -> Iterator[str]:
        """Yield the text of each token as soon as its characters are complete; special tokens have no text.

        Args:
            tokens: The tokens.
            after: Tokens of the preceding text, which decide on a space in between.
        """


@dataclass(frozen=True)
class TextSegment:
    """Transcript of a part of a recording."""

    start_s: float
    end_s: float
    tokens: tuple[int, ...]
    """Tokens without the timestamp tokens."""


class TimedText:
    """Converts the segments of a recording to text, optionally with their times.

    Attributes:
        segments: Transcribed segments; known with the first token.
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
        """Yield the text of each segment once all tokens are known, on a separate line with times."""
        for _ in tokens:
            yield ""
        for segment in self.segments:
            text = self._segment_text(segment, after)
            yield f"[{segment.start_s:.2f} → {segment.end_s:.2f}] {text.strip()}\n" if self._with_times else text

    def as_records(self, after: Sequence[int]) -> tuple[dict[str, object], ...] | None:
        """Return the segments as JSON values; None if no times were requested."""
        if not self._with_times:
            return None
        return tuple(
            {"start_s": segment.start_s, "end_s": segment.end_s, "text": self._segment_text(segment, after).strip()}
            for segment in self.segments
        )

    def _segment_text(self, segment: TextSegment, after: Sequence[int]) -> str:
        return "".join(self._tokenizer.pieces(segment.tokens, after=after))


def read_tokenizer(folder: Path) -> TextTokenizer:
    """Open the tokenizer in the folder of a model.

    Raises:
        InputError: the tokenizer is missing, or cannot be read.
    """
    path = library_file(folder, TOKENIZER_NAME)
    if path is not None:
        return _TokenizerOfFile(path)
    names = {CHECKPOINT_CONFIG_NAME, TOKENIZER_CONFIG_NAME, "vocab.json", "tokenizer.model", "spiece.model"}
    if not any((folder / name).is_file() for name in names - {CHECKPOINT_CONFIG_NAME}):
        raise InputError(
            f"{folder}: no tokenizer ({TOKENIZER_NAME})",
            hint="Copy the tokenizer files of the model there. If its checkpoint has them, build it again without "
            f"{opt.no_tokenizer}.",
        )
    return _TokenizerOfTransformers(folder)


class _TokenizerOfFile:
    """A ``tokenizer.json``, read by the ``tokenizers`` library."""

    def __init__(self, path: Path) -> None:
        import tokenizers

        self._folder = path.parent
        with foreign_parser(f"{path} cannot be read", hint=_REBUILD), tokenizer_call(self._folder):
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        # Settings of the training: a prompt is neither truncated nor padded.
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
    """Open transformers' tokenizer in a folder.

    Raises:
        InputError: the tokenizer cannot be read.
    """
    with library_folder(folder, f"{folder}: its tokenizer cannot be read", hint=_REBUILD), tokenizer_call(folder):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder)


class _TokenizerOfTransformers:
    """Any tokenizer transformers can read from a folder."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = open_tokenizer(folder)

    def encode(self, text: str, *, with_special: bool = True) -> list[int]:
        with tokenizer_call(self._tokenizer, text):
            return list(self._tokenizer.encode(text, add_special_tokens=with_special))

    def pieces(self, tokens: Iterable[int], *, after: Sequence[int]) -> Iterator[str]:
        all_tokens = list(after)
        reported = self._decode(all_tokens)
        for token in tokens:
            all_tokens.append(token)
            text = self._decode(all_tokens)
            if text.endswith(_BROKEN):
                yield ""
                continue
            yield text[len(reported) :]
            reported = text

    def _decode(self, tokens: Sequence[int]) -> str:
        with tokenizer_call(self._tokenizer):
            return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))
