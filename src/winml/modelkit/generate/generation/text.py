"""Turns text and chat messages into tokens, and tokens into text, with the files beside a model.

A tokenizer that is whole in ``tokenizer.json`` is read by the ``tokenizers`` library, which starts in no time; any
other by transformers, which brings in torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from winml.modelkit.errors import InputError, UsageError, opt
from winml.modelkit.file_names import CHECKPOINT_CONFIG_NAME, TOKENIZER_CONFIG_NAME, TOKENIZER_NAME
from winml.modelkit.generate.generation.settings import read_record
from winml.modelkit.onnx.files.foreign_files import foreign_parser, library_file
from winml.modelkit.options import JsonError, read_text_file
from winml.modelkit.ort.foreign_libraries import library_folder
from winml.modelkit.ort.processes import ask_limited
from winml.modelkit.samples.processors import LONGEST_TEXT_CHARACTERS, tokenizer_call

_REBUILD = "Build the model again."
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
    """``tokenizer.json``, read by the library that wrote it."""

    def __init__(self, path: Path) -> None:
        import tokenizers

        self._folder = path.parent
        with foreign_parser(f"{path} cannot be read", hint=_REBUILD), tokenizer_call(self._folder):
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


_TEMPLATE_NAME = "chat_template.jinja"
"""Specified: the file transformers keeps a chat template in; before, it was a key of the tokenizer's config."""
_LIMIT_SECONDS: Final = 5.0
"""Chosen: a thousand times what templates of chat models take (measured: 1 to 5 ms)."""
_LIMIT_BYTES: Final = 1_000_000_000
"""Chosen: more than ten times what rendering takes (measured: 60 MB, libraries included)."""
RENDERING = "winml.modelkit.generate.generation.template_rendering"
"""The module that renders."""


def chat_prompt(folder: Path, message: str, system: str | None = None) -> str:
    """Return the text with which a model is asked to answer a message of a user, as its chat template writes it.

    Args:
        folder: With the template.
        message: What the user says.
        system: What is said before it in the role ``system``.

    The special tokens are in the text: it is encoded without adding any.

    Raises:
        UsageError: the model has no chat template.
        InputError: the template fails or takes too much, or a file is damaged.
    """
    config = read_record(folder, TOKENIZER_CONFIG_NAME)
    template = _chat_template(folder, config)
    if template is None:
        raise UsageError(
            f"{folder}: no chat template ({_TEMPLATE_NAME})",
            hint=f"Omit {opt.chat}: without it, the model continues the text as it is.",
        )
    before = [] if system is None else [{"role": "system", "content": system}]
    return rendered_chat(folder, template, [*before, {"role": "user", "content": message}], _special_tokens(config))


def rendered_chat(
    folder: Path, template: str, messages: Sequence[Mapping[str, object]], variables: Mapping[str, object]
) -> str:
    """Return what a template makes of messages.

    Args:
        folder: Where the template is from, for messages.
        template: Its text.
        messages: Each a role and its content: a text, or parts.
        variables: What the template knows besides, such as ``bos_token``.

    Raises:
        InputError: the template fails, or takes too much time or memory.
    """
    question = {
        "template": template,
        "messages": list(messages),
        "variables": dict(variables),
    }
    try:
        output = ask_limited(
            RENDERING,
            question,
            f"{folder}: its chat template",
            seconds=_LIMIT_SECONDS,
            resident_bytes=_LIMIT_BYTES,
        )
    except InputError as error:
        error.hint = f"Omit {opt.chat}, or replace the template."
        raise
    if "error" in output:
        raise InputError(f"{folder}: the chat template failed: {output['error']}")
    text = str(output["text"])
    if len(text) > LONGEST_TEXT_CHARACTERS:
        raise InputError(
            f"{folder}: the chat template expands the message to {len(text)} characters; the maximum is "
            f"{LONGEST_TEXT_CHARACTERS}",
            hint=f"Omit {opt.chat}, or replace the template.",
        )
    return text


def _chat_template(folder: Path, config: Mapping[str, object]) -> str | None:
    path = library_file(folder, _TEMPLATE_NAME)
    if path is not None:
        try:
            return read_text_file(path)
        except JsonError as error:
            raise InputError(f"{path}: {error}", hint=error.hint) from error
    value = config.get("chat_template") or read_record(folder, "chat_template.json").get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _special_tokens(config: Mapping[str, object]) -> dict[str, object]:
    """Return what templates know of a tokenizer: ``bos_token`` and the like."""
    tokens = {key: value for key, value in config.items() if key.endswith("_token")}
    named = {key: value.get("content") if isinstance(value, dict) else value for key, value in tokens.items()}
    return {key: value for key, value in named.items() if isinstance(value, str)}
