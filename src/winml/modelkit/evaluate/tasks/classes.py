"""One class a sample, and the text of a recording by one answer for each frame (CTC)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from winml.modelkit.errors import UsageError
from winml.modelkit.evaluate.labels import LabelMap, label_names, match_labels, model_labels
from winml.modelkit.evaluate.metrics import CHARACTER_ERROR_RATE, CLASS_METRICS, WORD_ERROR_RATE
from winml.modelkit.evaluate.preprocessing import Batch
from winml.modelkit.evaluate.processors import tokenizer_call
from winml.modelkit.evaluate.tasks.task import (
    Evaluator,
    EvaluatorContext,
    Outputs,
    Sample,
    TaskDefinition,
    named_output,
)

__all__ = [
    "CLASSIFICATION_TASKS",
    "SPEECH_RECOGNITION",
]


# --- One class a sample: of a text, of a pair of texts, of an image, of a recording.


@dataclass(frozen=True)
class _ClassEvaluator(Evaluator):
    """A prediction is the number of the class of the largest score."""

    labels: LabelMap
    notes: tuple[str, ...] = ()

    def reference(self, sample: Sample) -> int:
        return self.labels.number(sample["label"])

    def answers(self, outputs: Outputs, batch: Batch) -> list[int]:  # noqa: ARG002  # scores say it all
        classes: list[int] = np.argmax(named_output(outputs, "logits"), axis=-1).tolist()
        return classes


def _class_evaluator(context: EvaluatorContext) -> _ClassEvaluator:
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
    return _ClassEvaluator(labels, labels.notes)


_AGREEMENT = "equal classes"

CLASSIFICATION_TASKS = (
    TaskDefinition(
        "text-classification",
        ("text", "label"),
        CLASS_METRICS,
        _class_evaluator,
        _AGREEMENT,
        optional_roles=("text_pair",),
    ),
    TaskDefinition("image-classification", ("image", "label"), CLASS_METRICS, _class_evaluator, _AGREEMENT),
    # As the pipeline: recordings of other lengths would be filled up to one.
    TaskDefinition(
        "audio-classification", ("audio", "label"), CLASS_METRICS, _class_evaluator, _AGREEMENT, batch_size=1
    ),
)


# --- What was said? The text of a recording, of models with one answer for each frame (CTC).


@dataclass(frozen=True)
class _SpeechEvaluator(Evaluator):
    """A prediction is the text of the likeliest token of each frame."""

    tokenizer: Any
    notes: tuple[str, ...] = (
        "Texts are compared as they are: another case and other punctuation than those of the references are errors.",
    )

    def reference(self, sample: Sample) -> str:
        return str(sample["reference"])

    def answers(self, outputs: Outputs, batch: Batch) -> list[str]:  # noqa: ARG002  # scores say it all
        tokens = np.argmax(named_output(outputs, "logits"), axis=-1)
        # Frames are decoded in Python, where numpy numbers are slow.
        with tokenizer_call(self.tokenizer):
            return [self.tokenizer.decode(row, skip_special_tokens=False) for row in tokens.tolist()]


def _speech_evaluator(context: EvaluatorContext) -> _SpeechEvaluator:
    return _SpeechEvaluator(context.processor("tokenizer"))


SPEECH_RECOGNITION = TaskDefinition(
    "automatic-speech-recognition",
    ("audio", "reference"),
    (WORD_ERROR_RATE, CHARACTER_ERROR_RATE),
    _speech_evaluator,
    "equal texts",
    # As the pipeline: what fills a shorter recording up would be decoded as well.
    batch_size=1,
)
