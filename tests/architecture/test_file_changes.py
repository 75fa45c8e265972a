"""Moves, links and removals of files, in one module, which repeats them while another program holds a file."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from architecture.sources import modules

HOME = "onnx.files.moving"
_FUNCTIONS = {
    "os": {"link", "remove", "rename", "replace", "symlink", "unlink"},
    "shutil": {"copytree", "move", "rmtree"},
}
_METHODS = {"hardlink_to", "rename", "symlink_to", "unlink"}
_REPLACE = "replace"
"""Method of a path with one argument, and of a string with two."""


def _changes(tree: ast.AST) -> Iterator[int]:
    """Yield the lines that move, link or remove a file."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, name = node.func.value, node.func.attr
        is_function = isinstance(owner, ast.Name) and name in _FUNCTIONS.get(owner.id, ())
        if is_function or name in _METHODS or (name == _REPLACE and len(node.args) == 1 and not node.keywords):
            yield node.lineno


def test_files_are_moved_linked_and_removed_by_one_module() -> None:
    """Elsewhere, a virus scanner that reads a new file for a moment would end a command on Windows."""
    assert [] == [
        f"{module.name}:{line}" for module in modules() if module.name != HOME for line in _changes(module.tree)
    ]
