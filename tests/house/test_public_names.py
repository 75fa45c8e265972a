"""Is what is public declared, documented and reachable?"""

from __future__ import annotations

import ast
import importlib

import pytest

import winml.modelkit
from house.sources import PACKAGE, Module, exported_names, modules

WITH_ALL = [module for module in modules() if module.name and exported_names(module) is not None]


def _defined_names(module: Module) -> set[str]:
    """Return the public functions and classes a module defines at its top level."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in module.tree.body if isinstance(node, kinds) and not node.name.startswith("_")}


def _undocumented(module: Module) -> set[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {
        node.name
        for node in module.tree.body
        if isinstance(node, kinds) and not node.name.startswith("_") and not ast.get_docstring(node)
    }


def test_package_all_is_sorted_and_reachable() -> None:
    """Every name the package offers can be fetched, and the list is easy to read."""
    names = winml.modelkit.__all__
    assert sorted(names) == names
    assert [] == [name for name in names if getattr(winml.modelkit, name, None) is None]


def test_package_names_are_documented() -> None:
    """Whoever asks for help on a public name gets an answer of its own."""
    offered = {name: getattr(winml.modelkit, name) for name in winml.modelkit.__all__ if name != "__version__"}
    # A class does not inherit __doc__, so an answer found here is its own.
    assert [] == [name for name, value in offered.items() if not (value.__doc__ or "").strip()]


def test_package_type_hints_and_lazy_table_name_the_same_homes() -> None:
    """What a type checker sees under ``TYPE_CHECKING`` is what the lazy table delivers."""
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


def test_package_unknown_name_is_refused_with_the_names_there_are() -> None:
    """A wrong name is an AttributeError that says what is offered."""
    with pytest.raises(AttributeError, match=r"'export_tensorflow'; available: .*export_pytorch"):
        winml.modelkit.export_tensorflow  # noqa: B018 -- the access is what is tested


@pytest.mark.parametrize("module", WITH_ALL, ids=lambda module: module.name)
def test_module_all_lists_what_the_module_defines(module: Module) -> None:
    """Public functions and classes are in ``__all__``, and everything in it exists."""
    names = exported_names(module) or []
    loaded = importlib.import_module(f"{PACKAGE}.{module.name}")
    assert set() == _defined_names(module) - set(names)
    assert [] == [name for name in names if not hasattr(loaded, name)]


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name or PACKAGE)
def test_module_and_its_public_names_are_documented(module: Module) -> None:
    """Every module, public function and public class has a docstring."""
    assert module.docstring
    assert set() == _undocumented(module)
