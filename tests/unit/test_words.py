"""Printing of foreign texts, and cuts of long ones."""

from __future__ import annotations

import json
import types
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from winml.modelkit.words import command_line, json_printable, message_words, printable

_ANY_TEXT = st.text(st.characters(), max_size=300)
_OBEYED = {"Cc", "Cf", "Cs", "Zl", "Zp"}


@given(_ANY_TEXT)
def test_printable_text_contains_no_control_characters(text: str) -> None:
    """The result can be encoded, stands on one line, and keeps all printable characters."""
    shown = printable(text)
    assert set() == {character for character in shown if unicodedata.category(character) in _OBEYED}
    shown.encode("utf-8")
    assert shown == printable(shown)
    kept = "".join(character for character in text if unicodedata.category(character) not in _OBEYED)
    assert kept == printable(kept)


@given(st.dictionaries(_ANY_TEXT, _ANY_TEXT, max_size=3))
def test_printable_json_keeps_its_meaning(record: dict[str, str]) -> None:
    """Every string keeps its value, lone surrogates included."""
    text = json_printable(json.dumps(record, indent=1, ensure_ascii=False))
    assert record == json.loads(text)
    assert set() == {sign for sign in text if unicodedata.category(sign) in _OBEYED} - {"\n"}


@pytest.mark.parametrize(
    ("system", "line"), [("posix", "winml perf 'my model.onnx' a:0=1"), ("nt", 'winml perf "my model.onnx" a:0=1')]
)
def test_command_is_quoted_for_the_shell_of_the_system(system: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("winml.modelkit.words.os", types.SimpleNamespace(name=system))
    assert line == command_line(["winml", "perf", "my model.onnx", "a:0=1"])


@given(_ANY_TEXT)
def test_message_is_never_long(text: str) -> None:
    """A message stays short however long the quoted texts are."""
    assert len(message_words(f"{text * 30} is '{text * 100}', not {text * 10}")) < 2100


def test_message_has_the_length_of_cut_text() -> None:
    """Quoted texts and texts without a space are cut; the text around them stays."""
    name, path = "a b " * 100, "x" * 201
    assert message_words(f"node '{name}' in {path} fails") == (
        f"node '{name[:200]}… (400 characters)' in {path[:200]}… (201 characters) fails"
    )
    assert message_words(f"node 'it' in {path[1:]} fails") == f"node 'it' in {path[1:]} fails"
