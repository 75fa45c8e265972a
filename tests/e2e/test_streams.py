"""Commands with closed, full and early-ending streams.

The streams decide how a result is reported, never whether the work is done.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from e2e.workplace import Workplace
from graphs import parse

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the shell of this system closes no descriptors")


_NET = """
import torch

def net():
    return torch.nn.Linear(2, 3)

def example_inputs():
    return torch.ones(1, 2)
"""


@pytest.fixture(scope="module")
def place(make_workplace: Callable[[], Workplace]) -> Workplace:
    """A workplace with a large ONNX file, which fills the buffer of a pipe when inspected, and a small one."""
    import onnx_ir as ir

    workplace = make_workplace()
    lines = "\n".join(f"v{number} = Relu(v{number - 1})" for number in range(1, 1500))
    model = parse(f"g (float[2] v0) => (float[2] y) {{ {lines} y = Neg(v1499) }}")
    ir.save(model, workplace.folder / "model.onnx")
    ir.save(parse("g (float[2] x) => (float[2] y) { h = Relu(x) y = Neg(h) }"), workplace.folder / "small.onnx")
    return workplace


def _shell(place: Workplace, command: str, *, unbuffered: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {**place.environment(), "WINML": f"{sys.executable} -m winml.modelkit"}
    environment.pop("PYTHONUNBUFFERED", None)
    if unbuffered:
        environment["PYTHONUNBUFFERED"] = "1"
    return subprocess.run(
        ["/bin/sh", "-c", command], cwd=place.folder, env=environment, capture_output=True, text=True, check=False,
        timeout=300,
    )  # fmt: skip


@pytest.mark.parametrize("unbuffered", [False, True], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("arguments", ["inspect model.onnx -H --module '**'", "inspect model.onnx --format json -v"])
def test_early_closing_reader_is_no_failure(place: Workplace, arguments: str, unbuffered: bool) -> None:
    """The exit code is 0, and stderr is empty."""
    done = _shell(place, f"{{ $WINML {arguments}; echo $? >&2; }} | true", unbuffered=unbuffered)
    assert "0\n" == done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no device that is always full")  # noqa: PTH110
@pytest.mark.parametrize("unbuffered", [False, True], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("arguments", ["sys", "--help", "--version", "inspect model.onnx --format json"])
def test_result_for_a_full_disk_is_a_failure_with_its_reason(
    place: Workplace, arguments: str, unbuffered: bool
) -> None:
    """The reason is on stderr, and the exit code is 1."""
    done = _shell(place, f"$WINML {arguments} > /dev/full", unbuffered=unbuffered)
    assert 1 == done.returncode
    assert re.match(r"error: .* stdout: No space left on device\n", done.stderr)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_work_is_complete_with_any_closed_stream(place: Workplace, closed: str) -> None:
    """The file is complete: no text of a stream was written into it."""
    (place.folder / "new.onnx").unlink(missing_ok=True)
    done = _shell(place, f"$WINML optimize -m small.onnx -o new.onnx {closed}")
    assert 0 == done.returncode, done.stderr
    onnx.load(place.folder / "new.onnx")
    assert ("y" in done.stdout) == (">&-" not in closed.replace("2>&-", ""))


@pytest.mark.parametrize("arguments", ["sys", "inspect model.onnx", "--help"])
def test_result_for_a_closed_stdout_is_a_failure(place: Workplace, arguments: str) -> None:
    """The result was the only request."""
    done = _shell(place, f"$WINML {arguments} >&-")
    assert 1 == done.returncode
    assert "stdout: Bad file descriptor" in done.stderr


def test_cached_export_is_no_result(place: Workplace) -> None:
    """The request is for the times of a checkpoint, not for the cached export."""
    (place.folder / "closed.py").write_text(_NET)
    command = "$WINML perf -m closed.py:net --iterations 2 --warmup 0"
    done = _shell(place, f"{command} >&-")
    assert 1 == done.returncode, done.stderr
    assert "stdout: Bad file descriptor\n" in done.stderr


@pytest.mark.parametrize("place_of_words", ["2>&-", "2>/dev/full"])
def test_unwritable_stderr_changes_no_exit_code(place: Workplace, place_of_words: str) -> None:
    """Neither the exit code of a failure nor that of a success depends on stderr."""
    assert 2 == _shell(place, f"$WINML nosuchverb {place_of_words}").returncode
    done = _shell(place, f"$WINML optimize -m small.onnx -o new.onnx --overwrite {place_of_words}")
    assert 0 == done.returncode


def test_closed_stdin_is_empty(place: Workplace) -> None:
    """A config read from it is no valid JSON."""
    done = _shell(place, "$WINML config --check - <&-")
    assert 2 == done.returncode
    assert "stdin: not valid JSON" in done.stderr


_LATE = """
import signal, sys
import winml.modelkit.optimize.table as summary

def press_ctrl_c(*_, **__):
    signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
summary.optimization_document = press_ctrl_c
from winml.modelkit.cli.main import main
main()
"""


def test_interruption_after_publishing_lists_written_files(place: Workplace) -> None:
    """The message lists the written files."""
    command = [sys.executable, "-c", _LATE, "optimize", "-m", "small.onnx", "-o", "late.onnx", "--format", "table"]
    done = subprocess.run(
        command, cwd=place.folder, env=place.environment(), capture_output=True, text=True, check=False, timeout=300
    )
    assert -2 == done.returncode
    assert done.stderr.endswith(f"interrupted: late.onnx was written before{os.linesep}")
    assert (place.folder / "late.onnx").is_file()


_EARLY = """
import builtins, signal, sys
real = builtins.__import__

def interrupted_import(name, *arguments):
    if name == "click":
        signal.raise_signal(signal.SIGINT)
    return real(name, *arguments)

signal.signal(signal.SIGINT, signal.default_int_handler)
from winml.modelkit.__main__ import main
builtins.__import__ = interrupted_import
sys.argv = ["winml", "sys"]
main()
"""


def test_ctrl_c_before_the_command_is_read_shows_no_traceback(place: Workplace) -> None:
    """The process ends by the signal."""
    done = subprocess.run(
        [sys.executable, "-c", _EARLY], cwd=place.folder, env=place.environment(), capture_output=True, text=True,
        check=False, timeout=300,
    )  # fmt: skip
    assert (-2, "", "") == (done.returncode, done.stdout, done.stderr)


def test_entry_point_handles_an_early_interruption() -> None:
    """The installed command starts in the function of ``python -m``."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert 'winml = "winml.modelkit.__main__:main"' in text


_HELD_TO_THE_END = """
import atexit, sys, types
class Held:
    def __del__(self):
        print("freed", flush=True)
sys.modules["triton"] = types.ModuleType("triton")
sys.modules["triton"].held = Held()
from winml.modelkit.cli.main import main
atexit.register(print, "tidied up")
main()
"""
"""A program with a library that prints when Python frees its modules, as torch for CUDA does."""


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["--no-such"], 2)])
def test_library_output_at_exit_is_hidden_and_the_exit_status_is_unchanged(arguments: list[str], code: int) -> None:
    """Exit status, output and exit handlers of others are unchanged."""
    command = [sys.executable, "-c", _HELD_TO_THE_END, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert code == done.returncode
    assert done.stdout.endswith("tidied up\n")
    assert (not code) == done.stdout.startswith("winml")
    assert bool(code) == ("--no-such" in done.stderr)
