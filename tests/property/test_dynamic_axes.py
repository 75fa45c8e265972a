"""Parsing of dynamic axes given inline, as JSON, or mixed."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from winml.modelkit.errors import ConfigError
from winml.modelkit.onnx.specs import parse_dynamic_axes

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
axes = st.dictionaries(names, st.dictionaries(st.integers(0, 5), names, min_size=1, max_size=4), min_size=1, max_size=4)


def inline(wanted: dict[str, dict[int, str]], separator: str) -> str:
    """Write axes as a user would in a shell."""
    return separator.join(
        f"{name}:{','.join(f'{axis}={symbol}' for axis, symbol in named.items())}" for name, named in wanted.items()
    )


@given(wanted=axes, separator=st.sampled_from([" ", ";", "; "]))
def test_inline_and_json_read_alike(wanted: dict[str, dict[int, str]], separator: str) -> None:
    """The inline text, the JSON text and separate options give the same axes."""
    assert wanted == parse_dynamic_axes([inline(wanted, separator)])
    assert wanted == parse_dynamic_axes([json.dumps(wanted)])
    assert wanted == parse_dynamic_axes([inline({name: named}, " ") for name, named in wanted.items()])


@given(text=st.text(max_size=30).filter(lambda text: "\0" not in text))
def test_any_text_is_read_or_refused(text: str) -> None:
    """A text that is not valid raises our own error and no other."""
    try:
        read = parse_dynamic_axes([text])
    except ConfigError:
        return
    assert all(axis >= 0 for named in read.values() for axis in named)
