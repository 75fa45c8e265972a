"""JSON texts as options, and errors that name the key."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from winml.modelkit.errors import ConfigError
from winml.modelkit.options import (
    JsonError,
    Options,
    load_metadata,
    load_metadata_record,
    nearest,
    parse_options,
    read_json,
    unknown_key_message,
)


class Inner(Options):
    """A record inside another."""

    depth_limit: int = 1


class Outer(Options):
    """A record of every kind of field."""

    name: str
    share: float = 0.5
    sizes: tuple[int, ...] = ()
    is_fast: bool = False
    inner: Inner = Inner()
    others: tuple[Inner, ...] = ()


def parse(value: Any) -> Outer:
    """Validate against the record ``Outer``."""
    return parse_options(Outer, value, "--outer")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{\n  "a": 1\n  "b": 2\n}', "line 3, column 3"),
        ("{'a': 1}", "line 1, column 2"),
        ('{"a": 1', "line 1, column 8"),
        ("[1, 2", "line 1, column 6"),
        ('{"a": 1} x', "line 1, column 10"),
        ('{"a": "b\nc"}', "line 1, column 9"),
    ],
)
def test_read_json_malformed_names_line_and_column(text: str, place: str) -> None:
    """The error names line and column of the wrong character."""
    with pytest.raises(ConfigError) as caught:
        read_json(text, "--options")
    assert caught.value.message.startswith(f"--options: not valid JSON at {place}: ")


def test_read_json_malformed_file_is_named(tmp_path: Path) -> None:
    """The message names option, file, line and column."""
    path = tmp_path / "options.json"
    path.write_text('{\n"a" 1}', encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_json(path, "--options")
    assert caught.value.message.startswith(f"--options {path}: not valid JSON at line 2, column 5")


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"b": {"a": 1, "a": 1}}', '[{"a": 1, "b": 2, "a": 3}]'])
def test_read_json_duplicate_key_is_refused(text: str) -> None:
    """A key twice in one object would silently lose a value, at any depth."""
    with pytest.raises(ConfigError, match="--options: key 'a' occurs twice in one object"):
        read_json(text, "--options")


def test_read_json_same_key_in_two_objects_is_fine() -> None:
    """Only a single object must not repeat a key."""
    assert ([{"a": 1}, {"a": 1}], "--options") == read_json('[{"a": 1}, {"a": 1}]', "--options")


def test_read_json_takes_text_and_files_alike(tmp_path: Path) -> None:
    """The text may be inline, begin with white space, or be in a file with a byte order mark."""
    path = tmp_path / "options.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": "\xc3\xa9"}')
    for given in (' \n{"a": "é"}', path, os.fspath(path)):
        assert {"a": "é"} == read_json(given, "--options")[0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("batch_size=2,sequence_length=open", {"batch_size": 2, "sequence_length": "open"}),
        ("BertLayer.0 = fp32, op:Gemm=int8", {"BertLayer.0": "fp32", "op:Gemm": "int8"}),
        ("x=float32[1,3,8,8],y=[1,2]", {"x": "float32[1,3,8,8]", "y": "[1,2]"}),
        ("a=true,b=null,c=-1.5e3,d=007", {"a": True, "b": None, "c": -1500.0, "d": "007"}),
    ],
)
def test_pairs_need_no_quotes(text: str, value: object) -> None:
    """PowerShell and cmd remove the quotes of JSON text; numbers and words are as in JSON, the rest is text."""
    assert read_json(text, "--options") == (value, "--options")


@pytest.mark.parametrize("text", ["a=1,b", "=1", "a=", "a=1,a=2", "a=1,,b=2"])
def test_incomplete_or_repeated_pairs_are_refused(text: str) -> None:
    """A pair without a name or a value, or a repeated name, would lose what was meant."""
    with pytest.raises(ConfigError, match="--options: "):
        read_json(text, "--options")


def test_file_with_an_equals_sign_in_its_name_is_read(tmp_path: Path) -> None:
    """An existing file is no pair."""
    path = tmp_path / "a=b.json"
    path.write_text('{"c": 1}', encoding="utf-8")
    assert read_json(path, "--options")[0] == {"c": 1}


def test_read_json_missing_file_is_named(tmp_path: Path) -> None:
    """The hint says that JSON or a file is expected."""
    with pytest.raises(ConfigError, match=r"gone\.json: no such file") as caught:
        read_json(tmp_path / "gone.json", "--options")
    assert "JSON" in caught.value.hint


@pytest.mark.parametrize("content", [None, b"\xff\xfe{}"], ids=["directory", "not UTF-8"])
def test_read_json_unreadable_file_is_named(content: bytes | None, tmp_path: Path) -> None:
    """A directory and a file of another encoding are errors with the path."""
    path = tmp_path / "options.json"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"options\.json: cannot be read: "):
        read_json(path, "--options")


def test_read_json_nested_too_deep_is_refused() -> None:
    """A text made to exhaust the parser is an error like any other."""
    with pytest.raises(ConfigError, match="too deep"):
        read_json("[" * 100_000, "--options")


def test_parse_options_misspelled_required_key_is_named() -> None:
    """A misspelled key leaves the required key missing; the error names the misspelling."""
    with pytest.raises(ConfigError, match="unknown key 'nane'; did you mean 'name'"):
        parse({"nane": "x"})


@pytest.mark.parametrize("name", ["NaN", "Infinity", "-Infinity"])
def test_read_json_non_finite_numbers_are_refused(name: str) -> None:
    """Python reads NaN and infinity, JSON does not have them, and no option of ours needs them."""
    with pytest.raises(ConfigError, match=f"--outer: not valid JSON: {name} is not a JSON value"):
        read_json(f'{{"share": [{name}]}}', "--outer")


def test_parse_options_reads_json_types() -> None:
    """Arrays become tuples and whole numbers become floats, if the record declares them so."""
    value = {"name": "x", "share": 1, "sizes": [1, 2], "others": [{"depth_limit": 3}]}
    assert Outer(name="x", share=1.0, sizes=(1, 2), others=(Inner(depth_limit=3),)) == parse(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"name": "x", "nam": 1}, "--outer: unknown key 'nam'; did you mean 'name'?"),
        ({"name": "x", "IS_FAST": True}, "--outer: unknown key 'IS_FAST'; did you mean 'is_fast'?"),
        ({"name": "x", "inner": {"depth": 1}}, "--outer: inner: unknown key 'depth'; did you mean 'depth_limit'?"),
        (
            {"name": "x", "others": [{}, {"limit": 1}]},
            "--outer: others.1: unknown key 'limit'; did you mean 'depth_limit'?",
        ),
        (
            {"name": "x", "qqq": 1},
            "--outer: unknown key 'qqq'; known keys: inner, is_fast, name, others, share, sizes",
        ),
        ({"name": "x", "inner": {"qqq": 1}}, "--outer: inner: unknown key 'qqq'; known keys: depth_limit"),
    ],
)
def test_parse_options_unknown_key_names_the_nearest(value: dict[str, Any], message: str) -> None:
    """The nearest key is one of the record that holds the unknown key, however deep."""
    with pytest.raises(ConfigError) as caught:
        parse(value)
    assert message == caught.value.message


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({}, "--outer: name: Field required"),
        ({"name": 3}, "--outer: name: Input should be a valid string (got 3)"),
        ({"name": "x", "is_fast": "yes"}, "--outer: is_fast: Input should be a valid boolean (got 'yes')"),
        ({"name": "x", "is_fast": 1}, "--outer: is_fast: Input should be a valid boolean (got 1)"),
        ({"name": "x", "share": "0.5"}, "--outer: share: Input should be a valid number (got '0.5')"),
        ({"name": "x", "sizes": [1, 2.5]}, "--outer: sizes.1: Input should be a valid integer"),
        ({"name": "x", "sizes": [1, "2"]}, "--outer: sizes.1: Input should be a valid integer (got '2')"),
        ({"name": "x", "sizes": 1}, "--outer: sizes: Input should be a valid"),
        ({"name": "x", "others": [{"depth_limit": None}]}, "--outer: others.0.depth_limit: Input should be"),
        ([], "--outer: expected a JSON object, got list"),
        (None, "--outer: expected a JSON object, got NoneType"),
    ],
)
def test_parse_options_wrong_kind_names_the_field(value: Any, words: str) -> None:
    """No value is converted from another kind; the message holds key, expectation and value."""
    with pytest.raises(ConfigError) as caught:
        parse(value)
    assert caught.value.message.startswith(words)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("opset", "opset_version"),
        ("OPSET_VERSION", "opset_version"),
        ("opsetversion", "opset_version"),
        ("verfy", "verify"),
        ("v", "verify"),
        ("zzz", None),
    ],
)
def test_nearest_guesses_misspellings_and_beginnings(word: str, expected: str | None) -> None:
    """Case does not matter, and a word unlike all names has no nearest name."""
    assert expected == nearest(word, ["opset_version", "verify", "hierarchy"])


def test_nearest_of_a_name_in_capitals_is_that_name() -> None:
    assert "LayerNorm" == nearest("layernorm", ["Linear", "LayerNorm"])
    assert "GELU" == nearest("gelu", ["GELU", "Linear"])


def test_unknown_key_message_of_a_record_without_keys_is_whole() -> None:
    """The message is a sentence even without known keys."""
    assert "--x: unknown key 'a'; known keys: b" == unknown_key_message("a", ["b"], "--x")


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000 + "]" * 100_000, "[" * 600 + "]" * 600, str(10**308), "9" * 5000, "1e400", "Infinity", "NaN", "{"],
    ids=lambda text: text[:9],
)
def test_load_metadata_refuses_numbers_and_levels_that_no_graph_has(text: str) -> None:
    """A reader of metadata handles one error class, and 64-bit numbers only."""
    with pytest.raises(JsonError):
        load_metadata(f'{{"size": {text}}}')


@pytest.mark.parametrize(("text", "record"), [('{"a": 1}', {"a": 1}), ("[1]", {}), ("{", {}), ('{"a": 1e999}', {})])
def test_damaged_metadata_record_is_empty(text: str, record: dict[str, int]) -> None:
    assert record == load_metadata_record(text)


def test_load_metadata_reads_numbers_of_64_bits() -> None:
    """The largest and the smallest 64-bit numbers are read."""
    assert [2**63 - 1, -(2**63), 1.5, -0.0] == load_metadata(f"[{2**63 - 1}, {-(2**63)}, 1.5, -0.0]")


def test_lists_of_python_callers_are_tuples() -> None:
    """A list becomes a tuple as in JSON, and its items are checked as strictly."""
    assert Outer(name="x", sizes=(1, 2)) == Outer(name="x", sizes=[1, 2])  # type: ignore[arg-type]
    assert (Inner(),) == Outer(name="x", others=[Inner()]).others  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"sizes\.1"):
        Outer(name="x", sizes=[1, "2"])  # type: ignore[list-item, arg-type]
