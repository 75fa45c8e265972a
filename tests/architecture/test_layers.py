"""Direction of imports between subpackages.

Imports inside functions and under ``TYPE_CHECKING`` count: a hidden cycle is still a cycle. Reasons of the order:
docs/decisions/0001-subpackage-order.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

import pytest

from architecture.sources import PACKAGE, Import, Module, imports, modules, subpackage_of
from winml.modelkit.cli.main import MODULES

ORDER: tuple[str, ...] = (
    "version",
    "errors",
    "python_functions",
    "fields",
    "options",
    "records",
    "verdicts",
    "registries",
    "progress",
    "words",
    "arrays",
    "metadata_keys",
    "file_names",
    "tags",
    "onnx",
    "ort",
    "report",
    "models",
    "samples",
    "compare",
    "normalize",
    "transform",
    "extract",
    "profile",
    "evaluate",
    "optimize",
    "compile",
    "quantize",
    "export",
    "inspect",
    "builds",
    "generate",
    "tune",
    "sweep",
    "view",
    "verbs",
    "cli",
    "extend",
)
"""Order of subpackages: each may import every subpackage to its left and itself; most import few."""

RANK = {subpackage: rank for rank, subpackage in enumerate(ORDER)}

FREE = {
    "": "the package's face: names every subpackage it re-exports, lazily",
    "__main__": "python -m winml.modelkit is the command",
}
"""Modules outside the order, each with its reason."""

ONLY_IN = {"click": "cli"}
"""Libraries that one subpackage alone may import."""


def _subpackage_of(target: str) -> str | None:
    """Return the subpackage of an imported name; `None` if the name is foreign, ``""`` for the package itself."""
    if target != PACKAGE and not target.startswith(f"{PACKAGE}."):
        return None
    return subpackage_of(target[len(PACKAGE) + 1 :])


INSIDE: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("tags", ("", "carry")),
    ("models", ("checkpoints", "inputs", "")),
    ("models", ("checkpoints", "caches", "families")),
)
"""Subpackage → the order of its folders; ``""`` stands for the files of the subpackage itself."""


def _folder_inside(name: str) -> str:
    """Return the folder of a module inside its subpackage; ``""`` for the files of the subpackage itself."""
    parts = name.split(".")
    return parts[1] if len(parts) > 2 else ""


def _folder_of(target: str) -> str:
    """Return the folder of an imported name inside its subpackage; ``""`` for the files of the subpackage itself."""
    name = target.removeprefix(f"{PACKAGE}.")
    is_folder = any(module.name.startswith(f"{'.'.join(name.split('.')[:2])}.") for module in modules())
    return name.split(".")[1] if is_folder else ""


def _may_import(importer: str, imported: str) -> bool:
    return RANK[imported] <= RANK[importer]


def _violations(module: Module) -> list[str]:
    return [
        f"{module.path.name}:{found.line} ({module.name}) imports {found.target}"
        for found in imports(module.tree)
        if (subpackage := _subpackage_of(found.target)) is not None and not _is_allowed(module, subpackage, found)
    ]


def _is_allowed(module: Module, subpackage: str, found: Import) -> bool:
    # Everything the package itself offers has a home that can be named.
    return subpackage in RANK and _may_import(module.subpackage, subpackage)


def test_modules_belong_to_known_subpackages() -> None:
    """Every module belongs to a subpackage of the order, or is listed as free with a reason."""
    strays = {
        module.name: module.subpackage
        for module in modules()
        if module.subpackage not in RANK and module.name not in FREE
    }
    assert {} == strays, "give each subpackage its place in ORDER"


def test_modules_import_only_earlier_subpackages() -> None:
    """No import, deferred or for types only, leads to the right."""
    assert [] == [found for module in modules() if module.name not in FREE for found in _violations(module)]


@pytest.mark.parametrize(("subpackage", "order"), INSIDE)
def test_folders_of_a_subpackage_import_only_earlier_folders(subpackage: str, order: tuple[str, ...]) -> None:
    """The same rule holds for the folders inside a subpackage."""
    strays = [
        f"{module.name} imports {found.target}"
        for module in modules()
        if module.subpackage == subpackage and _folder_inside(module.name) in order
        for found in imports(module.tree)
        if _subpackage_of(found.target) == subpackage
        # The last part of a target may be a name inside a module.
        and (folder := _folder_of(found.target)) in order
        and order.index(folder) > order.index(_folder_inside(module.name))
    ]
    assert [] == strays


def _imported_modules(module: Module) -> Iterator[str]:
    """Yield the modules of ours that a module imports anywhere, and their packages."""
    names = {candidate.name for candidate in modules()}
    for found in imports(module.tree):
        parts = found.target.removeprefix(f"{PACKAGE}.").split(".") if found.target.startswith(f"{PACKAGE}.") else []
        # The last part may be a name inside a module.
        yield from {".".join(parts[:end]) for end in range(1, len(parts) + 1)} & names


def test_modules_have_no_circle() -> None:
    """The imports of a module, at its top, inside a function or for types only, never lead back to it."""
    imported = {module.name: {*_imported_modules(module)} - {module.name} for module in modules()}
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        # graphlib lists each module before its importer.
        pytest.fail(f"a circle of modules: {' <- '.join(error.args[1])}; move what is shared below both")


def test_library_with_a_home_is_imported_only_in_its_home() -> None:
    """A library reserved for a subpackage is imported in no other subpackage."""
    strays = [
        f"{module.name}:{found.line} imports {found.target}"
        for module in modules()
        for found in imports(module.tree)
        if ONLY_IN.get(found.target.split(".")[0], module.subpackage) != module.subpackage
    ]
    assert [] == strays


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("tags", "errors", True),
        ("tags", "onnx", False),
        ("export", "ort", True),
        ("export", "models", True),
        ("models", "models", True),
        ("quantize", "export", False),
        ("builds", "cli", False),
    ],
)
def test_order_decides_allowed_imports(importer: str, imported: str, allowed: bool) -> None:
    """An import to the left is allowed, an import to the right is not."""
    assert allowed == _may_import(importer, imported)


@pytest.mark.parametrize(
    ("name", "subpackage"),
    [("tags", "tags"), ("onnx.files.writing", "onnx"), ("tune.verb", "verbs"), ("builds.cache_command.command", "cli")],
)
def test_surfaces_of_subjects_are_at_the_end_of_the_order(name: str, subpackage: str) -> None:
    """``verb.py`` and ``command.py`` of a subject import every subject, and only surfaces import them."""
    assert subpackage == subpackage_of(name)


def test_every_command_is_a_verb() -> None:
    """No command module is left out of the table of verbs."""
    commands = {module.name for module in modules() if module.subpackage == "cli" and module.folder != "cli"}
    assert commands == set(MODULES.values())
