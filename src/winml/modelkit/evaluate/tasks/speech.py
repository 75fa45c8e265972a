"""What was said? The text of a recording, of models with one answer for each frame (CTC)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from winml.modelkit.evaluate.metrics.texts import CHARACTER_ERROR_RATE, WORD_ERROR_RATE
from winml.modelkit.evaluate.preprocessing import Batch
from winml.modelkit.evaluate.tasks.task import Judge, JudgeContext, Outputs, Sample, TaskDefinition, named_output
from winml.modelkit.evaluate.tokenizer_calls import tokenizer_call

__all__ = ["SPEECH_RECOGNITION"]


@dataclass(frozen=True)
class _SpeechJudge(Judge):
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


def _judge(context: JudgeContext) -> _SpeechJudge:
    return _SpeechJudge(context.processor("tokenizer"))


SPEECH_RECOGNITION = TaskDefinition(
    "automatic-speech-recognition",
    ("audio", "reference"),
    (WORD_ERROR_RATE, CHARACTER_ERROR_RATE),
    _judge,
    "equal texts",
    # As the pipeline: what fills a shorter recording up would be decoded as well.
    batch_size=1,
)
