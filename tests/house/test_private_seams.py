"""Does every use of a private name of a library stand in the table of docs/decisions/0004-private-seams.md?

A private name moves without notice. The table says why each is used and which test fails when it moves.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from house.sources import REPOSITORY, Module, imports, modules

LIBRARIES = ("torch", "transformers", "onnx", "onnx_ir", "onnxscript", "onnxruntime")
SEMI_PRIVATE = ("transformers.exporters", "onnxruntime.capi")
"""Spelled without an underscore, and promised by nobody."""

_ROW = re.compile(r"^\| `(?P<file>[\w/]+\.py)` \| .+? \| .+? \| (?P<tests>.+?) \|$", re.MULTILINE)
_TEST = re.compile(r"`(tests/[\w/]+\.py)`")


def _table() -> dict[str, list[str]]:
    text = (REPOSITORY / "docs" / "decisions" / "0004-private-seams.md").read_text(encoding="utf-8")
    return {row["file"]: _TEST.findall(row["tests"]) for row in _ROW.finditer(text)}


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def _of_library(name: str) -> bool:
    return name.split(".")[0] in LIBRARIES


def _private_names(module: Module) -> Iterator[str]:
    for found in imports(module.tree):
        if _of_library(found.target) and (_is_private(found.target) or found.target.startswith(SEMI_PRIVATE)):
            yield found.target
    bound = _bound_names(module.tree)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in bound:
                yield f"{bound[root.id]} … {node.attr}"


def _bound_names(tree: ast.Module) -> dict[str, str]:
    """Return what imports of libraries bind: name in the file → dotted name."""
    bound = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            bound.update({(alias.asname or alias.name).split(".")[0]: alias.name for alias in node.names})
        elif isinstance(node, ast.ImportFrom):
            bound.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return {name: target for name, target in bound.items() if _of_library(target)}


def test_files_with_private_names_are_listed_with_a_reason() -> None:
    """No file reaches into a library unlisted, and no listed one has stopped to."""
    package = modules()[0].path.parent
    using = {
        module.path.relative_to(package).as_posix(): sorted(set(_private_names(module)))
        for module in modules()
        if any(_private_names(module))
    }
    assert set(using) == set(_table()), using


def test_listed_tests_exist() -> None:
    """Every file of the table names at least one test, and each is there."""
    table = _table()
    assert [] == [file for file, tests in table.items() if not tests]
    assert [] == [test for tests in table.values() for test in tests if not (REPOSITORY / test).is_file()]
