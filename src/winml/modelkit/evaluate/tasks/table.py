"""Which tasks can be judged? Task → definition."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

from winml.modelkit.errors import TaskError, UsageError
from winml.modelkit.evaluate.data_sets import ROLES
from winml.modelkit.evaluate.media import install_hint
from winml.modelkit.evaluate.metrics import Metric
from winml.modelkit.evaluate.tasks.classes import CLASSIFICATION_TASKS, SPEECH_RECOGNITION
from winml.modelkit.evaluate.tasks.images import IMAGE_SEGMENTATION, OBJECT_DETECTION
from winml.modelkit.evaluate.tasks.task import TaskDefinition
from winml.modelkit.evaluate.tasks.texts import (
    FEATURE_EXTRACTION,
    FILL_MASK,
    QUESTION_ANSWERING,
    TEXT_GENERATION,
    TOKEN_CLASSIFICATION,
)
from winml.modelkit.options import nearest
from winml.modelkit.registries import Registry

__all__ = ["TASK_DEFINITIONS", "chosen_metrics", "refuse_missing_libraries", "task_definition"]

_BUILT_IN = {
    task.name: task
    for task in (
        *CLASSIFICATION_TASKS,
        TOKEN_CLASSIFICATION,
        QUESTION_ANSWERING,
        FILL_MASK,
        FEATURE_EXTRACTION,
        IMAGE_SEGMENTATION,
        OBJECT_DETECTION,
        SPEECH_RECOGNITION,
        TEXT_GENERATION,
    )
}


def _problem_of(name: str, task: TaskDefinition) -> str:
    """Return why a task of a plug-in cannot be judged; empty where it can."""
    if task.name != name:
        return f"it calls itself {task.name}"
    unknown = [role for role in (*task.roles, *task.optional_roles) if role not in ROLES]
    return f"it reads {', '.join(unknown)} of a sample; roles are {', '.join(ROLES)}" if unknown else ""


TASK_DEFINITIONS: Registry[TaskDefinition] = Registry(
    "tasks",
    "task",
    _BUILT_IN,
    lambda: TaskDefinition,
    _problem_of,
)
"""Every task that can be judged, by its name in transformers; plug-ins may add names of their own."""


def task_definition(name: str) -> TaskDefinition:
    """Return the definition of a task.

    Raises:
        TaskError: it cannot be judged; lists those that can.
    """
    if name in TASK_DEFINITIONS:
        return TASK_DEFINITIONS[name]
    raise TaskError(
        f"task {name}: there is no way to judge it yet",
        hint=f"Tasks that can be judged: {', '.join(TASK_DEFINITIONS)}; give one with --task if the model serves it.",
        candidates=tuple(TASK_DEFINITIONS),
    )


def chosen_metrics(task: TaskDefinition, names: tuple[str, ...], option: str = "--metric") -> tuple[Metric, ...]:
    """Return metrics of a task by name, in the order of the task; all of them where none is named.

    Raises:
        UsageError: one is not of the task; lists those that are.
    """
    for name in names:
        if name not in task.metric_names:
            guess = nearest(name, task.metric_names)
            raise UsageError(
                f"{option} {name}: is not a metric of {task.name}",
                hint=f"{f'Did you mean {guess}? ' if guess else ''}Its metrics: {', '.join(task.metric_names)}.",
            )
    return tuple(metric for metric in task.metrics if not names or metric.name in names)


def refuse_missing_libraries(metrics: Iterable[Metric]) -> None:
    """Refuse metrics whose library is not installed, before any sample is run.

    Raises:
        UsageError: names the library.
    """
    for metric in metrics:
        if metric.library and importlib.util.find_spec(metric.library) is None:
            raise UsageError(
                f"the metric {metric.name} needs {metric.library}, which is not installed", hint=install_hint()
            )
