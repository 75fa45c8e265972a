"""Classification of lines in the user's Python: lines that only assert, and lines with caught errors.

A value that only an assertion reads decides nothing in the graph, unless the forward continues after a failure.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

_PACKAGE_FOLDER = Path(__file__).parents[1]


def is_of_user(file: str) -> bool:
    """Return True if a file belongs neither to an installed package nor to this one."""
    path = Path(file)
    return "site-packages" not in path.parts and not path.is_relative_to(_PACKAGE_FOLDER)


def asserts_only(file: str, line: int) -> bool:
    """Return True for a line that only asserts: ``assert``, or an ``if`` that does nothing but raise.

    False if the source is not available, or if the function catches the error.
    """
    lines = _classify_lines(file)
    return line in lines.asserting and line not in lines.caught


def asserts_only_at(frame: FrameType) -> bool:
    """Return True if the line of a frame only asserts, and no caller in the user's forward catches the error."""
    return asserts_only(frame.f_code.co_filename, frame.f_lineno) and not is_caught(frame.f_back)


def is_caught(frame: FrameType | None) -> bool:
    """Return True if the user's forward catches an error that is raised at a frame."""
    while frame is not None and not Path(frame.f_code.co_filename).is_relative_to(_PACKAGE_FOLDER):
        file = frame.f_code.co_filename
        if is_of_user(file) and frame.f_lineno in _classify_lines(file).caught:
            return True
        frame = frame.f_back
    return False


@dataclass(frozen=True)
class _SourceLines:
    """Line numbers of one file."""

    asserting: frozenset[int] = frozenset()
    caught: frozenset[int] = frozenset()
    """Lines inside a ``try`` or ``suppress()`` that catches their errors, so that the function continues."""


@cache
def _classify_lines(file: str) -> _SourceLines:
    """Find the lines of a file that only assert, and lines with caught errors; none for unreadable source."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return _SourceLines()
    asserting: set[int] = set()
    deciding: set[int] = set()
    caught: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and not node.orelse and all(isinstance(child, ast.Raise) for child in node.body):
            asserting.update(_line_numbers([node.test]))
        if isinstance(node, ast.stmt) and not hasattr(node, "body"):
            # ``assert (size := int(n)) > 0`` assigns the value that it reads.
            assigns = any(isinstance(subnode, ast.NamedExpr) for subnode in ast.walk(node))
            is_assertion = isinstance(node, (ast.Assert, ast.Raise)) and not assigns
            (asserting if is_assertion else deciding).update(_line_numbers([node]))
        if (isinstance(node, ast.Try) and _handles_error(node)) or (isinstance(node, ast.With) and _suppresses(node)):
            caught.update(_line_numbers(node.body))
    return _SourceLines(frozenset(asserting - deciding), frozenset(caught))


def _line_numbers(nodes: Iterable[ast.expr | ast.stmt]) -> Iterable[int]:
    return (line for node in nodes for line in range(node.lineno, (node.end_lineno or node.lineno) + 1))


def _handles_error(node: ast.Try) -> bool:
    """Return True if some handler does not end in raising an error."""
    return any(not isinstance(handler.body[-1], ast.Raise) for handler in node.handlers)


def _suppresses(node: ast.With) -> bool:
    """Return True if a ``with`` statement is a ``suppress()``."""
    calls = (with_item.context_expr for with_item in node.items)
    names = (ast.unparse(call.func) for call in calls if isinstance(call, ast.Call))
    return any(name.rpartition(".")[2] == "suppress" for name in names)
