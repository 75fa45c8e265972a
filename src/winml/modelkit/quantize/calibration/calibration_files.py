"""Classification of calibration data, and checks of its files.

Reads names only, and imports no model library: requests are refused, and earlier results found, before a model is
loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from winml.modelkit.errors import UsageError, opt, spell
from winml.modelkit.quantize.options import QuantizeOptions
from winml.modelkit.samples.columns import refuse_unknown_roles
from winml.modelkit.samples.data_sources import find_source, refuse_missing_datasets, source_files
from winml.modelkit.samples.text_files import TEXT_SUFFIXES

CalibrationKind = Literal["arrays", "texts", "data set"]
"""``.npz`` files; a text file, read without another package; or data read by the datasets library."""

FORMATS = (
    "Pass an .npz file or a folder of .npz files (numpy.savez, one array per graph input, one file per "
    "sample); text: .txt (one per line), .csv or .jsonl; a .json, .parquet or .arrow file; a folder of such "
    "files, of images, of audio files, or from save_to_disk; or the name of a dataset on the Hub."
)
"""Supported formats, for hints."""


def calibration_kind(data: str | Path) -> CalibrationKind:
    """Classify calibration data.

    Raises:
        UsageError: the data is missing or has an unsupported format.
    """
    path = Path(data)
    suffix = path.suffix.lower()
    if path.is_file() and suffix in (".npz", *TEXT_SUFFIXES):
        return "arrays" if suffix == ".npz" else "texts"
    if path.is_dir() and any(path.glob("*.npz")):
        return "arrays"
    try:
        find_source(data, opt.calibration_data)
    except UsageError as error:
        raise UsageError(error.message, hint=FORMATS) from None
    return "data set"


def npz_files(data: Path) -> list[Path]:
    """Sample files of a folder, in order; for a file, itself."""
    return sorted(data.glob("*.npz")) if data.is_dir() else [data]


def calibration_files(data: str | Path) -> dict[str, Path]:
    """List the files of the data: name in its folder → file; ``{}`` for a dataset on the Hub.

    Raises:
        UsageError: as in :func:`calibration_kind`.
    """
    path, kind = Path(data), calibration_kind(data)
    if kind == "data set":
        source = find_source(data, opt.calibration_data)
        files = source_files(source)
        return {file.name if file == source.path else file.relative_to(path).as_posix(): file for file in files}
    return {file.name: file for file in npz_files(path)}


def refuse_missing_files(options: QuantizeOptions) -> None:
    """Refuse missing or unsupported data, and --split or --columns without a dataset.

    Raises:
        UsageError: names the option and the supported formats.
    """
    data = options.calibration_data
    kind = None if data is None else calibration_kind(data)
    option_text = (
        f"{opt.split} {options.split}" if options.split is not None else spell("columns" if options.columns else "")
    )
    if options.dataset is not None:
        find_source(options.dataset)
        refuse_missing_datasets(f"{opt.dataset} {options.dataset}")
    if option_text and kind in (None, "arrays") and not options.has_judging_data_alone:
        origin = "random values" if kind is None else f"{opt.calibration_data} {data}, which contains arrays by input"
        raise UsageError(f"{option_text} does not apply to {origin}", hint="Omit it, or pass a dataset.")
    refuse_unknown_roles(options.columns)
    if kind == "data set":
        refuse_missing_datasets(f"{opt.calibration_data} {data}")
