"""Is every room, module, class and function small enough to be told in one breath?

A limit is a reason to look twice, not a law: where the longer form reads better, it is listed with that reason.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

from house.sources import Module, functions, modules

ROOM_LINES, ROOM_FILES = 2500, 20
MODULE_LINES = 600
CLASS_LINES = 200
FUNCTION_LINES = 60
PARAMETERS = 6
"""Chosen from the tails of well-kept code bases: medians are 90 to 260 lines a module and 7 to 16 a function."""

LARGE_ROOMS: dict[str, str] = {
    "cli/verbs": "one module for each verb, and beside it what its options alone ask for",
    "results": "one short record for each answer of a verb",
    "builds": "configs, stages, folders and the cache read each other's records; none of them is a room by itself",
    "graph/files": "short modules, each one promise about files: reading, writing, placing, completing, removing",
    "runtime": "short modules, each one fact about ONNX Runtime, its devices, or what a graph is fed",
    "inference/generation": "short modules, three kinds of models: what runs each, and what prepares its prompt",
    "verify": "short modules, each one question about a file that was written, or one run it is compared with",
    "report": "one short renderer for each answer of a verb",
    "sweep": "short modules, from plan to process to cluster; a fifth is the rules by which configs are made small",
}
LONG_MODULES: dict[str, str] = {}
LONG_CLASSES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}
"""``module:qualified.name`` to the reason it is better long."""
_PUBLIC = "public: its keywords are what callers write"
MANY_PARAMETERS: dict[str, str] = {
    "builds.build_model:build_hf_model": _PUBLIC,
    "builds.build_model:build_onnx_model": _PUBLIC,
    "inference.auto_model:_BuiltModel.from_pretrained": _PUBLIC,
    "flows.export.export:export_pytorch": _PUBLIC,
    "flows.compile:compile_onnx": _PUBLIC,
    "flows.optimize:optimize_onnx": _PUBLIC,
    "flows.quantize.quantize:quantize_onnx": _PUBLIC,
    "flows.quantize.sensitivity:quantization_sensitivity": _PUBLIC,
    "flows.optimize:run_optimize_analyze_loop": _PUBLIC,
    "tune.tuning:tune_model": _PUBLIC,
    "sweep.sweep:sweep_models": _PUBLIC,
    "export.preparation:prepared_for_export": "each keyword is a field of a part: what is called, where, and how",
    "runtime.sessions:Session.__init__": "the one place that opens sessions: each keyword is an option of ONNX Runtime",
}
"""``module:qualified.name`` to the reason its parameters are no record."""


def _room(module: Module) -> str:
    """Return the folder a module stands in, which is a room with a question of its own."""
    return "/".join(module.path.parent.relative_to(modules()[0].path.parent).parts)


def _large_rooms() -> set[str]:
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for module in modules():
        lines[_room(module)] += module.line_count
        files[_room(module)] += 1
    return {room for room in lines if lines[room] > ROOM_LINES or files[room] > ROOM_FILES}


def _line_count(node: ast.AST) -> int:
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _named_functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for module in modules():
        for name, node in functions(module.tree):
            yield f"{module.name}:{name}", node


def _parameter_count(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the parameters a caller may give; ``self`` and ``cls``, ``*args`` and ``**kwargs`` are none."""
    names = [item.arg for item in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def test_rooms_stay_small_unless_listed_with_a_reason() -> None:
    """No room passes the limits unlisted, and no listed one has become small."""
    assert set(LARGE_ROOMS) == _large_rooms()


def test_modules_stay_short_unless_listed_with_a_reason() -> None:
    """No module passes the limit unlisted, and no listed one has become short."""
    assert set(LONG_MODULES) == {module.name for module in modules() if module.line_count > MODULE_LINES}


def test_classes_stay_short_unless_listed_with_a_reason() -> None:
    """No class passes the limit unlisted, and no listed one has become short."""
    long = {
        f"{module.name}:{node.name}"
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef) and _line_count(node) > CLASS_LINES
    }
    assert set(LONG_CLASSES) == long


def test_functions_stay_short_unless_listed_with_a_reason() -> None:
    """No function passes the limit unlisted, and no listed one has become short."""
    assert set(LONG_FUNCTIONS) == {name for name, node in _named_functions() if _line_count(node) > FUNCTION_LINES}


def test_functions_take_few_parameters_unless_listed_with_a_reason() -> None:
    """No function passes the limit unlisted, and no listed one has come below it."""
    assert set(MANY_PARAMETERS) == {name for name, node in _named_functions() if _parameter_count(node) > PARAMETERS}
