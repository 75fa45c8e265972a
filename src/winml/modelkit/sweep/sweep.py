"""Flow of ``winml sweep``, and its function in Python.

Each result is saved at once, so a stopped sweep can be resumed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from winml.modelkit import file_names
from winml.modelkit.builds.cache import tool_versions
from winml.modelkit.errors import UsageError, opt
from winml.modelkit.onnx.files.moving import remove_folder
from winml.modelkit.onnx.files.output_files import refuse_existing
from winml.modelkit.options import JsonError, read_json_file
from winml.modelkit.ort.host import available_bytes, available_cores
from winml.modelkit.python_functions import python_function
from winml.modelkit.report.html import render_html
from winml.modelkit.sweep.bounded_processes import Bounds
from winml.modelkit.sweep.cells import Cell, SweepFolder, cells_of, held_sweep, refuse_foreign_sweep, requests_of
from winml.modelkit.sweep.plan import SweepPlan, plan_from_record, read_plan, refuse_unusable
from winml.modelkit.sweep.records import CellResult, SweepLimit, SweepResult
from winml.modelkit.sweep.table import sweep_document, sweep_table
from winml.modelkit.sweep.work_queue import (
    QUEUES,
    LocalQueue,
    Place,
    QueueKind,
    SweepListener,
    SweepStoppedError,
    WorkQueue,
)
from winml.modelkit.words import json_printable

_DEFAULT_SECONDS = 3600.0
"""Chosen: longer than every export of our measurements; larger models need a higher limit."""
_MEMORY_SHARE = 0.9
"""Chosen: share of the free memory that all processes together may use by default."""
_CELL_BYTES = 2_000_000_000
"""Chosen: memory per process below which fewer processes run in parallel; a small model takes a third of it."""


@dataclass(frozen=True)
class SweepOptions:
    """Options of a sweep."""

    seconds: float = _DEFAULT_SECONDS
    """Time limit of one cell."""
    resident_bytes: int | None = None
    """Memory limit of one cell with its child processes; None: its share of the free memory."""
    jobs: int | None = None
    """Number of parallel processes; None: one per core, as memory allows; one if latency is measured; on Ray, one per
    CPU."""
    ray: str | None = None
    """Address of a Ray cluster, or ``auto``; None: this machine only."""
    queue: str | None = None
    """``NAME=ADDRESS`` of another work queue, such as a queue of a plug-in; None: determined by ``ray``."""
    artifacts: str | None = None
    """Folder or URL for the files of cells; None: the folder of the sweep."""
    keeps_files: bool = True
    """Keep built models after they are measured."""
    retries_failed: bool = False
    """Run failed cells again."""
    against: Path | None = None
    """Folder of an earlier sweep to compare with."""


@python_function()
def sweep_models(
    models: str | os.PathLike[str] | Mapping[str, object] | Sequence[str],
    output: str | os.PathLike[str],
    *,
    set: Mapping[str, Sequence[object]] | None = None,
    do: Sequence[str] | None = None,
    min: Mapping[str, float] | None = None,
    max: Mapping[str, float] | None = None,
    options: SweepOptions = SweepOptions(),
    listener: SweepListener | None = None,
) -> SweepResult:
    """Export, build, measure and compare many models in many configurations, each in a separate process.

    Uses :mod:`multiprocessing`: call it from a script under ``if __name__ == "__main__":``.

    Args:
        models: Path of a plan or of a list of models, JSON object of a plan, or list of models.
        output: Folder of the sweep; cells that an earlier run finished are not run again.
        set: Key of the config → its values, such as ``{"quant.precision": ["fp32", "int8"]}``.
        do: Steps: ``export``, ``build``, ``perf``, ``eval``, ``compare``; default ``build``.
        min: Measure → its minimum in every cell.
        max: Measure → its maximum in every cell.
        options: Limits, number of processes, cluster.
        listener: Receives the progress.

    Returns:
        The table: one row for each model in each configuration, failures included.

    Raises:
        UsageError: the plan is wrong, a key of the config is unknown, or another sweep works in the folder.
        SweepStoppedError: the disk is full, or no machine of the cluster responds.
        WriteError: the folder cannot be written to.

    Example:
        ```python
        if __name__ == "__main__":
            result = sweep_models(
                ["model.onnx"], "swept", set={"optim.level": ["none", "full"]}, do=["build", "perf", "compare"],
                max={"relative_error": 0.01}, options=SweepOptions(seconds=600, jobs=1),
            )
        ```
    """
    if isinstance(models, (str, os.PathLike)):
        plan, notes = read_plan(Path(models))
    else:
        record = dict(models) if isinstance(models, Mapping) else {"models": list(models)}
        plan, notes = plan_from_record(record, "sweep")
    plan, change_notes = changed_plan(plan, {"set": set, "do": do, "min": min, "max": max})
    refuse_early(plan, options)
    return run_sweep(plan, Path(output), options, listener or SweepListener(), notes=(*notes, *change_notes))


def changed_plan(plan: SweepPlan, changes: Mapping[str, Any]) -> tuple[SweepPlan, tuple[str, ...]]:
    """Update a plan, key by key, with values of options; return the plan and notes on it.

    Raises:
        ConfigError: a value of the wrong kind.
    """
    record = json.loads(plan.model_dump_json())
    for name, value in changes.items():
        if isinstance(value, Mapping):
            record[name] |= {key: list(entry) if isinstance(entry, tuple) else entry for key, entry in value.items()}
        elif value:
            record[name] = list(value)
    return plan_from_record(record, "sweep")


def refuse_early(plan: SweepPlan, options: SweepOptions) -> None:
    """Refuse errors in plan and options, before any model is loaded.

    Raises:
        UsageError: names the error.
    """
    refuse_unusable(plan)
    if options.against is not None:
        read_results(options.against)
    if options.artifacts is not None:
        from winml.modelkit.sweep.cell_work import refuse_unknown_place

        refuse_unknown_place(options.artifacts)
    if (queue := _parse_queue(options)) is not None:
        kind, address = queue
        kind.refuse(address)


def look_at_sweep(plan: SweepPlan, output: Path, options: SweepOptions) -> tuple[tuple[Cell, bool], ...]:
    """Return the cells of a plan, each with True if it is finished already. Writes nothing.

    Raises:
        UsageError: the plan or the options are wrong, or a model type does not exist.
        OutputExistsError: the folder does not belong to a sweep.
        WriteError: the folder cannot be written to.
    """
    if output.is_file():
        raise UsageError(f"-o {output}: this is a file", hint="Choose a folder.")
    refuse_early(plan, options)
    refuse_foreign_sweep(output)
    refuse_existing([output / file_names.SWEEP_PLAN_NAME], overwrite=True)
    cells = cells_of(plan)
    if not (output / file_names.SWEEP_PLAN_NAME).exists():
        return tuple((cell, False) for cell in cells)
    requests = requests_of(cells, _create_queue(plan, options).conditions)
    finished = _saved_results(SweepFolder(output.absolute()), cells, requests, options)
    return tuple((cell, cell.cell_id in finished) for cell in cells)


def _parse_queue(options: SweepOptions) -> tuple[QueueKind, str] | None:
    """Return the requested queue and its address; None: this machine only.

    Raises:
        UsageError: the queue does not exist, or two queues are requested.
    """
    if options.queue is None:
        return None if options.ray is None else (QUEUES["ray"], options.ray)
    if options.ray is not None:
        raise UsageError(
            f"{opt.queue} {options.queue}: {opt.ray} {options.ray} also selects a queue", hint="Use one of them."
        )
    name, equals, address = options.queue.partition("=")
    if not equals:
        raise UsageError(
            f"{opt.queue} {options.queue}: expected NAME=ADDRESS", hint=f"Names: {', '.join(QUEUES.names)}."
        )
    return QUEUES.find(name, opt.queue), address


def run_sweep(
    plan: SweepPlan, output: Path, options: SweepOptions, listener: SweepListener, *, notes: tuple[str, ...] = ()
) -> SweepResult:
    """Run every unfinished cell of a plan, and write the table.

    Raises:
        UsageError: another sweep works in the folder, or a model type does not exist.
        SweepStoppedError: the disk is full, or no machine of the cluster responds.
        WriteError: the folder cannot be written to.
    """
    cells = cells_of(plan)
    with held_sweep(output) as folder:
        folder.write(output / file_names.SWEEP_PLAN_NAME, f"{plan.model_dump_json(indent=1)}\n")
        queue = _create_queue(plan, options)
        requests = requests_of(cells, queue.conditions)
        results = _saved_results(folder, cells, requests, options)
        reused_count = len(results)
        unfinished = {cell.cell_id: cell for cell in cells if cell.cell_id not in results}
        place = Place(folder, options.artifacts, options.keeps_files)
        try:
            with closing(queue.results(list(unfinished.values()), place, listener)) as endings:
                for result in endings:
                    if result.state == "stopped":
                        raise SweepStoppedError(
                            f"{result.model}: {result.problem}; {len(results)} of {len(cells)} cells are finished",
                            hint="Fix the problem, and run the same command again to resume.",
                        )
                    folder.keep(unfinished[result.cell_id], requests[result.cell_id], result)
                    results[result.cell_id] = result
                    listener.on_end(result)
                    if not options.keeps_files:
                        _drop_files(folder, result, cells, results)
        finally:
            # Also for a stopped sweep: its finished cells are reported.
            rows = tuple(results[cell.cell_id] for cell in cells if cell.cell_id in results)
            outcome = SweepResult(
                folder=str(output),
                plan=json.loads(plan.model_dump_json()),
                cells=rows,
                total=len(cells),
                limits=_check_limits(plan, rows),
                versions=tool_versions(),
                machine={"cores": os.cpu_count(), "memory_bytes": psutil.virtual_memory().total},
                against=None if options.against is None else read_results(options.against),
                jobs=queue.jobs,
                bounds=queue.limits,
                reused=reused_count,
                notes=(*notes, *_latency_notes(plan, queue)),
            )
            text = json_printable(json.dumps(outcome.as_record(), indent=1, ensure_ascii=False))
            folder.write(folder.path / file_names.SWEEP_RESULTS_NAME, f"{text}\n")
            folder.write(folder.path / file_names.SWEEP_TABLE_NAME, sweep_table(outcome))
            folder.write(folder.path / file_names.SWEEP_PAGE_NAME, render_html(sweep_document(outcome)))
        return outcome


def _saved_results(
    folder: SweepFolder, cells: Iterable[Cell], requests: Mapping[str, Mapping[str, object]], options: SweepOptions
) -> dict[str, CellResult]:
    """Return the saved results of cells that are not run again, by cell id."""
    results = {cell.cell_id: folder.finished(cell, requests[cell.cell_id]) for cell in cells}
    return {
        cell_id: result
        for cell_id, result in results.items()
        if result is not None and not (result.state == "failed" and options.retries_failed)
    }


def _create_queue(plan: SweepPlan, options: SweepOptions) -> WorkQueue:
    """Return the requested queue, or else processes on this machine that share its free memory."""
    if (queue := _parse_queue(options)) is not None:
        kind, address = queue
        return kind.open(address, options.seconds, options.resident_bytes, options.jobs)
    free = int(_MEMORY_SHARE * available_bytes())
    max_jobs = max(1, min(available_cores(), free // (options.resident_bytes or _CELL_BYTES)))
    jobs = options.jobs or (1 if "perf" in plan.do else max_jobs)
    share = free // jobs
    return LocalQueue(Bounds(options.seconds, options.resident_bytes or share), jobs)


def _drop_files(
    folder: SweepFolder, result: CellResult, cells: Iterable[Cell], results: Mapping[str, CellResult]
) -> None:
    """Remove the built files of a model after the last of its configurations."""
    cell_ids = [cell.cell_id for cell in cells if cell.model == result.model]
    if all(cell_id in results for cell_id in cell_ids):
        for cell_id in cell_ids:
            remove_folder(folder.cell_folder(cell_id) / "build")


def _check_limits(plan: SweepPlan, rows: Sequence[CellResult]) -> tuple[SweepLimit, ...]:
    """Check all limits of a plan against the finished cells."""
    minima = tuple(SweepLimit.of("min", name, value, rows) for name, value in plan.min.items())
    return (*minima, *(SweepLimit.of("max", name, value, rows) for name, value in plan.max.items()))


def _latency_notes(plan: SweepPlan, queue: WorkQueue) -> Iterator[str]:
    """Note that latencies were measured while other processes ran."""
    if "perf" in plan.do and queue.jobs != 1:
        number = queue.jobs or "several"
        yield f"{number} processes ran in parallel: latencies are those of a busy machine"


def read_results(path: Path) -> SweepResult:
    """Read the table of an earlier sweep.

    Args:
        path: Folder of the sweep, or its JSON file.

    Raises:
        UsageError: there is no table.
    """
    file = path / file_names.SWEEP_RESULTS_NAME if path.is_dir() else path
    try:
        record = read_json_file(file)
        cells = tuple(CellResult.from_fields(cell) for cell in record["cells"])
        fields = {name: record[name] for name in ("versions", "machine", "jobs", "bounds")}
        return SweepResult(record["folder"], record["plan"], cells, record["counts"]["total"], **fields)
    except (OSError, JsonError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path}: no results of a sweep", hint="Pass the folder of a finished sweep.") from error
