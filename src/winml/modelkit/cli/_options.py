"""Which options do several verbs share? Each is declared here, once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from winml.modelkit.errors import ModelPathError
from winml.modelkit.export.declared_options import DynamicFields
from winml.modelkit.fields import GENERAL, INPUT, OPTIONS, OUTPUT, Field, fields_of
from winml.modelkit.graph.files.named_paths import named_path
from winml.modelkit.load.load_options import Group, declared_options

__all__ = [
    "NonEmptyPath",
    "debug_option",
    "declared_options_of",
    "device_option",
    "dynamic_options",
    "format_option",
    "grouped_option",
    "input_options",
    "model_option",
    "output_options",
    "quiet_option",
    "random_options",
    "request_options",
    "result_options",
    "source_options",
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
    return grouped_option("-m", "--model", required=required, metavar="MODEL", group=INPUT, help=help)


def _load_options(group: Group) -> Callable[[_F], _F]:
    """Return the options of a group that load/load_options.py declares."""
    heading = {"cls": _GroupedOption, "group": "Model loading"}
    return _all_of(*(_declared_option(option, **heading) for option in declared_options() if option.group == group))


class _GroupedOption(click.Option):
    """An option that stands below a heading in the help.

    Attributes:
        group: The heading.
        config_key: Key of a build config that says the same; empty: none.
    """

    def __init__(self, *names: Any, group: str, config_key: str = "", **settings: Any) -> None:
        super().__init__(*names, **settings)
        self.group, self.config_key = group, config_key


class _GroupedArgument(click.Argument):
    """An argument that the help describes below a heading."""

    def __init__(self, names: Sequence[str], *, group: str, words: str, **settings: Any) -> None:
        super().__init__(names, **settings)
        self.group, self._words = group, words

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """Return the row of the help."""
        return self.make_metavar(ctx), self._words


def grouped_option(*names: str, group: str = GENERAL, **settings: object) -> Callable[[_F], _F]:
    """Return an option that is no field of a request, with the heading below which the help has it."""
    return click.option(*names, cls=_GroupedOption, group=group, **settings)


def _declared_option(option: Field, **heading: object) -> Callable[[_F], _F]:
    """Return the option of the command that a field declares; ``heading`` is that of a :class:`_GroupedOption`."""
    if option.is_argument:
        type_ = NonEmptyPath() if option.annotation is Path else None
        return click.argument(
            option.name, cls=_GroupedArgument, group=option.group, words=option.help.replace("`", ""), type=type_
        )
    default = None if option.read is not None else option.default
    settings: dict[str, Any] = {"help": option.help.replace("`", ""), **heading}
    settings |= {"required": True} if option.is_required else {"default": default}
    names = [option.name, *([option.short] if option.short else []), *(option.spelling.split() or [option.flag])]
    kinds = (option.annotation, *get_args(option.annotation))
    if option.is_switch and not option.spelling and option.default is not False:
        names[-1] += f"/--no-{option.flag[2:]}"
    if option.annotation is bool:
        is_pair = "/" in names[-1]
        return click.option(*names, is_flag=True, show_default=is_pair, **settings)
    if option.is_switch:
        return click.option(*names, **settings)
    if option.is_repeatable:
        return click.option(*names, multiple=True, metavar=option.metavar, **{**settings, "default": ()})
    if option.choices:
        settings["type"] = _Choice(option.choices)
    elif Path in kinds:
        settings["type"] = NonEmptyPath()
    elif float in kinds:
        least = option.minimum if option.above is None else option.above
        is_limited = least is not None or option.maximum is not None
        limits = click.FloatRange(least, option.maximum, min_open=option.above is not None)
        settings["type"] = limits if is_limited else float
    elif int in kinds and option.read is None:
        is_limited = (option.minimum, option.maximum) != (None, None)
        settings["type"] = click.IntRange(option.minimum, option.maximum) if is_limited else int
    return click.option(*names, metavar=option.metavar, show_default=default is not None, **settings)


class _Choice(click.Choice[Any]):
    """One of several values; another is met with the nearest."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        """Return what there is, and what was probably meant."""
        from winml.modelkit.options import nearest  # imports pydantic

        guess = nearest(str(value), map(str, self.choices))
        return super().get_invalid_choice_message(value, ctx) + (f" Did you mean {guess!r}?" if guess else "")


def declared_options_of(fields: Iterable[Field]) -> Callable[[_F], _F]:
    """Return the options that fields declare, below their headings."""
    return _all_of(*(_declared_option(field, cls=_GroupedOption, group=field.group) for field in fields))


def request_options(kind: type[Any]) -> Callable[[_F], _F]:
    """Return the options that a request declares, and ``--dry-run``.

    Args:
        kind: The request. Where it has options of a section of a build config (``section``, ``declaring``), these are
            options as well, and the config is.
    """
    keys: dict[type, str] = {kind: ""}
    config: list[Callable[[_F], _F]] = []
    if hasattr(kind, "declaring"):
        keys = {kind.declaring: f"{kind.section}.", **keys}
        help = f"A build config, or its {kind.section} section; options win over it."
        config.append(grouped_option("-c", "--config", metavar="JSON", group=INPUT, help=help))
    return _all_of(
        *(
            _declared_option(
                field, cls=_GroupedOption, group=field.group, config_key=f"{start}{field.name}" if start else ""
            )
            for declaring, start in keys.items()
            for field in fields_of(declaring)
            if field.in_command
        ),
        *config,
        grouped_option("--dry-run", is_flag=True, group=OUTPUT, help="Print what would be done, and write nothing."),
    )


def source_options(command: _F) -> _F:
    """Add the options that say how the model is to be read."""
    return _load_options("source")(command)


def input_options(command: _F) -> _F:
    """Add the options that say what the inputs are."""
    return _all_of(
        grouped_option(
            "--input-specs",
            group="Model inputs",
            metavar="JSON",
            help="All inputs, as a JSON file or text; wins over shapes.",
        ),
        grouped_option(
            "--shape-config",
            group="Model inputs",
            metavar="JSON",
            help='Sizes, such as {"sequence_length": 64}; a name instead of a number leaves one open; a file or text.',
        ),
        grouped_option(
            "--batch-size",
            group="Model inputs",
            type=click.IntRange(min=1),
            help="Batch size; 1 where nothing says otherwise.",
        ),
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
        declared_options_of(fields_of(DynamicFields)),
        grouped_option(
            "--dynamic-axes",
            multiple=True,
            metavar="AXES",
            group="Model inputs",
            help="Leave axes open by place: input_ids:0=batch,1=sequence; repeatable; or a JSON file or text.",
        ),
    )(command)


def verbose_option(help: str) -> Callable[[_F], _F]:
    """Return the option that asks for more."""
    return grouped_option("-v", "--verbose", is_flag=True, help=help)


def tree_options(help: str) -> Callable[[_F], _F]:
    """Return the options that say how much is told, of a verb that shows the module tree."""

    def add(command: _F) -> _F:
        return _all_of(
            grouped_option(
                "-v", "--verbose", count=True, group=OPTIONS, help=f"{help} Twice: equal modules each by itself."
            ),
            grouped_option(
                "--depth", type=click.IntRange(min=1), group=OPTIONS, help="Levels of the module tree to show."
            ),
        )(command)

    return add


def quiet_option(help: str) -> Callable[[_F], _F]:
    """Return the option that asks for less."""
    return grouped_option("-q", "--quiet", is_flag=True, help=help)


def format_option(command: _F) -> _F:
    """Add the option that says in which form the answer comes."""
    return grouped_option(
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
    return grouped_option("--debug", is_flag=True, help="Show library warnings, and the traceback of a failure.")(
        command
    )


def output_options(command: _F) -> _F:
    """Add the options that say how much is told, and in which form."""
    return verbose_option("Tell more: what each step of a stage did.")(result_options(command))


def result_options(command: _F) -> _F:
    """Add the options that say in which form is told what was done."""
    return _all_of(
        quiet_option("Print nothing but errors."),
        format_option,
        debug_option,
    )(command)
