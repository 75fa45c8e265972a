"""Which options do several verbs share? Each is declared here, once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

__all__ = ["model_options", "output_options"]

_F = TypeVar("_F", bound=Callable[..., Any])


def _all_of(*options: Callable[[_F], _F]) -> Callable[[_F], _F]:
    def decorate(command: _F) -> _F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def model_options(command: _F) -> _F:
    """Add the options that say which model, and what it eats."""
    return _all_of(
        click.option(
            "-m",
            "--model",
            required=True,
            metavar="MODEL",
            help="Hub id, checkpoint folder, config.json, file.py:factory or package.module:factory.",
        ),
        click.option("--task", help="What the model is for, such as feature-extraction; else read from its config."),
        click.option("--revision", help="Branch, tag or commit of a Hub id."),
        click.option("--trust-remote-code", is_flag=True, help="Allow code that comes with the checkpoint to run."),
        click.option("--random-weights", is_flag=True, help="Build from the config alone, with seeded random weights."),
        click.option("--seed", type=int, default=0, show_default=True, help="Seed of random weights and inputs."),
        click.option("--input-specs", metavar="JSON", help="All inputs, as a JSON file or text; wins over shapes."),
        click.option(
            "--shape-config",
            metavar="JSON",
            help='Sizes, such as {"sequence_length": 64, "height": 224}; a file or text.',
        ),
        click.option("--batch-size", type=click.IntRange(min=1), help="Batch size; 1 where nothing says otherwise."),
    )(command)


def output_options(command: _F) -> _F:
    """Add the options that say how much is told, and in which form."""
    return _all_of(
        click.option("-v", "--verbose", is_flag=True, help="Tell more: the module tree with node counts."),
        click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors."),
        click.option(
            "--format",
            "format_",
            type=click.Choice(["table", "json"]),
            default="table",
            show_default=True,
            help="Form of the answer on stdout.",
        ),
        click.option("--debug", is_flag=True, help="Show library warnings, and the traceback of a failure."),
    )(command)
