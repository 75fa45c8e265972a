"""Reading of one key in the front matter of a README, in bounded time for any other keys."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from winml.modelkit.models.checkpoints.config import card_task
from winml.modelkit.onnx.files.front_matter import FrontMatterError, front_matter_value


def _value(folder: Path, text: str, most_bytes: int = 1000) -> Any:
    (folder / "README.md").write_text(text, encoding="utf-8")
    return front_matter_value(folder / "README.md", "key", most_bytes)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("---\nkey: a\n---\n# Words", "a"),
        ("\ufeff---\r\nkey: 'a b' # why\r\n---\r\n", "a b"),
        ("---\na: 1\nkey:\n- x: 1\n  y: [2]\n\n# why\n- z\nb: 2\n---\n", [{"x": 1, "y": [2]}, "z"]),
        ("---\nkey: [\n1\n, 2\n]\nb: 2\n---\n", None),
        ("---\nkey: [\n 1, 2\n]\nb: 2\n---\n", [1, 2]),
        ("---\nkey: a\nkey: b\n---\n", "b"),
        ("---\nother: [ &x !!y\nkey: a\n---\n", "a"),
        ("---\nkeys: a\n key: b\n---\nkey: c", None),
        ("key: a\n---\nkey: a\n", None),
        ("", None),
    ],
)
def test_value_of_a_key_equals_yaml(tmp_path: Path, text: str, value: Any) -> None:
    """Other keys do not matter, not even damaged ones."""
    if "1\n, 2" in text:
        with pytest.raises(FrontMatterError):
            _value(tmp_path, text)
    else:
        assert value == _value(tmp_path, text)


@pytest.mark.parametrize(
    "value",
    ["[", "!!python/name:os.system", "!!int 3", "{a: &x 1, b: *x}", "[" * 40 + "]" * 40, "[" * 900, "a" * 2000,
     "2001-99-99", "\x01", "? ["],
)  # fmt: skip
def test_unneeded_yaml_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(FrontMatterError):
        _value(tmp_path, f"---\nkey: {value}\n---\n")


def test_large_facts_cost_no_time(tmp_path: Path) -> None:
    """The line of the tag is found in four megabytes, which YAML would parse for minutes."""
    facts = "".join(f"- [{{name: x{number}, dtype: string}}]\n" for number in range(100_000))
    (tmp_path / "README.md").write_text(f"---\nfacts:\n{facts}pipeline_tag: fill-mask\n---\n", encoding="utf-8")
    started = time.perf_counter()
    assert "fill-mask" == card_task(tmp_path)
    assert time.perf_counter() - started < 5
    (tmp_path / "README.md").write_text(f"---\npipeline_tag: [{'a, ' * 100_000}]\n---\n", encoding="utf-8")
    assert card_task(tmp_path) is None
