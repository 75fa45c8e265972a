"""Where may a name lead that another file holds?"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from winml.modelkit.errors import CheckpointError, InputError
from winml.modelkit.graph.files.foreign_names import (
    ForeignNameError,
    file_below,
    file_within,
    lies_within,
    look_up_name,
    refuse_special_file,
)

needs_links = pytest.mark.skipif(sys.platform == "win32", reason="links and pipes need rights there")


@pytest.fixture(name="folder")
def make_folder(tmp_path: Path) -> Path:
    """A folder with a file, and one outside."""
    (tmp_path / "outside.bin").write_bytes(b"secret")
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "weights.bin").write_bytes(b"12345")
    return folder


@pytest.mark.parametrize("name", ["sub/weights.bin", "./sub/weights.bin", "sub//weights.bin", Path("sub/weights.bin")])
def test_name_below_the_folder_is_found(folder: Path, name: str | Path) -> None:
    """However it is spelled; the size comes along."""
    assert file_within(folder, name, "index.json").samefile(folder / "sub" / "weights.bin")
    assert look_up_name(folder, name).size_bytes == 5


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", "no name"),
        (" ", "no name"),
        (None, "no name"),
        (7, "no name"),
        (["a"], "no name"),
        ("../outside.bin", "outside"),
        ("sub/../../outside.bin", "outside"),
        ("sub/../sub/weights.bin", "outside"),
        ("..\\outside.bin", "outside"),
        ("/etc/passwd", "outside"),
        ("C:\\Windows\\win.ini", "outside"),
        ("C:weights.bin", "outside"),
        ("\\\\server\\share\\weights.bin", "outside"),
        ("missing.bin", "missing"),
        ("sub/weights.bin/more", "missing"),
        ("nul\0.bin", "unusable"),
        ("\ud800.bin", "unusable"),
        ("a" * 5000, "unusable"),
        ("sub", "not regular"),
        (".", "not regular"),
    ],
)
def test_name_that_is_no_file_below_the_folder_is_refused(folder: Path, name: object, problem: str) -> None:
    """By what is wrong with it."""
    assert look_up_name(folder, name).problem == problem
    with pytest.raises(InputError, match=r"index\.json: names"):
        file_within(folder, name, folder / "index.json")


def test_refusal_is_of_the_type_the_reader_raises(folder: Path) -> None:
    """The caller chooses among the errors of files."""
    with pytest.raises(CheckpointError):
        file_within(folder, "../outside.bin", "index.json", error=CheckpointError)


def test_folder_is_found_where_one_is_expected(folder: Path) -> None:
    """And a file is none."""
    assert file_within(folder, "sub", "index.json", kind="folder") == folder / "sub"
    assert look_up_name(folder, "sub/weights.bin", kind="folder").problem == "not regular"


@needs_links
def test_links_and_pipes_are_followed_below_the_folder_only(folder: Path) -> None:
    """A link that stays inside is a file; one that leaves, a loop, a pipe and a device are none."""
    (folder / "inside.bin").symlink_to("sub/weights.bin")
    (folder / "leaves.bin").symlink_to("../outside.bin")
    (folder / "up").symlink_to("..")
    (folder / "loop").symlink_to("loop")
    (folder / "device").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe")
    problems = {
        name: look_up_name(folder, name).problem
        for name in ("inside.bin", "leaves.bin", "up/outside.bin", "loop", "device", "pipe")
    }
    assert problems == {
        "inside.bin": None,
        "leaves.bin": "outside",
        "up/outside.bin": "outside",
        "loop": "unusable",
        "device": "outside",
        "pipe": "not regular",
    }


@needs_links
def test_place_to_write_is_below_the_folder_whatever_is_there(folder: Path) -> None:
    """A link of the name itself is replaced, and one above it would be followed."""
    (folder / "up").symlink_to("..")
    (folder / "link.bin").symlink_to("../outside.bin")
    assert lies_within(folder, "link.bin")
    assert lies_within(folder, "new/file.bin")
    assert not lies_within(folder, "up/outside.bin")
    assert not lies_within(folder, "../outside.bin")


@needs_links
def test_folder_that_is_a_link_itself_is_no_way_out(folder: Path, tmp_path: Path) -> None:
    """The user named it; what lies below its target is inside."""
    (tmp_path / "link").symlink_to(folder)
    assert look_up_name(tmp_path / "link", "sub/weights.bin").problem is None


@needs_links
@pytest.mark.parametrize("below", ["", "onnx"])
def test_snapshot_of_the_hub_cache_leads_to_its_own_blobs(tmp_path: Path, below: str) -> None:
    """Every file there is a link to a blob of the repository; those of another repository are outside."""
    for repository in ("models--a--one", "models--a--two"):
        (tmp_path / repository / "blobs").mkdir(parents=True)
        (tmp_path / repository / "blobs" / "0123").write_bytes(b"12345")
    snapshot = tmp_path / "models--a--one" / "snapshots" / "abc" / below
    snapshot.mkdir(parents=True)
    (snapshot / "own.bin").symlink_to(tmp_path / "models--a--one" / "blobs" / "0123")
    (snapshot / "other.bin").symlink_to(tmp_path / "models--a--two" / "blobs" / "0123")
    assert look_up_name(snapshot, "own.bin").size_bytes == 5
    assert look_up_name(snapshot, "other.bin").problem == "outside"


@pytest.mark.parametrize(
    "name",
    ["../outside.bin", "/etc/passwd", "", ".", "sub", "gone", "C:x", "a\0b", "..", "x" * 300, "http://127.0.0.1/x",
     "\\\\server\\share\\x", "\ud800"],
)  # fmt: skip
def test_cell_that_names_no_file_below_the_folder_is_refused(folder: Path, name: str) -> None:
    """Readers of many names get the reason alone, and say themselves where the name stands."""
    assert file_below(folder, "sub/weights.bin").samefile(folder / "sub" / "weights.bin")
    with pytest.raises(ForeignNameError):
        file_below(folder, name)


@needs_links
def test_special_files_are_refused_and_a_link_the_user_named_is_not(folder: Path) -> None:
    """Reading a pipe that nobody writes to would wait for ever."""
    os.mkfifo(folder / "pipe")
    (folder / "outside").symlink_to("../outside.bin")
    for path in (folder / "pipe", folder, folder / "gone", Path(os.devnull)):
        with pytest.raises(ForeignNameError):
            refuse_special_file(path)
    refuse_special_file(folder / "outside")
