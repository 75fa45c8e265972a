"""Commands in one process of another Python environment."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from architecture.sources import REPOSITORY

_PROGRAM = """
import contextlib, io, json, sys
sys.modules.update(dict.fromkeys(json.loads(sys.argv[1])))  # their import raises ModuleNotFoundError
from winml.modelkit.cli.main import main
for line in sys.stdin:
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2)]
    code = 0
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        try:
            main(json.loads(line))
        except SystemExit as stop:
            code = stop.code
    for stream in streams:
        stream.seek(0)
    print(json.dumps([code, *(stream.read() for stream in streams)]))
"""
"""Runs a command of each line of stdin, and prints its exit code and its output."""


def run_elsewhere(
    python: str | Path, folder: Path, commands: list[list[str]], *, without: Sequence[str] = ()
) -> list[tuple[int, str, str]]:
    """Run commands in one process and return the exit code, stdout and stderr of each.

    Args:
        python: Interpreter of the environment.
        folder: Working directory.
        commands: Words of each command, without ``winml``.
        without: Libraries whose import fails.
    """
    done = subprocess.run(
        [python, "-c", _PROGRAM, json.dumps(without)], input="\n".join(map(json.dumps, commands)), cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")},
        capture_output=True, text=True, encoding="utf-8", check=True,
    )  # fmt: skip
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]
