"""Registry of the tasks that can be evaluated; defines classification and speech recognition."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from winml.modelkit.errors import TaskError, UsageError, opt, spell
from winml.modelkit.evaluate.labels import LabelMap, label_names, match_labels, model_labels
from winml.modelkit.evaluate.metrics import CHARACTER_ERROR_RATE, CLASS_METRICS, WORD_ERROR_RATE, Metric
from winml.modelkit.evaluate.tasks.images import IMAGE_SEGMENTATION, OBJECT_DETECTION
from winml.modelkit.evaluate.tasks.similarity import FEATURE_EXTRACTION
from winml.modelkit.evaluate.tasks.task import (
    Evaluator,
    EvaluatorContext,
    Outputs,
    Sample,
    TaskDefinition,
    named_output,
)
from winml.modelkit.evaluate.tasks.texts import FILL_MASK, QUESTION_ANSWERING, TEXT_GENERATION, TOKEN_CLASSIFICATION
from winml.modelkit.options import nearest
from winml.modelkit.registries import Registry
from winml.modelkit.samples.columns import ROLES
from winml.modelkit.samples.media import install_hint
from winml.modelkit.samples.preprocessing import Batch
from winml.modelkit.samples.processors import tokenizer_call


@dataclass(frozen=True)
class _ClassEvaluator(Evaluator):
    """Evaluator of the class with the largest score."""

    labels: LabelMap
    notes: tuple[str, ...] = ()

    @property
    def classes(self) -> tuple[str, ...]:
        return self.labels.model

    def reference(self, sample: Sample) -> int:
        return self.labels.number(sample["label"])

    def words(self, value: int) -> str:
        return self.labels.model[value]

    def row_predictions(self, outputs: Outputs, batch: Batch) -> list[int]:  # noqa: ARG002  # scores say it all
        classes: list[int] = np.argmax(named_output(outputs, "logits"), axis=-1).tolist()
        return classes


def _class_evaluator(context: EvaluatorContext) -> _ClassEvaluator:
    problem = getattr(context.config, "problem_type", None)
    model = model_labels(context.config)
    if problem in {"regression", "multi_label_classification"} or len(model) == 1:
        problem = f"problem_type {problem}" if problem else "one label only"
        raise UsageError(
            f"the config states {problem}: the model does not predict exactly one class",
            hint=f"Classification tasks, such as {opt.task} text-classification, require a model that predicts one "
            "class.",
        )
    column = context.columns["label"]
    names = label_names(context.data_set.features[column])
    labels = match_labels(model, names, context.values("label"), column)
    return _ClassEvaluator(labels, labels.notes)


_AGREEMENT = "equal classes"

_CLASSIFICATION_TASKS = (
    TaskDefinition(
        "text-classification",
        ("text", "label"),
        CLASS_METRICS,
        _class_evaluator,
        _AGREEMENT,
        optional_roles=("text_pair",),
    ),
    TaskDefinition("image-classification", ("image", "label"), CLASS_METRICS, _class_evaluator, _AGREEMENT),
    # Like the pipeline: shorter recordings in a batch would be padded.
    TaskDefinition(
        "audio-classification", ("audio", "label"), CLASS_METRICS, _class_evaluator, _AGREEMENT, batch_size=1
    ),
)


@dataclass(frozen=True)
class _SpeechEvaluator(Evaluator):
    """Evaluator of the text decoded from the likeliest token of each frame."""

    tokenizer: Any
    notes: tuple[str, ...] = ("Texts are compared exactly: differences in case and punctuation count as errors.",)

    def reference(self, sample: Sample) -> str:
        return str(sample["reference"])

    def row_predictions(self, outputs: Outputs, batch: Batch) -> list[str]:  # noqa: ARG002  # scores say it all
        tokens = np.argmax(named_output(outputs, "logits"), axis=-1)
        # Frames are decoded in Python, where numpy integers are slow.
        with tokenizer_call(self.tokenizer):
            return [self.tokenizer.decode(row, skip_special_tokens=False) for row in tokens.tolist()]


SPEECH_RECOGNITION = TaskDefinition(
    "automatic-speech-recognition",
    ("audio", "reference"),
    (WORD_ERROR_RATE, CHARACTER_ERROR_RATE),
    lambda context: _SpeechEvaluator(context.processor("tokenizer")),
    "equal texts",
    # Like the pipeline: the padding of a shorter recording would be decoded too.
    batch_size=1,
)


_BUILT_IN = {
    task.name: task
    for task in (
        *_CLASSIFICATION_TASKS,
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


def _task_problem(name: str, task: TaskDefinition) -> str:
    """Reason why a task of a plug-in is invalid; empty if valid."""
    if task.name != name:
        return f"it calls itself {task.name}"
    unknown = [role for role in (*task.roles, *task.optional_roles) if role not in ROLES]
    return f"it reads {', '.join(unknown)} of a sample; roles are {', '.join(ROLES)}" if unknown else ""


TASK_DEFINITIONS: Registry[TaskDefinition] = Registry("tasks", "task", _BUILT_IN, lambda: TaskDefinition, _task_problem)
"""Name in transformers → definition of the task; plug-ins may add other names."""


def task_definition(name: str) -> TaskDefinition:
    """Return the definition of a task.

    Raises:
        TaskError: the task is not supported; lists the supported tasks.
    """
    if name in TASK_DEFINITIONS:
        return TASK_DEFINITIONS[name]
    raise TaskError(
        f"task {name}: evaluation is not supported",
        hint=f"Supported tasks: {', '.join(TASK_DEFINITIONS)}. Set one with {opt.task} if the model supports it.",
        candidates=tuple(TASK_DEFINITIONS),
    )


def chosen_metrics(task: TaskDefinition, names: tuple[str, ...], option: str = "metric") -> tuple[Metric, ...]:
    """Return metrics of a task by name, in the order of the task; all metrics without names.

    Raises:
        UsageError: a metric does not belong to the task; lists its metrics.
    """
    _refuse_unknown_names(names, task.metric_names, option, f"not a metric of {task.name}", "Its metrics")
    return tuple(metric for metric in task.metrics if not names or metric.name in names)


def refuse_unknown_metrics(names: Iterable[str], option: str, *further: str) -> None:
    """Refuse metrics that no task has, while the task is unknown.

    Args:
        names: Names of metrics.
        option: The option that states them.
        further: Additional valid names of the option.

    Raises:
        UsageError: lists the metrics of all tasks.
    """
    valid = {metric for task in TASK_DEFINITIONS.values() for metric in task.metric_names}
    _refuse_unknown_names(names, sorted({*valid, *further}), option, "not a metric of any task", "Metrics")


def _refuse_unknown_names(names: Iterable[str], valid: Sequence[str], option: str, problem: str, heading: str) -> None:
    """Refuse names outside the valid names.

    Raises:
        UsageError: names the nearest valid name.
    """
    for name in names:
        if name not in valid:
            guess = nearest(name, valid)
            raise UsageError(
                f"{spell(option)} {name}: {problem}",
                hint=f"{f'Did you mean {guess}? ' if guess else ''}{heading}: {', '.join(valid)}.",
            )


def refuse_missing_libraries(metrics: Iterable[Metric]) -> None:
    """Refuse metrics whose library is not installed, before any sample is run.

    Raises:
        UsageError: names the library.
    """
    for metric in metrics:
        if metric.library and importlib.util.find_spec(metric.library) is None:
            raise UsageError(
                f"the metric {metric.name} requires {metric.library}, which is not installed", hint=install_hint()
            )
