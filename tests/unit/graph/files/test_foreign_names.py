"""Names that stand in foreign files lead to regular files below their folder, or nowhere."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from winml.modelkit.graph.files.foreign_names import ForeignNameError, file_below, refuse_special_file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file below, beside another file."""
    (tmp_path / "in" / "below").mkdir(parents=True)
    (tmp_path / "in" / "below" / "x").write_text("")
    (tmp_path / "other").write_text("")
    return tmp_path / "in"


@pytest.mark.parametrize("name", ["below/x", "./below//x", "below/./x", Path("below", "x")])
def test_file_below_the_folder_is_found(folder: Path, name: str | Path) -> None:
    assert (folder / "below" / "x").samefile(file_below(folder, name))


@pytest.mark.parametrize(
    "name",
    ["../other", "below/../../other", "/etc/passwd", "", ".", "below", "gone", "C:x", "a\0b", "..", "x" * 300,
     "http://127.0.0.1/x", "\\\\server\\share\\x", "\ud800"],
)  # fmt: skip
def test_any_other_name_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(ForeignNameError):
        file_below(folder, name)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no links for everybody, and no pipes in folders")
def test_links_count_by_where_they_lead_and_pipes_are_no_files(folder: Path) -> None:
    """Also where the folder itself is reached by a link."""
    (folder / "inside").symlink_to("below/x")
    (folder / "outside").symlink_to("../other")
    (folder / "up").symlink_to("..")
    (folder / "circle").symlink_to("circle")
    os.mkfifo(folder / "pipe")
    (folder.parent / "alias").symlink_to(folder)
    for place in (folder, folder.parent / "alias"):
        assert file_below(place, "inside").is_file()
        for name in ("outside", "up/other", "circle", "pipe"):
            with pytest.raises(ForeignNameError):
                file_below(place, name)
    for path in (folder / "pipe", folder, folder / "gone", Path(os.devnull)):
        with pytest.raises(ForeignNameError):
            refuse_special_file(path)
    refuse_special_file(folder / "outside")  # a name that the user gave
