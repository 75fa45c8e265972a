"""Which options do several verbs share? Each is declared here, once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

__all__ = [
    "NonEmptyPath",
    "debug_option",
    "dtype_option",
    "dynamic_options",
    "format_option",
    "input_options",
    "model_option",
    "model_options",
    "output_options",
    "random_options",
    "source_options",
    "verbose_option",
]

LARGEST_SEED = 2**63 - 1
"""Specified: what torch.manual_seed takes."""

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


def source_options(command: _F) -> _F:
    """Add the options that say how the model is to be read."""
    return _all_of(
        click.option("--task", help="What the model is for, such as feature-extraction; else read from its config."),
        click.option("--revision", help="Branch, tag or commit of a Hub id."),
        click.option("--trust-remote-code", is_flag=True, help="Allow code that comes with the checkpoint to run."),
    )(command)


def input_options(command: _F) -> _F:
    """Add the options that say what the model eats."""
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
    return _all_of(
        click.option("--random-weights", is_flag=True, help="Build from the config alone, with seeded random weights."),
        click.option(
            "--seed",
            type=click.IntRange(0, LARGEST_SEED),
            default=0,
            show_default=True,
            help="Seed of random weights and inputs.",
        ),
    )(command)


def model_options(command: _F) -> _F:
    """Add the options that say which model, with which weights, and what it eats."""
    return _all_of(
        model_option(
            required=True, help="Hub id, checkpoint folder, config.json, file.py:factory or package.module:factory."
        ),
        source_options,
        random_options,
        input_options,
    )(command)


def dtype_option(command: _F) -> _F:
    """Add the option that says in which type the weights are kept."""
    return click.option(
        "--dtype",
        type=click.Choice(["fp32", "fp16", "bf16"]),
        help="Cast floating point weights to this type; else they stay as the checkpoint has them.",
    )(command)


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


def verbose_option(help: str) -> Callable[[_F], _F]:
    """Return the option that asks for more."""
    return click.option("-v", "--verbose", is_flag=True, help=help)


def format_option(command: _F) -> _F:
    """Add the option that says in which form the answer comes."""
    return click.option(
        "--format",
        "format_",
        type=click.Choice(["table", "json"]),
        default="table",
        show_default=True,
        help="Form of the answer on stdout.",
    )(command)


def debug_option(command: _F) -> _F:
    """Add the option that shows what is kept from users."""
    return click.option("--debug", is_flag=True, help="Show library warnings, and the traceback of a failure.")(command)


def output_options(command: _F) -> _F:
    """Add the options that say how much is told, and in which form."""
    return _all_of(
        verbose_option("Tell more: the module tree with node counts."),
        click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors."),
        format_option,
        debug_option,
    )(command)
