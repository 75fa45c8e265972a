"""Plan of a verb: its steps, and the files to read, write and remove.

Standard library only: requests are refused, and plans made, before a model library is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from winml.modelkit.file_names import data_path
from winml.modelkit.onnx.files.recovery import Interrupted, interrupted_in, settle_interrupted
from winml.modelkit.records import Record, entry
from winml.modelkit.report import document as doc


class PlannedFile(Record):
    """A file that would be written."""

    path: Path
    """Path. A ``*`` in the name of a weight file stands for the digits of the content hash, which is not known yet."""
    replaces: bool = False
    """True if an existing file is replaced."""
    only_if: str = field(default="", metadata=entry(null_if_empty=True))
    """Condition under which the file is written; empty: always."""


class PlannedStep(Record):
    """One step, with a one-line description."""

    name: str
    words: str = field(metadata=entry("does"))


@dataclass(frozen=True)
class Plan:
    """Plan of a verb. Everything that can be checked without weights has been checked; nothing has been written."""

    verb: str
    reads: tuple[Path, ...]
    writes: tuple[PlannedFile, ...]
    steps: tuple[PlannedStep, ...]
    """Steps in order, without :attr:`interrupted`, which precedes them all."""
    notes: tuple[str, ...] = ()
    """Automatic decisions and their reasons: one sentence each."""
    removes: tuple[Path, ...] = ()
    """Weight files of replaced models, removed unless a model references them; for the cache, folders of builds."""
    interrupted: tuple[Interrupted, ...] = ()
    """Leftovers of killed commands in the directories of the written files."""

    def recover(self) -> None:
        """Complete or remove leftovers of killed commands; the first step of a run, before any file is read."""
        for directory in dict.fromkeys(leftover.directory for leftover in self.interrupted):
            settle_interrupted(directory)

    def as_record(self) -> dict[str, object]:
        """Return the plan as JSON-ready values."""
        return {
            "schema_version": 1,
            "verb": self.verb,
            "reads": [str(path) for path in self.reads],
            "writes": [file.as_record() for file in self.writes],
            "removes": [str(path) for path in self.removes],
            "recovery": [
                {
                    "folder": str(leftover.folder),
                    "completes": [str(leftover.directory / name) for name in leftover.completes],
                }
                for leftover in self.interrupted
            ],
            "steps": [step.as_record() for step in self.steps],
            "notes": list(self.notes),
        }


def interruptions_beside(outputs: Iterable[Path]) -> tuple[Interrupted, ...]:
    """Return leftovers of killed commands in the directories of files that would be written; changes nothing."""
    directories = dict.fromkeys(path.parent for path in outputs)
    return tuple(leftover for directory in directories for leftover in interrupted_in(directory))


def planned_file(path: Path, only_if: str = "") -> PlannedFile:
    """Plan a file, which replaces an existing file at its path."""
    return PlannedFile(path, path.exists(), only_if)


def planned_data(model: Path, *, only_if: str = "") -> PlannedFile:
    """Plan the external weight file of a model; its name contains the hash of its content."""
    return PlannedFile(data_path(model, "*"), only_if=only_if)


def planned_files(folder: Path, conditions: Mapping[str, str]) -> tuple[PlannedFile, ...]:
    """Return the files that would be written into a folder.

    Args:
        folder: The folder.
        conditions: Name, or ``name/*`` for all files of an inner folder → condition, empty if it is always written.
    """
    return tuple(
        PlannedFile(folder / name, (folder / name.removesuffix("/*")).exists(), only_if)
        for name, only_if in conditions.items()
    )


def plan_document(plan: Plan) -> doc.Document:
    """Describe a plan: recovery, files that are read, written and removed, and steps."""
    fields: list[doc.Field] = [
        *(
            (
                "recovery",
                f"{leftover.folder}, of a command that was killed or still runs: "
                + (f"would put in place {', '.join(leftover.completes)}" if leftover.completes else "would be removed"),
            )
            for leftover in plan.interrupted
        ),
        *(("reads", str(path)) for path in plan.reads),
        *((f"{number}. {step.name}", step.words) for number, step in enumerate(plan.steps, 1)),
        *(
            (
                "would write",
                f"{file.path}{' (replaced)' * file.replaces}{f' if {file.only_if}' if file.only_if else ''}",
            )
            for file in plan.writes
        ),
        *(("would remove", f"{path}, if nothing uses it") for path in plan.removes),
        *doc.note_fields(plan.notes),
        ("wrote", "nothing: this is a plan"),
    ]
    return doc.Document([doc.Fields(fields)])
