"""Which options do several verbs share? Each is declared here, once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import click

from winml.modelkit.errors import ModelPathError
from winml.modelkit.graph.files.named_paths import named_path
from winml.modelkit.load.load_options import Group, LoadOption, declared_options

__all__ = [
    "NonEmptyPath",
    "answer_options",
    "debug_option",
    "device_option",
    "dynamic_options",
    "format_option",
    "functions_option",
    "input_options",
    "model_option",
    "output_options",
    "random_options",
    "source_options",
    "submodel_option",
    "tree_options",
    "verbose_option",
    "weight_options",
]

_F = TypeVar("_F", bound=Callable[..., Any])


class NonEmptyPath(click.Path):
    """A path, as a ``Path``; an empty text, as an unset variable of a shell leaves it, is none."""

    def __init__(self) -> None:
        """Take files and folders, there or not; who reads or writes says which of them is wanted."""
        super().__init__(path_type=Path)

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        """Refuse the empty text, which would mean the current folder."""
        if not os.fspath(value).strip():
            self.fail("the path is empty.", param, ctx)
        try:
            named_path(value)
        except ModelPathError as error:
            self.fail(f"{error.message}.", param, ctx)
        return super().convert(value, param, ctx)


def _all_of(*options: Callable[[_F], _F]) -> Callable[[_F], _F]:
    def decorate(command: _F) -> _F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def model_option(*, required: bool, help: str) -> Callable[[_F], _F]:
    """Return the option that says which model."""
    return click.option("-m", "--model", required=required, metavar="MODEL", help=help)


def _load_options(group: Group) -> Callable[[_F], _F]:
    """Return the options of a group that load/load_options.py declares."""
    return _all_of(*(_declared_option(option) for option in declared_options() if option.group == group))


def _declared_option(option: LoadOption) -> Callable[[_F], _F]:
    settings: dict[str, Any] = {"default": option.default, "help": option.help}
    names = (option.short, option.flag) if option.short else (option.flag,)
    if option.annotation is bool:
        if option.default:
            return click.option(f"{option.flag}/--no-{option.name.replace('_', '-')}", show_default=True, **settings)
        return click.option(*names, is_flag=True, **settings)
    if get_origin(option.annotation) is tuple:
        return click.option(*names, multiple=True, metavar=option.metavar, help=option.help)
    if option.choices:
        settings["type"] = click.Choice(option.choices)
    elif int in (option.annotation, *get_args(option.annotation)):
        settings["type"] = click.IntRange(option.minimum, option.maximum)
    return click.option(*names, show_default=option.default is not None, **settings)


def source_options(command: _F) -> _F:
    """Add the options that say how the model is to be read."""
    return _load_options("source")(command)


def input_options(command: _F) -> _F:
    """Add the options that say what the inputs are."""
    return _all_of(
        click.option("--input-specs", metavar="JSON", help="All inputs, as a JSON file or text; wins over shapes."),
        click.option(
            "--shape-config",
            metavar="JSON",
            help='Sizes, such as {"sequence_length": 64}; a name instead of a number leaves one open; a file or text.',
        ),
        click.option("--batch-size", type=click.IntRange(min=1), help="Batch size; 1 where nothing says otherwise."),
    )(command)


def random_options(command: _F) -> _F:
    """Add the options that say what is drawn at random."""
    return _load_options("random")(command)


def weight_options(command: _F) -> _F:
    """Add the options that say how the weights are kept."""
    return _load_options("weights")(command)


def dynamic_options(command: _F) -> _F:
    """Add the options that leave dimensions open."""
    return _all_of(
        click.option("--dynamic-batch", is_flag=True, help="Leave the batch size open."),
        click.option(
            "--dynamic-seq-len",
            "--dynamic-sequence",
            "dynamic_sequence",
            is_flag=True,
            help="Leave the length of text or audio open.",
        ),
        click.option("--dynamic-image-size", is_flag=True, help="Leave height and width of images open."),
        click.option(
            "--dynamic-axes",
            multiple=True,
            metavar="AXES",
            help="Leave axes open by place: input_ids:0=batch,1=sequence; repeatable; or a JSON file or text.",
        ),
        click.option("--allow-dynamic", is_flag=True, help="Leave dimensions open even where --ep needs fixed sizes."),
    )(command)


def functions_option(command: _F) -> _F:
    """Add the option that writes modules as functions."""
    return click.option(
        "--functions",
        metavar="SELECTOR",
        help="Write modules as ONNX functions: all; classes, where those of a class with equal graphs share one; or "
        "those a selector names.",
    )(command)


def submodel_option(command: _F) -> _F:
    """Add the option that names parts in the folder of a build."""
    return click.option(
        "--submodel", multiple=True, metavar="PART", help="Of a folder with several parts, only this one; repeatable."
    )(command)


def verbose_option(help: str) -> Callable[[_F], _F]:
    """Return the option that asks for more."""
    return click.option("-v", "--verbose", is_flag=True, help=help)


def tree_options(help: str) -> Callable[[_F], _F]:
    """Return the options that say how much is told, of a verb that shows the module tree."""

    def add(command: _F) -> _F:
        return _all_of(
            click.option("-v", "--verbose", count=True, help=f"{help} Twice: equal modules each by itself."),
            click.option("--depth", type=click.IntRange(min=1), help="Levels of the module tree to show."),
        )(command)

    return add


def format_option(command: _F) -> _F:
    """Add the option that says in which form the answer comes."""
    return click.option(
        "-f",
        "--format",
        "format_",
        type=click.Choice(["table", "json"]),
        default="table",
        show_default=True,
        help="Form of the answer on stdout.",
    )(command)


def device_option(help: str) -> Callable[[_F], _F]:
    """Return the option that says on which kind of processor a model runs."""
    return click.option("-d", "--device", type=click.Choice(["cpu", "gpu", "npu"]), help=help)


def debug_option(command: _F) -> _F:
    """Add the option that shows what is kept from users."""
    return click.option("--debug", is_flag=True, help="Show library warnings, and the traceback of a failure.")(command)


def output_options(command: _F) -> _F:
    """Add the options that say how much is told, and in which form."""
    return verbose_option("Tell more: what each step of a stage did.")(answer_options(command))


def answer_options(command: _F) -> _F:
    """Add the options that say in which form is told what was done."""
    return _all_of(
        click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors."),
        format_option,
        debug_option,
    )(command)
