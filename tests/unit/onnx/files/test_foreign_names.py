"""Paths of names that are read from another file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from winml.modelkit.errors import CheckpointError, InputError
from winml.modelkit.onnx.files.foreign_names import file_within, lies_within, name_problem

on_posix = pytest.mark.skipif(sys.platform == "win32", reason="other names are unusable there")
needs_links = pytest.mark.skipif(sys.platform == "win32", reason="links and pipes need rights there")


@pytest.fixture(name="folder")
def make_folder(tmp_path: Path) -> Path:
    """Make a folder with a file, and a file outside."""
    (tmp_path / "outside.bin").write_bytes(b"secret")
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "weights.bin").write_bytes(b"12345")
    return folder


@pytest.mark.parametrize("name", ["sub/weights.bin", "./sub/weights.bin", "sub//weights.bin", Path("sub/weights.bin")])
def test_name_below_the_folder_is_accepted(folder: Path, name: str | Path) -> None:
    """The spelling of the path does not matter."""
    assert file_within(folder, name, "index.json").samefile(folder / "sub" / "weights.bin")


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
        pytest.param("\ud800.bin", "unusable", marks=on_posix),
        pytest.param("a" * 5000, "unusable", marks=on_posix),
        ("sub", "not regular"),
        (".", "not regular"),
    ],
)
def test_name_outside_the_folder_is_refused(folder: Path, name: object, problem: str) -> None:
    """The refusal states the problem of the name."""
    assert name_problem(folder, name) == problem
    with pytest.raises(InputError, match=r"index\.json: names"):
        file_within(folder, name, folder / "index.json")


def test_refusal_is_of_the_type_the_reader_raises(folder: Path) -> None:
    """The caller chooses among the errors of files."""
    with pytest.raises(CheckpointError):
        file_within(folder, "../outside.bin", "index.json", error=CheckpointError)


def test_folder_is_accepted_for_a_folder_only(folder: Path) -> None:
    """A file is not accepted as a folder."""
    assert file_within(folder, "sub", "index.json", kind="folder") == folder / "sub"
    assert name_problem(folder, "sub/weights.bin", kind="folder") == "not regular"


@needs_links
def test_links_and_pipes_are_followed_below_the_folder_only(folder: Path) -> None:
    """A link within the folder is a file; outward links, loops, pipes and devices are refused."""
    (folder / "inside.bin").symlink_to("sub/weights.bin")
    (folder / "leaves.bin").symlink_to("../outside.bin")
    (folder / "up").symlink_to("..")
    (folder / "loop").symlink_to("loop")
    (folder / "device").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe")
    problems = {
        name: name_problem(folder, name)
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
def test_output_path_stays_below_the_folder_despite_links(folder: Path) -> None:
    """A link of the name itself is replaced, and one above it would be followed."""
    (folder / "up").symlink_to("..")
    (folder / "link.bin").symlink_to("../outside.bin")
    assert lies_within(folder, "link.bin")
    assert lies_within(folder, "new/file.bin")
    assert not lies_within(folder, "up/outside.bin")
    assert not lies_within(folder, "../outside.bin")


@needs_links
def test_linked_folder_is_a_valid_root(folder: Path, tmp_path: Path) -> None:
    """The user named the link, so files below its target are inside."""
    (tmp_path / "link").symlink_to(folder)
    assert name_problem(tmp_path / "link", "sub/weights.bin") is None


@needs_links
@pytest.mark.parametrize("below", ["", "onnx"])
def test_snapshot_of_the_hub_cache_leads_to_its_own_blobs(tmp_path: Path, below: str) -> None:
    """Every file in a snapshot is a link to a blob of its repository; blobs of other repositories are outside."""
    for repository in ("models--a--one", "models--a--two"):
        (tmp_path / repository / "blobs").mkdir(parents=True)
        (tmp_path / repository / "blobs" / "0123").write_bytes(b"12345")
    snapshot = tmp_path / "models--a--one" / "snapshots" / "abc" / below
    snapshot.mkdir(parents=True)
    (snapshot / "own.bin").symlink_to(tmp_path / "models--a--one" / "blobs" / "0123")
    (snapshot / "other.bin").symlink_to(tmp_path / "models--a--two" / "blobs" / "0123")
    assert name_problem(snapshot, "own.bin") is None
    assert name_problem(snapshot, "other.bin") == "outside"
