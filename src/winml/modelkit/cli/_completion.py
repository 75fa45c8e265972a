"""Shell completion of option values: paths, registered names, and modules of the named model.

The completion of a value is chosen by the name or metavar of its option, which have one meaning in all verbs.
Registries are imported when a shell requests a completion. A model that cannot be read offers no modules: completion
reports no errors.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from winml.modelkit.cli._help import POSITIONAL
from winml.modelkit.errors import WinMLError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_PATHS = frozenset({"MODEL", "CHECKPOINT", "DATA", "FILE", "FOLDER", "PATH", "JSON"})
"""Words of a metavar that stand for a path: ``PATH|NAME``, ``[MODEL]``. ``JSON`` is a file or text."""
_MODELS = ("model", POSITIONAL)
"""Parameters that name a model, in the order of the search."""


class _PathText(click.types.StringParamType):
    """Text that may be a path, such as a model: a file, a folder, or a Hub id."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002  # click's
        """Return a request for file completion, which the shell performs."""
        from click.shell_completion import CompletionItem

        return [CompletionItem(incomplete, type="file")]


class _ListedName(click.types.StringParamType):
    """Text with registered names as completions."""

    def __init__(self, names: Callable[[click.Context], Iterable[str]]) -> None:
        """Store the function that returns the names for the partial command line."""
        self._names = names

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002  # click's
        """Return the names that start with the typed text; after a comma, the names for the next value."""
        from click.shell_completion import CompletionItem

        earlier, comma, prefix = incomplete.rpartition(",")
        names = self._names(ctx)
        return [CompletionItem(f"{earlier}{comma}{name}") for name in names if name.startswith(prefix)]


def _registry_lister(module: str, name: str, *extra_names: str) -> Callable[[click.Context], Iterable[str]]:
    """Return a function that lists the names of a registry, imported when a shell requests it."""
    return lambda _ctx: (*getattr(importlib.import_module(f"winml.modelkit.{module}"), name), *extra_names)


def _task_names(_ctx: click.Context) -> Iterable[str]:
    from winml.modelkit.models.checkpoints.task import TASK_ALIASES, TASK_VARIANTS, TASKS

    return sorted({*TASKS, *TASK_VARIANTS, *TASK_ALIASES})


def _module_names(ctx: click.Context) -> Iterable[str]:
    """Return the module paths of the model, followed by its class names; `()` for an unreadable model."""
    from winml.modelkit.builds.folder_transformation import part_modules

    try:
        modules = [module for part in part_modules(_model_files(ctx)).values() for module in part]
    except (WinMLError, OSError):
        return ()
    paths = dict.fromkeys(module.path for module in modules if module.path)
    classes = dict.fromkeys(module.class_name for module in modules if module.class_name)
    return (*paths, *classes)


def _part_names(ctx: click.Context) -> Iterable[str]:
    """Return the names of the parts of a model with several parts; `()` for other models."""
    files = _model_files(ctx)
    return files if len(files) > 1 else ()


def _model_files(ctx: click.Context) -> Mapping[str, Path]:
    """Return the ONNX files of the model on the command line, by part; nothing is downloaded from the Hub.

    `{}` if the model has no ONNX file, or is unreadable.
    """
    from winml.modelkit.builds.found_models import onnx_file_in, part_files
    from winml.modelkit.file_names import ONLY_PART

    path = Path(next((str(ctx.params[name]) for name in _MODELS if ctx.params.get(name)), os.devnull))
    if path.is_file():
        return {ONLY_PART: path}
    try:
        file = None if (parts := part_files(str(path))) else onnx_file_in(str(path))
    except (WinMLError, OSError):
        return {}
    return parts if file is None else {ONLY_PART: file}


_BY_NAME: Mapping[str, Callable[[click.Context], Iterable[str]]] = {
    "ep": _registry_lister("ort.execution_providers", "EXECUTION_PROVIDERS"),
    "task": _task_names,
    "precision": _registry_lister("quantize.precisions", "PRECISIONS", "auto"),
    "only": _registry_lister("tune.records", "KINDS"),
    "do": _registry_lister("sweep.plan", "STEPS"),
}
"""Name of an option → function that lists its values."""
_BY_METAVAR: Mapping[str, Callable[[click.Context], Iterable[str]]] = {"SELECTOR": _module_names, "PART": _part_names}
"""Metavar → function that lists the values."""


def complete_arguments(params: Iterable[click.Parameter], args: list[str]) -> list[str]:
    """Return the arguments of a partial command line, without a trailing option that has no value yet.

    Click would stop at this option, before positional arguments such as the model.
    """
    value_options = {
        name
        for param in params
        if isinstance(param, click.Option) and not (param.is_flag or param.count)
        for name in param.opts
    }
    return args[:-1] if args and args[-1] in value_options else args


def complete_values(params: Iterable[click.Parameter]) -> None:
    """Add shell completion to the arguments of a verb and to the options with known values; in place."""
    for param in params:
        if not isinstance(param.type, click.types.StringParamType):
            continue
        metavar = param.metavar or ""
        if names := _BY_NAME.get(param.name or "") or _BY_METAVAR.get(metavar):
            param.type = _ListedName(names)
        elif isinstance(param, click.Argument) or _PATHS & set(re.findall(r"[A-Z]+", metavar)):
            param.type = _PathText()
