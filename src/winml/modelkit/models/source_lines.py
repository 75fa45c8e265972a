"""Which lines of a script only assert something? A value that is read there decides nothing in the graph."""

from __future__ import annotations

import ast
import linecache
from functools import cache


def asserts_only(file: str, line: int) -> bool:
    """Say whether a line only asserts: ``assert``, or an ``if`` that does nothing but raise.

    False where the source is not at hand.
    """
    return line in _lines_of_assertions(file)


@cache
def _lines_of_assertions(file: str) -> frozenset[int]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return frozenset()
    asserting: set[int] = set()
    deciding: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and not node.orelse and all(isinstance(item, ast.Raise) for item in node.body):
            asserting.update(range(node.test.lineno, (node.test.end_lineno or node.test.lineno) + 1))
        if isinstance(node, ast.stmt) and not hasattr(node, "body"):
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            # ``assert (size := int(n)) > 0`` keeps what it read.
            keeps = any(isinstance(part, ast.NamedExpr) for part in ast.walk(node))
            (asserting if isinstance(node, (ast.Assert, ast.Raise)) and not keeps else deciding).update(lines)
    return frozenset(asserting - deciding)
