"""Progress of a long step without a terminal."""

from __future__ import annotations

import time

import pytest

from winml.modelkit.cli import _progress
from winml.modelkit.progress import StepClock, count_progress


def _run_step(seconds: float) -> None:
    with StepClock(("write",), _progress.show_step).step("write"):
        count_progress(1, 4, "1 of 4 MB")
        time.sleep(seconds)


def test_long_step_prints_progress(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """A long step prints progress with an estimate now and then.

    A short step, and a paused one, print only their end.
    """
    for name in ("LINE_S", "SHORT_S", "_TICK_S"):
        monkeypatch.setattr(_progress, name, 0.05)
    _run_step(0.0)
    with _progress.steps_paused():
        _run_step(0.2)
    quiet = capfd.readouterr().err
    assert "…" not in quiet
    assert 2 == len(quiet.splitlines())
    _run_step(0.4)
    *running, last = capfd.readouterr().err.splitlines()
    assert running
    assert all(line.startswith("[1/1] write … 0 s, 1 of 4 MB, about ") for line in running)
    assert last.startswith("[1/1] write  ")
