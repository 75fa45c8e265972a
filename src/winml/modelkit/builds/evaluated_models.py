"""Evaluates a model by name, or the result of a build. Names are resolved to files or requests here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winml.modelkit.builds.found_models import resolve_side
from winml.modelkit.errors import ConfigError, UsageError, opt, spell_options
from winml.modelkit.evaluate.options import NO_BASELINE, PYTORCH, EvaluationOptions
from winml.modelkit.models.checkpoints.adapters import named_adapter
from winml.modelkit.models.load_options import declared_options
from winml.modelkit.models.request import ModelRequest
from winml.modelkit.options import parse_options, unknown_key_message
from winml.modelkit.python_functions import python_function
from winml.modelkit.samples.data_sources import find_source

if TYPE_CHECKING:
    from winml.modelkit.evaluate.evaluated_models import Subject
    from winml.modelkit.evaluate.records import Evaluation
    from winml.modelkit.ort.opened_model import RunOptions
    from winml.modelkit.progress import OnStep, Progress

_NAME = "evaluate_model"
_RUN_OPTIONS = ("ep", "device", "ep_options", "threads")
_LOAD_OPTIONS = ("model_class", "revision", "trust_remote_code", "adapter")


@python_function()
def evaluate_model(
    model: str | os.PathLike[str],
    dataset: str | os.PathLike[str] | None = None,
    *,
    options: EvaluationOptions | None = None,
    on_step: OnStep | None = None,
    progress: Progress | None = None,
    **flags: Any,
) -> Evaluation:
    """Evaluate a model on a dataset, and compare it with a baseline on the same samples.

    Args:
        model: ONNX file, folder of a build, or a checkpoint, which PyTorch runs.
        dataset: File or folder; or ``name``, ``owner/name`` or ``owner/name:config`` at the Hub.
        options: Complete options, in place of ``dataset`` and ``flags``; None: those in ``flags``.
        on_step: Called when a step starts and when it ends.
        progress: Called with the number and the share of finished samples.
        **flags: Fields of :class:`~winml.modelkit.evaluate.options.EvaluationOptions`, such as ``metrics`` and ``min``;
            ``ep``, ``device``, ``ep_options`` and ``threads`` of an ONNX file; ``model_class``, ``revision`` and
            ``trust_remote_code`` of a checkpoint.

    Returns:
        Metrics with intervals, agreement and latency; ``is_good_enough`` states whether all limits are met.

    Raises:
        UsageError: an unknown flag, a task without evaluation, a metric of another task, a missing column, or labels
            that are not those of the model.
        InputError: a file is missing or damaged.
        StageError: a model cannot be loaded, or cannot run a sample.

    Example:
        ```python
        quality = evaluate_model("int8.onnx", "reviews.csv", baseline="model.onnx")
        ```
    """
    from winml.modelkit.evaluate.evaluation import evaluate
    from winml.modelkit.ort.opened_model import RunOptions

    flag_names = (*EvaluationOptions.model_fields, *_RUN_OPTIONS, *_LOAD_OPTIONS)
    for flag in flags:
        if flag not in flag_names:
            raise ConfigError(unknown_key_message(flag, flag_names, _NAME))
    name = os.fspath(model)
    run = RunOptions(name, **{key: flags.pop(key) for key in _RUN_OPTIONS if key in flags})
    load = {key: flags.pop(key) for key in _LOAD_OPTIONS if key in flags}
    dataset_options = {"dataset": os.fspath(dataset)} if dataset is not None else {}
    if options is not None and (both := [*dataset_options, *flags]):
        raise UsageError(
            f"{_NAME}: options= and {both[0]} are both passed",
            hint=f"Pass one of them, or options.model_copy(update={{{both[0]!r}: …}}).",
        )
    requested = options or parse_options(EvaluationOptions, {**dataset_options, **flags}, _NAME)
    return evaluate(named_subject(name, requested, run, **load), requested, on_step=on_step, progress=progress)


def named_baseline(name: str | None) -> Path | ModelRequest | None:
    """Return the baseline of a name; ``None`` for ``pytorch``, ``none`` and no name.

    Raises:
        UsageError: the name is neither a file nor a checkpoint.
    """
    return None if name in (None, PYTORCH, NO_BASELINE) else resolve_side(str(name))


def named_subject(name: str, options: EvaluationOptions, run: RunOptions, **load: Any) -> Subject:
    """Return the models of an evaluation.

    Args:
        name: ONNX file, folder of a build, or a checkpoint.
        options: Options with the baseline, and the task of a checkpoint.
        run: Provider and device of an ONNX file.
        load: Load options of a checkpoint.

    Raises:
        UsageError: a name is no usable model.
    """
    from winml.modelkit.evaluate.evaluated_models import Subject

    model = resolve_side(name)
    refuse_named_adapters(load)
    if isinstance(model, ModelRequest):
        model = replace(model, task=options.task, **load)
    return Subject(model, run, named_baseline(options.baseline), _has_baseline(options))


def refuse_named_adapters(load: Mapping[str, Any]) -> None:
    """Refuse named adapters, which are separate from the weights: PyTorch evaluates a checkpoint with merged adapters.

    Raises:
        UsageError: an adapter has a name.
    """
    for adapter in map(named_adapter, load.get("adapter", ())):
        if adapter.name is not None:
            raise UsageError(
                f"{adapter.words}: an adapter with a name is selected at run time, and PyTorch evaluates a checkpoint "
                "with adapters that are merged into its weights",
                hint=f"Omit the name: {opt.adapter} {adapter.folder}",
            )


def _has_baseline(options: EvaluationOptions) -> bool | None:
    """Return True if a baseline is requested, False for ``none``; ``None``: a baseline is used if known."""
    return None if options.baseline is None else options.baseline != NO_BASELINE


def refuse_missing_evaluations(options: EvaluationOptions) -> None:
    """Refuse a missing data set or baseline before the build runs.

    Raises:
        UsageError: the data set or baseline does not exist.
    """
    find_source(options.dataset, "eval.dataset")
    named_baseline(options.baseline)


def refuse_unfit_limits(options: EvaluationOptions, task: str | None, *, is_section: bool = True) -> None:
    """Refuse metrics and limits that the task lacks, and limits on drops without a baseline.

    Args:
        options: The ``eval`` section of a config, or the options of a command.
        task: The task of the model, if stated.
        is_section: True if messages name keys of the section.

    Raises:
        UsageError: a metric or limit does not apply; names the option.
    """
    from winml.modelkit.evaluate.evaluated_models import task_name
    from winml.modelkit.evaluate.evaluation import check_limits, check_unknown_task, refuse_limits_without_baseline
    from winml.modelkit.evaluate.tasks.table import task_definition

    with spell_options(_SECTION_KEYS if is_section else {}):
        if options.baseline == NO_BASELINE:
            refuse_limits_without_baseline(options, None)
        if (stated_task := options.task or task) is not None:
            check_limits(task_definition(task_name(stated_task)), options)
        else:
            check_unknown_task(options)


_SECTION_KEYS = {"metric": "eval.metrics"} | {
    name: f"eval.{name}"
    for name in ("min", "max", "max_drop", "baseline", "dataset", "columns", "split", "samples", "task")
}
"""Option of the command → key of the section."""


def evaluate_build(
    model: Path, options: EvaluationOptions, request: ModelRequest | None, on_step: OnStep | None = None
) -> Evaluation:
    """Evaluate the model of a build.

    Args:
        model: Its ONNX file, with config and processors in the same folder.
        options: The ``eval`` section.
        request: The checkpoint that it was built from, the default baseline; None for a build of an ONNX file.
        on_step: Called when a step starts and when it ends.

    Raises:
        UsageError: the task has no evaluation, a column is missing, or labels are not those of the model.
        InputError: a file is missing or damaged.
        StageError: a model cannot be loaded, or cannot run a sample.
    """
    from winml.modelkit.evaluate.evaluated_models import Subject
    from winml.modelkit.evaluate.evaluation import evaluate
    from winml.modelkit.ort.opened_model import RunOptions

    baseline = named_baseline(options.baseline)
    if baseline is None and request is not None:
        # Only load options: the samples determine the sizes.
        load = {option.name: getattr(request, option.name) for option in declared_options()}
        baseline = ModelRequest(model=request.model, **load)
    subject = Subject(model, RunOptions(model.name), baseline, _has_baseline(options))
    with spell_options(_SECTION_KEYS):
        return evaluate(subject, options, on_step=on_step)
