"""Cells of a plan, and their results in the folder of the sweep. A cell is a model in a configuration.

Each cell has a separate folder, named after model and configuration, with its result in a file. Imports no model
library until model types are listed.
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
from winml.modelkit.onnx.files.output_files import write_errors_of
from winml.modelkit.onnx.files.resumable_results import ResumableResults, locked_folder, write_atomically
from winml.modelkit.options import suggest
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
    """Return the model types of a name.

    Args:
        name: A model type, or ``*`` for every type with a base model.
        task: For the task of text generation, ``*`` means every type with a class for this task.

    Raises:
        UsageError: the model type does not exist.
    """
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if name == _ALL:
        generating = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        is_generating = task is not None and canonical_task(task) == _GENERATION
        return tuple(sorted(generating if is_generating else modeling_auto.MODEL_MAPPING_NAMES))
    if name not in CONFIG_MAPPING:
        raise UsageError(
            f"random:{name}: transformers has no model type {name!r}",
            hint=suggest(name, CONFIG_MAPPING.keys(), otherwise="Use random:* for all types."),
        )
    return (name,)


_OF_OTHERS = (file_names.BUILD_MANIFEST_NAME, file_names.EXTRACT_MANIFEST_NAME, file_names.TUNE_STATE_NAME)
_NAME_LENGTH = 40
"""Characters of the model's name in the name of a folder; the digest after it distinguishes cells."""


@dataclass(frozen=True)
class Cell:
    """One model in one configuration."""

    cell_id: str
    """Name of the folder of the cell."""
    model: str
    settings: Mapping[str, Any]
    """Key of the config → value, for keys that differ between cells."""
    work: WorkSettings
    do: tuple[StepName, ...]

    @property
    def named_files(self) -> tuple[str, ...]:
        """Names of the model and the data; a name need not be a path."""
        model = self.model.partition(":")[0] if ".py:" in self.model else self.model
        quant, evaluation = self.work.build.quant, self.work.build.eval
        data = (quant and quant.calibration_data, evaluation and evaluation.dataset if "eval" in self.do else None)
        return (model, *(name for name in data if name))

    def result(self, state: CellState, problem: str = "") -> CellResult:
        """Return a result without measures."""
        return CellResult(self.cell_id, self.model, self.settings, state, problem=problem)


def requests_of(cells: Iterable[Cell], conditions: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """Return everything that the result of each cell currently depends on, as JSON values, by cell id.

    Args:
        cells: The cells.
        conditions: Further conditions of a latency: ``threads`` of each process, and number of parallel processes.
    """
    state = functools.cache(_path_state)
    requests = {}
    for cell in cells:
        request: dict[str, object] = {
            "model": cell.model,
            "work": cell.work.model_dump(mode="json"),
            "do": list(cell.do),
        }
        if "perf" in cell.do:
            request["conditions"] = {**conditions, "threads": cell.work.perf.threads or conditions["threads"]}
        requests[cell.cell_id] = resume_identity(request, [state(name) for name in cell.named_files])
    return requests


def cells_of(plan: SweepPlan) -> tuple[Cell, ...]:
    """Return the cells of a plan: model by model, the configurations of each model in the order of the plan.

    Raises:
        UsageError: a model type does not exist.
    """
    cells: dict[str, Cell] = {}
    for entry in plan.listed:
        for model in _expand_models(entry):
            for settings in configurations(plan, entry):
                cell = _create_cell(plan, model, settings)
                cells.setdefault(cell.cell_id, cell)
    return tuple(cells.values())


def _create_cell(plan: SweepPlan, model: str, settings: Mapping[str, object]) -> Cell:
    """Return the cell of a model and its settings, with an id derived from both."""
    config = plan.config
    if is_onnx_path(model):
        settings = settings_of_onnx(settings)
        config = settings_of_onnx(config)
    work = parse_work(config, settings, model)
    # A key with one value for all cells does not distinguish cells.
    own_settings = {key: value for key, value in settings.items() if len(plan.set.get(key, "  ")) > 1}
    name = re.sub(r"[^\w.-]+", "-", model).strip("-.")[-_NAME_LENGTH:].strip("-.") or "model"
    # Without defaults: a new option of a later version does not change the id, by which sweeps are compared.
    work_record = work.model_dump(mode="json", exclude_defaults=True)
    return Cell(f"{name}-{digest([model, work_record])[:12]}", model, own_settings, work, plan.do)


def _expand_models(entry: ListedModel) -> tuple[str, ...]:
    """Return the models of an entry of the list: a single model, or all model types of ``random:*``.

    Raises:
        UsageError: the model type does not exist.
    """
    if not entry.model.startswith(RANDOM_PREFIX):
        return (entry.model,)

    return tuple(
        f"{RANDOM_PREFIX}{name}"
        for name in model_types(entry.model.removeprefix(RANDOM_PREFIX), entry.set.get("loader.task"))
    )


def _path_state(name: str) -> str | None:
    """Return the state of a path, without files written by sweeps; None if the path does not exist."""
    return place_state(
        name,
        lambda folder: any(
            (folder / file).exists() for file in (file_names.SWEEP_LOCK_NAME, file_names.SWEEP_PLAN_NAME)
        ),
    )


class SweepFolder:
    """The folder of a sweep; changes require the lock (:func:`held_sweep`)."""

    def __init__(self, path: Path) -> None:
        """Take the locked folder."""
        self.path = path

    def cell_folder(self, cell_id: str) -> Path:
        """Return the folder of a cell."""
        return self.path / "cells" / cell_id

    @property
    def shared(self) -> Path:
        """Folder of results shared by the cells of one model."""
        return self.path / "shared"

    def finished(self, cell: Cell, request: Mapping[str, object]) -> CellResult | None:
        """Return the saved result of a cell; None if unfinished, or if the request has changed."""
        earlier = self._open_results(cell, request).read(lambda record: CellResult.from_fields(record["result"]))
        # The settings that distinguish cells depend on the plan of this run.
        return replace(earlier, settings=cell.settings) if isinstance(earlier, CellResult) else None

    def keep(self, cell: Cell, request: Mapping[str, object], result: CellResult) -> None:
        """Save the result of a cell.

        Args:
            cell: The cell.
            request: Request at the start of the cell: a model that has changed since then is a different model.
            result: The result.

        Raises:
            WriteError: the file cannot be written.
        """
        self._open_results(cell, request).write({"result": result.as_record()}, indent=1)

    def _open_results(self, cell: Cell, request: Mapping[str, Any]) -> ResumableResults:
        """Return the result file of a cell, valid for one request."""
        return ResumableResults(self.cell_folder(cell.cell_id) / file_names.SWEEP_CELL_NAME, request)

    def write(self, path: Path, text: str) -> None:
        """Write a file of the sweep atomically.

        Raises:
            WriteError: the file cannot be written.
        """
        with write_errors_of(path):
            write_atomically(path, text)


def refuse_foreign_sweep(path: Path) -> None:
    """Refuse a folder that does not belong to a sweep.

    Raises:
        OutputExistsError: the folder contains result files that no sweep wrote, or belongs to another command.
    """
    names = (file_names.SWEEP_RESULTS_NAME, file_names.SWEEP_TABLE_NAME, file_names.SWEEP_PAGE_NAME)
    if not (path / file_names.SWEEP_PLAN_NAME).exists() and (
        files := [name for name in names if (path / name).exists()]
    ):
        raise OutputExistsError(f"{path / files[0]} exists and is not from a sweep", hint="Choose a different folder.")
    if owned := [name for name in _OF_OTHERS if (path / name).exists()]:
        raise OutputExistsError(f"{path} belongs to a different command: {owned[0]}", hint="Choose a different folder.")


@contextmanager
def held_sweep(path: Path) -> Iterator[SweepFolder]:
    """Lock a folder for one sweep; a missing folder is created.

    Raises:
        UsageError: another sweep works in the folder.
        OutputExistsError: the folder does not belong to a sweep.
        WriteError: the folder cannot be created or written to.
    """
    refuse_foreign_sweep(path)
    with locked_folder(path, file_names.SWEEP_LOCK_NAME, "sweep"):
        yield SweepFolder(path.absolute())
