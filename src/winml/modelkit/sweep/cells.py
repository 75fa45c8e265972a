"""Which cells does a plan have, and which of them are finished? A cell is one model in one configuration.

Each has a folder of its own, named after both, and what was found in it is a file there. Imports no model library until
model types are listed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from winml.modelkit import file_names
from winml.modelkit.builds.cache import digest, place_state, resume_identity
from winml.modelkit.builds.plan import is_onnx_path
from winml.modelkit.errors import OutputExistsError, UsageError
from winml.modelkit.models.checkpoints.task import canonical_task
from winml.modelkit.onnx.files.output_files import write_error
from winml.modelkit.onnx.files.resumable_results import ResumableResults, locked_folder, write_atomically
from winml.modelkit.options import nearest
from winml.modelkit.sweep.plan import (
    RANDOM_PREFIX,
    ListedModel,
    StepName,
    SweepPlan,
    WorkSettings,
    configurations,
    parse_work,
    settings_of_onnx,
)
from winml.modelkit.sweep.records import CellResult, CellState

_ALL = "*"
_GENERATION = "text-generation"


def model_types(name: str, task: str | None = None) -> tuple[str, ...]:
    """Return the model types that a name stands for.

    Args:
        name: A model type, or ``*`` for every one with a base model.
        task: Where it is one of models that generate text, ``*`` means every type with a class for that.

    Raises:
        UsageError: there is no such model type.
    """
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if name == _ALL:
        generating = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        is_generating = task is not None and canonical_task(task) == _GENERATION
        return tuple(sorted(generating if is_generating else modeling_auto.MODEL_MAPPING_NAMES))
    if name not in CONFIG_MAPPING:
        guess = nearest(name, list(CONFIG_MAPPING.keys()))
        raise UsageError(
            f"random:{name}: transformers has no model type {name!r}",
            hint=f"Did you mean {guess!r}?" if guess else "Use random:* for all types.",
        )
    return (name,)


_OF_OTHERS = (file_names.BUILD_MANIFEST_NAME, file_names.EXTRACT_MANIFEST_NAME, file_names.TUNE_STATE_NAME)
_NAME_LENGTH = 40
"""Characters of the model's name in the name of a folder; the digest behind it tells cells apart."""


@dataclass(frozen=True)
class Cell:
    """One model in one configuration."""

    cell_id: str
    """Name of its folder."""
    model: str
    settings: Mapping[str, Any]
    """Key of the config → value, of what differs between cells."""
    work: WorkSettings
    do: tuple[StepName, ...]

    @property
    def named_files(self) -> tuple[str, ...]:
        """The model and the data, as they are named; not each name is that of a file."""
        model = self.model.partition(":")[0] if ".py:" in self.model else self.model
        quant, evaluated = self.work.build.quant, self.work.build.eval
        data = (quant and quant.calibration_data, evaluated and evaluated.dataset if "eval" in self.do else None)
        return (model, *(name for name in data if name))

    def result(self, state: CellState, problem: str = "") -> CellResult:
        """Return a result in which nothing was measured."""
        return CellResult(self.cell_id, self.model, self.settings, state, problem=problem)


def requests_of(cells: Iterable[Cell], conditions: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """Return all that the result of each cell depends on at this moment, as JSON values, by the id of the cell.

    Args:
        cells: The cells.
        conditions: What a latency depends on besides: ``threads`` of each process, and processes at a time.
    """
    state = functools.cache(_state)
    requests = {}
    for cell in cells:
        requested: dict[str, object] = {
            "model": cell.model,
            "work": cell.work.model_dump(mode="json"),
            "do": list(cell.do),
        }
        if "perf" in cell.do:
            requested["conditions"] = {**conditions, "threads": cell.work.perf.threads or conditions["threads"]}
        requests[cell.cell_id] = resume_identity(requested, [state(name) for name in cell.named_files])
    return requests


def cells_of(plan: SweepPlan) -> tuple[Cell, ...]:
    """Return the cells of a plan: model by model, the configurations of each in the order of the plan.

    Raises:
        UsageError: there is no such model type.
    """
    cells: dict[str, Cell] = {}
    for listed in plan.listed:
        for model in _named_models(listed):
            for settings in configurations(plan, listed):
                cell = _cell(plan, model, settings)
                cells.setdefault(cell.cell_id, cell)
    return tuple(cells.values())


def _cell(plan: SweepPlan, model: str, settings: Mapping[str, object]) -> Cell:
    config = plan.config
    if is_onnx_path(model):
        settings = settings_of_onnx(settings)
        config = settings_of_onnx(config)
    work = parse_work(config, settings, model)
    # One value for all cells tells none from another.
    displayed = {key: value for key, value in settings.items() if len(plan.set.get(key, "  ")) > 1}
    name = re.sub(r"[^\w.-]+", "-", model).strip("-.")[-_NAME_LENGTH:].strip("-.") or "model"
    # Without defaults: an option that a later version adds leaves the id, by which sweeps are compared, as it is.
    stated = work.model_dump(mode="json", exclude_defaults=True)
    return Cell(f"{name}-{digest([model, stated])[:12]}", model, displayed, work, plan.do)


def _named_models(listed: ListedModel) -> tuple[str, ...]:
    """Return the models that an entry of the list means: one, or every model type that there is.

    Raises:
        UsageError: there is no such model type.
    """
    if not listed.model.startswith(RANDOM_PREFIX):
        return (listed.model,)

    return tuple(
        f"{RANDOM_PREFIX}{name}"
        for name in model_types(listed.model.removeprefix(RANDOM_PREFIX), listed.set.get("loader.task"))
    )


def _state(name: str) -> str | None:
    """Return what is at a path, without what sweeps wrote there; None where nothing is."""
    return place_state(
        name,
        lambda folder: any(
            (folder / file).exists() for file in (file_names.SWEEP_LOCK_NAME, file_names.SWEEP_PLAN_NAME)
        ),
    )


class SweepFolder:
    """The folder of a sweep; only who holds it (:func:`held_sweep`) may change it."""

    def __init__(self, path: Path) -> None:
        """Take the folder that was locked."""
        self.path = path

    def cell_folder(self, cell_id: str) -> Path:
        """Return where the files of a cell are."""
        return self.path / "cells" / cell_id

    @property
    def shared(self) -> Path:
        """Where cells find what others of the same model made."""
        return self.path / "shared"

    def finished(self, cell: Cell, request: Mapping[str, object]) -> CellResult | None:
        """Return what was found in a cell; None where it is not finished, or was asked for something else."""
        earlier = self._results(cell, request).read(lambda record: CellResult.from_fields(record["result"]))
        # Which settings tell cells apart depends on the plan of this run.
        return replace(earlier, settings=cell.settings) if isinstance(earlier, CellResult) else None

    def keep(self, cell: Cell, request: Mapping[str, object], result: CellResult) -> None:
        """Write down what was found in a cell.

        Args:
            cell: The cell.
            request: What it was asked before it began: a model that changed since is another.
            result: What was found.

        Raises:
            WriteError: it cannot be written.
        """
        self._results(cell, request).write({"result": result.as_record()}, indent=1)

    def _results(self, cell: Cell, request: Mapping[str, Any]) -> ResumableResults:
        return ResumableResults(self.cell_folder(cell.cell_id) / file_names.SWEEP_CELL_NAME, request)

    def write(self, path: Path, text: str) -> None:
        """Write one of the files of the sweep, whole or not at all.

        Raises:
            WriteError: it cannot be written.
        """
        try:
            write_atomically(path, text)
        except OSError as error:
            raise write_error(path, error) from error


def refuse_foreign_sweep(path: Path) -> None:
    """Refuse a folder that is not that of a sweep.

    Raises:
        OutputExistsError: files of a sweep's names are there, and no sweep wrote them, or another command owns it.
    """
    names = (file_names.SWEEP_RESULTS_NAME, file_names.SWEEP_TABLE_NAME, file_names.SWEEP_PAGE_NAME)
    if not (path / file_names.SWEEP_PLAN_NAME).exists() and (
        there := [name for name in names if (path / name).exists()]
    ):
        raise OutputExistsError(f"{path / there[0]} exists and is not from a sweep", hint="Choose a different folder.")
    if owned := [name for name in _OF_OTHERS if (path / name).exists()]:
        raise OutputExistsError(f"{path} belongs to a different command: {owned[0]}", hint="Choose a different folder.")


@contextmanager
def held_sweep(path: Path) -> Iterator[SweepFolder]:
    """Hold a folder for one sweep; it is made where it is missing.

    Raises:
        UsageError: another sweep works in it.
        OutputExistsError: it is not that of a sweep.
        WriteError: it cannot be made or written to.
    """
    refuse_foreign_sweep(path)
    with locked_folder(path, file_names.SWEEP_LOCK_NAME, "sweep"):
        yield SweepFolder(path.absolute())
