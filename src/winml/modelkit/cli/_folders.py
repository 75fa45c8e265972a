"""Plan, run and output of commands on ONNX files. A build folder stands for its parts; ``--submodel`` selects some."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from winml.modelkit.cli._progress import show_step
from winml.modelkit.cli._streams import library_output_to_stderr, show_result

if TYPE_CHECKING:
    from winml.modelkit.report.document import Document
    from winml.modelkit.report.plan import Plan
    from winml.modelkit.transform.records import TransformedFile
    from winml.modelkit.verbs.file_to_file import FileRequest

PlanT = TypeVar("PlanT", bound="Plan")

_ResultT = TypeVar("_ResultT", bound=Any)
_FileT = TypeVar("_FileT", bound="TransformedFile")


def show_parts(
    results: Mapping[str, _ResultT],
    options: Mapping[str, Any],
    describe: Callable[[_ResultT], Document],
    *,
    of_several: bool,
    record: Callable[[_ResultT], Mapping[str, object]] = lambda result: result.as_record(),
    show: Callable[..., None] = show_result,
) -> None:
    """Print the result of a model with one part, or the results of several parts by part name.

    Args:
        results: Name of the part → result.
        options: Options of the command, with ``model``.
        describe: Makes the document of a result.
        of_several: True if the model has several parts, even if only one part has a result.
        record: Returns the record of a result.
        show: Prints a record, as :func:`~winml.modelkit.cli._streams.show_result` does.
    """
    records = {part: record(result) for part, result in results.items()}
    if not of_several:
        ((part, result),) = results.items()
        show(records[part], options, lambda: describe(result))
        return
    from winml.modelkit.report.document import parts_document

    record_of_parts = {"schema_version": 1, "model": str(options["model"]), "parts": records}
    show(record_of_parts, options, lambda: parts_document(results, describe))


def end_dry_run(plan: PlanT, options: Mapping[str, Any], refuse: Callable[[PlanT], None] = lambda _plan: None) -> None:
    """Print a plan and end the command, if ``--dry-run`` is specified.

    Args:
        plan: The plan of the command.
        options: Options of the command.
        refuse: Raises errors of the run that are detectable before weights are read.
    """
    if not options["dry_run"]:
        return
    from winml.modelkit.report.plan import plan_document

    with library_output_to_stderr():
        refuse(plan)
    show_result(plan.as_record(), options, lambda: plan_document(plan), is_answer=True)
    click.get_current_context().exit()


def run_verb(
    request: FileRequest[Any, _FileT],
    options: Mapping[str, Any],
    write: Callable[[_FileT], list[Path]] = lambda _record: [],
    next_command: Callable[[Path, Path, _FileT], str] | None = None,
) -> None:
    """Plan a request; print the plan for ``--dry-run``, else run the plan and print the record.

    Args:
        request: The request.
        options: Options of the command: ``dry_run``, ``quiet``, ``debug`` and ``format_``.
        write: Writes the requested files beside the result; takes the record of the file, or of the first part of a
            folder, and returns the paths.
        next_command: Returns the command that acts on the result. Takes the source, the file or folder of the result,
            and the same record. `None`: the command that measures both.

    Raises:
        WinMLError: the request is refused, or the work failed.
    """
    with library_output_to_stderr():
        plan = request.plan()
    end_dry_run(plan, options, lambda plan: plan.refuse_unrun())
    from winml.modelkit.transform.records import TransformedFolder

    with library_output_to_stderr():
        result = plan.run(None if options["quiet"] else show_step)
        record = next(iter(result.parts.values())) if isinstance(result, TransformedFolder) else result
        files = write(record)
    source = result.source
    output = result.folder if isinstance(result, TransformedFolder) else record.model_path
    from winml.modelkit.verbs.next_commands import timing_command

    following = timing_command(source, output) if next_command is None else next_command(source, output, record)
    shown = {**result.as_record(), "next": following or None}
    show_result(shown, options, lambda: result.document().with_files(files).with_next(following))
