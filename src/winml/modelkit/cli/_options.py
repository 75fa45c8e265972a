"""Which options do several verbs share? Each is declared here, once."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin

import click

from winml.modelkit.errors import ModelPathError, UsageError
from winml.modelkit.graph.files.named_paths import named_path
from winml.modelkit.load.load_options import Group, LoadOption, declared_options

if TYPE_CHECKING:
    from winml.modelkit.evaluate.data_sets import DataSetRequest

__all__ = [
    "NonEmptyPath",
    "answer_options",
    "columns_option",
    "data_set_files",
    "debug_option",
    "device_option",
    "dynamic_options",
    "format_option",
    "functions_option",
    "input_options",
    "model_option",
    "output_options",
    "random_options",
    "requested_samples",
    "source_options",
    "split_option",
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


# --- Which options say what is read of a data set? Declared here, once, for every verb.


def split_option(command: _F) -> _F:
    """Add ``--split``."""
    words = "Split of the data set; else validation, test, train, or the only one."
    return click.option("--split", metavar="NAME", help=words)(command)


def columns_option(command: _F) -> _F:
    """Add ``--columns``, which may be given several times."""
    words = "Column of the data set that is the text, image, …, where its name does not say so."
    return click.option("--columns", metavar="ROLE=COLUMN", multiple=True, help=words)(command)


def requested_samples(options: dict[str, Any], most: int) -> DataSetRequest | None:
    """Return the samples that ``--dataset`` names; None without it.

    Args:
        options: Of the verb.
        most: Samples that are read where no number is given.

    Raises:
        UsageError: there is no such data set, or something is said of one that is not given.
    """
    from winml.modelkit.evaluate.columns import parse_columns
    from winml.modelkit.evaluate.data_sets import DataSetRequest
    from winml.modelkit.evaluate.data_sources import find_source, refuse_missing_datasets

    columns = parse_columns(options["columns"])
    if options["dataset"] is None:
        if columns or options["split"] is not None:
            given = "--columns" if columns else "--split"
            raise UsageError(f"{given} has no meaning without --dataset", hint="Leave it out, or give a data set.")
        return None
    find_source(options["dataset"])
    request = DataSetRequest(
        options["dataset"],
        split=options["split"],
        columns=columns,
        samples=options["samples"],
        most=most,
        seed=options["seed"],
    )
    refuse_missing_datasets(request.words)
    return request


def data_set_files(options: Mapping[str, Any]) -> list[Path]:
    """Return the files on this disk of the data set that ``--dataset`` names; nothing may be written over them."""
    from winml.modelkit.evaluate.data_sources import find_source, source_files

    return [] if options["dataset"] is None else list(source_files(find_source(options["dataset"])))
