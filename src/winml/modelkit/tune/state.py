"""Stores the measurements of a tuning in its folder, so an interrupted tuning resumes.

Each measurement is saved before the next begins. Measurements for another model, plan or machine are never used.
Measures nothing.
"""

from __future__ import annotations

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
from winml.modelkit.onnx.files.moving import remove_file, remove_folder
from winml.modelkit.onnx.files.output_files import recover, refuse_existing, waiting_files
from winml.modelkit.onnx.files.resumable_results import OtherRequest, ResumableResults, locked_folder
from winml.modelkit.options import Options, parse_options
from winml.modelkit.tune.records import CandidateFacts, CandidateStatus

_VERSION = 2
"""Increased when earlier states must not be used any more."""
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
    """Reason why a candidate is excluded."""

    status: CandidateStatus
    reason: str


@dataclass(frozen=True)
class SharedValues:
    """Description of the values that all candidates run on."""

    shapes: dict[str, list[int]]
    """Input → shape of the values used for timing."""
    notes: list[str]
    samples: QualitySamples
    """Samples for the comparison of outputs."""
    batch_size: Annotated[int, pydantic.Field(ge=1)]
    is_as_drawn: bool
    """True if the values are those drawn by the seed."""
    run_ms: _Milliseconds
    """Time of one run of the plain file."""
    block: Annotated[int, pydantic.Field(ge=1)]
    """Number of runs of a candidate in one turn."""


class _Content(Options):
    """Content of a state file; other content is damaged."""

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
        """Read the measurements of an interrupted run.

        Args:
            folder: Folder of the tuning.
            request: JSON-ready values that the measurements depend on.
            overwrite: Restart if the folder belongs to another request, rather than refuse the folder.

        Raises:
            UsageError: the folder belongs to another request; names the differences.
            WriteError: the folder cannot be written to.
        """
        self._path = folder / file_names.TUNE_STATE_NAME
        refuse_existing([self._path], overwrite=True)
        recover([self._path])
        self._file = ResumableResults(self._path, request, schema_version=_VERSION)
        earlier = _read_state(self._file, overwrite=overwrite)
        if isinstance(earlier, OtherRequest):
            for name in (file_names.TUNE_CANDIDATES_NAME, file_names.TUNED_NAME, file_names.TUNE_EXPORT_NAME):
                remove_folder(folder / name)
            for name in (file_names.TUNE_RESULT_NAME, file_names.TUNE_PAGE_NAME):
                remove_file(folder / name)
        self._content = earlier if isinstance(earlier, _Content) else _Content()
        self.resumed = len(self._content.facts)
        """Number of candidates that were measured already."""
        self.save()

    @property
    def exported(self) -> Path | None:
        """Export used for all candidates if exports of the model are not reproducible; None if not saved.

        Raises:
            InputError: the state names a file outside the folder of the export.
        """
        name = self._content.exported
        if name is None:
            return None
        path = file_within(
            self._path.parent / file_names.TUNE_EXPORT_NAME, name, f"{self._path}: 'exported'", missing_ok=True
        )
        return path if path.exists() else None

    def keep_exported(self, path: Path) -> None:
        """Record that the export is complete."""
        self._content.exported = path.name
        self.save()

    @property
    def values(self) -> SharedValues | None:
        """Description of the values that all candidates run on."""
        return self._content.values

    def keep_values(self, values: SharedValues) -> None:
        """Save the description of the values."""
        self._content.values = values
        self.save()

    def facts(self, name: str) -> CandidateFacts | None:
        """Return the measurements of a candidate; None if not measured."""
        return self._content.facts.get(name)

    def keep_facts(self, name: str, facts: CandidateFacts) -> None:
        """Save the measurements of a candidate."""
        self._content.facts[name] = facts
        self.save()

    def failure(self, name: str) -> Failure | None:
        """Return the reason why a candidate is excluded; None if not excluded, or not tried."""
        return self._content.failed.get(name)

    def keep_failure(self, name: str, failure: Failure) -> None:
        """Save the reason why a candidate is excluded."""
        self._content.failed[name] = failure
        self.save()

    def rules(self, name: str) -> dict[str, str] | None:
        """Return the modules of a candidate that stay in float, selector → precision; None before a search."""
        return self._content.rules.get(name)

    def keep_rules(self, name: str, rules: Mapping[str, str]) -> None:
        """Save the modules of a candidate that stay in float."""
        self._content.rules[name] = dict(rules)
        self.save()

    def turns(self, race: str) -> dict[str, list[float]]:
        """Return the times of a race, candidate → its time in each turn, in milliseconds."""
        return {name: list(times) for name, times in self._content.races.get(race, {}).items()}

    def keep_turns(self, race: str, times: Mapping[str, list[float]]) -> None:
        """Save the times of a race after a complete turn."""
        self._content.races[race] = {name: list(series) for name, series in times.items()}
        self.save()

    def forget(self) -> None:
        """Remove the files of a tuning from its folder if nothing was measured."""
        if self._content.facts:
            return
        remove_file(self._path)
        for name in (file_names.TUNE_CANDIDATES_NAME, file_names.TUNE_EXPORT_NAME):
            remove_folder(self._path.parent / name)

    def save(self) -> None:
        """Write the state file.

        Raises:
            WriteError: the file cannot be written.
        """
        self._file.write(self._content.model_dump())


def measured_candidates(folder: Path, request: Mapping[str, Any], *, overwrite: bool) -> frozenset[str] | None:
    """Return the candidates settled by an earlier run; None if the folder belongs to another tuning. Changes nothing.

    Raises:
        UsageError: the folder belongs to another request, and may not be replaced.
    """
    file = ResumableResults(folder / file_names.TUNE_STATE_NAME, request, schema_version=_VERSION)
    earlier = _read_state(file, overwrite=overwrite)
    if isinstance(earlier, OtherRequest):
        return None
    return frozenset() if earlier is None else frozenset({*earlier.facts, *earlier.failed})


def _read_state(file: ResumableResults, *, overwrite: bool) -> _Content | OtherRequest | None:
    """Return the state of an earlier run; None without an earlier run.

    Raises:
        UsageError: the state belongs to another request, and may not be replaced.
    """

    def parse(record: dict[str, Any]) -> _Content:
        results = {key: value for key, value in record.items() if key not in ("schema_version", "request")}
        return parse_options(_Content, results, str(file.path))

    earlier = file.read(parse)
    if isinstance(earlier, OtherRequest) and not overwrite:
        difference = f"{', '.join(earlier.changed)} changed" if earlier.changed else "it cannot be read"
        raise UsageError(
            f"{file.path} belongs to a different tuning: {difference}",
            hint=f"Repeat its options to resume, choose a different folder, or restart with {opt.overwrite}.",
        )
    return earlier


def refuse_foreign_folder(folder: Path) -> None:
    """Refuse a folder with files that no tuning wrote.

    Raises:
        OutputExistsError: the folder contains such files, or is a file.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise OutputExistsError(f"output {folder} is a file", hint="Choose a folder: a tuning writes several files.")
    # Partial files of a killed command are hidden; its completed files appear after recovery.
    entries = {path.name for path in folder.iterdir() if not path.name.startswith(file_names.PARTIAL_PREFIX)}
    entries |= {path.name for path in waiting_files([folder / file_names.TUNE_STATE_NAME])}
    foreign = sorted(entries - _OURS)
    if not foreign and file_names.TUNE_STATE_NAME not in entries:
        # The lock exists before the state; without a state, other files with our names are foreign.
        foreign = sorted(entries - {file_names.TUNE_LOCK_NAME})
    if foreign:
        names = ", ".join(foreign[:3])
        raise OutputExistsError(
            f"output {folder} contains files that are not from a tuning: {names}", hint="Choose a new or empty folder."
        )


@contextmanager
def held_tune_folder(folder: Path) -> Iterator[None]:
    """Lock the folder of a tuning, created if missing, against other tunings.

    Raises:
        OutputExistsError: the folder contains files that no tuning wrote.
        UsageError: another tuning works in the folder.
        WriteError: the folder cannot be created.
    """
    refuse_foreign_folder(folder)
    with locked_folder(folder, file_names.TUNE_LOCK_NAME, "tuning"):
        yield
