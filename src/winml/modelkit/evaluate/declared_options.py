"""Options that describe a data set, declared once for every verb that reads one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winml.modelkit.errors import opt
from winml.modelkit.fields import DATASET, LIMITS, declare, refuse_stated

if TYPE_CHECKING:
    from collections.abc import Mapping

    from winml.modelkit.options import Drop
    from winml.modelkit.samples.data_sets import DataSetRequest


def _read_columns(texts: tuple[str, ...]) -> dict[str, str]:
    from winml.modelkit.samples.columns import parse_columns

    return parse_columns(texts)


def declare_limits(option: str, metavar: str = "METRIC=VALUE", *, is_common: bool = False) -> Any:
    """Return the field of a repeatable option that states limits by metric.

    Args:
        option: Name of the option.
        metavar: Form of one limit.
        is_common: True if ``--help`` lists the option.
    """

    def read(texts: tuple[str, ...]) -> Mapping[str, Drop]:
        from winml.modelkit.evaluate.options import parse_drops, parse_limits

        return parse_drops(texts) if option == "max_drop" else parse_limits(texts, option)

    return declare({}, LIMITS, metavar=metavar, is_repeatable=True, read=read, is_common=is_common)


@dataclass(frozen=True, kw_only=True)
class DataSetFields:
    """Options of a dataset."""

    dataset: str | None = declare(None, DATASET, metavar="PATH|NAME")
    """Dataset: a file, a folder, or NAME[:CONFIG] on the Hub."""
    split: str | None = declare(
        None, DATASET, metavar="NAME", min_length=1, default_words="validation, else test, train or the only one"
    )
    """Split of the dataset."""
    columns: dict[str, str] = declare({}, DATASET, metavar="ROLE=COLUMN", is_repeatable=True, read=_read_columns)
    """Column of the dataset by role, such as text or image, if its name is not recognized."""
    samples: int | None = declare(None, DATASET, minimum=1, default_words="all", is_common=True)
    """Number of samples."""


def requested_samples(request: DataSetFields, *, seed: int) -> DataSetRequest | None:
    """Return the samples that ``--dataset`` names, which outputs are compared on; None without it.

    Args:
        request: Request of the command.
        seed: Seed of the sample selection.

    Raises:
        UsageError: the dataset does not exist, or another option of a dataset is set without ``--dataset``.
    """
    if request.dataset is None:
        refuse_stated(request, ("columns", "split"), f"{{}} requires {opt.dataset}", "Omit it, or pass a dataset.")
        return None
    from winml.modelkit.compare.quality_samples import judging_request
    from winml.modelkit.samples.data_sources import find_source, refuse_missing_datasets

    find_source(request.dataset)
    refuse_missing_datasets(f"{opt.dataset} {request.dataset}")
    return judging_request(
        request.dataset, split=request.split, columns=request.columns, samples=request.samples, seed=seed
    )


def data_set_files(request: DataSetFields) -> tuple[Path, ...]:
    """Return the local files of ``--dataset``, which no output may replace; ``()`` without a dataset."""
    from winml.modelkit.samples.data_sources import find_source, source_files

    return () if request.dataset is None else source_files(find_source(request.dataset))
