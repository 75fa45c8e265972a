"""Errors of a tokenizer library that panics, and of a text that exceeds the memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from e2e.workplace import Workplace
from generating import PROMPT
from winml.modelkit.errors import InputError
from winml.modelkit.generate.generation.text import TextTokenizer, open_tokenizer, read_tokenizer
from winml.modelkit.samples.processors import LONGEST_TEXT_CHARACTERS, tokenizer_call

PRECOMPILED = {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}
"""Tokenizer that makes the library panic while it reads the file."""
RETRIES = {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}}
"""Tokenizer that makes the library panic while it encodes a text, after too many attempts."""
WORDS = "a" * 60 + "b"


def change(folder: Path, **values: Any) -> Path:
    """Change parts of the tokenizer in a folder, and return the folder."""
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return folder


@pytest.mark.parametrize(("part", "prompt"), [(PRECOMPILED, PROMPT), (RETRIES, WORDS)], ids=["reading", "encoding"])
def test_panic_is_reported_as_an_error_of_the_file(
    llama_copy: Path, workplace: Workplace, part: dict[str, Any], prompt: str
) -> None:
    """The error has two lines, without the traceback that Rust writes to the descriptor itself."""
    change(llama_copy, **part)
    outcome = workplace.winml("generate", llama_copy, "-p", prompt)
    assert (1, "", 2) == (outcome.code, outcome.out, len(outcome.err.splitlines())), outcome.err
    assert str(llama_copy / "tokenizer.json") in outcome.err


def test_panic_is_reported_by_eval(llama_copy: Path, workplace: Workplace) -> None:
    """The error names the samples, too."""
    rows = workplace.folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in (PROMPT, WORDS)))
    change(llama_copy, **RETRIES)
    outcome = workplace.winml("eval", llama_copy, "--dataset", rows, "--task", "text-generation")
    assert 1 == outcome.code, outcome.err
    assert "samples from 1" in outcome.err
    assert str(llama_copy / "tokenizer.json") in outcome.err
    assert "panicked" not in outcome.err


@pytest.mark.parametrize("open_one", [read_tokenizer, lambda folder: _Whole(open_tokenizer(folder))])
def test_overlong_text_is_refused(llama: Path, open_one: Any) -> None:
    """The library does not get the text, because its memory would end the process."""
    tokenizer: TextTokenizer = open_one(llama)
    assert tokenizer.encode(PROMPT)
    with pytest.raises(InputError, match=f"{LONGEST_TEXT_CHARACTERS + 1} characters"):
        tokenizer.encode("a" * (LONGEST_TEXT_CHARACTERS + 1))


class _Whole:
    """A tokenizer of transformers behind the guard, as evaluations call it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> Any:
        with tokenizer_call(self._tokenizer, [[text]]):
            return self._tokenizer(text)["input_ids"]


def test_foreign_text_on_stderr_stays(llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Other text on stderr appears after the call, and errors of another kind are passed on."""
    with tokenizer_call(llama):
        os.write(2, b"some words\n")
    assert "some words\n" == capfd.readouterr().err
    with pytest.raises(KeyError), tokenizer_call(llama):
        raise KeyError
