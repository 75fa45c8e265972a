"""Commands beside files of a killed command: readers report them, writers complete them and leave nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.in_process import run_here
from module_chains import save_chain
from winml.modelkit.file_names import OWNER_LOCK_NAME, PARTIAL_PREFIX
from winml.modelkit.onnx.files.recovery import STAGED, write_journal

KILLED = """
import os, signal, sys
from winml.modelkit.cli.main import main
from winml.modelkit.transform import graph_file

def killed(*_arguments, **_options):
    os.kill(os.getpid(), signal.SIGKILL)

graph_file.transform_file = killed  # the moment at which its folder is there and nothing is written
main()
"""


@pytest.fixture(name="unfinished")
def make_unfinished(here: Path) -> Path:
    """A folder with a model, and with a new version and report left by a killed command."""
    folder = here / "models"
    folder.mkdir()
    save_chain(folder / "model.onnx")
    hidden = folder / f"{PARTIAL_PREFIX}x"
    (hidden / STAGED).mkdir(parents=True)
    (hidden / OWNER_LOCK_NAME).touch()
    save_chain(hidden / STAGED / "model.onnx", outlier="w2")
    (hidden / STAGED / "report.md").write_text("new", encoding="utf-8")
    write_journal(hidden, hidden / STAGED, folder, ["report.md", "model.onnx"], [])
    return folder


def states(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of change of everything in a folder, hidden files included."""
    found = ((path.relative_to(folder).as_posix(), path.lstat()) for path in folder.rglob("*"))
    return {name: (state.st_size, state.st_mtime_ns) for name, state in found}


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (0, ("inspect", "models/model.onnx")),
        (0, ("inspect", "models/model.onnx", "-f", "json")),
        (0, ("perf", "models", "--iterations", "2")),
        (0, ("perf", "models/model.onnx", "--iterations", "2")),
        (0, ("compare", "models/model.onnx", "models/model.onnx")),
        (0, ("diff", "models/model.onnx", "models/model.onnx")),
        (0, ("extract", "models/model.onnx", "--module", "c", "-o", "elsewhere/cut")),
        (2, ("inspect", "models/other.onnx")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else str(value),
)
def test_reader_gets_one_note_and_changes_nothing(unfinished: Path, code: int, arguments: tuple[str, ...]) -> None:
    """The note is on stderr, even if the file does not exist yet."""
    before = states(unfinished)
    done = run_here(*arguments)
    assert code == done.code, done.err
    assert 1 == sum("unfinished files" in line for line in done.err.splitlines()), done.err
    assert "report.md" in done.err
    assert before == states(unfinished)


def test_writer_completes_the_set_with_one_note(unfinished: Path) -> None:
    """The set is complete before the file is read."""
    done = run_here("optimize", "-m", "models/model.onnx", "-o", "models/optimized.onnx")
    assert 0 == done.code, done.err
    assert "report.md, model.onnx" in done.err
    assert "unfinished files" not in done.err
    assert {"model.onnx", "optimized.onnx", "report.md"} == {*states(unfinished)}


@pytest.mark.skipif(sys.platform == "win32", reason="there, a process cannot kill itself by a signal")
def test_killed_compilation_leaves_hidden_files_only(here: Path) -> None:
    """The leftovers are hidden, and the next command that writes into the folder removes them."""
    save_chain(here / "model.onnx")
    command = [sys.executable, "-c", KILLED, "compile", "-m", "model.onnx", "-o", "compiled.onnx", "--ep", "cpu"]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    assert -signal.SIGKILL == done.returncode, done.stderr
    assert ["model.onnx"] == [path.name for path in here.iterdir() if not path.name.startswith(".")]
    assert [True] == [path.name.startswith(PARTIAL_PREFIX) for path in here.iterdir() if path.name != "model.onnx"]
    assert 0 == run_here("optimize", "-m", "model.onnx", "-o", "optimized.onnx").code
    assert {"model.onnx", "optimized.onnx"} == {path.name for path in here.iterdir()}
