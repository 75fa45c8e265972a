"""Exports that are interrupted, or run out of disk: earlier files stay, and no new ones are left."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from e2e.workplace import WITH_A_LIMIT, Outcome, Workplace

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="this system has no POSIX signals and limits to stop a process with"
)

_EARLIER = {"model.onnx": b"earlier model", "model_htp_metadata.json": b"{}"}

_OUTSIDE = """
import os, resource, signal, sys
from winml.modelkit.cli.main import main
from winml.modelkit.onnx.files.writing import write_model
# As above 2 GB, weights go to a file of their own.
write_model.__kwdefaults__["inline_limit_bytes"] = 1000

def press_ctrl_c(*_):
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
# The system tells a process that a file of its has reached the limit: that is the moment in the middle of it.
signal.signal(signal.SIGXFSZ, {"full": signal.SIG_IGN, "Ctrl-C": press_ctrl_c}[sys.argv.pop(1)])
resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, resource.RLIM_INFINITY))
main()
"""

_PREPARED = """
import signal
# A shell that starts a command in the background may have it ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
from winml.modelkit.cli.main import main
main()
"""


@pytest.fixture
def busy(workplace: Workplace) -> Workplace:
    """A workplace with the files of an earlier export."""
    for name, content in _EARLIER.items():
        (workplace.folder / name).write_bytes(content)
    return workplace


def _stopped_by(number: int, workplace: Workplace, nets: Path, *options: str) -> Outcome:
    """Run an export that receives a signal during the trace."""
    program = (sys.executable, "-c", _PREPARED)
    stopped = replace(workplace, program=program, is_warm=True, variables={"SENT_SIGNAL": f"{number:d}"})
    return stopped.export("-m", f"{nets}:waiting", "-o", "model.onnx", "--overwrite", *options)


@pytest.mark.parametrize(
    ("name", "options"), [("SIGINT", ()), ("SIGTERM", ()), ("SIGINT", ("--dynamo",))], ids=["INT", "TERM", "INT-dynamo"]
)
def test_interrupted_export_ends_by_signal_and_changes_no_file(
    busy: Workplace, nets: Path, name: str, options: tuple[str, ...]
) -> None:
    """Ctrl-C and SIGTERM end the export with one sentence, and the process ends by the signal."""
    number = getattr(signal, name)
    outcome = _stopped_by(number, busy, nets, *options)
    assert -number == outcome.code
    assert outcome.err.endswith("interrupted: no file was changed\n")
    assert "Traceback" not in outcome.err
    assert busy.files() == _EARLIER


def test_killed_export_changes_no_file(busy: Workplace, nets: Path) -> None:
    """Nothing can be cleaned up after SIGKILL, and before the last step nothing has to be."""
    assert -signal.SIGKILL == _stopped_by(signal.SIGKILL, busy, nets).code
    assert busy.files() == _EARLIER


@contextmanager
def _limited_files(limit_bytes: int) -> Iterator[None]:
    """Limit the size of files of this process, as a full disk does."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python would otherwise be killed by the signal.
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("limit_bytes", [4, 500, 2500])
def test_full_disk_ends_the_export_and_changes_no_file(busy: Workplace, nets: Path, limit_bytes: int) -> None:
    """The disk is full from the start, in the model or in the sidecar: the output is named, and earlier files stay."""
    words = ("cannot write", str(Path("here") / "model"), "choose another output path")
    arguments = ("-m", f"{nets}:good", "-o", "model.onnx", "--overwrite", "--no-verify", "--no-dynamo")
    with _limited_files(limit_bytes):
        outcome = busy.refuse(*arguments, code=1, words=words)
    assert ".winml-partial" not in outcome.err


def test_full_temporary_disk_is_reported(busy: Workplace, nets: Path) -> None:
    """A package that makes temporary files at its import is not blamed for the disk."""
    pytest.importorskip("dill", reason="the package that makes one")
    limited = replace(busy, program=(sys.executable, "-c", WITH_A_LIMIT, "0"))
    arguments = ("-m", f"{nets}:good", "-o", "model.onnx", "--overwrite")
    limited.refuse(*arguments, code=1, words=("temporary", "TMPDIR"))


@pytest.mark.parametrize("exporter", ["--dynamo", "--no-dynamo"])
def test_full_disk_during_the_weights_leaves_no_partial_file(busy: Workplace, nets: Path, exporter: str) -> None:
    """The third of four megabytes does not fit: the data file is named and removed."""
    limited = replace(busy, program=(sys.executable, "-c", _OUTSIDE, "full"), is_warm=True)
    arguments = ("-m", f"{nets}:wide", "-o", "model.onnx", "--overwrite", "--no-verify", exporter)
    outcome = limited.refuse(*arguments, code=1, words=("cannot write", "too large", "file sizes"))
    assert ".winml-partial" not in outcome.err


@pytest.mark.parametrize("exporter", ["--dynamo", "--no-dynamo"])
def test_interruption_during_the_weights_leaves_no_partial_file(busy: Workplace, nets: Path, exporter: str) -> None:
    """Ctrl-C comes after the second of four megabytes."""
    stopped = replace(busy, program=(sys.executable, "-c", _OUTSIDE, "Ctrl-C"), is_warm=True)
    arguments = ("-m", f"{nets}:wide", "-o", "model.onnx", "--overwrite", "--no-verify", exporter)
    outcome = stopped.export(*arguments)
    assert (-signal.SIGINT, "") == (outcome.code, outcome.out)
    assert ["interrupted: no file was changed"] == outcome.complaint
    assert _EARLIER == busy.files()


def test_closed_terminal_is_no_error(workplace: Workplace, nets: Path) -> None:
    """A pipe that ends early costs neither the file nor a traceback."""
    process = subprocess.Popen(
        [*workplace.program, "export", "-m", f"{nets}:good", "-o", "model.onnx", "-q", "--format", "json"],
        cwd=workplace.folder,
        env=workplace.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert "" == process.stderr.read()
    process.stderr.close()
    assert 0 == process.wait(timeout=120)
    assert {"model.onnx", "model_htp_metadata.json"} == set(workplace.files())
