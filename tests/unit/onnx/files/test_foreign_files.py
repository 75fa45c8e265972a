"""Files of a folder that libraries may open, and errors of parsers."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from winml.modelkit.errors import CheckpointError, InputError, UsageError
from winml.modelkit.onnx.files.foreign_files import check_library_files, foreign_parser, library_file

needs_links = pytest.mark.skipif(sys.platform == "win32", reason="links and pipes need rights there")


@pytest.fixture(name="folder")
def make_folder(tmp_path: Path) -> Path:
    """A checkpoint folder with a template, beside a secret."""
    (tmp_path / "id_rsa").write_text("secret")
    folder = tmp_path / "checkpoint"
    (folder / "additional_chat_templates").mkdir(parents=True)
    for name in ("config.json", "vocab.txt", "notes.txt", "additional_chat_templates/rag.jinja"):
        (folder / name).write_text("{}")
    return folder


def test_files_that_libraries_open_are_listed(folder: Path) -> None:
    """Files of other names and a missing folder are ignored."""
    (folder / "merges.txt").mkdir()
    names = [path.relative_to(folder).as_posix() for path in check_library_files(folder)]
    assert ["additional_chat_templates/rag.jinja", "config.json", "vocab.txt"] == names
    assert () == check_library_files(folder / "missing")


@needs_links
@pytest.mark.parametrize(
    "name", ["vocab.txt", "chat_template.jinja", "additional_chat_templates/x.jinja", "adapter_config.json"]
)
@pytest.mark.parametrize("target", ["{above}/id_rsa", "/dev/zero", "/proc/self/environ"])
def test_link_that_leads_out_is_refused(folder: Path, name: str, target: str) -> None:
    """Relative or absolute, to a file or a device."""
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(target.format(above=folder.parent))
    with pytest.raises(CheckpointError) as caught:
        check_library_files(folder, error=CheckpointError)
    assert str(folder / name) in caught.value.message


@pytest.mark.parametrize(
    ("holder", "key"), [("tokenizer_config.json", "fast_tokenizer_files"), ("config.json", "configuration_files")]
)
@pytest.mark.parametrize("name", ["../x/tokenizer.4.0.json", "{above}/tokenizer.4.0.json"])
def test_listed_file_of_another_version_outside_the_folder_is_refused(
    folder: Path, holder: str, key: str, name: str
) -> None:
    """Libraries open every path in such a list."""
    name = name.format(above=folder.parent.as_posix())
    (folder / holder).write_text(json.dumps({key: ["tokenizer.json", name]}))
    with pytest.raises(CheckpointError, match="leads out of the folder") as caught:
        check_library_files(folder, error=CheckpointError)
    assert str(folder / holder) in caught.value.message
    assert name in caught.value.message


def test_listed_files_of_other_versions_inside_the_folder_pass(folder: Path) -> None:
    """Missing files pass too; a damaged list, reported by its reader, names no files."""
    (folder / "config.4.0.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps({"configuration_files": ["config.4.0.json", "config.9.0.json", 3]}))
    assert folder / "config.4.0.json" in check_library_files(folder)
    for text in ('{"configuration_files": 3}', "[1]", "{"):
        (folder / "config.json").write_text(text)
        assert folder / "config.json" in check_library_files(folder)


@needs_links
def test_pipe_is_refused(folder: Path) -> None:
    """Opening a pipe would wait forever."""
    os.mkfifo(folder / "tokenizer.json")
    with pytest.raises(InputError, match="not a regular file"):
        check_library_files(folder)


@needs_links
def test_link_to_a_missing_file_is_refused(folder: Path) -> None:
    """The tokenizer that it stands for would be left out in silence; a name without a link is left out."""
    (folder / "merges.txt").symlink_to("nowhere")
    with pytest.raises(InputError, match=r"merges\.txt.*nowhere"):
        check_library_files(folder)
    (folder / "merges.txt").unlink()
    assert library_file(folder, "merges.txt") is None


@needs_links
def test_links_inside_the_folder_and_of_the_hub_cache_pass(folder: Path, tmp_path: Path) -> None:
    """A snapshot of the Hub's cache consists of links to blobs of the same repository."""
    (folder / "vocab.json").symlink_to("vocab.txt")
    assert library_file(folder, "vocab.json") == folder / "vocab.json"
    repository = tmp_path / "models--a--b"
    (repository / "snapshots" / "1234").mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "abc").write_text("{}")
    (repository / "snapshots" / "1234" / "config.json").symlink_to("../../blobs/abc")
    assert 1 == len(check_library_files(repository / "snapshots" / "1234"))


@pytest.mark.parametrize("raised", [ZeroDivisionError("x"), MemoryError(), RecursionError("x"), KeyError("x")])
def test_any_error_of_a_parser_names_the_file(raised: Exception) -> None:
    """The message has the reason, and the error is the cause."""
    with pytest.raises(CheckpointError) as caught, foreign_parser("a.bin cannot be read", error=CheckpointError):
        raise raised
    assert caught.value.message.startswith("a.bin cannot be read: ")
    assert caught.value.__cause__ is raised


@pytest.mark.parametrize("raised", [UsageError("x"), KeyboardInterrupt(), ImportError("x")])
def test_own_errors_and_interruptions_pass(raised: BaseException) -> None:
    """Errors that the caller handles pass too."""
    with pytest.raises(type(raised)) as caught, foreign_parser("a.bin", spared=ImportError):
        raise raised
    assert caught.value is raised
