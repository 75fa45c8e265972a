"""Processes of candidates: starts them, and asks them; ``worker.py`` is what runs there.

A candidate whose process ends, hangs or answers with an error has lost, with that reason. Decides nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from winml.modelkit.compare.fidelity import QualitySamples
from winml.modelkit.errors import MeasureError, WriteError
from winml.modelkit.ort.host import available_bytes
from winml.modelkit.ort.processes import AnsweringProcess, ProcessEndedError
from winml.modelkit.tune.records import Candidate

_LONGEST_S = 600.0
"""Chosen: a provider that compiles a large model when a session opens takes minutes; one that hangs never ends."""


class Contestant:
    """The process of one candidate; it starts with the first question."""

    def __init__(self, name: str) -> None:
        """Name it; for messages."""
        self._name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        self._process = AnsweringProcess("winml.modelkit.tune.worker", errors=self._log)

    def ask(self, what: str, **arguments: object) -> dict[str, Any]:
        """Return the answer of the process.

        Raises:
            MeasureError: it says what is wrong, has ended, or does not answer.
            WriteError: it cannot write a file.
        """
        try:
            output: dict[str, Any] = self._process.ask({"do": what, **arguments}, seconds=_LONGEST_S)
        except TimeoutError as error:
            raise MeasureError(f"{self._name}: did not respond within {error}") from None
        except ProcessEndedError as error:
            last = self._last_line()
            raise MeasureError(
                f"{self._name}: its process ended with exit code {error.status}{f': {last}' if last else ''}"
            ) from None
        if "error" in output:
            kind = WriteError if output["is_unwritten"] else MeasureError
            raise kind(output["error"], hint=output["hint"])
        return output

    def close(self) -> None:
        """End the process."""
        self._process.close()
        self._log.close()

    def _last_line(self) -> str:
        """Return the last line that the process wrote on stderr; empty without one."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


class Contestants:
    """The processes of a tuning, each opened on its file.

    In a race all stay open, or each ends when it has answered: a warm session beside a cold one would win by that.
    """

    def __init__(self, folder: Path) -> None:
        """Open none yet.

        Args:
            folder: Folder of the values that all are run on.
        """
        self._folder = folder
        self._open: dict[str, Contestant] = {}
        self._stay_open = True

    def measure(self, candidate: Candidate, model: Path, samples: QualitySamples | None) -> dict[str, Any]:
        """Open a candidate in a fresh process; return what that took, and how near its answers are.

        Args:
            candidate: Which.
            model: Its file.
            samples: What its answers are compared on; None: they are not.

        Raises:
            MeasureError: it does not run, or needs fixed sizes.
        """
        self.drop(candidate.name)
        compared: dict[str, Any] = {}
        try:
            opened = self._opened(candidate, model)
            if samples is not None:
                compared = self._open[candidate.name].ask("compare", folder=str(self._folder), samples=asdict(samples))
        except MeasureError:
            self.drop(candidate.name)
            raise
        if opened["peak_bytes"] > available_bytes():  # no room for another one like it
            self.drop(candidate.name)
        return {**opened, **compared}

    def begin_race(self, peak_bytes: Mapping[str, int]) -> None:
        """Decide for a whole race whether all of its processes stay open, or none.

        Args:
            peak_bytes: The most memory that each took, by name.
        """
        for name in [name for name in self._open if name not in peak_bytes]:
            self.drop(name)
        # What the open ones hold is not available any more.
        missing = sum(size for name, size in peak_bytes.items() if name not in self._open)
        self._stay_open = missing <= available_bytes()
        if not self._stay_open:
            self.close()

    def block(self, candidate: Candidate, model_of: Callable[[Candidate], Path], size: int) -> list[float]:
        """Return the times of a block of runs of a candidate, in milliseconds for one run of all its callers.

        Raises:
            MeasureError: it does not run any more.
        """
        if candidate.name not in self._open:
            self._opened(candidate, model_of(candidate))
        times: list[float] = self._open[candidate.name].ask("block", size=size)["runs_ms"]
        if not self._stay_open:
            self.drop(candidate.name)
        return times

    @property
    def open_names(self) -> tuple[str, ...]:
        """Whose processes are open."""
        return tuple(self._open)

    def drop(self, name: str) -> None:
        """End the process of a candidate, where there is one."""
        if (contestant := self._open.pop(name, None)) is not None:
            contestant.close()

    def close(self) -> None:
        """End all of them."""
        for name in list(self._open):
            self.drop(name)

    def _opened(self, candidate: Candidate, model: Path) -> dict[str, Any]:
        contestant = self._open[candidate.name] = Contestant(candidate.name)
        return contestant.ask("open", path=str(model), folder=str(self._folder), run=candidate.as_record()["run"])
