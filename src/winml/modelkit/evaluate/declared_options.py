"""Which options say what is read of a data set? Declared once, for every verb that reads one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winml.modelkit.errors import UsageError
from winml.modelkit.fields import declare

if TYPE_CHECKING:
    from winml.modelkit.evaluate.data_sets import DataSetRequest

__all__ = ["DATA_SET", "DataSetFields", "data_set_files", "declare_limits", "requested_samples"]

DATA_SET = "Data set"
"""Their heading in the help."""


def _read_columns(texts: tuple[str, ...]) -> dict[str, str]:
    from winml.modelkit.evaluate.data_sets import parse_columns

    return parse_columns(texts)


def declare_limits(option: str, text: str, group: str, metavar: str = "METRIC=VALUE") -> Any:
    """Return the field of a repeatable option that states limits by metric.

    Args:
        option: Its spelling, which errors name.
        text: Its help.
        group: Its heading in the help.
        metavar: Form of one limit.
    """

    def read(texts: tuple[str, ...]) -> dict[str, float]:
        from winml.modelkit.evaluate.options import parse_limits

        return parse_limits(texts, option)

    return declare({}, text, group, metavar=metavar, is_repeatable=True, read=read)


@dataclass(frozen=True, kw_only=True)
class DataSetFields:
    """What is read of a data set."""

    dataset: str | None = declare(None, "File, folder, or NAME[:CONFIG] at the Hub.", DATA_SET, metavar="PATH|NAME")
    split: str | None = declare(
        None,
        "Split of the data set; else validation, test, train, or the only one.",
        DATA_SET,
        metavar="NAME",
        min_length=1,
    )
    columns: dict[str, str] = declare(
        {},
        "Column of the data set that is the text, image, …, where its name does not say so.",
        DATA_SET,
        metavar="ROLE=COLUMN",
        is_repeatable=True,
        read=_read_columns,
    )
    samples: int | None = declare(None, "Samples to draw; else all.", DATA_SET, minimum=1)


def requested_samples(request: DataSetFields, *, most: int, seed: int) -> DataSetRequest | None:
    """Return the samples that ``--dataset`` names; None without it.

    Args:
        request: That of the verb.
        most: Samples that are read where no number is given.
        seed: Of the draw.

    Raises:
        UsageError: there is no such data set, or something is said of one that is not given.
    """
    if request.dataset is None:
        if request.columns or request.split is not None:
            passed = "--columns" if request.columns else "--split"
            raise UsageError(f"{passed} has no meaning without --dataset", hint="Leave it out, or give a data set.")
        return None
    from winml.modelkit.evaluate.data_sets import DataSetRequest
    from winml.modelkit.evaluate.data_sources import find_source, refuse_missing_datasets

    find_source(request.dataset)
    found = DataSetRequest(
        request.dataset,
        split=request.split,
        columns=request.columns,
        samples=request.samples,
        most=most,
        seed=seed,
    )
    refuse_missing_datasets(found.words)
    return found


def data_set_files(request: DataSetFields) -> tuple[Path, ...]:
    """Return the files on this disk of the data set that ``--dataset`` names; nothing may be written over them."""
    from winml.modelkit.evaluate.data_sources import find_source, source_files

    return () if request.dataset is None else source_files(find_source(request.dataset))
