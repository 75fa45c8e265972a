"""Foreign text in a model: limits for its chat template, and escapes for generated text."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from e2e.in_process import run_here
from generating import PROMPT
from winml.modelkit.errors import InputError
from winml.modelkit.ort.processes import ask_limited
from winml.modelkit.samples.chat_templates import RENDERING, chat_prompt

NESTED_RANGES = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 'a'*3000000000 }}", "1 GB of memory"),
        ("{{ 'a'*5000000 }}", "5000000 characters"),
        ("{{ raise_exception('not this one') }}", "not this one"),
        ("{{ 'a'*(10**18) }}", "MemoryError"),
    ],
    ids=["memory", "length", "its own words", "more than there is"],
)
def test_chat_template_is_bounded(llama_copy: Path, template: str, words: str) -> None:
    """The template is ended, and the error is two lines with its folder."""
    (llama_copy / "chat_template.jinja").write_text(template)
    started = time.monotonic()
    outcome = run_here("generate", llama_copy, "--chat", "-p", PROMPT)
    assert 1 == outcome.code, outcome.err
    assert words in outcome.err
    assert str(llama_copy) in outcome.err
    assert len(outcome.complaint) <= 2
    assert time.monotonic() - started < 60


def test_chat_template_that_takes_too_long_is_ended() -> None:
    """The sandbox allows each of the nested loops."""
    question = {"template": NESTED_RANGES, "chats": [{"messages": [], "variables": {}}]}
    with pytest.raises(InputError, match=r"0\.5 s"):
        ask_limited(RENDERING, question, "the template", seconds=0.5, resident_bytes=10**9)


def test_template_reads_any_message(tmp_path: Path) -> None:
    """Quotes, other scripts and half a character are passed unchanged; a damaged list entry is skipped."""
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    message = "'\"\\ 日本 \ud800 {{ 1 }}\n"
    assert message == chat_prompt(tmp_path, message)
    (tmp_path / "chat_template.jinja").unlink()
    templates = [{}, "x", {"name": "default", "template": "{{ bos_token }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates, "bos_token": "<s>"}))
    assert "<s>" == chat_prompt(tmp_path, message)


def test_process_without_an_answer_is_reported() -> None:
    """The module prints no answer."""
    with pytest.raises(InputError, match="terminated its process"):
        ask_limited("this", None, "the test", seconds=5, resident_bytes=10**9)


def test_control_characters_of_a_text_are_not_obeyed(llama_copy: Path) -> None:
    """The terminal gets escapes; JSON has the text unchanged."""
    path = llama_copy / "tokenizer.json"
    sign = "\x1b]0;title\x07\r\x9b2J\n\t"
    decoder: dict[str, Any] = {"type": "Replace", "pattern": {"String": "e"}, "content": sign}
    path.write_text(json.dumps({**json.loads(path.read_text()), "decoder": decoder}))
    text = json.loads(run_here("generate", llama_copy, "-p", PROMPT, "--max-new-tokens", "8", "-f", "json").out)["text"]
    assert sign in text
    outcome = run_here("generate", llama_copy, "-p", PROMPT, "--max-new-tokens", "8")
    assert "\\x1b]0;title\\x07\\r\\x9b2J\n\t" in outcome.out
    assert {"\n", "\t"} == {character for character in outcome.out if not character.isprintable()}
