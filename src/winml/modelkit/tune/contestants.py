"""Processes of candidates: starts them and sends requests; ``worker.py`` runs inside the processes.

A candidate fails if its process ends, hangs or returns an error. Decides nothing.
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
"""Chosen: a provider takes minutes to compile a large model for a session; a hanging provider never ends."""


class Contestant:
    """The process of one candidate; started by the first request."""

    def __init__(self, name: str) -> None:
        """Store the name for messages."""
        self._name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        self._process = AnsweringProcess("winml.modelkit.tune.worker", errors=self._log)

    def ask(self, what: str, **arguments: object) -> dict[str, Any]:
        """Send a request and return the response of the process.

        Raises:
            MeasureError: the process reports an error, has ended, or does not respond.
            WriteError: the process cannot write a file.
        """
        try:
            output: dict[str, Any] = self._process.ask({"do": what, **arguments}, seconds=_LONGEST_S)
        except TimeoutError as error:
            raise MeasureError(f"{self._name}: did not respond within {error}") from None
        except ProcessEndedError as error:
            last = self._last_error_line()
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

    def _last_error_line(self) -> str:
        """Return the last line that the process wrote on stderr; empty without one."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


class Contestants:
    """The processes of a tuning, each with the file of its candidate.

    In a race, either all processes stay open, or each ends after its response: a warm session would have an advantage
    over a cold session.
    """

    def __init__(self, folder: Path) -> None:
        """Store the folder; starts no process.

        Args:
            folder: Folder of the values of all runs.
        """
        self._folder = folder
        self._open: dict[str, Contestant] = {}
        self._stay_open = True

    def measure(self, candidate: Candidate, model: Path, samples: QualitySamples | None) -> dict[str, Any]:
        """Open a candidate in a fresh process; return its measurements and the fidelity of its outputs.

        Args:
            candidate: The candidate.
            model: Its file.
            samples: Samples for the comparison of outputs; None: no comparison.

        Raises:
            MeasureError: the candidate does not run, or needs fixed sizes.
        """
        self.drop(candidate.name)
        fidelity_values: dict[str, Any] = {}
        try:
            costs = self._open_model(candidate, model)
            if samples is not None:
                contestant = self._open[candidate.name]
                fidelity_values = contestant.ask("compare", folder=str(self._folder), samples=asdict(samples))
        except MeasureError:
            self.drop(candidate.name)
            raise
        if costs["peak_bytes"] > available_bytes():  # no memory for a second such process
            self.drop(candidate.name)
        return {**costs, **fidelity_values}

    def begin_race(self, peak_bytes: Mapping[str, int]) -> None:
        """Decide whether all processes of a race stay open, or none.

        Args:
            peak_bytes: Name → peak memory of the candidate.
        """
        for name in [name for name in self._open if name not in peak_bytes]:
            self.drop(name)
        # Memory of open processes is already excluded from the available memory.
        missing = sum(size for name, size in peak_bytes.items() if name not in self._open)
        self._stay_open = missing <= available_bytes()
        if not self._stay_open:
            self.close()

    def block(self, candidate: Candidate, model_of: Callable[[Candidate], Path], size: int) -> list[float]:
        """Time a block of runs of a candidate, in milliseconds per run of all its callers.

        Raises:
            MeasureError: the candidate does not run any more.
        """
        if candidate.name not in self._open:
            self._open_model(candidate, model_of(candidate))
        times: list[float] = self._open[candidate.name].ask("block", size=size)["runs_ms"]
        if not self._stay_open:
            self.drop(candidate.name)
        return times

    @property
    def open_names(self) -> tuple[str, ...]:
        """Names of candidates with open processes."""
        return tuple(self._open)

    def drop(self, name: str) -> None:
        """End the process of a candidate, if open."""
        if (contestant := self._open.pop(name, None)) is not None:
            contestant.close()

    def close(self) -> None:
        """End all processes."""
        for name in list(self._open):
            self.drop(name)

    def _open_model(self, candidate: Candidate, model: Path) -> dict[str, Any]:
        contestant = self._open[candidate.name] = Contestant(candidate.name)
        return contestant.ask("open", path=str(model), folder=str(self._folder), run=candidate.as_record()["run"])
