"""File names and contents of extracted modules, readable on every system."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from winml.modelkit.extract.extraction import _file_stems, _write_arrays
from winml.modelkit.tags.address import ModuleIdentity


def _names(*modules: str) -> list[str]:
    identities = [ModuleIdentity(module, f"/M/{number}", "C") for number, module in enumerate(modules)]
    return list(_file_stems(identities))


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("encoder.layer.0.attention", "encoder.layer.0.attention"),
        ('blocks.a/b:c*"<d>|e?', "blocks.a_b_c___d__e_"),
        ("con", "_con"),
        ("Lpt1.norm", "_Lpt1.norm"),
        ("console", "console"),
        (".hidden", "_.hidden"),
        ("ends. ", "ends"),
    ],
)
def test_name_is_one_that_windows_takes(module: str, expected: str) -> None:
    """Characters and names that Windows reserves are replaced, all others stay."""
    assert [expected] == _names(module)


def test_names_differing_in_case_or_replaced_signs_stay_distinct() -> None:
    """Two modules never share a file on a file system that ignores case."""
    assert ["block.a", "block.A-2", "b_c", "b_c-2"] == _names("block.a", "block.A", "b/c", "b:c")


def test_long_name_keeps_its_end() -> None:
    """The last component of a path tells modules apart; a file name holds 255 bytes."""
    (name,) = _names("ü" * 200 + ".last")
    assert len(name.encode()) <= 150
    assert name.endswith("ü.last")


def test_root_is_called_after_its_tag_and_calls_are_numbered() -> None:
    """The root module has no path and is named by its tag.

    Each call of a module that is called twice gets its number.
    """
    identities = [
        ModuleIdentity("", "/BertModel", "BertModel"),
        *(ModuleIdentity("block", "/M/Block", "Block", call, 2) for call in (1, 2)),
    ]
    assert ["BertModel", "block.call1", "block.call2"] == list(_file_stems(identities))


def test_arrays_of_any_name_are_read_back(tmp_path: Path) -> None:
    """Names of tensors start with slashes, and may be equal to a parameter of numpy's own function."""
    arrays = {"/a/b": np.arange(6).reshape(2, 3), "file": np.array(2.5, np.float32), "half": np.ones(3, np.float16)}
    _write_arrays(tmp_path / "x.npz", arrays)
    with np.load(tmp_path / "x.npz", allow_pickle=False) as found:
        assert list(arrays) == list(found)
        assert all(np.array_equal(arrays[name], found[name]) for name in arrays)


def test_bfloat16_arrays_keep_their_bytes(tmp_path: Path) -> None:
    """Files of numpy have no name for bfloat16; ``--input-data`` restores the type."""
    array = np.array([1.5, -2], ml_dtypes.bfloat16)
    _write_arrays(tmp_path / "x.npz", {"x": array})
    with np.load(tmp_path / "x.npz") as found:
        assert np.array_equal(array, found["x"].view(ml_dtypes.bfloat16))
