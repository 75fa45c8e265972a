"""Plans of commands that only write a report, and checks of the report files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from winml.modelkit.errors import UsageError, opt, spell
from winml.modelkit.fields import OUTPUT, declare, fields_of
from winml.modelkit.file_names import ONLY_PART, part_path
from winml.modelkit.report.plan import Plan, PlannedStep, interruptions_beside, planned_file

if TYPE_CHECKING:
    from winml.modelkit.models.request import ModelRequest

SubjectT = TypeVar("SubjectT")


@dataclass(frozen=True, kw_only=True)
class AnswerRequest:
    """Files of a report, besides stdout."""

    output: Path | None = declare(None, OUTPUT, short="-o", is_common=True)
    """Also write the result to this JSON file."""
    overwrite: bool = declare(False, OUTPUT)
    """Overwrite existing files."""

    @property
    def writes_files(self) -> bool:
        """True if the report is written to any file."""
        return bool(dict(_report_files(self, ())))


@dataclass(frozen=True, kw_only=True)
class PageAnswerRequest(AnswerRequest):
    """Files of a report with an HTML page."""

    report: Path | None = declare(None, OUTPUT, is_common=True)
    """Also write an HTML report with chart and table."""


@dataclass(frozen=True, kw_only=True)
class ModuleAnswerRequest(PageAnswerRequest):
    """Files of a report by module; each of several parts has its own files, except for ``output``."""

    node_data: Path | None = declare(None, OUTPUT)
    """Also write node data for Model Explorer (JSON)."""


@dataclass(frozen=True, kw_only=True)
class AnswerPlan(Plan, Generic[SubjectT]):
    """Plan of a command that only writes a report."""

    subject: SubjectT
    """Subject of the report: the models and settings that the request resolves to."""
    files: Mapping[str, tuple[Path, ...]]
    """Option → its files: one for each part, or one for all parts."""


def plan_answer(
    verb: str,
    subject: SubjectT,
    request: AnswerRequest,
    *,
    reads: Iterable[Path],
    steps: Iterable[PlannedStep],
    parts: Sequence[str] = (ONLY_PART,),
    exports: ModelRequest | None = None,
) -> AnswerPlan[SubjectT]:
    """Check the report files and plan their creation. Writes nothing, and loads no model.

    Args:
        verb: Name of the command.
        subject: Subject of the report.
        request: Files of the report.
        reads: Files that are read, existing or not; none of the files may be replaced.
        steps: Steps before the files are written.
        parts: Parts of the model in the report.
        exports: The model that is exported into the cache first, unless its export is cached already.

    Raises:
        UsageError: ``overwrite`` without a file, one file for two options, or an output that is an input or no regular
            file.
        OutputExistsError: a file exists already.
        WriteError: a directory, or the cache, cannot be written.
    """
    from winml.modelkit.onnx.files.output_files import refuse_existing, refuse_inputs

    reads = tuple(dict.fromkeys(reads))
    files = dict(_report_files(request, parts))
    outputs = [path for paths in files.values() for path in paths]
    if request.overwrite and not outputs:
        raise UsageError(
            f"{opt.overwrite} requires a file to write", hint=f"Specify one with -o, or omit {opt.overwrite}."
        )
    _refuse_shared_file(files)
    refuse_inputs(outputs, reads)
    refuse_existing(outputs, overwrite=request.overwrite)
    export = None
    if exports is not None:
        from winml.modelkit.builds.cache import plan_cached_export

        export = plan_cached_export(exports)
    writing = (PlannedStep("writing", ", ".join(map(str, outputs))),) if outputs else ()
    return AnswerPlan(
        verb=verb,
        reads=tuple(path for path in reads if path.is_file()),
        writes=(*(export.writes if export else ()), *map(planned_file, outputs)),
        steps=(*(export.steps if export else ()), *steps, *writing),
        interrupted=interruptions_beside(outputs),
        subject=subject,
        files=files,
    )


def _report_files(request: AnswerRequest, parts: Sequence[str]) -> Iterator[tuple[str, tuple[Path, ...]]]:
    """Yield each file option of a report with its files: one for ``output``, one for each part for other options."""
    request_type: type = type(request)
    for field in fields_of(request_type):
        path = getattr(request, field.name)
        if field.group == OUTPUT and isinstance(path, Path):
            per_part = len(parts) > 1 and field.name not in _OF_ALL_PARTS
            yield field.name, tuple(part_path(path, part, of_several=True) for part in parts) if per_part else (path,)


_OF_ALL_PARTS = ("output", "junit")
"""Options whose file describes all parts."""


def _refuse_shared_file(files: Mapping[str, tuple[Path, ...]]) -> None:
    """Refuse one file for two options; raises UsageError."""
    option_by_path: dict[Path, str] = {}
    for option, paths in files.items():
        for path in paths:
            first_option = option_by_path.setdefault(path.absolute(), option)
            if first_option != option:
                names = " and ".join(spell(name) for name in (first_option, option))
                raise UsageError(f"{names} specify the same file: {path}", hint="Use a separate file for each.")
