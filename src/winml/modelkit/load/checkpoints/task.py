"""Decides the task of a model and the class that serves it.

The task decides the model class; both come from transformers' own auto-model tables. The task is the user's, else that
of the architecture the config names, else that of the model type's base model; which rule decided is said in words.
Loads nothing and imports no model code: the tables hold names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from winml.modelkit.errors import TaskError
from winml.modelkit.options import nearest

__all__ = [
    "TASKS",
    "TASK_ALIASES",
    "TaskDecision",
    "canonical_task",
    "inference_class",
    "inference_classes",
    "resolve_custom_task",
    "resolve_task",
    "tasks_for",
]

TASKS: Mapping[str, tuple[str, ...]] = {
    "text2text-generation": ("SEQ_TO_SEQ_CAUSAL_LM",),
    "fill-mask": ("MASKED_LM",),
    "text-classification": ("SEQUENCE_CLASSIFICATION",),
    "token-classification": ("TOKEN_CLASSIFICATION",),
    "question-answering": ("QUESTION_ANSWERING",),
    "multiple-choice": ("MULTIPLE_CHOICE",),
    "next-sentence-prediction": ("NEXT_SENTENCE_PREDICTION",),
    "text-generation": ("CAUSAL_LM",),
    "table-question-answering": ("TABLE_QUESTION_ANSWERING",),
    "document-question-answering": ("DOCUMENT_QUESTION_ANSWERING",),
    "visual-question-answering": ("VISUAL_QUESTION_ANSWERING",),
    "image-classification": ("IMAGE_CLASSIFICATION",),
    "zero-shot-image-classification": ("ZERO_SHOT_IMAGE_CLASSIFICATION",),
    "image-segmentation": ("IMAGE_SEGMENTATION", "SEMANTIC_SEGMENTATION", "UNIVERSAL_SEGMENTATION",
                           "INSTANCE_SEGMENTATION"),
    "object-detection": ("OBJECT_DETECTION",),
    "zero-shot-object-detection": ("ZERO_SHOT_OBJECT_DETECTION",),
    "depth-estimation": ("DEPTH_ESTIMATION",),
    "image-to-image": ("IMAGE_TO_IMAGE",),
    "image-to-text": ("VISION_2_SEQ",),
    "image-text-to-text": ("IMAGE_TEXT_TO_TEXT",),
    "video-classification": ("VIDEO_CLASSIFICATION",),
    "mask-generation": ("MASK_GENERATION",),
    "keypoint-detection": ("KEYPOINT_DETECTION",),
    "keypoint-matching": ("KEYPOINT_MATCHING",),
    "masked-im": ("MASKED_IMAGE_MODELING",),
    "automatic-speech-recognition": ("CTC", "SPEECH_SEQ_2_SEQ"),
    "audio-classification": ("AUDIO_CLASSIFICATION",),
    "audio-frame-classification": ("AUDIO_FRAME_CLASSIFICATION",),
    "audio-xvector": ("AUDIO_XVECTOR",),
    "text-to-audio": ("TEXT_TO_WAVEFORM", "TEXT_TO_SPECTROGRAM"),
    "time-series-forecasting": ("TIME_SERIES_PREDICTION",),
    "feature-extraction": ("", "TEXT_ENCODING", "IMAGE"),
    "backbone": ("BACKBONE",),
    "pretraining": ("PRETRAINING",),
}  # fmt: skip
"""Task → transformers tables ("" is the table of base models).

The order decides between tasks that share one class: what it is mostly used for first, training last.
"""

TASK_ALIASES: Mapping[str, str] = {
    "default": "feature-extraction",
    "sentence-similarity": "feature-extraction",
    "sentence-embedding": "feature-extraction",
    "sentence-transformers": "feature-extraction",
    "embeddings": "feature-extraction",
    "image-feature-extraction": "feature-extraction",
    "masked-lm": "fill-mask",
    "causal-lm": "text-generation",
    "conversational": "text-generation",
    "seq2seq-lm": "text2text-generation",
    "summarization": "text2text-generation",
    "translation": "text2text-generation",
    "sequence-classification": "text-classification",
    "sentiment-analysis": "text-classification",
    "zero-shot-classification": "text-classification",
    "text-ranking": "text-classification",
    "ner": "token-classification",
    "vqa": "visual-question-answering",
    "semantic-segmentation": "image-segmentation",
    "instance-segmentation": "image-segmentation",
    "universal-segmentation": "image-segmentation",
    "vision2seq-lm": "image-to-text",
    "image-captioning": "image-to-text",
    "masked-image-modeling": "masked-im",
    "speech2seq-lm": "automatic-speech-recognition",
    "audio-ctc": "automatic-speech-recognition",
    "asr": "automatic-speech-recognition",
    "text-to-speech": "text-to-audio",
}
"""Other names people and tools use → task."""

_INFERENCE_PREFIX = "WinMLModelFor"

_AUTO_CLASS_PARTS = {
    "": "AutoModel",
    "MASKED_LM": "AutoModelForMaskedLM",
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_TO_SEQ_CAUSAL_LM": "AutoModelForSeq2SeqLM",
    "SPEECH_SEQ_2_SEQ": "AutoModelForSpeechSeq2Seq",
    "VISION_2_SEQ": "AutoModelForVision2Seq",
    "PRETRAINING": "AutoModelForPreTraining",
    "CTC": "AutoModelForCTC",
    "AUDIO_XVECTOR": "AutoModelForAudioXVector",
    "TABLE_QUESTION_ANSWERING": "AutoModelForTableQuestionAnswering",
    "BACKBONE": "AutoBackbone",
}
"""Names of auto classes that do not follow from the table's."""


@dataclass(frozen=True)
class TaskDecision:
    """The task, its class, and why."""

    task: str
    """Canonical name, a key of :data:`TASKS`."""
    rule: str
    """The rule that decided, as a sentence."""
    model_class_name: str
    """Class of the task for this model type."""
    candidates: tuple[str, ...]
    """All tasks the model type has."""


def canonical_task(name: str) -> str:
    """Return the task behind a name or alias, in any case and with ``_`` or spaces for ``-``.

    Raises:
        TaskError: unknown; names the nearest and lists all.
    """
    word = name.strip().lower().replace("_", "-").replace(" ", "-")
    task = TASK_ALIASES.get(word, word)
    if task in TASKS:
        return task
    task_names = tuple(sorted(TASKS))
    guess = nearest(word, [*TASKS, *TASK_ALIASES])
    hint = f"Did you mean {guess!r}? " if guess else ""
    raise TaskError(
        f"--task {name}: unknown task", hint=f"{hint}Tasks: {', '.join(task_names)}.", candidates=task_names
    )


def tasks_for(model_type: str) -> dict[str, tuple[str, ...]]:
    """Return every task of a model type with its classes, in the order of :data:`TASKS`."""
    classes_by_task = {task: tuple(dict.fromkeys(_classes_of_task(task, model_type))) for task in TASKS}
    return {task: classes for task, classes in classes_by_task.items() if classes}


def resolve_task(config: Any, task: str | None = None) -> TaskDecision:
    """Decide task and class of a model whose type transformers knows.

    Args:
        config: The transformers config.
        task: The user's task or alias, or None.

    Raises:
        TaskError: unknown, not offered by the architecture, or nothing decides between several.
    """
    offered = tasks_for(config.model_type)
    architectures = tuple(config.architectures or ())
    if task is not None:
        return _requested_decision(canonical_task(task), task, config.model_type, architectures, offered)
    by_architecture = _decide_by_architecture(architectures, config.model_type, offered)
    return by_architecture or _decide_by_model_type(config.model_type, offered)


def resolve_custom_task(
    references: Mapping[str, str], architectures: tuple[str, ...], task: str | None = None
) -> TaskDecision:
    """Decide task and class of a checkpoint that brings its own code.

    Args:
        references: Auto class → ``module.Class``, as in the config's ``auto_map``.
        architectures: The config's ``architectures``.
        task: The user's task or alias, or None.

    Returns:
        A decision whose class name is the reference.

    Raises:
        TaskError: unknown, not among the references, or nothing decides between several.
    """
    offered = {name: tuple(references[auto] for auto in _auto_classes(name) if auto in references) for name in TASKS}
    offered = {name: classes for name, classes in offered.items() if classes}
    if task is not None:
        return _requested_decision(canonical_task(task), task, "these custom", (), offered)
    for reference in references.values():
        name = reference.rpartition(".")[2]
        tasks = [name for name, classes in offered.items() if reference in classes]
        if name in architectures and tasks:
            return TaskDecision(tasks[0], f"from the architecture {name} in the config", reference, tuple(offered))
    if len(offered) == 1 or "feature-extraction" in offered:
        name = "feature-extraction" if "feature-extraction" in offered else next(iter(offered))
        return TaskDecision(name, "from the auto_map of the config", offered[name][0], tuple(offered))
    raise TaskError(
        f"the config's own code serves {len(offered) or 'no known'} tasks and no architecture says which",
        hint=f"Choose with --task: {', '.join(offered)}." if offered else "Give the model as file.py:factory.",
        candidates=tuple(offered),
    )


def inference_class(task: str, class_name: str = "", model_type: str = "") -> str:
    """Return the class that runs an exported model of a task: transformers' auto class, said of ours.

    Args:
        task: Canonical task.
        class_name: Class of the model; tells which of several auto classes of the task it is.
        model_type: Its model type.

    >>> inference_class("fill-mask"), inference_class("feature-extraction")
    ('WinMLModelForMaskedLM', 'WinMLModelForFeatureExtraction')
    """
    autos = dict(zip(TASKS[task], _auto_classes(task), strict=True))
    part = next((part for part in autos if class_name in _table_entries(part, model_type)), TASKS[task][0])
    auto = autos[part]
    return f"{_INFERENCE_PREFIX}{'FeatureExtraction' if task == 'feature-extraction' else _after_for(auto)}"


def inference_classes() -> dict[str, str]:
    """Return every class that runs an exported model, and the task it is for.

    >>> inference_classes()["WinMLModelForSequenceClassification"]
    'text-classification'
    """
    names_by_task = {"feature-extraction": [f"{_INFERENCE_PREFIX}FeatureExtraction"]}
    for task in TASKS:
        names_by_task.setdefault(task, [f"{_INFERENCE_PREFIX}{_after_for(auto)}" for auto in _auto_classes(task)])
    return {name: task for task, names in names_by_task.items() for name in names}


def _after_for(auto_class: str) -> str:
    return auto_class.removeprefix("Auto").removeprefix("ModelFor")


def _requested_decision(
    task: str, name: str, model_type: str, architectures: tuple[str, ...], offered: Mapping[str, tuple[str, ...]]
) -> TaskDecision:
    if task not in offered:
        raise TaskError(
            f"--task {name}: {model_type} models have no {task} task",
            hint=f"This architecture has: {', '.join(offered) or 'none'}.",
            candidates=tuple(offered),
        )
    alias = "" if name == task else f" ({name!r} is {task!r})"
    # The checkpoint's own class first: a task may have several, and its weights fit that one.
    own = [name for name in architectures if name in offered[task]]
    return TaskDecision(task, f"given by --task{alias}", (own or offered[task])[0], tuple(offered))


def _decide_by_architecture(
    architectures: tuple[str, ...], model_type: str, offered: Mapping[str, tuple[str, ...]]
) -> TaskDecision | None:
    """Return the decision of the config's ``architectures``, or None if it names none."""
    if not architectures:
        return None
    class_tasks = {name: [task for task, classes in offered.items() if name in classes] for name in architectures}
    class_tasks = {name: tasks for name, tasks in class_tasks.items() if tasks}
    if len(class_tasks) > 1:
        candidates = tuple(dict.fromkeys(task for tasks in class_tasks.values() for task in tasks))
        raise TaskError(
            f"the config names {len(class_tasks)} architectures ({', '.join(class_tasks)}), which do different things",
            hint=f"Choose with --task: {', '.join(candidates)}.",
            candidates=candidates,
        )
    for name, tasks in class_tasks.items():
        further_tasks = [task for task in tasks[1:] if task != "pretraining"]
        also = f"; it also serves {', '.join(further_tasks)}" if further_tasks else ""
        return TaskDecision(tasks[0], f"from the architecture {name} in the config{also}", name, tuple(offered))
    return _decide_outside_the_tables(architectures, model_type, offered)


def _decide_outside_the_tables(
    architectures: tuple[str, ...], model_type: str, offered: Mapping[str, tuple[str, ...]]
) -> TaskDecision:
    """Decide for a class that transformers has but lists under no task."""
    import transformers

    for name in architectures:
        if isinstance(getattr(transformers, name, None), type):
            rule = f"from the architecture {name} in the config, which no auto-model table lists"
            return TaskDecision("feature-extraction", rule, name, tuple(offered))
    raise TaskError(
        f"the architecture {architectures[0]!r} in the config is unknown to transformers {transformers.__version__}",
        hint=f"Choose with --task what the weights are for; {model_type} models have: {', '.join(offered) or 'none'}.",
        candidates=tuple(offered),
    )


def _decide_by_model_type(model_type: str, offered: Mapping[str, tuple[str, ...]]) -> TaskDecision:
    """Return the base model's task, or the only one there is."""
    rule = f"from the model type {model_type!r}: the config names no architecture"
    if "feature-extraction" in offered:
        return TaskDecision(
            "feature-extraction", f"{rule}, so the base model", offered["feature-extraction"][0], tuple(offered)
        )
    if len(offered) == 1:
        task, classes = next(iter(offered.items()))
        return TaskDecision(task, f"{rule}, and this is its only task", classes[0], tuple(offered))
    raise TaskError(
        f"the config names no architecture, and {model_type} models have {len(offered) or 'no'} tasks",
        hint=f"Choose with --task: {', '.join(offered)}." if offered else "Give the model as file.py:factory.",
        candidates=tuple(offered),
    )


def _auto_classes(task: str) -> Iterator[str]:
    """Yield the auto classes under which custom code registers models of a task."""
    for part in TASKS[task]:
        words = part.replace("_", " ").title().replace(" ", "")
        yield _AUTO_CLASS_PARTS.get(part) or f"AutoModelFor{words}"


def _classes_of_task(task: str, model_type: str) -> Iterator[str]:
    for part in TASKS[task]:
        yield from _table_entries(part, model_type)


def _table_entries(part: str, model_type: str) -> tuple[str, ...]:
    from transformers.models.auto import modeling_auto

    name = f"MODEL_FOR_{part}_MAPPING_NAMES" if part else "MODEL_MAPPING_NAMES"
    # A table may be new or gone in the installed transformers: then the task has one way less.
    entry = getattr(modeling_auto, name, {}).get(model_type, ())
    return (entry,) if isinstance(entry, str) else tuple(entry)
