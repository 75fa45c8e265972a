"""Declaration, documentation and imports of public names."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections import defaultdict
from pathlib import Path

import pytest

import winml.modelkit
from architecture.sources import (
    PACKAGE,
    REPOSITORY,
    Module,
    defined_names,
    imports,
    modules,
    repository_files,
)


def _annotation_names(module: Module) -> set[str]:
    """Return the names that annotations and bases of a module's top level use, functions and fields included."""
    shown: list[ast.AST | None] = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef):
            shown += node.bases
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = node.args
            shown += [node.returns, *(each.annotation for each in ast.walk(arguments) if isinstance(each, ast.arg))]
        elif isinstance(node, ast.AnnAssign):
            shown.append(node.annotation)
        elif isinstance(node, ast.Assign) and isinstance(node.value, (ast.Subscript, ast.BinOp)):
            shown.append(node.value)
    return {name.id for part in shown if part for name in ast.walk(part) if isinstance(name, ast.Name)}


def _undocumented(module: Module) -> set[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {
        node.name
        for node in module.tree.body
        if isinstance(node, kinds) and not node.name.startswith("_") and not ast.get_docstring(node)
    }


def test_package_all_is_sorted_and_reachable() -> None:
    """Every public name of the package can be imported, and ``__all__`` is sorted."""
    names = winml.modelkit.__all__
    assert sorted(names) == names
    assert [] == [name for name in names if getattr(winml.modelkit, name, None) is None]


def test_package_names_are_documented() -> None:
    """``help`` of a public name shows a docstring of its own."""
    offered = {name: getattr(winml.modelkit, name) for name in winml.modelkit.__all__ if name != "__version__"}
    # A class does not inherit __doc__, so an answer found here is its own.
    assert [] == [name for name, value in offered.items() if not (value.__doc__ or "").strip()]


def test_package_type_hints_and_lazy_table_name_the_same_homes() -> None:
    """The imports that a type checker sees under ``TYPE_CHECKING`` are those of the lazy table."""
    face = next(module for module in modules() if module.name == "")
    declared = {
        alias.name: (node.module or "").removeprefix(f"{PACKAGE}.")
        for block in face.tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert winml.modelkit._HOMES == declared
    assert {*declared, "__version__"} == set(winml.modelkit.__all__)


def test_package_unknown_name_is_refused_with_the_public_names() -> None:
    """A wrong name raises an AttributeError that lists the public names."""
    with pytest.raises(AttributeError, match=r"'export_tensorflow'; available: .*export_pytorch"):
        winml.modelkit.export_tensorflow  # noqa: B018 -- the access is what is tested


def test_names_that_no_other_file_uses_are_private() -> None:
    """A public name is used by another file, or is part of a public signature of its module."""
    files = {path for path in repository_files() if path.suffix in {".py", ".md", ".toml", ".ipynb", ".yml"}}
    files |= {module.path for module in modules()}  # an installed wheel is outside of the repository
    users: dict[str, set[Path]] = defaultdict(set)
    for path in files:
        for word in set(re.findall(r"[A-Za-z_]\w*", path.read_text(encoding="utf-8"))):
            users[word].add(path)
    assert [] == [
        f"{module.name}: {name}"
        for module in modules()
        for name in sorted({*defined_names(module)} - _annotation_names(module))
        if not users[name] - {module.path}
    ]


def test_benchmarks_and_scripts_import_names_that_exist() -> None:
    """No test runs them all, so that a renamed function would be noticed by the next user of a benchmark."""
    targets = {
        f"{path.name}: {found.target}": found.target
        for folder in ("benchmarks", "scripts")
        for path in sorted((REPOSITORY / folder).glob("*.py"))
        for found in imports(ast.parse(path.read_text(encoding="utf-8")))
        if found.target.startswith(f"{PACKAGE}.")
    }
    assert len(targets) > 20
    assert [] == [words for words, target in targets.items() if not _is_importable(target)]


def _is_importable(target: str) -> bool:
    """Return True if a dotted name is a module, or a name in one."""
    parent, _, name = target.rpartition(".")
    try:
        if hasattr(importlib.import_module(parent), name):
            return True
    except ModuleNotFoundError:  # the parent is a class, or is missing itself
        return False
    return importlib.util.find_spec(target) is not None


def test_modules_and_their_public_names_are_documented() -> None:
    """Every module, public function and public class has a docstring."""
    assert [] == [module.name for module in modules() if not module.docstring]
    assert {} == {module.name: names for module in modules() if (names := _undocumented(module))}
