"""Source text of the package, read as syntax trees without an import.

The package is looked up at its installed location, so the same tests hold for a wheel without ``src``. The rules are in
the tests beside this module.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "winml.modelkit"
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    name: str
    """Dotted, relative to the package: ``tags.tree``, ``hierarchy`` for its ``__init__``, ``""`` for the root."""
    path: Path
    tree: ast.Module

    @property
    def folder(self) -> str:
        """Folder or top-level module of the module: ``tags``, ``errors``; ``""`` is the package itself."""
        return self.name.split(".")[0]

    @property
    def subpackage(self) -> str:
        """Position in the order of imports, see :func:`subpackage_of`."""
        return subpackage_of(self.name)

    @property
    def line_count(self) -> int:
        return len(self.path.read_text(encoding="utf-8").splitlines())

    @property
    def docstring(self) -> str:
        return ast.get_docstring(self.tree) or ""


def subpackage_of(name: str) -> str:
    """Return the position of a module, or of a name in it, in the order of imports.

    The position is the folder. The surfaces of a subject import other subjects freely: its plan and run (``verb.py``)
    count as ``verbs``, its command (``command.py``) as ``cli``.
    """
    folder, *rest = name.split(".")
    surface = re.fullmatch(r"(?:\w+_)?(verb|command)", rest[0]) if rest else None
    if surface is None or not (package_folder() / folder / f"{rest[0]}.py").exists():
        return folder
    return {"verb": "verbs", "command": "cli"}[surface[1]]


@dataclass(frozen=True)
class Import:
    """One imported name, anywhere in a module."""

    target: str
    """Absolute dotted name; for ``from a import b`` it is ``a.b``, since b may be a module."""
    line: int


@functools.cache
def repository_files() -> tuple[Path, ...]:
    """Return the files that git tracks, so leftovers do not count.

    Without git, as in an unpacked source archive, return every file outside of caches and environments.
    """
    if (REPOSITORY / ".git").exists():
        # A hook sets variables that would make git list another checkout.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        told = subprocess.run(
            ["git", "ls-files", "-z"], cwd=REPOSITORY, env=environment, capture_output=True, check=True
        )
        names = os.fsdecode(told.stdout).split("\0")
        return tuple(path for path in (REPOSITORY / name for name in names if name) if path.is_file())
    ignored = {"__pycache__", ".venv", "build", "dist"}
    return tuple(
        path
        for path in sorted(REPOSITORY.rglob("*"))
        if path.is_file() and not ignored.intersection(path.relative_to(REPOSITORY).parts)
    )


def package_folder() -> Path:
    """Return the folder of the installed package."""
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None, f"{PACKAGE} is not installed: pip install -e '.[test]'"
    assert spec.origin is not None
    return Path(spec.origin).parent


@functools.cache
def modules() -> tuple[Module, ...]:
    """Return every module of the package, in path order."""
    folder = package_folder()
    found = []
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(Module(name, path, ast.parse(path.read_text(encoding="utf-8"), filename=str(path))))
    return tuple(found)


@functools.cache
def imports(tree: ast.AST) -> tuple[Import, ...]:
    """Return every import, including imports inside functions and under ``TYPE_CHECKING``."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # Relative imports are refused by ruff (TID252); a dot here would hide the subpackage.
            assert node.level == 0, f"relative import at line {node.lineno}"
            found += [Import(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return tuple(found)


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield ``(qualified name, definition)`` of every function, methods and nested ones included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{prefix}{node.name}", node
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        else:
            yield from functions(node, prefix)


def defined_names(module: Module) -> Iterator[str]:
    """Yield the public functions, classes and constants that a module defines at its top level."""
    for node in module.tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names = [node.name]
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        else:
            continue
        yield from (name for name in names if not name.startswith("_"))
