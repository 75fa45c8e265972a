"""User inputs of each task, and the kind of its result.

Names of texts, images and audio, as in ``winml run``; the tokenizer or processor next to the model converts them to the
tensors of a graph. Imports no model library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from winml.modelkit.models.checkpoints.task import TASK_VARIANTS, canonical_task, canonical_word
from winml.modelkit.samples.processors import kinds_for

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
"""Suffixes of files that an image is saved to."""
AUDIO_SUFFIX = ".wav"
"""Suffix of a file that audio is saved to."""
InputKind = Literal["text", "image", "audio"]
Saved = Literal["image", "audio", "arrays"]
"""Content written by ``--save``: an image, audio, or the arrays of the result."""


@dataclass(frozen=True)
class TaskInput:
    """One input of a task."""

    name: str
    kind: InputKind
    meaning: str
    example: str
    """A value for the example command."""
    is_required: bool = True
    is_repeatable: bool = False
    is_in_example: bool = False
    """True if the example command has it although it is optional: one of several inputs is required."""


@dataclass(frozen=True)
class RunTask:
    """Inputs of a task, and the savable content of its result."""

    inputs: tuple[TaskInput, ...]
    saved: Saved | None = None


_TEXT = TaskInput("text", "text", "the text", "The house is old.")
_IMAGE = TaskInput("image", "image", "the image", "photo.jpg")
_AUDIO = TaskInput("audio", "audio", "the audio file", "speech.wav")

RUN_TASKS: Mapping[str, RunTask] = {
    "text-classification": RunTask((
        _TEXT,
        TaskInput("text_pair", "text", "the second text, for models of text pairs", "It is new.", is_required=False),
        TaskInput("label", "text", "a candidate label, for models of natural language inference", "animals",
                  is_required=False, is_repeatable=True),
    )),
    "token-classification": RunTask((_TEXT,)),
    "question-answering": RunTask((
        TaskInput("question", "text", "the question", "What is old?"),
        TaskInput("context", "text", "the text that contains the answer", "The house is old."),
    )),
    "document-question-answering": RunTask((
        TaskInput("question", "text", "the question", "What is the total?"),
        TaskInput("word_boxes", "text", 'the words of the page as JSON, each with left, top, right and bottom in '
                  'thousandths of its size: [["Total", [10, 20, 90, 40]], …]',
                  '[["Total", [10, 20, 90, 40]], ["42", [100, 20, 160, 40]]]', is_required=False, is_in_example=True),
        TaskInput("image", "image", "the page, whose words Tesseract reads if there are no word_boxes", "page.png",
                  is_required=False),
    )),
    "fill-mask": RunTask((
        TaskInput("text", "text", "the text with the mask token of the tokenizer", "The [MASK] is old."),
    )),
    "feature-extraction": RunTask(
        (TaskInput("text", "text", "one text: its embedding; several: the similarity of each to the first",
                   "The house is old.", is_repeatable=True),),
        "arrays",
    ),
    "image-feature-extraction": RunTask(
        (TaskInput("image", "image", "one image: its embedding; several: the similarity of each to the first",
                   "photo.jpg", is_repeatable=True),),
        "arrays",
    ),
    "image-classification": RunTask((_IMAGE,)),
    "object-detection": RunTask((_IMAGE,), "image"),
    "image-segmentation": RunTask((_IMAGE,), "image"),
    "mask-generation": RunTask((
        _IMAGE,
        TaskInput("points", "text", "points of objects as JSON, in pixels from left and top: [[120, 80], …]; without "
                  "them, the objects at a grid of points", "[[120, 80]]", is_required=False),
    ), "image"),
    "depth-estimation": RunTask((_IMAGE,), "image"),
    "image-to-image": RunTask((_IMAGE,), "image"),
    "zero-shot-image-classification": RunTask((
        _IMAGE,
        TaskInput("label", "text", "a candidate label, such as: a photo of a cat", "a photo of a cat",
                  is_repeatable=True),
    )),
    "zero-shot-object-detection": RunTask((
        _IMAGE,
        TaskInput("label", "text", "an object to find", "a cat", is_repeatable=True),
    ), "image"),
    "video-classification": RunTask((
        TaskInput("image", "image", "the frames of the video, in order", "frame.jpg", is_repeatable=True),
    )),
    "automatic-speech-recognition": RunTask((_AUDIO,)),
    "audio-classification": RunTask((_AUDIO,)),
    "zero-shot-audio-classification": RunTask((
        _AUDIO,
        TaskInput("label", "text", "a candidate label, such as: dog barking", "dog barking", is_repeatable=True),
    )),
    "text2text-generation": RunTask((_TEXT,)),
    "text-to-audio": RunTask((_TEXT,), "audio"),
}  # fmt: skip
"""Task → its inputs. Other tasks are run on tensors by name."""
LOADED_TASKS: Mapping[str, str] = {"zero-shot-audio-classification": "feature-extraction"}
"""Task → task of the class of transformers that is loaded for it, if another."""
_OF_SPEECH = frozenset({"input_ids", "attention_mask"})
"""Inputs of a model that makes audio in one run."""
_AUDIO_FEATURES = RunTask(
    (TaskInput("audio", "audio", "one audio file: its embedding; several: the similarity of each to the first",
               "speech.wav", is_repeatable=True),),
    "arrays",
)  # fmt: skip
"""``feature-extraction`` of a model of audio."""


def run_task(name: str, tensors: tuple[str, ...]) -> tuple[str, RunTask | None]:
    """Return the canonical task of a name and its inputs; None if the model is run on tensors only.

    Args:
        name: Task, alias or variant.
        tensors: Inputs of the graph. For ``feature-extraction``, they distinguish models of texts, images and audio.

    Raises:
        TaskError: the task is unknown.

    >>> run_task("ner", ())[0]
    'token-classification'
    >>> [item.name for item in run_task("feature-extraction", ("input_values",))[1].inputs]
    ['audio']
    """
    canonical = canonical_word(name)
    task = canonical if canonical in TASK_VARIANTS or canonical in RUN_TASKS else canonical_task(name)
    task = {"summarization": "text2text-generation", "translation": "text2text-generation"}.get(task, task)
    if task == "text-to-audio" and not _OF_SPEECH.issuperset(tensors):
        return task, None  # a loop makes the audio, or a spectrogram
    if task != "feature-extraction":
        return task, RUN_TASKS.get(task)
    if "decoder_input_ids" in tensors:
        return task, None
    match kinds_for(tensors):
        case ("tokenizer",):
            return task, RUN_TASKS[task]
        case ("feature extractor",):
            return task, _AUDIO_FEATURES
        case ("tokenizer", "feature extractor"):
            task = "zero-shot-audio-classification"
            return task, RUN_TASKS[task]
        case (*_, "image processor"):
            task = "zero-shot-image-classification" if "input_ids" in tensors else "image-feature-extraction"
            return task, RUN_TASKS[task]
        case _:
            return task, None
