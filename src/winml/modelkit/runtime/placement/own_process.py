"""Puts a question to ONNX Runtime in a process of its own, which a provider may end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from winml.modelkit.graph.files.temporary import temporary_folder

__all__ = ["answered"]


@contextmanager
def answered(question: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any] | None, Path]]:
    """Yield the answer, None where the process ended before, and the file of what it printed, for the block.

    Args:
        question: As ``asking`` takes it, without the file of the answer.
    """
    with temporary_folder() as folder:
        answer, log = folder / "answer.json", folder / "log.txt"
        task = json.dumps({**question, "answer": str(answer)})
        command = [sys.executable, "-m", "winml.modelkit.runtime.placement.asking", task]
        with log.open("wb") as stream:
            # In a folder of ours: providers write files into the working directory.
            subprocess.run(command, stdout=stream, stderr=stream, cwd=folder, env=_environment(), check=False)  # noqa: S603 - ours
        yield (json.loads(answer.read_text(encoding="utf-8")) if answer.is_file() else None), log


def _environment() -> dict[str, str]:
    """Return the environment in which the same packages are found from another working directory."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(Path(entry or ".").absolute()) for entry in sys.path)}
