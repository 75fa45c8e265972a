"""Plan and run of ``winml sweep``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winml.modelkit import file_names
from winml.modelkit.errors import ConfigError, opt
from winml.modelkit.evaluate.declared_options import declare_limits
from winml.modelkit.fields import LIMITS, MODEL, OUTPUT, declare
from winml.modelkit.report.plan import Plan, PlannedStep, interruptions_beside, planned_files

if TYPE_CHECKING:
    from winml.modelkit.sweep.plan import SweepPlan
    from winml.modelkit.sweep.records import SweepResult
    from winml.modelkit.sweep.sweep import SweepOptions
    from winml.modelkit.sweep.work_queue import SweepListener

_CELLS, _WORK = "Configurations", "Processes"


def _read_settings(texts: tuple[str, ...]) -> dict[str, tuple[Any, ...]]:
    from winml.modelkit.sweep.plan import parse_settings

    return parse_settings(texts)


def _read_steps(text: str) -> tuple[str, ...]:
    """Parse comma-separated steps; raises ConfigError for an unknown step."""
    from winml.modelkit.sweep.plan import STEPS

    steps = tuple(step.strip() for step in text.split(","))
    for step in steps:
        if step not in STEPS:
            raise ConfigError(f"{opt.do} {text}: unknown step {step!r}", hint=f"Steps: {', '.join(STEPS)}.")
    return steps


@dataclass(frozen=True, kw_only=True)
class SweepRequest:
    """Request of ``winml sweep``."""

    plan: Path = declare(None, MODEL, is_argument=True)
    """JSON plan, or text file with one model per line."""
    output: Path = declare(None, OUTPUT, short="-o", is_required=True, is_common=True)
    """Folder of the sweep. An existing sweep is resumed."""
    set: dict[str, tuple[Any, ...]] = declare(
        {}, _CELLS, metavar="KEY=V,V", is_repeatable=True, read=_read_settings, is_common=True
    )
    """Values of a config key, of which each makes a configuration."""
    do: tuple[str, ...] = declare(
        (), _CELLS, metavar="STEPS", is_repeatable=False, read=_read_steps, default_words="build", is_common=True
    )
    """Steps, separated by commas: export, build, perf, eval, compare."""
    min: dict[str, float] = declare_limits("min", "MEASURE=N", is_common=True)
    """Minimum of a measured value. If it is missed, the exit code is 3."""
    max: dict[str, float] = declare_limits("max", "MEASURE=N", is_common=True)
    """Maximum of a measured value. If it is exceeded, the exit code is 3."""
    timeout: float | None = declare(None, _WORK, metavar="SECONDS", above=0, default_words="3600 s", is_common=True)
    """Time limit of each model in each configuration, in seconds."""
    memory: float | None = declare(
        None, _WORK, metavar="GB", above=0, default_words="share of the free memory", is_common=True
    )
    """Memory limit of each process and its children, in GB."""
    jobs: int | None = declare(
        None, _WORK, minimum=1, default_words="number of cores; 1 if perf is measured", is_common=True
    )
    """Parallel processes."""
    ray: str | None = declare(None, _WORK, metavar="HOST:PORT|auto")
    """Run on this Ray cluster."""
    queue: str | None = declare(None, _WORK, metavar="NAME=ADDRESS")
    """Run on another queue, such as one of a plug-in."""
    artifacts: str | None = declare(None, OUTPUT, metavar="FOLDER|URL")
    """Folder or URL for built models, such as s3://bucket/sweep."""
    keep: bool = declare(True, OUTPUT)
    """Keep built models after they are measured."""
    retry_failed: bool = declare(False, _CELLS, is_common=True)
    """Retry the models and configurations that failed in an earlier run."""
    against: Path | None = declare(None, LIMITS, is_common=True)
    """Folder of an earlier sweep to compare with."""

    def sweep_options(self) -> SweepOptions:
        """Return the options of the sweep."""
        from winml.modelkit.sweep.sweep import SweepOptions

        is_local = self.artifacts is not None and "://" not in self.artifacts
        return SweepOptions(
            resident_bytes=None if self.memory is None else int(self.memory * 1e9),
            jobs=self.jobs,
            ray=self.ray,
            queue=self.queue,
            artifacts=str(Path(self.artifacts).absolute()) if is_local and self.artifacts else self.artifacts,
            keeps_files=self.keep,
            retries_failed=self.retry_failed,
            against=self.against,
            **({} if self.timeout is None else {"seconds": self.timeout}),
        )


@dataclass(frozen=True, kw_only=True)
class PlannedSweep(Plan):
    """Plan of a sweep."""

    cells: SweepPlan
    """Plan of the models and configurations, with the values of options."""


def plan_sweep(request: SweepRequest) -> PlannedSweep:
    """Plan the cells to run and the cells that are finished already. Nothing is written.

    Raises:
        ConfigError: the plan is wrong.
        UsageError, OutputExistsError, WriteError: as :func:`winml.modelkit.sweep.sweep.look_at_sweep` raises.
    """
    from winml.modelkit.sweep.plan import read_plan
    from winml.modelkit.sweep.sweep import changed_plan, look_at_sweep

    plan, notes = read_plan(request.plan)
    changes = {"set": request.set, "do": request.do, "min": request.min, "max": request.max}
    plan, change_notes = changed_plan(plan, changes)
    folder = request.output
    cells = look_at_sweep(plan, folder, request.sweep_options())
    input_files = dict.fromkeys(Path(name) for cell, _ in cells for name in cell.named_files)
    conditions = {
        file_names.SWEEP_PLAN_NAME: "",
        file_names.SWEEP_RESULTS_NAME: "",
        file_names.SWEEP_TABLE_NAME: "",
        file_names.SWEEP_PAGE_NAME: "",
        "cells/*": "a configuration is not finished",
        "shared/*": "several configurations use it",
        file_names.SWEEP_LOCK_NAME: "the lock leaves its file",
    }
    return PlannedSweep(
        verb="sweep",
        reads=tuple(path for path in (request.plan, *input_files) if path.is_file()),
        writes=planned_files(folder, conditions),
        steps=tuple(
            PlannedStep(cell.cell_id, "finished already" if is_finished else f"{', '.join(cell.do)} of {cell.model}")
            for cell, is_finished in cells
        ),
        notes=(*notes, *change_notes),
        interrupted=interruptions_beside([folder / file_names.SWEEP_PLAN_NAME]),
        cells=plan,
    )


def run_planned_sweep(plan: PlannedSweep, request: SweepRequest, listener: SweepListener) -> SweepResult:
    """Recover leftovers of killed commands, and run the unfinished cells.

    Raises:
        WinMLError: as :func:`winml.modelkit.sweep.sweep.run_sweep` raises.
    """
    plan.recover()
    from winml.modelkit.sweep.sweep import run_sweep

    return run_sweep(plan.cells, request.output, request.sweep_options(), listener, notes=plan.notes)
