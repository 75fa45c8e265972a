"""Removal of a folder of unfinished files after its owner has ended."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from winml.modelkit.file_names import OWNER_LOCK_NAME, TEMPORARY_PREFIX
from winml.modelkit.onnx.files.recovery import OwnedFolder, abandoned_folders

PREFIX = ".unfinished-"

_OWNER = """
import sys, time
from pathlib import Path
from winml.modelkit.onnx.files.recovery import OwnedFolder
folder = OwnedFolder.make(Path(sys.argv[1]), ".unfinished-")
(folder.path / "weights").write_bytes(b"many")
print(folder.path, flush=True)
time.sleep(120)
"""


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _remove_abandoned(directory: Path, *, with_unlocked: bool = False) -> None:
    for folder in abandoned_folders(directory, PREFIX, with_unlocked=with_unlocked):
        folder.remove()


def test_folder_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    """The folder stays while its owner lives, and is removed with all its files afterwards."""
    owner = subprocess.Popen([sys.executable, "-c", _OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        path = Path(owner.stdout.readline().strip())
        _remove_abandoned(tmp_path)
        assert (path / "weights").exists()
    finally:
        owner.kill()
        owner.communicate()
    _remove_abandoned(tmp_path)
    assert [] == _names(tmp_path)


def test_folder_that_its_owner_leaves_is_abandoned(tmp_path: Path) -> None:
    """Every later process, and the same one, may take over the content."""
    folder = OwnedFolder.make(tmp_path, PREFIX)
    (folder.path / "weights").write_bytes(b"many")
    folder.release()
    assert [OWNER_LOCK_NAME, "weights"] == _names(folder.path)
    _remove_abandoned(tmp_path)
    assert [] == _names(tmp_path)


def test_folder_of_this_process_is_not_abandoned(tmp_path: Path) -> None:
    """Commands in one process do not take over each other's folders; the creator removes its folder."""
    folder = OwnedFolder.make(tmp_path, PREFIX)
    assert [] == list(abandoned_folders(tmp_path, PREFIX))
    folder.remove()
    assert [] == _names(tmp_path)


def test_unlocked_folder_of_a_killed_owner_is_removed_if_empty(tmp_path: Path) -> None:
    """An unlocked folder with files may belong to another version until a day has passed."""
    for name in ("empty", "full"):
        (tmp_path / f"{PREFIX}{name}").mkdir()
    (tmp_path / f"{PREFIX}full" / "weights").touch()
    (tmp_path / f"{PREFIX}file").touch()
    _remove_abandoned(tmp_path, with_unlocked=True)
    assert [f"{PREFIX}file", f"{PREFIX}full"] == _names(tmp_path)
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    _remove_abandoned(tmp_path)
    assert [f"{PREFIX}file", f"{PREFIX}full"] == _names(tmp_path)
    _remove_abandoned(tmp_path, with_unlocked=True)
    assert [] == _names(tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="locks of another kind there")
def test_folder_on_a_file_system_without_locks_is_removed_after_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locks cannot show whether the owner has ended, so the age decides."""
    import fcntl

    def refuse(_file: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    folder = OwnedFolder.make(tmp_path, PREFIX)
    (folder.path / "weights").touch()
    _remove_abandoned(tmp_path, with_unlocked=True)
    os.utime(folder.path, (0, 0))
    _remove_abandoned(tmp_path)
    assert (folder.path / "weights").exists()
    _remove_abandoned(tmp_path, with_unlocked=True)
    assert [] == _names(tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="needs rights there")
def test_link_to_a_folder_is_never_followed(tmp_path: Path) -> None:
    """A link with the prefix of owned folders does not make its target an owned folder."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / OWNER_LOCK_NAME).touch()
    (tmp_path / f"{PREFIX}x").symlink_to(tmp_path / "precious")
    _remove_abandoned(tmp_path, with_unlocked=True)
    assert ["precious"] == [name for name in _names(tmp_path) if not name.startswith(PREFIX)]
    assert (tmp_path / "precious" / OWNER_LOCK_NAME).exists()


_TEMPORARY = """
import os, signal, sys
from winml.modelkit.onnx.files.recovery import temporary_folder
with temporary_folder() as folder:
    (folder / "copy").write_bytes(b"weights")
    if sys.argv[1:]:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no such signal")
def test_temporary_folder_removes_files_of_killed_commands(tmp_path: Path) -> None:
    """The full copies of a killed optimization do not stay for ever."""
    variables = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(tmp_path))}
    killed = subprocess.run([sys.executable, "-c", _TEMPORARY, "kill"], env=variables, check=False)
    assert -signal.SIGKILL == killed.returncode
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(TEMPORARY_PREFIX)
    subprocess.run([sys.executable, "-c", _TEMPORARY], env=variables, check=True)
    assert [] == _names(tmp_path)
