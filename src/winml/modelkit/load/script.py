"""Which module does the user's factory return, and which inputs does it take?

Runs ``file.py:factory`` or ``package.module:factory`` and the function beside it that gives example inputs. This is the
only place where the user's code runs; whatever it raises comes back as one error with file and line. Knows no
transformers.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch

from winml.modelkit.errors import InputError, ModelPathError, WinMLError, failed_import, place_of
from winml.modelkit.graph.files.named_paths import restored_working_directory
from winml.modelkit.hierarchy.torch_modules import uncompiled
from winml.modelkit.load.inputs.examples import NamedExample, name_examples, refuse_uninitialized
from winml.modelkit.load.request import ModelSource
from winml.modelkit.options import nearest

__all__ = ["ScriptModel", "load_script"]

EXAMPLE_INPUTS = "example_inputs"
SHOWN_FUNCTIONS = 8
"""Functions of a script that a message names. Chosen: they fit on one line."""

_ResultT = TypeVar("_ResultT")


@dataclass(frozen=True)
class ScriptModel:
    """What a factory returned."""

    model: torch.nn.Module
    """In evaluation mode."""
    example: NamedExample | None
    """The example inputs; None if nothing gives any."""
    example_origin: str
    """What gave them, for messages."""
    notes: tuple[str, ...] = ()
    """What the user should hear."""


def load_script(source: ModelSource, *, is_example_needed: bool) -> ScriptModel:
    """Call the factory that ``source`` names, and find its example inputs.

    They are, the first that there is: what the factory returns beside the model, what ``example_inputs_<factory>()``
    returns, what ``example_inputs()`` returns.

    Args:
        source: The factory.
        is_example_needed: Whether the example says what the inputs are. If not, one that cannot be made is a note.

    Raises:
        ModelPathError: the module or the factory does not exist.
        InputError: the user's code raised (names file and line), or returned something else than asked for.
        UsageError: a tensor of the example cannot be a graph input.
    """
    folder = source.path.resolve().parent if source.path is not None else Path.cwd()
    with _importable_folder(folder):
        module = _import_script(source)
        factory = _find_factory(module, source)
        returned = factory if isinstance(factory, torch.nn.Module) else _call_user_code(factory, source.name, module)
        model, inputs = _model_and_inputs(returned, source)
        model = uncompiled(model)
        refuse_uninitialized(model, source.name)
        origin = f"the inputs beside the model of {source.name}"
        try:
            if inputs is None and (function := _example_function(module, source)) is not None:
                origin = f"{function.name}() of {source.name}"
                inputs = _call_user_code(function.call, origin, module)
            example = None if inputs is None else name_examples(inputs, model, origin)
        except WinMLError as error:
            if is_example_needed:
                raise
            return ScriptModel(model.eval(), None, origin, (f"{error.message}; it is not used",))
    return ScriptModel(model.eval(), example, origin)


def _model_and_inputs(returned: object, source: ModelSource) -> tuple[torch.nn.Module, Any]:
    """Return the model, and the example inputs where the factory returned both.

    Raises:
        InputError: it returned something else.
    """
    if isinstance(returned, torch.nn.Module):
        return returned, None
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], torch.nn.Module):
        return returned
    kinds = ", ".join(type(item).__name__ for item in returned) if isinstance(returned, tuple) else ""
    raise InputError(
        f"{source.name}: returned {type(returned).__name__}{f' of {kinds}' if kinds else ''}, "
        "expected a torch.nn.Module",
        hint="Let the factory return the model itself, or (model, inputs).",
    )


@dataclass(frozen=True)
class _ExampleFunction:
    """A function of the script that returns example inputs."""

    name: str
    call: Callable[[], Any]


def _example_function(module: ModuleType, source: ModelSource) -> _ExampleFunction | None:
    """Return the function that gives the inputs of this factory, else the one that gives those of every factory.

    Raises:
        InputError: what has its name is no function.
    """
    own_name = f"{EXAMPLE_INPUTS}_{str(source.factory).replace('.', '_')}"
    for name in (own_name, EXAMPLE_INPUTS):
        function = getattr(module, name, None)
        if callable(function):
            return _ExampleFunction(name, function)
        if function is not None:
            raise InputError(
                f"{source.name}: {name} is a {type(function).__name__}, not a function",
                hint=f"Let a function return it: def {name}(): return ...",
            )
    return None


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


class _ScriptLoader(SourceFileLoader):
    """Writes no bytecode beside the script, as ``python file.py`` does not."""

    def set_data(self, path: str, data: object, *, _mode: int = 0o666) -> None:
        """Drop the bytecode."""


def _import_script(source: ModelSource) -> ModuleType:
    if source.path is None:
        return _import_module(str(source.module), source.name)
    name = f"_winml_script_{source.path.stem}"
    path = str(source.path.resolve())
    spec = importlib.util.spec_from_file_location(name, path, loader=_ScriptLoader(name, path))
    assert spec is not None  # it has a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up while it is executed
    loader = spec.loader
    _guard_user_code(lambda: loader.exec_module(module), source.name, path)
    return module


def _import_module(name: str, displayed: str) -> ModuleType:
    try:
        return _guard_user_code(lambda: importlib.import_module(name), displayed, None)
    except InputError as error:
        cause = error.__cause__
        # A package missing inside the user's module is a fault of that code; the module itself missing is a wrong name.
        if isinstance(cause, ModuleNotFoundError) and cause.name and f"{name}.".startswith(f"{cause.name}."):
            raise ModelPathError(
                f"{displayed}: no module {name!r}",
                hint="Install the package, or run in the folder that holds it, or give file.py:factory.",
            ) from cause
        raise


def _find_factory(module: ModuleType, source: ModelSource) -> Any:
    factory: Any = module
    for name in str(source.factory).split("."):
        if not hasattr(factory, name):
            raise ModelPathError(
                f"{source.name}: {source.path or source.module} has no {name!r}",
                hint=_hint_of_functions(name, factory),
            )
        factory = getattr(factory, name)
    if not callable(factory):
        raise ModelPathError(
            f"{source.name}: {source.factory!r} is a {type(factory).__name__}, not a function",
            hint="Name a function without parameters that returns the model.",
        )
    return factory


def _hint_of_functions(name: str, holder: object) -> str:
    """Return what to write in place of a name that a module or a class lacks."""
    public = {key: value for key, value in vars(holder).items() if callable(value) and not key.startswith("_")}
    if guess := nearest(name, public):
        return f"Did you mean {guess!r}?"
    home = getattr(holder, "__name__", None)
    own = [key for key, value in public.items() if getattr(value, "__module__", None) == home]
    own = [key for key in own if not key.startswith(EXAMPLE_INPUTS)]
    found = f" It has: {', '.join(own[:SHOWN_FUNCTIONS])}." if own else ""
    return f"Name a function in it that returns the model.{found}"


def _call_user_code(function: Callable[[], object], displayed: str, module: ModuleType) -> Any:
    return _guard_user_code(function, displayed, getattr(module, "__file__", None))


def _guard_user_code(function: Callable[[], _ResultT], displayed: str, file: str | None) -> _ResultT:
    """Run code of the user. Anything may go wrong in it, and nothing of that is a fault of ours."""
    try:
        with restored_working_directory():
            return function()
    except BaseException as error:
        if type(error) is KeyboardInterrupt:
            raise  # most likely of whoever sits at the keyboard
        raise _user_error(error, displayed, file) from error


def _user_error(error: BaseException, displayed: str, file: str | None) -> InputError:
    text = " ".join(str(error).split())
    package = failed_import(error)
    if displayed.startswith((f"{package}:", f"{package}.")):
        package = ""  # the user's own, whose line is told
    what = f"{package} cannot be imported: " if package else ""
    return InputError(
        f"{displayed}: {_place_of_error(error, file)}{what}{type(error).__name__}{f': {text}' if text else ''}",
        hint=f"Mend {package}, or install it again." if package else "Mend the code there.",
    )


def _place_of_error(error: BaseException, file: str | None) -> str:
    """Return ``file:line: `` of the innermost line in the user's file, else of the innermost of the user's at all."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: "
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if file and frame.filename == file]
    return f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else place_of(error)
