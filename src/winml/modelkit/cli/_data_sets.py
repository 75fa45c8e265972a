"""Which options say what is read of a data set? Declared here, once, for every verb."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from winml.modelkit.errors import UsageError

if TYPE_CHECKING:
    from winml.modelkit.evaluate.data_sets import DataSetRequest

__all__ = ["columns_option", "data_set_files", "requested_samples", "split_option"]

_F = TypeVar("_F", bound=Callable[..., Any])


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
    from winml.modelkit.evaluate.data_sources import find_source
    from winml.modelkit.evaluate.datasets_library import refuse_missing_datasets

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
