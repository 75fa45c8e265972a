"""Which module does the user's factory return, and which inputs does it take?

Runs ``file.py:factory`` or ``package.module:factory`` and the ``example_inputs()`` beside it. This is the only place
where the user's code runs; whatever it raises comes back as one error with file and line. Knows no
transformers.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch

from winml.modelkit.errors import InputError, ModelPathError, failed_import, place_of
from winml.modelkit.graph.files.working_directory import working_directory_kept
from winml.modelkit.graph.specs import InputTensorSpec
from winml.modelkit.hierarchy.compiled_modules import uncompiled
from winml.modelkit.load.inputs.examples import name_examples, refuse_uninitialized, spec_of_example
from winml.modelkit.load.request import ModelSource
from winml.modelkit.options import nearest

__all__ = ["ScriptModel", "load_script"]

EXAMPLE_INPUTS = "example_inputs"

_ResultT = TypeVar("_ResultT")


@dataclass(frozen=True)
class ScriptModel:
    """What a factory returned."""

    model: torch.nn.Module
    """In evaluation mode."""
    example: Mapping[str, torch.Tensor] | None
    """What ``example_inputs()`` returned, by parameter name; None if there is no such function."""
    inputs: tuple[InputTensorSpec, ...] | None
    """The specification of the example."""


def load_script(source: ModelSource, *, wants_example: bool) -> ScriptModel:
    """Call the factory that ``source`` names and, if asked, the ``example_inputs()`` beside it.

    Raises:
        ModelPathError: the module or the factory does not exist.
        InputError: the user's code raised (names file and line), or returned something else than asked for.
    """
    folder = source.path.resolve().parent if source.path is not None else Path.cwd()
    with _importable_folder(folder):
        module = _import_script(source)
        factory = _find_factory(module, source)
        model = factory if isinstance(factory, torch.nn.Module) else _call_user_code(factory, source.name, module)
        if not isinstance(model, torch.nn.Module):
            raise InputError(
                f"{source.name}: returned {type(model).__name__}, expected a torch.nn.Module",
                hint="Let the factory return the model itself.",
            )
        model = uncompiled(model)
        refuse_uninitialized(model, source.name)
        example_function = getattr(module, EXAMPLE_INPUTS, None) if wants_example else None
        returned = (
            None
            if example_function is None
            else _call_user_code(example_function, f"{EXAMPLE_INPUTS}() of {source.name}", module)
        )
    if example_function is None:
        return ScriptModel(model.eval(), None, None)
    shown = f"{EXAMPLE_INPUTS}() of {source.name}"
    example = name_examples(returned, model, shown)
    specs = tuple(spec_of_example(name, value, shown) for name, value in example.items())
    return ScriptModel(model.eval(), example, specs)


@contextmanager
def _importable_folder(folder: Path) -> Iterator[None]:
    """Let modules beside the script be imported, as ``python file.py`` would."""
    entry = str(folder)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        if entry in sys.path:
            sys.path.remove(entry)


def _import_script(source: ModelSource) -> ModuleType:
    if source.path is None:
        return _import_module(str(source.module), source.name)
    name = f"_winml_script_{source.path.stem}"
    spec = importlib.util.spec_from_file_location(name, source.path.resolve())
    assert spec is not None  # the path ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up while it is executed
    loader = spec.loader
    _guard_user_code(lambda: loader.exec_module(module), source.name, str(source.path.resolve()))
    return module


def _import_module(name: str, shown: str) -> ModuleType:
    try:
        return _guard_user_code(lambda: importlib.import_module(name), shown, None)
    except InputError as error:
        cause = error.__cause__
        # A package missing inside the user's module is a fault of that code; the module itself missing is a wrong name.
        if isinstance(cause, ModuleNotFoundError) and cause.name and f"{name}.".startswith(f"{cause.name}."):
            raise ModelPathError(
                f"{shown}: no module {name!r}",
                hint="Install the package, or run in the folder that holds it, or give file.py:factory.",
            ) from cause
        raise


def _find_factory(module: ModuleType, source: ModelSource) -> Any:
    factory: Any = module
    for name in str(source.factory).split("."):
        if not hasattr(factory, name):
            guess = nearest(name, [public for public in vars(factory) if not public.startswith("_")])
            raise ModelPathError(
                f"{source.name}: {source.path or source.module} has no {name!r}",
                hint=f"Did you mean {guess!r}?" if guess else "Name a function in it that returns the model.",
            )
        factory = getattr(factory, name)
    if not callable(factory):
        raise ModelPathError(
            f"{source.name}: {source.factory!r} is a {type(factory).__name__}, not a function",
            hint="Name a function without parameters that returns the model.",
        )
    return factory


def _call_user_code(function: Callable[[], Any], shown: str, module: ModuleType) -> Any:
    return _guard_user_code(function, shown, getattr(module, "__file__", None))


def _guard_user_code(function: Callable[[], _ResultT], shown: str, file: str | None) -> _ResultT:
    """Run code of the user. Anything may go wrong in it, and nothing of that is a fault of ours."""
    try:
        with working_directory_kept():
            return function()
    except BaseException as error:
        if type(error) is KeyboardInterrupt:
            raise  # most likely of whoever sits at the keyboard
        raise _user_error(error, shown, file) from error


def _user_error(error: BaseException, shown: str, file: str | None) -> InputError:
    text = " ".join(str(error).split())
    package = failed_import(error)
    if shown.startswith((f"{package}:", f"{package}.")):
        package = ""  # the user's own, whose line is told
    what = f"{package} cannot be imported: " if package else ""
    return InputError(
        f"{shown}: {_place_of_error(error, file)}{what}{type(error).__name__}{f': {text}' if text else ''}",
        hint=f"Mend {package}, or install it again." if package else "Mend the code there.",
    )


def _place_of_error(error: BaseException, file: str | None) -> str:
    """Return ``file:line: `` of the innermost line in the user's file, else of the innermost of the user's at all."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: "
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if file and frame.filename == file]
    return f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else place_of(error)
