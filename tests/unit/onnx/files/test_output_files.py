"""Publication of several files, all or none."""

from __future__ import annotations

import errno
import os
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from winml.modelkit.errors import OutputExistsError, UsageError, WriteError
from winml.modelkit.onnx.files import output_files as files_module
from winml.modelkit.onnx.files.output_files import OutputFiles, recover, refuse_existing, refuse_inputs


def _file_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_commit_puts_every_staged_file_in_place(tmp_path: Path) -> None:
    """Files appear under their final names, in directories made for them, and no trace of the staging is left."""
    folder = tmp_path / "made" / "for it"
    with OutputFiles() as files:
        files.reserve(folder / "model.onnx").write_bytes(b"model")
        files.reserve(folder / "report.md").write_text("report")
        assert {folder / "model.onnx": 5, folder / "report.md": 6} == files.written_sizes()
        written = files.commit()
    assert {folder / "model.onnx": 5, folder / "report.md": 6} == written
    assert ["model.onnx", "report.md"] == _file_names(folder)


def test_commit_publishes_files_beside_a_staged_file(tmp_path: Path) -> None:
    """External data beside the staged model is published with the model, and before it."""
    with OutputFiles() as files:
        place = files.reserve(tmp_path / "model.onnx")
        place.write_bytes(b"model")
        place.with_name("model.onnx.data").write_bytes(b"weights")
        written = files.commit()
    assert [tmp_path / "model.onnx.data", tmp_path / "model.onnx"] == list(written)
    assert b"weights" == (tmp_path / "model.onnx.data").read_bytes()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_output_files_after_an_error_are_unchanged(tmp_path: Path, error: type[BaseException]) -> None:
    """An error inside the block, or an interruption, keeps the earlier file and removes new files and directories."""
    (tmp_path / "model.onnx").write_bytes(b"earlier")

    def fail() -> None:
        with OutputFiles() as files:
            files.reserve(tmp_path / "model.onnx").write_bytes(b"new")
            files.reserve(tmp_path / "a" / "b" / "report.md").write_text("report")
            raise error

    with pytest.raises(error):
        fail()
    assert ["model.onnx"] == _file_names(tmp_path)
    assert b"earlier" == (tmp_path / "model.onnx").read_bytes()


def test_output_files_without_commit_write_nothing(tmp_path: Path) -> None:
    """Leaving the block without a commit leaves no file."""
    with OutputFiles() as files:
        files.reserve(tmp_path / "model.onnx").write_bytes(b"new")
    assert [] == _file_names(tmp_path)


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "Permission denied"), KeyboardInterrupt()])
def test_commit_failing_midway_puts_earlier_files_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Published files are removed again and earlier files restored if a file cannot be published."""
    targets = [tmp_path / name for name in ("first", "second", "third")]
    for target in targets[:2]:
        target.write_text(f"earlier {target.name}")
    replace = Path.replace

    def failing(source: Path, target: Path) -> Path:
        if target == targets[1] and source.read_text() == "new":
            raise error
        return replace(source, target)

    monkeypatch.setattr(Path, "replace", failing)

    def commit_all() -> None:
        with OutputFiles() as files:
            for target in targets:
                files.reserve(target).write_text("new")
            files.commit()

    with pytest.raises(WriteError if isinstance(error, OSError) else KeyboardInterrupt) as raised:
        commit_all()
    assert ["first", "second"] == _file_names(tmp_path)
    assert ["earlier first", "earlier second"] == [target.read_text() for target in targets[:2]]
    if isinstance(error, OSError):
        assert f"cannot write {targets[1]}: Permission denied" in str(raised.value)


def test_earlier_files_that_cannot_be_put_back_are_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next command completes the rollback if the disk fails during the commit and during the rollback."""
    targets = [tmp_path / name for name in ("first.txt", "second.txt")]
    for target in targets:
        target.write_text(f"earlier {target.name}")
    replace = Path.replace

    def failing(source: Path, target: Path) -> Path:
        if target == targets[0] or "earlier" in source.parts:
            raise OSError(errno.EIO, "Input/output error")
        return replace(source, target)

    def commit_both() -> None:
        with OutputFiles() as files:
            for target in targets:
                files.reserve(target).write_text(f"new {target.name}")
            files.commit()

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", failing)
        with pytest.raises(WriteError, match="Input/output error"):
            commit_both()
    recover([tmp_path / "other"])
    assert ["new first.txt", "new second.txt"] == [target.read_text() for target in targets]
    assert ["first.txt", "second.txt"] == _file_names(tmp_path)


def test_commit_on_a_file_system_without_links_replaces_and_rolls_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier file is moved aside if links are not supported."""

    def no_links(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(files_module.os, "link", no_links)
    (tmp_path / "model.onnx").write_text("earlier")
    with OutputFiles() as files:
        files.reserve(tmp_path / "model.onnx").write_text("new")
        files.commit()
    assert "new" == (tmp_path / "model.onnx").read_text()
    assert ["model.onnx"] == _file_names(tmp_path)


def test_full_disk_while_writing_becomes_a_write_error_naming_the_output(tmp_path: Path) -> None:
    """An error of the disk inside the block names the output and its reason; other errors pass unchanged."""

    def stage_and_raise(error: OSError) -> None:
        with OutputFiles() as files:
            files.reserve(tmp_path / "report.md")
            raise error

    with pytest.raises(WriteError, match=r"report\.md: No space"):
        stage_and_raise(OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(FileNotFoundError):
        stage_and_raise(FileNotFoundError(errno.ENOENT, "No such file", "something else"))
    assert [] == _file_names(tmp_path)


def test_refuse_existing_names_the_file_and_the_option(tmp_path: Path) -> None:
    """An output that is there is refused, and accepted with overwrite."""
    (tmp_path / "model.onnx").touch()
    paths = [tmp_path / "report.md", tmp_path / "model.onnx"]
    with pytest.raises(OutputExistsError, match=r"model\.onnx exists already\n.*--overwrite"):
        refuse_existing(paths, overwrite=False)
    refuse_existing(paths, overwrite=True)


def test_refuse_existing_refuses_a_directory_even_with_overwrite(tmp_path: Path) -> None:
    """A directory is never replaced by a file."""
    with pytest.raises(OutputExistsError, match="directory"):
        refuse_existing([tmp_path], overwrite=True)


def test_refuse_existing_detects_an_unwritable_path_without_creating_it(tmp_path: Path) -> None:
    """A path below a file cannot be written; a directory that does not exist yet can, and is not made by asking."""
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match="cannot write"):
        refuse_existing([tmp_path / "file" / "model.onnx"], overwrite=False)
    refuse_existing([tmp_path / "new" / "deep" / "model.onnx"], overwrite=False)
    assert ["file"] == _file_names(tmp_path)


def _make_special(path: Path, kind: str) -> None:
    """Put something at a path that is no regular file."""
    if kind == "a named pipe":
        os.mkfifo(path)
    elif kind == "a socket":
        # Paths of sockets are short; the socket may be made under another name.
        with socket.socket(socket.AF_UNIX) as server, tempfile.TemporaryDirectory(dir="/tmp") as folder:
            server.bind(f"{folder}/s")
            Path(folder, "s").rename(path)
    elif kind == "a device":
        try:
            os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("only root makes devices")
    else:
        targets = {"to a file": "file", "to nothing": "missing", "to itself": path.name, "to a device": "/dev/null"}
        path.with_name("file").write_text("mine")
        path.symlink_to(targets[kind])


@pytest.mark.skipif(sys.platform == "win32", reason="this system has no such files")
@pytest.mark.parametrize(
    "kind", ["a named pipe", "a socket", "a device", "to a file", "to nothing", "to itself", "to a device"]
)
def test_only_regular_files_are_replaced(tmp_path: Path, kind: str) -> None:
    """An existing special file is refused early, one made meanwhile at the commit; neither is changed."""
    target = tmp_path / "out"
    words = kind if kind.startswith("a ") else "a symbolic link to "

    def commit_late() -> None:
        with OutputFiles() as files:
            files.reserve(target).write_text("new")
            _make_special(target, kind)
            files.commit()

    with pytest.raises(UsageError, match=rf"out is {words}"):
        commit_late()
    mode = target.lstat().st_mode
    with pytest.raises(UsageError, match=rf"output .*out is {words}"):
        refuse_existing([target], overwrite=True)
    assert mode == target.lstat().st_mode
    assert [] == [name for name in _file_names(tmp_path) if name not in ("out", "file")]
    if kind == "to a file":
        assert "mine" == (tmp_path / "file").read_text()


def test_files_module_imports_the_standard_library_only() -> None:
    """A usage error does not wait for heavy imports."""
    code = (
        "import sys; import winml.modelkit.onnx.files.output_files; "
        "print([name for name in ('onnx_ir', 'onnx', 'torch', 'numpy') if name in sys.modules])"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "[]" == completed.stdout.strip()


def test_commit_without_overwrite_refuses_a_file_that_came_meanwhile(tmp_path: Path) -> None:
    """The later of two commands that write one file is refused, and the earlier file stays whole."""
    target = tmp_path / "model.onnx"
    with OutputFiles() as files:
        files.reserve(target).write_text("second", encoding="utf-8")
        target.write_text("first", encoding="utf-8")
        with pytest.raises(OutputExistsError, match="exists already"):
            files.commit(overwrite=False)
    assert "first" == target.read_text(encoding="utf-8")
    assert [target] == list(tmp_path.iterdir())


def test_output_equal_to_an_input_is_refused_under_any_path(tmp_path: Path) -> None:
    """Another spelling and a symbolic link are the input; a hard link and a missing file are allowed."""
    source = tmp_path / "model.onnx"
    source.write_bytes(b"model")
    (tmp_path / "folder").mkdir()
    outputs = [source, tmp_path / "folder" / ".." / "model.onnx"]
    if sys.platform != "win32":  # links need rights there
        (tmp_path / "link.onnx").symlink_to(source)
        outputs.append(tmp_path / "link.onnx")
    for output in outputs:
        with pytest.raises(UsageError, match=r"the input .*model\.onnx"):
            refuse_inputs([tmp_path / "other", output], [tmp_path / "missing", source])
    os.link(source, tmp_path / "hard.onnx")
    refuse_inputs([tmp_path / "hard.onnx", tmp_path / "new.onnx"], [source])
    with pytest.raises(UsageError):
        refuse_inputs([source], [source])


def test_file_that_another_program_has_open_is_a_write_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rename onto an open file works on Windows, not even from a hard link of the same file."""
    target = tmp_path / "held.json"
    target.write_text("earlier")
    replace = Path.replace

    def failing(source: Path, place: Path) -> Path:
        if Path(place) == target and target.exists():
            raise PermissionError(errno.EACCES, "Access is denied", str(source), 5, str(place))
        return replace(source, place)

    def commit_both() -> None:
        with OutputFiles() as files:
            for path in (target, tmp_path / "other.json"):
                files.reserve(path).write_text("new")
            files.commit()

    monkeypatch.setattr(Path, "replace", failing)
    with pytest.raises(WriteError, match=r"held\.json: (Access is denied|another program has it open)"):
        commit_both()
    assert ["held.json"] == _file_names(tmp_path)
    assert "earlier" == target.read_text()


def test_path_without_an_existing_folder_above_is_a_write_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drive or a share may be disconnected on Windows."""
    monkeypatch.setattr(os.path, "lexists", lambda _path: False)
    with pytest.raises(WriteError, match="does not exist"):
        refuse_existing([tmp_path / "model.onnx"], overwrite=False)


def test_copy_that_fills_the_disk_names_the_output(tmp_path: Path) -> None:
    """The error of a copy names its source first."""

    def write() -> None:
        with OutputFiles() as files:
            place = files.reserve(tmp_path / "model.onnx")
            raise OSError(errno.ENOSPC, "No space left on device", "source.onnx", None, str(place))

    with pytest.raises(WriteError) as raised:
        write()
    assert f"{tmp_path / 'model.onnx'}: No space left on device" in str(raised.value)
