"""Decision on the task of a model and the class that serves it.

The task decides the model class; both come from transformers' own auto-model tables. Sources of the task, in this
order: the user, the architecture in the config, the model card, the base model of the model type; the deciding rule is
reported as a sentence. Loads nothing and imports no model code: the tables hold names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from winml.modelkit.errors import TaskError, UsageError, opt
from winml.modelkit.options import suggest

WITH_PAST = "-with-past"
"""Specified by optimum: suffix of a task with a cache in its graph."""

_Classes = Mapping[str, tuple[str, ...]]
"""Task → names of its classes."""

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

The order decides between tasks that share one class: the most frequent use first, training last.
"""

TASK_ALIASES: Mapping[str, str] = {
    "default": "feature-extraction",
    "sentence-similarity": "feature-extraction",
    "sentence-embedding": "feature-extraction",
    "sentence-transformers": "feature-extraction",
    "embeddings": "feature-extraction",
    "masked-lm": "fill-mask",
    "causal-lm": "text-generation",
    "conversational": "text-generation",
    f"text-generation{WITH_PAST}": "text-generation",
    "seq2seq-lm": "text2text-generation",
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
"""Alias used by people and tools → task."""

TASK_VARIANTS: Mapping[str, tuple[str, str]] = {
    "image-feature-extraction": ("feature-extraction", "IMAGE"),
    "summarization": ("text2text-generation", "SEQ_TO_SEQ_CAUSAL_LM"),
    "translation": ("text2text-generation", "SEQ_TO_SEQ_CAUSAL_LM"),
}
"""Task of the Hub served by classes of another task → the other task, and the table of the supported models.

A request for such a task gets a class of that table, and keeps its name.
"""

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
"""Names of auto classes that do not follow from the name of the table."""


@dataclass(frozen=True)
class TaskDecision:
    """The task, its class, and the reason."""

    task: str
    """A key of :data:`TASKS` or of :data:`TASK_VARIANTS`."""
    rule: str
    """The deciding rule, as a sentence."""
    model_class_name: str
    """Class of the task for this model type."""
    candidates: tuple[str, ...]
    """All tasks of the model type."""


def canonical_task(name: str) -> str:
    """Return the task behind a name, alias or variant, in any case and with ``_`` or spaces for ``-``.

    Raises:
        TaskError: unknown; names the nearest and lists all.
    """
    task_name = canonical_word(name)
    task = TASK_VARIANTS[task_name][0] if task_name in TASK_VARIANTS else TASK_ALIASES.get(task_name, task_name)
    if task in TASKS:
        return task
    task_names = tuple(sorted({*TASKS, *TASK_VARIANTS}))
    hint = suggest(task_name, [*task_names, *TASK_ALIASES], also=f"Tasks: {', '.join(task_names)}.")
    raise TaskError(f"{opt.task} {name}: unknown task", hint=hint, candidates=task_names)


def canonical_word(name: str) -> str:
    """Return the name of a task in the spelling of the tables."""
    return name.strip().lower().replace("_", "-").replace(" ", "-")


def tasks_for(model_type: str) -> dict[str, tuple[str, ...]]:
    """Return task → classes for a model type, in the order of :data:`TASKS`."""
    classes_by_task = {
        task: tuple(dict.fromkeys(name for part in parts for name in _classes_in_table(part, model_type)))
        for task, parts in TASKS.items()
    }
    return {task: classes for task, classes in classes_by_task.items() if classes}


def tasks_and_variants_for(model_type: str) -> dict[str, tuple[str, ...]]:
    """Return every name that ``--task`` takes for a model type, with its classes; a variant follows its task."""
    by_task = tasks_for(model_type)
    return _add_variants(
        by_task, [name for name, (_, part) in TASK_VARIANTS.items() if _classes_in_table(part, model_type)]
    )


def all_tasks() -> dict[str, tuple[str, ...]]:
    """Return task or variant → auto classes, like :func:`tasks_and_variants_for` for one model type."""
    return _add_variants({task: tuple(_auto_classes(task)) for task in TASKS}, tuple(TASK_VARIANTS))


def _add_variants(by_task: _Classes, variants: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Insert each variant after its task, with the classes of the task."""
    extended: dict[str, tuple[str, ...]] = {}
    for task, classes in by_task.items():
        extended[task] = classes
        extended.update({name: classes for name in variants if TASK_VARIANTS[name][0] == task})
    return extended


def resolve_task(
    config: Any, task: str | None = None, *, model_class: str | None = None, card_task: str | None = None
) -> TaskDecision:
    """Decide task and class of a model of a type in transformers.

    Args:
        config: The transformers config.
        task: The user's task or alias, or None.
        model_class: The user's class, or auto class, or None.
        card_task: Task in the model card; used if the config states no architecture.

    Raises:
        TaskError: unknown, not offered by the architecture, or ambiguous.
        UsageError: the class does not belong to this model type, or does not serve the task.
    """
    by_task = tasks_for(config.model_type)
    architectures = tuple(config.architectures or ())
    if model_class is not None:
        return _decide_by_class(model_class, task, config.model_type, architectures)
    if task is not None:
        return _decide_by_request(task, config.model_type, architectures, tasks_and_variants_for(config.model_type))
    by_architecture = _decide_by_architecture(architectures, config.model_type, by_task)
    return (
        by_architecture
        or _decide_by_card(card_task, config.model_type)
        or _decide_by_model_type(config.model_type, by_task)
    )


def resolve_custom_task(
    references: Mapping[str, str],
    architectures: tuple[str, ...],
    task: str | None = None,
    *,
    model_class: str | None = None,
) -> TaskDecision:
    """Decide task and class of a checkpoint with its own code.

    Args:
        references: Auto class → ``module.Class``, as in the config's ``auto_map``.
        architectures: The config's ``architectures``.
        task: The user's task or alias, or None.
        model_class: The user's class, or auto class, or None.

    Returns:
        A decision with the reference as its class name.

    Raises:
        TaskError: unknown, not among the references, or ambiguous.
        UsageError: the class is not among the references.
    """
    if model_class is not None:
        names = ", ".join(sorted({reference.rpartition(".")[2] for reference in references.values()}))
        references = {
            auto: reference
            for auto, reference in references.items()
            if model_class in (auto, reference.rpartition(".")[2])
        }
        if not references:
            raise UsageError(
                f"{opt.model_class} {model_class}: the code of the checkpoint has no such class",
                hint=f"It has: {names}.",
            )
    by_task = {name: tuple(references[auto] for auto in _auto_classes(name) if auto in references) for name in TASKS}
    by_task = {name: classes for name, classes in by_task.items() if classes}
    if task is not None:
        return _decide_by_request(task, "these custom", (), _add_variants(by_task, tuple(TASK_VARIANTS)))
    for reference in references.values():
        name = reference.rpartition(".")[2]
        tasks = [name for name, classes in by_task.items() if reference in classes]
        if name in architectures and tasks:
            return TaskDecision(tasks[0], f"from the architecture {name} in the config", reference, tuple(by_task))
    if len(by_task) == 1 or "feature-extraction" in by_task:
        name = "feature-extraction" if "feature-extraction" in by_task else next(iter(by_task))
        return TaskDecision(name, "from the auto_map of the config", by_task[name][0], tuple(by_task))
    raise TaskError(
        f"the code of the checkpoint serves {len(by_task) or 'no known'} tasks, and no architecture determines which",
        hint=f"Choose with {opt.task}: {', '.join(by_task)}." if by_task else "Pass the model as file.py:function.",
        candidates=tuple(by_task),
    )


def inference_class(task: str, class_name: str = "", model_type: str = "") -> str:
    """Return the class that runs an exported model of a task: transformers' auto class with our prefix.

    Args:
        task: Task, or variant of one.
        class_name: Class of the model; selects one of several auto classes of the task.
        model_type: Model type of the model.

    >>> inference_class("fill-mask"), inference_class("feature-extraction")
    ('WinMLModelForMaskedLM', 'WinMLModelForFeatureExtraction')

    Raises:
        TaskError: the task is unknown.
    """
    task = canonical_task(task)
    autos = dict(zip(TASKS[task], _auto_classes(task), strict=True))
    part = next((part for part in autos if class_name in _classes_in_table(part, model_type)), TASKS[task][0])
    auto = autos[part]
    return f"{_INFERENCE_PREFIX}{'FeatureExtraction' if task == 'feature-extraction' else _class_suffix(auto)}"


def inference_classes() -> dict[str, str]:
    """Return class that runs an exported model → its task.

    >>> inference_classes()["WinMLModelForSequenceClassification"]
    'text-classification'
    """
    names_by_task = {"feature-extraction": [f"{_INFERENCE_PREFIX}FeatureExtraction"]}
    for task in TASKS:
        names_by_task.setdefault(task, [f"{_INFERENCE_PREFIX}{_class_suffix(auto)}" for auto in _auto_classes(task)])
    return {name: task for task, names in names_by_task.items() for name in names}


def _class_suffix(auto_class: str) -> str:
    return auto_class.removeprefix("Auto").removeprefix("ModelFor")


_NEW_TASK_NAMES: Mapping[str, str] = {"image-to-text": "image-text-to-text"}
"""Task → its name in transformers 5, in which the table of the old task is empty."""


def _decide_by_request(name: str, model_type: str, architectures: tuple[str, ...], by_name: _Classes) -> TaskDecision:
    """Return the decision for a task that a user or a model card names.

    Raises:
        TaskError: the task is unknown, or the architecture does not have it.
    """
    task_name = canonical_word(name)
    task = task_name if task_name in TASK_VARIANTS else canonical_task(name)
    if task not in by_name and (new_name := _NEW_TASK_NAMES.get(task)) in by_name:
        task = str(new_name)
    if task not in by_name:
        raise TaskError(
            f"{opt.task} {name}: {model_type} models have no {task} task",
            hint=f"This architecture has: {', '.join(by_name) or 'none'}.",
            candidates=tuple(by_name),
        )
    alias = "" if name == task else f" ({name!r} is {task!r})"
    # The checkpoint's own class first: a task may have several classes, and the weights fit this class.
    own_classes = [name for name in architectures if name in by_name[task]]
    return TaskDecision(task, f"from {opt.task}{alias}", (own_classes or by_name[task])[0], tuple(by_name))


def _decide_by_class(
    model_class: str, task: str | None, model_type: str, architectures: tuple[str, ...]
) -> TaskDecision:
    """Return the decision for a class named by the user, or for an auto class, which has a class per model type.

    A class in no table is accepted, for the requested task or ``feature-extraction``.

    Raises:
        UsageError: the class belongs to another model type, or does not serve the requested task.
    """
    by_task = tasks_for(model_type)
    serving = {name: tuple(_matching_classes(model_class, name, model_type)) for name in by_task}
    serving = {name: classes for name, classes in serving.items() if classes}
    if not serving:
        _refuse_foreign_class(model_class, model_type, by_task)
        # The class is in no table, for example a class made for one checkpoint.
        serving = {"feature-extraction" if task is None else canonical_task(task): (model_class,)}
    if task is not None and canonical_task(task) not in serving:
        raise UsageError(
            f"{opt.model_class} {model_class}: does not serve {opt.task} {task}",
            hint=f"It serves: {', '.join(serving)}. Remove one of the two.",
        )
    task_name = canonical_word(task) if task is not None else next(iter(serving))
    name = task_name if task_name in TASK_VARIANTS else canonical_task(task_name)
    classes = serving[canonical_task(task_name)]
    own_classes = [architecture for architecture in architectures if architecture in classes]
    options = opt.model_class if task is None else f"{opt.task} and {opt.model_class}"
    return TaskDecision(name, f"from {options}", (own_classes or classes)[0], tuple(by_task))


def _matching_classes(model_class: str, task: str, model_type: str) -> Iterator[str]:
    for part, auto in zip(TASKS[task], _auto_classes(task), strict=True):
        yield from (name for name in _classes_in_table(part, model_type) if model_class in (name, auto))


def _refuse_foreign_class(model_class: str, model_type: str, by_task: _Classes) -> None:
    """Refuse a class that transformers does not have for this model type.

    Raises:
        UsageError: names the nearest.
    """
    import transformers

    other_class = getattr(transformers, model_class, None)
    if getattr(getattr(other_class, "config_class", None), "model_type", None) == model_type:
        return
    names = sorted({name for classes in by_task.values() for name in classes})
    raise UsageError(
        f"{opt.model_class} {model_class}: {model_type} models have no such class",
        hint=suggest(model_class, names, also=f"Their classes: {', '.join(names) or 'none'}."),
    )


def _decide_by_architecture(architectures: tuple[str, ...], model_type: str, by_task: _Classes) -> TaskDecision | None:
    """Return the decision by the config's ``architectures``; `None` without architectures.

    Raises:
        TaskError: the architectures serve different tasks, or transformers knows none of them.
    """
    if not architectures:
        return None
    class_tasks = {name: [task for task, classes in by_task.items() if name in classes] for name in architectures}
    class_tasks = {name: tasks for name, tasks in class_tasks.items() if tasks}
    if len(class_tasks) > 1:
        candidates = tuple(dict.fromkeys(task for tasks in class_tasks.values() for task in tasks))
        raise TaskError(
            f"the config lists {len(class_tasks)} architectures ({', '.join(class_tasks)}), for different tasks",
            hint=f"Choose with {opt.task}: {', '.join(candidates)}.",
            candidates=candidates,
        )
    for name, listed in class_tasks.items():
        tasks = _put_images_first(name, listed)
        further_tasks = [task for task in tasks[1:] if task != "pretraining"]
        addition = f"; it also serves {', '.join(further_tasks)}" if further_tasks else ""
        return TaskDecision(tasks[0], f"from the architecture {name} in the config{addition}", name, tuple(by_task))
    return _decide_without_table(architectures, model_type, by_task)


def _put_images_first(class_name: str, tasks: Sequence[str]) -> Sequence[str]:
    """Move the task of vision-language models to the front of the tasks of such a class.

    transformers also lists the class of a whole vision-language model as a causal language model, so that the model can
    be loaded for text alone. For: GOT-OCR 2, Gemma 3.
    """
    images = "image-text-to-text"
    if images not in tasks or not class_name.endswith("ForConditionalGeneration"):
        return tasks
    return (images, *(task for task in tasks if task != images))


def _decide_without_table(architectures: tuple[str, ...], model_type: str, by_task: _Classes) -> TaskDecision:
    """Decide for a class that transformers has but lists under no task.

    Raises:
        TaskError: transformers has none of the classes.
    """
    import transformers

    for name in architectures:
        if isinstance(getattr(transformers, name, None), type):
            rule = f"from the architecture {name} in the config, which is in no auto-model table of transformers"
            return TaskDecision("feature-extraction", rule, name, tuple(by_task))
    raise TaskError(
        f"the architecture {architectures[0]!r} in the config is unknown to transformers {transformers.__version__}",
        hint=f"Choose the task of the weights with {opt.task}; {model_type} models have: "
        f"{', '.join(by_task) or 'none'}.",
        candidates=tuple(by_task),
    )


def _decide_by_card(task: str | None, model_type: str) -> TaskDecision | None:
    """Return the decision by the model card; `None` if the card names no task of this model type."""
    by_name = tasks_and_variants_for(model_type)
    try:
        decision = None if task is None else _decide_by_request(task, model_type, (), by_name)
    except TaskError:
        return None
    return decision and replace(decision, rule=f"from the pipeline_tag {task} of the model card")


def _decide_by_model_type(model_type: str, by_task: _Classes) -> TaskDecision:
    """Return the decision for the base model's task, or for the only task.

    Raises:
        TaskError: there is no base model, and not exactly one task.
    """
    rule = f"from the model type {model_type!r}: the config states no architecture"
    if "feature-extraction" in by_task:
        return TaskDecision(
            "feature-extraction", f"{rule}, so the base model", by_task["feature-extraction"][0], tuple(by_task)
        )
    if len(by_task) == 1:
        task, classes = next(iter(by_task.items()))
        return TaskDecision(task, f"{rule}, and this is its only task", classes[0], tuple(by_task))
    raise TaskError(
        f"the config states no architecture, and {model_type} models have {len(by_task) or 'no'} tasks",
        hint=f"Choose with {opt.task}: {', '.join(by_task)}." if by_task else "Pass the model as file.py:function.",
        candidates=tuple(by_task),
    )


def _auto_classes(task: str) -> Iterator[str]:
    """Yield transformers' auto classes of a task, in the order of its tables."""
    for part in TASKS[task]:
        class_part = part.replace("_", " ").title().replace(" ", "")
        yield _AUTO_CLASS_PARTS.get(part) or f"AutoModelFor{class_part}"


def _classes_in_table(part: str, model_type: str) -> tuple[str, ...]:
    """Return the classes of a model type in one of transformers' auto-model tables; `()` if the type is missing."""
    from transformers.models.auto import modeling_auto

    name = f"MODEL_FOR_{part}_MAPPING_NAMES" if part else "MODEL_MAPPING_NAMES"
    # The installed transformers may lack a table: then the task has fewer classes.
    entry = getattr(modeling_auto, name, {}).get(model_type, ())
    return (entry,) if isinstance(entry, str) else tuple(entry)
