"""Programs of torch as modules: TorchScript, exported programs, and files with either.

An exported program is unflattened into the modules that it was traced from; a TorchScript module becomes a Python
module of the same structure. Both are then traced like any module, with tags from their own scopes.
"""

from __future__ import annotations

import ast
import copy
import inspect
import itertools
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.jit._script import RecursiveScriptModule  # not public; torch.jit.script returns it
from torch.jit._trace import TopLevelTracedModule

from winml.modelkit.errors import InputError
from winml.modelkit.models.script_modules import as_python_module, module_with_forward
from winml.modelkit.onnx.files.foreign_files import foreign_parser
from winml.modelkit.ort.shared_settings import attributes_replaced


def open_program(model: object, inputs: Any, requested_by: str) -> tuple[nn.Module, Any]:
    """Return a program as a module, and its example inputs; a module without programs is returned unchanged.

    Args:
        model: A module, an exported program, or the ``module()`` of one.
        inputs: Example inputs; `None`: those of an exported program.
        requested_by: Origin of the model, for messages.

    Raises:
        InputError: the model is neither, or a program cannot be opened.
    """
    if isinstance(model, ExportedProgram):
        return _unflatten(model, requested_by), _example_of(model) if inputs is None else inputs
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{requested_by}: {type(model).__name__} is no torch.nn.Module",
            hint="Pass an nn.Module, a module of torch.jit, or an exported program.",
        )
    # Only in the module of an exported program are these instance attributes; they raise.
    if isinstance(model, GraphModule) and "eval" in vars(model):
        return _unflatten_module(model, inputs, requested_by), inputs
    if isinstance(model, TopLevelTracedModule | RecursiveScriptModule):
        return as_python_module(model), inputs
    return _with_python_modules(model), inputs


def _with_python_modules(model: nn.Module) -> nn.Module:
    """Return a module whose scripted submodules are Python modules; modules above them are copies."""
    changed: nn.Module | None = None
    for name, child in model.named_children():
        is_script = isinstance(child, RecursiveScriptModule)
        other = as_python_module(child) if is_script else _with_python_modules(child)
        if other is child:
            continue
        if changed is None:
            changed = copy.copy(model)
            changed._modules = dict(model._modules)
        changed._modules[name] = other
    return model if changed is None else changed


def _unflatten(program: ExportedProgram, requested_by: str) -> nn.Module:
    """Return the modules that a program was exported from.

    Raises:
        InputError: torch cannot restore them.
    """
    hint = "Pass the nn.Module that was exported, with its weights."
    with foreign_parser(f"{requested_by}: the exported program cannot be opened", hint=hint), warnings.catch_warnings():
        # torch calls a function of its own that it has deprecated.
        warnings.simplefilter("ignore", FutureWarning)
        module: Any = torch.export.unflatten(program)
    for _, inner in module.named_modules():
        if inner is not module and getattr(inner, "_ty", None):
            package, _, name = str(inner._ty).rpartition(".")
            inner.__class__ = type(name, (type(inner),), {"__module__": package})
    package, _, name = str(module._ty or "ExportedProgram").rpartition(".")
    parameters = dict.fromkeys(_parameter_names(program), inspect.Parameter.empty)
    base = _with_positional_keywords(type(module), _keyword_names(program))
    module.__class__ = module_with_forward(base, name, package, parameters)
    result: nn.Module = module
    return result


def _with_positional_keywords(base: type[nn.Module], keywords: Sequence[str]) -> type[nn.Module]:
    """Return a subclass of the class of a program, whose forward takes the keyword arguments last, by position.

    torch refuses an argument by position that the program was exported with by keyword.
    """
    if not keywords:
        return base

    def forward(self: nn.Module, *values: Any) -> Any:
        first = len(values) - len(keywords)
        return base.forward(self, *values[:first], **dict(zip(keywords, values[first:], strict=True)))

    return type(base.__name__, (base,), {"forward": forward})


def _keyword_names(program: ExportedProgram) -> list[str]:
    """Return the names of the arguments that the program was exported with by keyword."""
    in_spec = program.call_spec.in_spec
    return [] if in_spec is None else list(in_spec.child(1).context)


def _parameter_names(program: ExportedProgram) -> list[str]:
    """Return the names of the arguments of a program: the keyword, or the name of the input if it is one tensor."""
    in_spec = program.call_spec.in_spec
    if in_spec is None:
        return [name for name in program.graph_signature.user_inputs if isinstance(name, str)]
    inputs = iter(program.graph_signature.user_inputs)
    names = []
    for number, argument in enumerate(in_spec.child(0).children()):
        leaves = list(itertools.islice(inputs, argument.num_leaves))
        is_tensor = argument.is_leaf() and isinstance(leaves[0], str)
        names.append(str(leaves[0]) if is_tensor else f"args_{number}")
    return [*names, *_keyword_names(program)]


def _example_of(program: ExportedProgram) -> Any:
    """Return the example inputs by name; `None` if the file of the program has none."""
    if program.example_inputs is None:
        return None
    args, keywords = program.example_inputs
    return dict(zip(_parameter_names(program), (*args, *keywords.values()), strict=True))


def _unflatten_module(module: GraphModule, inputs: Any, requested_by: str) -> nn.Module:
    """Export the ``module()`` of a program once more, and return its modules.

    Raises:
        InputError: there are no example inputs, or torch cannot export it.
    """
    if inputs is None:
        raise InputError(
            f"{requested_by}: the model is the module() of an exported program, and has no example inputs",
            hint="Return (model, inputs), or the exported program itself.",
        )
    keywords = dict(inputs) if isinstance(inputs, dict) else {}
    args = () if keywords else tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)
    hint = "Pass the exported program itself, or the nn.Module that was exported."
    with foreign_parser(f"{requested_by}: the module() of an exported program cannot be exported", hint=hint):
        program = torch.export.export(module, args, keywords)
    return _unflatten(program, requested_by)


def load_program(path: Path, source_name: str) -> object:
    """Load a file of ``torch.jit.save`` or ``torch.export.save``; no Python code of the file runs.

    Raises:
        InputError: torch cannot read it.
    """
    hint = "Save it again with this version of torch, or pass file.py:function."
    reads = foreign_parser(f"{source_name}: torch {torch.__version__} cannot read it", hint=hint)
    with reads, warnings.catch_warnings():
        # torch 2.15 deprecates torch.jit.load, but no other function reads such files.
        warnings.simplefilter("ignore", FutureWarning)
        if _is_exported_program(path):
            with _without_code():
                return torch.export.load(path)
        return torch.jit.load(path, map_location="cpu")


@contextmanager
def _without_code() -> Iterator[None]:
    """Refuse what may run code in a file: pickled Python objects, and text that sympy would evaluate as Python."""
    from torch._export.serde import serialize
    from torch.export.pt2_archive import _package

    sympy: Any = vars(serialize)["sympy"]
    sympify = sympy.sympify

    def parse_size(size: Any, locals: Mapping[str, Any] | None = None, **keywords: Any) -> Any:  # sympy's names
        if isinstance(size, str) and not _is_size(size, {**vars(sympy), **(locals or {})}, sympy.Basic):
            raise ValueError(f"{size[:_LONGEST_SIZE]!r} is no size")
        return sympify(size, locals=locals, **keywords)

    class _Refusing:
        """In place of ``pickle`` while a file is read."""

        @staticmethod
        def loads(_content: bytes) -> object:
            raise ValueError("it contains pickled Python objects, which may run code")

    load = torch.load

    def load_weights(*args: Any, **keywords: Any) -> Any:
        return load(*args, **{**keywords, "weights_only": True})

    replacements = ((_package, "pickle", _Refusing), (torch, "load", load_weights), (sympy, "sympify", parse_size))
    with attributes_replaced(*replacements):
        yield


_LONGEST_SIZE = 80
"""Chosen: characters of a refused size in the message, one line."""
_SIZE_NODES = (ast.Expression, ast.Name, ast.Load, ast.keyword, ast.Constant, ast.BinOp, ast.UnaryOp, ast.Compare)
"""Syntax of sizes; calls and operators besides."""


def _is_size(text: str, functions: Mapping[str, Any], expression_type: type) -> bool:
    """Return True for a size as torch writes it: ``Mul(Integer(4), Symbol('s77', integer=True))``.

    Args:
        text: Text of a file.
        functions: Name → function or class that the text may name.
        expression_type: Base of the classes that the text may call.
    """
    try:
        nodes = list(ast.walk(ast.parse(text, mode="eval")))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    called = [functions.get(function.id) if isinstance(function, ast.Name) else None for function in calls]
    texts = (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return (
        all(isinstance(function, type) and issubclass(function, expression_type) for function in called)
        and all(text.isidentifier() for text in texts)
        and all(isinstance(node, (*_SIZE_NODES, ast.Call, ast.operator, ast.unaryop, ast.cmpop)) for node in nodes)
    )


def _is_exported_program(path: Path) -> bool:
    """Return True for an archive of ``torch.export.save``."""
    return any(name.endswith(("archive_format", "serialized_exported_program.json")) for name in _names_in(path))


def _names_in(path: Path) -> list[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except (OSError, zipfile.BadZipFile):
        return []
