"""Paths of calibration data: arrays, texts or a data set, with their files listed before reading."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from winml.modelkit.errors import UsageError
from winml.modelkit.quantize.calibration.calibration_files import (
    calibration_files,
    calibration_kind,
    refuse_missing_files,
)
from winml.modelkit.quantize.options import QuantizeOptions


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    """A folder of two samples and a file of another format."""
    for name in ("b", "a"):
        np.savez(tmp_path / f"{name}.npz", x=np.zeros(2))
    (tmp_path / "texts.csv").write_text("text\ngood\n", encoding="utf-8")
    return tmp_path


def test_kind_of_data_follows_its_files(arrays: Path) -> None:
    """A folder with arrays is read as arrays."""
    assert "arrays" == calibration_kind(arrays) == calibration_kind(arrays / "a.npz")
    assert "texts" == calibration_kind(arrays / "texts.csv")


def test_files_of_a_folder_are_its_arrays_in_order(arrays: Path) -> None:
    """Files are sorted by name, so ranges do not depend on the file system."""
    assert [("a.npz", arrays / "a.npz"), ("b.npz", arrays / "b.npz")] == [*calibration_files(arrays).items()]
    assert {"texts.csv": arrays / "texts.csv"} == calibration_files(arrays / "texts.csv")


def test_missing_data_is_refused(tmp_path: Path) -> None:
    """An unsupported format is refused too."""
    (tmp_path / "data.bin").write_bytes(b"")
    for data in (tmp_path / "missing.npz", tmp_path / "data.bin"):
        with pytest.raises(UsageError):
            calibration_kind(data)


def test_columns_of_arrays_are_refused(arrays: Path) -> None:
    """Arrays lie by input, and random values have no split."""
    with pytest.raises(UsageError, match="--columns"):
        refuse_missing_files(QuantizeOptions(calibration_data=str(arrays), columns={"text": "review"}))
    with pytest.raises(UsageError, match="--split"):
        refuse_missing_files(QuantizeOptions(split="test"))
    refuse_missing_files(QuantizeOptions(calibration_data=str(arrays)))
