"""Guards around calls that let a library read a folder or build a model of a config: the folder's code must not run.

``local_files_only`` refuses the code for the whole process, without a question on stdin. ``library_folder`` enters the
guard.
"""

from __future__ import annotations

import ast

from architecture.sources import functions, modules

CALLS = frozenset({"from_pretrained", "from_config", "_from_config", "for_model", "pipeline"})
"""Functions of transformers that may import code named by a config."""
GUARDS = frozenset({"library_folder", "local_files_only", "local_libraries"})
CALLED_GUARDED: dict[str, str] = {
    "models.checkpoints.weights:load_checkpoint": "load_resolved and prepare_export enter local_libraries",
    "models.pipelines:build_modules.build": "_join enters local_libraries and library_folder",
    "models.pipelines:load_modules.load": "as build_modules",
    "models.random_weights:build_random_model": "as load_checkpoint",
    "models.resolution:_build_without_storage": "resolve_model enters local_libraries",
    "generate.answering:TaskRunner._pipeline": "every answer enters local_files_only (TaskRunner.__call__)",
}
"""``module:qualified.name`` of functions called inside a guard → the callers."""
OWN = frozenset({"WinMLAutoModel"})
"""Classes of this package with methods of the same names."""


def _called_name(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _is_of_a_library(call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in CALLS:
        return False
    return getattr(call.func.value, "id", "") not in OWN


def _guarded_calls(tree: ast.AST) -> set[int]:
    return {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.With)
        for item in node.items
        if isinstance(item.context_expr, ast.Call) and _called_name(item.context_expr) in GUARDS
        for statement in node.body
        for inner in ast.walk(statement)
    }


def _unguarded() -> tuple[set[str], int]:
    """Return the functions with a call outside of a guard, and the number of all calls."""
    found, count = set(), 0
    for module in modules():
        inside: dict[int, str] = {}
        for name, function in functions(module.tree):  # outer before inner, so the inner name wins
            inside.update({id(node): name for node in ast.walk(function)})
        guarded = _guarded_calls(module.tree)
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and _is_of_a_library(node):
                count += 1
                if id(node) not in guarded:
                    found.add(f"{module.name}:{inside.get(id(node), '<module>')}")
    return found, count


def test_every_call_of_a_library_is_guarded() -> None:
    """A call is inside a block of a guard, or in a function with guarded callers."""
    found, count = _unguarded()
    assert set(CALLED_GUARDED) == found
    assert count >= 10


def test_no_call_allows_remote_code() -> None:
    """``trust_remote_code`` is passed on from the request, and never the constant ``True``."""
    constants = [
        f"{module.name}:{node.lineno}"
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "trust_remote_code" and isinstance(keyword.value, ast.Constant) and keyword.value.value
    ]
    assert [] == constants
