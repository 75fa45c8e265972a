"""Puts a question to ONNX Runtime in a process of its own, which a provider may end."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from winml.modelkit.errors import StageError
from winml.modelkit.graph.files.recovery import temporary_folder
from winml.modelkit.runtime.processes import start_python

__all__ = ["answered"]


@contextmanager
def answered(question: Mapping[str, object], who: str, seconds: float) -> Iterator[tuple[dict[str, Any], Path]]:
    """Yield the answer and the file of what the process printed, for the block.

    Args:
        question: As ``asking`` takes it, without the file of the answer.
        who: Who is asked, for messages.
        seconds: After which the process is ended.

    Raises:
        StageError: the process ended without an answer, or did not answer in time.
    """
    with temporary_folder() as folder:
        output, log = folder / "answer.json", folder / "log.txt"
        task = json.dumps({**question, "answer": str(output)})
        # In a folder of ours: providers write files into the working directory.
        with (
            log.open("wb") as stream,
            start_python(
                "winml.modelkit.runtime.placement.placement_query", task, stdout=stream, stderr=stream, cwd=folder
            ) as process,
        ):
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                raise StageError(
                    f"{who} did not answer within {seconds:g} s, and its process was ended",
                    hint=f"{_last_line(log)} Give other --ep-options, or another --ep.".strip(),
                ) from None
            finally:
                process.kill()  # nothing where it has ended
        reported = _read(output)
        if reported is None:
            raise StageError(
                f"{who} ended its process before it answered",
                hint=f"{_last_line(log)} Give other --ep-options, or another --ep.".strip(),
            )
        yield reported, log


def _read(output: Path) -> dict[str, object] | None:
    try:
        return dict(json.loads(output.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None  # none, or cut off


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((f"Its last words: {line.strip()[:200]}." for line in reversed(lines) if line.strip()), "")
