"""Parsing of options about dynamic dimensions, and refusals with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from winml.modelkit.errors import ConfigError
from winml.modelkit.onnx.specs import DynamicDimension, DynamicRequest, OpenSize, parse_dynamic_axes


@pytest.mark.parametrize(
    "texts",
    [
        ["input_ids:0=batch,1=sequence attention_mask:0=batch"],
        ["input_ids:0=batch,1=sequence;attention_mask:0=batch"],
        ["input_ids:0=batch,1=sequence", "attention_mask:0=batch"],
        ["input_ids:0=batch", "input_ids:1=sequence attention_mask:0=batch"],
        ['{"input_ids": {"0": "batch", "1": "sequence"}, "attention_mask": {"0": "batch"}}'],
    ],
)
def test_dynamic_axes_forms_mean_the_same(texts: list[str]) -> None:
    """Inline, repeated and JSON options are equivalent."""
    assert {"input_ids": {0: "batch", 1: "sequence"}, "attention_mask": {0: "batch"}} == parse_dynamic_axes(texts)


def test_dynamic_axes_file_equals_inline_text(tmp_path: Path) -> None:
    """A path and the file's text as an option are equivalent."""
    path = tmp_path / "axes.json"
    path.write_text('{"x": {"0": "n"}}', encoding="utf-8")
    assert {"x": {0: "n"}} == parse_dynamic_axes([str(path)])


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["x:0=a", "x:0=b"], "both 'a' and 'b'"),
        (["x:0=a,0=b"], "both 'a' and 'b'"),
        (["x:-1=a"], "axis -1"),
        (['{"x": {"-1": "a"}}'], "axis -1"),
        (["x:0=1a"], "'1a'"),
        (["x:zero=a"], "'x:zero=a'"),
        (['{"x": {"zero": "a"}}'], "'zero'"),
        (['{"x": "a"}'], "object of"),
        (['{"x": {"0": 3}}'], "string"),
        (["axes.json"], "no such"),
    ],
)
def test_dynamic_axes_malformed_are_refused(texts: list[str], words: str) -> None:
    """The message names the option, the position and the error."""
    with pytest.raises(ConfigError) as caught:
        parse_dynamic_axes(texts)
    assert words in str(caught.value)
    assert "--dynamic-axes" in str(caught.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"min": 4, "max": 3}, "min 4 .* max 3"),
        ({"example": 9, "max": 8}, "example 9.*of 1 to 8"),
        ({"example": 1}, "a constant"),
        ({"min": 0}, "equal to 1"),
    ],
)
def test_open_size_contradiction_is_refused(values: dict[str, int], words: str) -> None:
    """Bounds and example fit each other."""
    with pytest.raises(ConfigError, match=words):
        OpenSize(**values)


def test_request_joined_with_another_holds_both_and_own_names_win() -> None:
    """The result contains both requests; the first name of an axis is used."""
    first = DynamicRequest(batch=True, axes={"x": {0: "n"}})
    other = DynamicRequest(sequence=True, axes={"x": {0: "m", 1: "k"}}, dimensions=(DynamicDimension(name="k"),))
    assert DynamicRequest(
        batch=True, sequence=True, axes={"x": {0: "n", 1: "k"}}, dimensions=(DynamicDimension(name="k"),)
    ) == first.joined(other)
    assert DynamicRequest().is_empty
    assert not first.is_empty
