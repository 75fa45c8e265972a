"""Keeps what a tuning has measured in its folder, so that an interrupted one goes on where it ended.

Each measurement is on disk before the next begins. What belongs to another model, plan or machine is never used.
Measures nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pydantic

from winml.modelkit import file_names
from winml.modelkit.compare.fidelity import QualitySamples
from winml.modelkit.errors import OutputExistsError, UsageError, opt
from winml.modelkit.onnx.files.foreign_names import file_within
from winml.modelkit.onnx.files.output_files import recover, refuse_existing, waiting_files
from winml.modelkit.onnx.files.resumable_results import OtherRequest, ResumableResults, locked_folder
from winml.modelkit.options import Options, parse_options
from winml.modelkit.tune.records import CandidateFacts, CandidateStatus

_VERSION = 2
"""Raised when an earlier state must not be used any more."""
_OURS = frozenset(
    {
        file_names.TUNED_NAME,
        file_names.TUNE_RESULT_NAME,
        file_names.TUNE_CANDIDATES_NAME,
        file_names.TUNE_EXPORT_NAME,
        file_names.TUNE_LOCK_NAME,
        file_names.TUNE_PAGE_NAME,
        file_names.TUNE_STATE_NAME,
    }
)


_Milliseconds = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Failure:
    """Why a candidate is out."""

    status: CandidateStatus
    reason: str


@dataclass(frozen=True)
class SharedValues:
    """What is known of the values that all candidates are run on."""

    shapes: dict[str, list[int]]
    """Input → its shape in the values that candidates are timed on."""
    notes: list[str]
    samples: QualitySamples
    """What outputs are compared on."""
    batch_size: Annotated[int, pydantic.Field(ge=1)]
    is_as_drawn: bool
    """Whether the values are those that the seed draws."""
    run_ms: _Milliseconds
    """Time of one run of the plain file."""
    block: Annotated[int, pydantic.Field(ge=1)]
    """Runs of a candidate in one turn."""


class _Content(Options):
    """What a state holds; one of other kinds is damaged."""

    model_config = pydantic.ConfigDict(frozen=False)

    exported: str | None = None
    values: SharedValues | None = None
    facts: dict[str, CandidateFacts] = pydantic.Field(default_factory=dict)
    rules: dict[str, dict[str, str]] = pydantic.Field(default_factory=dict)
    failed: dict[str, Failure] = pydantic.Field(default_factory=dict)
    races: dict[str, dict[str, list[_Milliseconds]]] = pydantic.Field(default_factory=dict)


class TuneState:
    """The measurements of one tuning."""

    def __init__(self, folder: Path, request: Mapping[str, Any], *, overwrite: bool) -> None:
        """Read what an interrupted run measured.

        Args:
            folder: That of the tuning.
            request: What the measurements depend on, JSON-ready.
            overwrite: Start anew where the folder belongs to another request, rather than refuse it.

        Raises:
            UsageError: it belongs to another request; names what differs.
            WriteError: it cannot be written to.
        """
        self._path = folder / file_names.TUNE_STATE_NAME
        refuse_existing([self._path], overwrite=True)
        recover([self._path])
        self._file = ResumableResults(self._path, request, schema_version=_VERSION)
        earlier = _read_state(self._file, overwrite=overwrite)
        if isinstance(earlier, OtherRequest):
            for name in (file_names.TUNE_CANDIDATES_NAME, file_names.TUNED_NAME, file_names.TUNE_EXPORT_NAME):
                shutil.rmtree(folder / name, ignore_errors=True)
            for name in (file_names.TUNE_RESULT_NAME, file_names.TUNE_PAGE_NAME):
                (folder / name).unlink(missing_ok=True)
        self._content = earlier if isinstance(earlier, _Content) else _Content()
        self.resumed = len(self._content.facts)
        """Number of candidates that were measured already."""
        self.save()

    @property
    def exported(self) -> Path | None:
        """The export that all candidates are made from, where a model cannot be exported twice the same.

        Raises:
            InputError: the state names a file that is not below the folder of the export.
        """
        name = self._content.exported
        if name is None:
            return None
        path = file_within(
            self._path.parent / file_names.TUNE_EXPORT_NAME, name, f"{self._path}: 'exported'", missing_ok=True
        )
        return path if path.exists() else None

    def keep_exported(self, path: Path) -> None:
        """Remember that the export is whole."""
        self._content.exported = path.name
        self.save()

    @property
    def values(self) -> SharedValues | None:
        """What is known of the values that all candidates are run on."""
        return self._content.values

    def keep_values(self, values: SharedValues) -> None:
        """Remember what is known of the values."""
        self._content.values = values
        self.save()

    def facts(self, name: str) -> CandidateFacts | None:
        """Return what was measured of a candidate; None where nothing was."""
        return self._content.facts.get(name)

    def keep_facts(self, name: str, facts: CandidateFacts) -> None:
        """Remember what was measured of a candidate."""
        self._content.facts[name] = facts
        self.save()

    def failure(self, name: str) -> Failure | None:
        """Return why a candidate is out; None where it is in, or was not tried."""
        return self._content.failed.get(name)

    def keep_failure(self, name: str, failure: Failure) -> None:
        """Remember why a candidate is out."""
        self._content.failed[name] = failure
        self.save()

    def rules(self, name: str) -> dict[str, str] | None:
        """Return the modules of a candidate that stay in float, selector to precision; None before a search."""
        return self._content.rules.get(name)

    def keep_rules(self, name: str, rules: Mapping[str, str]) -> None:
        """Remember the modules of a candidate that stay in float."""
        self._content.rules[name] = dict(rules)
        self.save()

    def turns(self, race: str) -> dict[str, list[float]]:
        """Return the times of a race, candidate to its time in each turn, in milliseconds."""
        return {name: list(times) for name, times in self._content.races.get(race, {}).items()}

    def keep_turns(self, race: str, times: Mapping[str, list[float]]) -> None:
        """Remember the times of a race after a whole turn."""
        self._content.races[race] = {name: list(series) for name, series in times.items()}
        self.save()

    def forget(self) -> None:
        """Take back what a tuning put into its folder, where nothing was measured."""
        if self._content.facts:
            return
        self._path.unlink(missing_ok=True)
        for name in (file_names.TUNE_CANDIDATES_NAME, file_names.TUNE_EXPORT_NAME):
            shutil.rmtree(self._path.parent / name, ignore_errors=True)

    def save(self) -> None:
        """Write it.

        Raises:
            WriteError: it cannot be written.
        """
        self._file.write(self._content.model_dump())


def measured_candidates(folder: Path, request: Mapping[str, Any], *, overwrite: bool) -> frozenset[str] | None:
    """Return the names of the candidates that an earlier run has settled; None of another tuning. Changes nothing.

    Raises:
        UsageError: it belongs to another request, and may not be replaced.
    """
    file = ResumableResults(folder / file_names.TUNE_STATE_NAME, request, schema_version=_VERSION)
    earlier = _read_state(file, overwrite=overwrite)
    if isinstance(earlier, OtherRequest):
        return None
    return frozenset() if earlier is None else frozenset({*earlier.facts, *earlier.failed})


def _read_state(file: ResumableResults, *, overwrite: bool) -> _Content | OtherRequest | None:
    """Return what an earlier run measured; None where there was none.

    Raises:
        UsageError: it belongs to another request, and may not be replaced.
    """

    def parse(record: dict[str, Any]) -> _Content:
        results = {key: value for key, value in record.items() if key not in ("schema_version", "request")}
        return parse_options(_Content, results, str(file.path))

    earlier = file.read(parse)
    if isinstance(earlier, OtherRequest) and not overwrite:
        words = f"{', '.join(earlier.changed)} changed" if earlier.changed else "it cannot be read"
        raise UsageError(
            f"{file.path} belongs to a different tuning: {words}",
            hint=f"Repeat its options to resume, choose a different folder, or restart with {opt.overwrite}.",
        )
    return earlier


def refuse_foreign_folder(folder: Path) -> None:
    """Refuse a folder that holds what no tuning wrote.

    Raises:
        OutputExistsError: it does, or is a file.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise OutputExistsError(f"output {folder} is a file", hint="Choose a folder: a tuning writes several files.")
    # What a killed command left unfinished is hidden; what it had finished is there once that is recovered.
    there = {path.name for path in folder.iterdir() if not path.name.startswith(file_names.PARTIAL_PREFIX)}
    there |= {path.name for path in waiting_files([folder / file_names.TUNE_STATE_NAME])}
    foreign = sorted(there - _OURS)
    if not foreign and file_names.TUNE_STATE_NAME not in there:
        # The lock is there before the state; what else is called as our files are is somebody's.
        foreign = sorted(there - {file_names.TUNE_LOCK_NAME})
    if foreign:
        names = ", ".join(foreign[:3])
        raise OutputExistsError(
            f"output {folder} contains files that are not from a tuning: {names}", hint="Choose a new or empty folder."
        )


@contextmanager
def held_tune_folder(folder: Path) -> Iterator[None]:
    """Hold the folder of a tuning, made if it is missing, so that no other works in it.

    Raises:
        OutputExistsError: it holds what no tuning wrote.
        UsageError: another tuning works in it.
        WriteError: it cannot be made.
    """
    refuse_foreign_folder(folder)
    with locked_folder(folder, file_names.TUNE_LOCK_NAME, "tuning"):
        yield
