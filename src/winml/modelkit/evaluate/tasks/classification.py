"""One class a sample: of a text, of a pair of texts, of an image, of a recording."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from winml.modelkit.errors import UsageError
from winml.modelkit.evaluate.labels import LabelMap, label_names, match_labels, model_labels
from winml.modelkit.evaluate.metrics.classes import CLASS_METRICS
from winml.modelkit.evaluate.preprocessing import Batch
from winml.modelkit.evaluate.tasks.task import Judge, JudgeContext, Outputs, Sample, TaskDefinition, named_output

__all__ = ["CLASSIFICATION_TASKS"]


@dataclass(frozen=True)
class _ClassJudge(Judge):
    """A prediction is the number of the class of the largest score."""

    labels: LabelMap
    notes: tuple[str, ...] = ()

    def reference(self, sample: Sample) -> int:
        return self.labels.number(sample["label"])

    def answers(self, outputs: Outputs, batch: Batch) -> list[int]:  # noqa: ARG002  # scores say it all
        classes: list[int] = np.argmax(named_output(outputs, "logits"), axis=-1).tolist()
        return classes


def _judge(context: JudgeContext) -> _ClassJudge:
    problem = getattr(context.config, "problem_type", None)
    model = model_labels(context.config)
    if problem in {"regression", "multi_label_classification"} or len(model) == 1:
        what = f"problem_type {problem}" if problem else "one label only"
        raise UsageError(
            f"the config says {what}: the model does not choose one class of several",
            hint="Only models that choose one class are judged by --task text-classification and its like.",
        )
    column = context.columns["label"]
    names = label_names(context.data_set.features[column])
    labels = match_labels(model, names, context.values("label"), column)
    return _ClassJudge(labels, labels.notes)


_AGREEMENT = "equal classes"

CLASSIFICATION_TASKS = (
    TaskDefinition(
        "text-classification", ("text", "label"), CLASS_METRICS, _judge, _AGREEMENT, optional_roles=("text_pair",)
    ),
    TaskDefinition("image-classification", ("image", "label"), CLASS_METRICS, _judge, _AGREEMENT),
    # As the pipeline: recordings of other lengths would be filled up to one.
    TaskDefinition("audio-classification", ("audio", "label"), CLASS_METRICS, _judge, _AGREEMENT, batch_size=1),
)
