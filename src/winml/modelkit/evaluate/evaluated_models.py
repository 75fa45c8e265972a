"""Opening of the evaluated model and its baseline: task, and folder of config and processors.

Both models receive the arrays created by the tokenizer of the evaluated model, and the outputs of both are decoded with
its labels. A baseline with other labels or another vocabulary is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winml.modelkit.errors import RemoteCodeError, TaskError, UsageError, opt
from winml.modelkit.evaluate.sides import Side, open_onnx_side, opened_torch_side
from winml.modelkit.evaluate.tasks.table import TASK_DEFINITIONS
from winml.modelkit.file_names import files_folder
from winml.modelkit.models.checkpoints.task import TASKS, WITH_PAST, canonical_task, canonical_word
from winml.modelkit.models.request import ModelRequest, exported_from, processor_folder, with_recorded_seed
from winml.modelkit.onnx.bundle import model_record
from winml.modelkit.ort.opened_model import RunOptions
from winml.modelkit.samples.processors import kinds_for, open_config, open_processor, processor_files

if TYPE_CHECKING:
    from winml.modelkit.models.parts import LoadedModel


_LABELED_TASKS = frozenset(
    {"image-classification", "image-segmentation", "object-detection", "text-classification", "token-classification"}
)
"""Tasks whose outputs are class indices."""


def _other_baseline_hint() -> str:
    return (
        f"Choose a baseline with the same checkpoint or fine-tuning, or evaluate the model alone: {opt.baseline} none."
    )


_MAX_LISTED_LABELS = 6
"""Maximum number of labels per model in a message. Chosen: enough to identify them."""


def _refuse_other_labels(task: str, config: Any, folder: Path, title: str) -> None:
    """Refuse a baseline whose config has other class names or indices.

    Args:
        task: Canonical name.
        config: Config of the evaluated model; ``None`` without a config.
        folder: Folder of the baseline's config.
        title: Name of the baseline in messages.

    Raises:
        UsageError: shows the labels of both.
        InputError: the config of the baseline is damaged.
    """
    if task not in _LABELED_TASKS:
        return
    ours, theirs = _read_labels(config), _read_labels(open_config(folder))
    if not ours or not theirs or ours == theirs:
        return
    are_unnamed = any(all(name == f"label_{number}" for number, name in labels.items()) for labels in (ours, theirs))
    if are_unnamed and ours.keys() == theirs.keys():
        return
    raise UsageError(
        f"{opt.baseline} {title}: its labels are {_label_words(theirs)}, and those of the model {_label_words(ours)}",
        hint=_other_baseline_hint(),
    )


def _refuse_other_vocabulary(names: Sequence[str], model: Path, baseline: Path, title: str) -> None:
    """Refuse a baseline whose tokenizer has other token ids.

    Args:
        names: Input names of the evaluated model.
        model: Folder of its tokenizer.
        baseline: Folder of the baseline's tokenizer.
        title: Name of the baseline in messages.

    Raises:
        UsageError: states the number of differing tokens.
        InputError: a tokenizer is damaged.
    """
    if "tokenizer" not in kinds_for(names):
        return
    for folder in (model, baseline):
        if not any(path.name.startswith(("tokenizer", "vocab")) for path in processor_files(folder)):
            return
    fast = [folder / "tokenizer.json" for folder in (model, baseline)]
    if all(path.is_file() for path in fast) and fast[0].read_bytes() == fast[1].read_bytes():
        return
    ours, theirs = (open_processor("tokenizer", folder, opt.baseline).get_vocab() for folder in (model, baseline))
    if changed := sum(ours.get(token) != number for token, number in theirs.items()) or abs(len(ours) - len(theirs)):
        raise UsageError(
            f"{opt.baseline} {title}: its tokenizer has {len(theirs)} tokens, {changed} of them different from the "
            f"model's {len(ours)}: both models receive the tokens of the model's tokenizer",
            hint=_other_baseline_hint(),
        )


def _read_labels(config: Any) -> dict[int, str]:
    """Return the class names of a config by index, in lower case; ``{}`` without names."""
    names = getattr(config, "id2label", None) or {}
    return {int(number): str(name).casefold() for number, name in names.items()}


def _label_words(labels: Mapping[int, str]) -> str:
    text = ", ".join(f"{number} {name}" for number, name in sorted(labels.items())[:_MAX_LISTED_LABELS])
    return text if len(labels) <= _MAX_LISTED_LABELS else f"{text} and {len(labels) - _MAX_LISTED_LABELS} more"


@dataclass(frozen=True)
class Subject:
    """The models of an evaluation."""

    model: Path | ModelRequest
    """An ONNX file, or a checkpoint that PyTorch runs."""
    run: RunOptions
    """Provider and sessions of an ONNX file; its ``shown`` is the model as written by the user."""
    baseline: Path | ModelRequest | None = None
    """Baseline; ``None``: the checkpoint that an ONNX file was exported from, if known."""
    has_baseline: bool | None = None
    """False: no baseline. True: a baseline is required. ``None``: a baseline if known."""


@dataclass(frozen=True)
class EvaluatedModel:
    """The evaluated model, ready to run."""

    side: Side
    task: str
    task_rule: str
    """Origin of the task, in words."""
    folder: Path
    """Folder of its config and processors."""
    config: Any
    """Transformers config; ``None`` without a config."""
    source: ModelRequest | None = None
    """Checkpoint that an ONNX file was exported from, if on this disk."""
    notes: tuple[str, ...] = ()


def opened_model(subject: Subject, task: str | None, stack: ExitStack) -> EvaluatedModel:
    """Open the evaluated model.

    Args:
        subject: The models.
        task: Task stated by the user.
        stack: Closes the model.

    Raises:
        UsageError: the task is unknown, or the execution provider is missing.
        InputError: a file is damaged.
        StageError: the model cannot be loaded.
    """
    if isinstance(subject.model, Path):
        return _open_onnx_model(subject.model, subject.run, task)
    return _load_torch_model(subject.model, task, stack)


def task_name(name: str) -> str:
    """Canonical name of a task; evaluation tasks may have names unknown to transformers.

    Raises:
        TaskError: the task does not exist.
    """
    return name if name in TASK_DEFINITIONS else canonical_task(name)


def _open_onnx_model(path: Path, run: RunOptions, task: str | None) -> EvaluatedModel:
    """Open an ONNX file with its task, config and source checkpoint.

    Raises:
        TaskError: neither the user nor the file states the task.
    """
    side = open_onnx_side(path, run)
    metadata = side.metadata
    recorded = _recorded_task(metadata)
    if task is None and recorded is None:
        raise TaskError(
            f"{run.shown} does not state its task", hint=f"Set it, for example with {opt.task} text-classification."
        )
    name = task_name(task or str(recorded))
    rule = f"set by {opt.task}" if task else "from the file"
    source = _find_source(metadata, run.shown)
    folder = files_folder(path)
    if not processor_files(folder) and source is not None and (beside := processor_folder(source)) is not None:
        folder = beside
    return EvaluatedModel(side, name, rule, folder, open_config(folder), source)


def _recorded_task(metadata: Mapping[str, str]) -> str | None:
    return model_record(metadata).get("task") or None


def _find_source(metadata: Mapping[str, str], title: str) -> ModelRequest | None:
    """Return the checkpoint that a file was exported from; ``None`` if not on this disk."""
    try:
        return exported_from(metadata, title)
    except UsageError:
        return None


def _load_torch_model(request: ModelRequest, task: str | None, stack: ExitStack) -> EvaluatedModel:
    """Load a checkpoint into PyTorch with its task and config.

    Raises:
        TaskError: the checkpoint does not state its task.
    """
    from winml.modelkit.models.model import load_model

    requested = task or request.task
    # Tasks unknown to transformers are loaded for the task of their config.
    added = requested if requested in TASK_DEFINITIONS and requested not in TASKS else None
    loaded = load_model(_disable_cache(request, None if added else requested))
    info = loaded.info
    if info.task is None:
        raise TaskError(f"{request.model} does not state its task", hint="Pass a transformers checkpoint.")
    beside = next((path for name, path in info.companions.items() if "/" not in name), None)
    folder = beside.parent if beside is not None else Path(request.model)
    side = stack.enter_context(opened_torch_side(loaded, None, shown=request.model))
    note = "The model is a checkpoint: it is evaluated in PyTorch, without an export."
    name, rule = (added, f"set by {opt.task}") if added else (info.task, str(info.task_rule))
    return EvaluatedModel(side, name, rule, folder, open_config(folder), None, (note, *_model_notes(loaded)))


def _disable_cache(request: ModelRequest, task: str | None) -> ModelRequest:
    """Request without KV cache for PyTorch, since each text is processed at once."""
    return replace(request, task=task and canonical_word(task).removesuffix(WITH_PAST), cache=False)


def _model_notes(loaded: LoadedModel) -> tuple[str, ...]:
    """Return the notes of a loaded model, without those on its KV cache, which the user did not request."""
    from winml.modelkit.models.caches.decision import no_cache_note

    return tuple(note for note in loaded.notes if note != no_cache_note())


def opened_baseline(subject: Subject, model: EvaluatedModel, stack: ExitStack) -> tuple[Side | None, tuple[str, ...]]:
    """Open the baseline; also returns notes. `None` without a baseline, or if its code must not run.

    Raises:
        UsageError: the checkpoint of the model is requested, but unknown.
        InputError: a file is damaged.
        StageError: the baseline cannot be loaded.
    """
    is_torch = not isinstance(subject.model, Path)
    if subject.has_baseline and subject.baseline is None and is_torch:
        raise UsageError(
            f"{opt.baseline} pytorch: {model.side.name} already runs in PyTorch",
            hint=f"Set {opt.baseline} to an ONNX file, or evaluate the ONNX file with this checkpoint as the baseline.",
        )
    if subject.has_baseline is False or (subject.baseline is None and is_torch):
        return None, ()
    baseline: Path | ModelRequest | None = subject.baseline or model.source
    if isinstance(baseline, Path):
        side = open_onnx_side(baseline, replace(subject.run, shown=str(baseline)))
        _refuse_other_task(side, model)
        _refuse_mismatch(model, files_folder(baseline), str(baseline))
        return side, ()
    if baseline is None:
        if subject.has_baseline is None:
            return None, ("There is no baseline: the checkpoint of the export is not on this machine.",)
        assert isinstance(subject.model, Path)
        baseline = exported_from(
            model.side.metadata,
            subject.run.shown,
            hint=f"Set {opt.baseline} to the checkpoint folder, or evaluate the file alone: {opt.baseline} none.",
        )
    baseline = with_recorded_seed(baseline, model.side.metadata)
    if (folder := processor_folder(baseline)) is not None:
        _refuse_mismatch(model, folder, str(baseline.model))
    try:
        return _load_torch_baseline(baseline, model, subject.run.threads, stack)
    except RemoteCodeError as error:
        if subject.has_baseline or subject.baseline is not None:
            raise
        # The baseline was not requested explicitly, and a file must never cause checkpoint code to run.
        return None, (f"There is no baseline: {error.message}.",)


def _refuse_mismatch(model: EvaluatedModel, folder: Path, title: str) -> None:
    """Refuse a baseline with other labels or another vocabulary, as far as its folder states.

    Raises:
        UsageError: names the labels or the vocabularies.
    """
    if folder.absolute() != model.folder.absolute():
        _refuse_other_labels(model.task, model.config, folder, title)
        _refuse_other_vocabulary([spec.name for spec in model.side.inputs], model.folder, folder, title)


def _refuse_other_task(baseline: Side, model: EvaluatedModel) -> None:
    """Refuse a baseline that was exported for another task.

    Raises:
        UsageError: names both tasks.
    """
    noted, model_task = _recorded_task(baseline.metadata), _recorded_task(model.side.metadata)
    if noted is not None and noted != model_task and task_name(noted) != model.task:
        raise UsageError(
            f"{opt.baseline} {baseline.name}: the baseline is a model for {noted}, and {model.side.name} is evaluated "
            f"for {model.task}",
            hint=f"Choose a baseline for the same task, or {opt.baseline} none.",
        )


def _load_torch_baseline(
    request: ModelRequest, model: EvaluatedModel, threads: int | None, stack: ExitStack
) -> tuple[Side, tuple[str, ...]]:
    """Load the baseline into PyTorch; return the baseline and its notes. The block restores the threads."""
    import torch

    from winml.modelkit.models.model import load_model

    if threads is not None:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(threads)
    loaded = load_model(_disable_cache(request, request.task or model.task))
    side = opened_torch_side(loaded, model.side.inputs, shown=f"pytorch ({request.model})")
    return stack.enter_context(side), _model_notes(loaded)
