"""Share of tests that assert the wording of messages instead of values and classes of errors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from architecture.sources import REPOSITORY

LARGEST_SHARE = 0.11
"""Largest share of tests that assert a sentence; it may only fall."""
_PLAIN_WORD = re.compile(r"(?<![^\s\"'(])[A-Za-z][a-z'’-]*(?=[,:;.?!)]*(?:\s|$|[\"']))")
_SEARCHES = {"startswith", "endswith", "search", "match", "fullmatch", "findall", "count"}


def is_sentence(text: str) -> bool:
    """Return True if a text, or a pattern, has three plain words or more."""
    return len(_PLAIN_WORD.findall(re.sub(r"\\(.)", r"\1", text))) >= 3


def asserts_a_sentence(test: ast.FunctionDef) -> bool:
    """Return True if a test compares a sentence, in a pattern or a compared parameter included."""
    compared = [node for part in _compared(test) for node in ast.walk(part)]
    names = {node.id for node in compared if isinstance(node, ast.Name)}
    compared += [node for cell in _parameters(test, names) for node in ast.walk(cell)]
    return any(isinstance(node, ast.Constant) and is_sentence(str(node.value)) for node in compared)


def _compared(test: ast.FunctionDef) -> Iterator[ast.expr]:
    for node in ast.walk(test):
        if isinstance(node, ast.Assert):
            for part in ast.walk(node.test):
                if isinstance(part, ast.Compare):
                    yield from (side for side in (part.left, *part.comparators) if not isinstance(side, ast.Call))
                elif (
                    isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr in _SEARCHES
                ):
                    yield from part.args
        elif isinstance(node, ast.keyword) and node.arg in {"match", "words"}:
            yield node.value


def _parameters(test: ast.FunctionDef, names: set[str]) -> Iterator[ast.expr]:
    """Yield the values that ``parametrize`` assigns to the names."""
    for decorator in test.decorator_list:
        if not (isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("parametrize")):
            continue
        keys, rows = decorator.args[:2]
        columns = str(keys.value).split(", ") if isinstance(keys, ast.Constant) else list(ast.literal_eval(keys))
        for row in getattr(rows, "elts", ()):
            cells = (
                row.args
                if isinstance(row, ast.Call)
                else row.elts
                if len(columns) > 1 and hasattr(row, "elts")
                else [row]
            )
            yield from (cell for column, cell in zip(columns, cells, strict=False) if column in names)


def _tests() -> Iterator[tuple[Path, ast.FunctionDef]]:
    for path in sorted((REPOSITORY / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield path, node


def test_few_tests_assert_a_sentence() -> None:
    """A message may be reworded without failing a test: tests assert its class, path, option or number."""
    tests = list(_tests())
    found = [f"{path.name}: {test.name}" for path, test in tests if asserts_a_sentence(test)]
    assert len(found) <= LARGEST_SHARE * len(tests), f"{len(found)} of {len(tests)}: {found}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("assert 'the file is gone' in message", True),
        ("assert message.startswith('nothing is left')", True),
        ("with raises(Error, match='no .* was found here'): run()", True),
        ("assert 'model.onnx: gone' in message", False),
        ("assert '--batch-size 4' in message, 'it is not there'", False),
        ("assert 3 == run('the king had words')", False),
        ("write('the king had words')", False),
    ],
)
def test_sentence_counts_in_a_comparison(source: str, expected: bool) -> None:
    """A sentence that is an input, or that explains a failure, does not count."""
    test = ast.parse(f"def test(): {source}" if not source.startswith("with") else f"def test():\n  {source}").body[0]
    assert isinstance(test, ast.FunctionDef)
    assert expected == asserts_a_sentence(test)


def test_sentence_counts_in_a_compared_parameter() -> None:
    """Only the compared one of two columns counts."""
    rows = "@mark.parametrize(('text', 'words'), [('x', 'it is gone')])\ndef test(text, words): assert {} in message"
    found = [ast.parse(rows.format(name)).body[0] for name in ("words", "text")]
    assert [True, False] == [isinstance(test, ast.FunctionDef) and asserts_a_sentence(test) for test in found]
