"""Runs of the command in the process of the test, for results that do not depend on a fresh process."""

from __future__ import annotations

import contextlib
import gc
import io
import signal
import sys
import warnings
from pathlib import Path

import pytest

from e2e.workplace import Outcome
from winml.modelkit.cli.main import main
from winml.modelkit.onnx.files.named_paths import pop_read_paths, pop_settled


def run_here(*arguments: str | Path, stdin: str = "") -> Outcome:
    """Run ``winml`` in the current directory, and restore the state of this process afterwards."""
    # Files that an earlier test read or found in this process do not belong to this command.
    pop_settled()
    pop_read_paths()
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="") for _ in range(2))
    threshold, handler = gc.get_threshold(), signal.getsignal(signal.SIGTERM)
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
    gc.set_threshold(*threshold)
    signal.signal(signal.SIGTERM, handler)
    return Outcome(int(stop.value.code or 0), _text(out), _text(err))


def _text(stream: io.TextIOWrapper) -> str:
    stream.flush()
    stream.seek(0)
    return stream.read()
