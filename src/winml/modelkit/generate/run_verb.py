"""Command ``winml run`` as a library function: runs a model on one set of inputs."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winml.modelkit.errors import ConfigError, InputError, ModelPathError, TaskError, UsageError, opt, spell
from winml.modelkit.fields import INPUTS, OUTPUT, RECORDED, declare
from winml.modelkit.file_names import (
    DECODER,
    ENCODER,
    MODEL_SUFFIX,
    ONLY_PART,
    TOKENIZER_NAME,
    VISION,
    answering_part,
    files_folder,
    prompt_parts,
)
from winml.modelkit.generate.task_inputs import (
    AUDIO_SUFFIX,
    IMAGE_SUFFIXES,
    LOADED_TASKS,
    RUN_TASKS,
    RunTask,
    TaskInput,
    run_task,
)
from winml.modelkit.models.checkpoints.task import canonical_task
from winml.modelkit.onnx.files.foreign_names import ForeignNameError, refuse_special_file
from winml.modelkit.options import load_json, nearest, read_json_file
from winml.modelkit.ort.execution_providers import provider_options_of
from winml.modelkit.python_functions import python_function
from winml.modelkit.report.plan import PlannedStep
from winml.modelkit.samples.data_sources import AUDIO_SUFFIXES
from winml.modelkit.samples.data_sources import IMAGE_SUFFIXES as IMAGE_FILES
from winml.modelkit.samples.processors import architecture_task, missing_processors
from winml.modelkit.verbs.answers import AnswerPlan, AnswerRequest, plan_answer
from winml.modelkit.verbs.named_models import (
    keyword_options,
    model_name,
    refuse_checkpoint_options,
    resolve_named_model,
    stated_keywords,
)
from winml.modelkit.verbs.running import ProviderFields
from winml.modelkit.words import command_line

if TYPE_CHECKING:
    from winml.modelkit.arrays import Array
    from winml.modelkit.generate.answering import Answer, TaskRunner
    from winml.modelkit.generate.records import AnswerEntry, InferenceResult, RunSchema, SchemaTensor
    from winml.modelkit.models.request import ModelRequest
    from winml.modelkit.onnx.specs import DynamicDimension

_ARRAYS_SUFFIX = ".npz"
_SHORT_S = 2.0
"""Chosen: a build takes longer, and finding one in the cache does not."""
_KIND_WORDS = {"text": "a text", "image": "an image", "audio": "a recording"}
_BY_OPTION = frozenset({"text", "image", "audio", "label"})
"""Inputs of tasks with an option of their own."""


@dataclass(frozen=True, kw_only=True)
class RunRequest(AnswerRequest, ProviderFields):
    """Request of ``winml run``."""

    name: str
    """The model as written by the user."""
    files: Mapping[str, Path]
    """Part → ONNX file; empty for a checkpoint."""
    checkpoint: ModelRequest | None = None
    task: str | None = None
    arrays: Mapping[str, Any] = field(default_factory=dict)
    """Input of the graph → array, tensor of PyTorch or nested list of a Python caller."""
    reference: str | None = None
    """The checkpoint that PyTorch runs as well; :data:`RECORDED`; or None."""

    values: tuple[str, ...] = declare((), INPUTS, is_argument=True, metavar="[INPUT]...")
    """Text, image file or audio file, as with the options below."""
    text: tuple[str, ...] = declare((), INPUTS, metavar="TEXT", is_common=True)
    """Text input. Several texts: their similarity for embedding models, one result per text for all other tasks."""
    image: tuple[str, ...] = declare((), INPUTS, metavar="FILE", is_common=True)
    """Image file. Several images: as for texts."""
    audio: tuple[str, ...] = declare((), INPUTS, metavar="FILE", is_common=True)
    """Audio file. Several files: as for texts."""
    label: tuple[str, ...] = declare((), INPUTS, metavar="TEXT", is_common=True)
    """Candidate label for zero-shot classification."""
    inputs: tuple[str, ...] = declare((), INPUTS, spelling="--input", metavar="NAME=VALUE", is_common=True)
    """Named input: of the task (question, context, text_pair), or a tensor of the graph. @FILE reads the value."""
    schema: bool = declare(False, OUTPUT, is_common=True)
    """Show the inputs of the model with an example command, and run nothing."""
    top: int | None = declare(None, OUTPUT, minimum=1, default_words="5", is_common=True)
    """Number of classes or tokens to show."""
    threshold: float | None = declare(
        None, OUTPUT, minimum=0, maximum=1, default_words="that of the pipeline", is_common=True
    )
    """Minimum score of boxes and segments, from 0 to 1."""
    save: Path | None = declare(None, OUTPUT, is_common=True)
    """Also write the result to this file: boxes, segments, depth or a new image (.png, .jpg), speech (.wav), embeddings
    or tensors as arrays (.npz)."""


@dataclass(frozen=True)
class RunSubject:
    """Model and inputs of a run."""

    task: str | None
    """None if tensors are passed by name, or if the task of a checkpoint is not known yet."""
    task_rule: str
    tensors: Mapping[str, str]
    """Input of the graph → value as the user wrote it."""
    named: Mapping[str, tuple[str, ...]]
    """Input of the task → values as the user wrote them."""
    definition: RunTask | None = None
    """Inputs of the task, if known."""


def plan_run(request: RunRequest) -> AnswerPlan[RunSubject]:
    """Plan a run. No file is written, and no model is loaded.

    Raises:
        UsageError: an input is missing, unknown or of another task, the result cannot be saved, or the execution
            provider is unknown or not installed.
        TaskError: the task is unknown, or the model is for another task.
        OutputExistsError, WriteError: as :func:`winml.modelkit.verbs.answers.plan_answer` raises.
    """
    request.refuse_unknown_provider()
    if request.schema and request.reference:
        raise UsageError(
            f"{opt.schema} and {opt.reference} cannot be combined, since {opt.schema} runs nothing",
            hint="Use one of them.",
        )
    subject = _make_subject(request)
    media = [Path(value[1:]) for value in subject.tensors.values() if value.startswith("@")]
    media += [Path(value) for values in subject.named.values() for value in values if value.startswith("@")]
    plan = plan_answer(
        "run",
        subject,
        request,
        reads=(*request.files.values(), *media, *map(Path, request.image), *map(Path, request.audio)),
        steps=(PlannedStep("running", f"{request.name}: {subject.task or 'tensors by name'}"),),
    )
    request.choose_provider()
    return plan


def _make_subject(request: RunRequest) -> RunSubject:
    """Determine the task of a run, and sort the values into tensors and task inputs.

    Raises:
        UsageError: an input is missing or unknown, or the result cannot be saved.
        TaskError: the task is unknown, not stated, or another than that of the file.
    """
    texts = _collect_values(request)
    tensors: tuple[str, ...] = ()
    recorded, file_rule = None, "from the file"
    if request.files:
        from winml.modelkit.onnx.bundle import described_model

        tensors = tuple(tensor.name for tensor in _read_tensors(request.files, "inputs"))
        path = _described_file(request)
        described = described_model(path)
        recorded = described.get("task")
        is_by_name = bool(request.arrays) or (bool(texts) and texts.keys() <= set(tensors))
        if not described and request.task is None and not is_by_name:  # a file of another tool
            outputs = {tensor.name for tensor in _read_tensors(request.files, "outputs")}
            recorded, file_rule = architecture_task(files_folder(path), outputs) or (None, "")
    if request.task and recorded and canonical_task(request.task) != canonical_task(recorded):
        raise TaskError(
            f"{opt.task} {request.task}: {request.name} was exported for {recorded}",
            hint=f"Omit {opt.task}, or build the model again for this task.",
        )
    name = request.task or recorded
    rule = f"set by {opt.task}" if request.task else file_rule if recorded else ""
    feeds = {key: value for key, value in texts.items() if key in tensors and not _is_task_input(key, name, tensors)}
    if feeds:
        if non_tensors := [key for key in texts if key not in tensors]:
            raise UsageError(
                f"input {non_tensors[0]!r} is none of the graph, and {next(iter(feeds))!r} is a tensor of it",
                hint=f"Pass all tensors by name: {', '.join(tensors)}; or only inputs of the task.",
            )
        _check_save(request, RunTask((), "arrays"), "tensors by name")
        values = {key: value[-1] for key, value in feeds.items()}
        return RunSubject(None, "tensors are passed by name", values, {})
    # Texts, images or audio? The tensors of a checkpoint are known after its build.
    if name is None or (not request.files and canonical_task(name) == "feature-extraction"):
        if request.files and not request.schema:
            by_name = [f"{opt.input} {tensor}=@FILE.npy" for tensor in tensors]
            if request.inputs or request.arrays:
                unknown = next(key for key in texts if key not in tensors)
                raise UsageError(
                    f"input {unknown!r} is none of the graph, whose inputs are {', '.join(tensors)}",
                    hint=f"Pass all tensors by name: {' '.join(by_name)}",
                )
            raise TaskError(
                f"{request.name} does not state its task",
                hint=f"Specify {opt.task}, such as {opt.task} text-classification, or pass tensors by name: "
                f"{', '.join(by_name)}.",
            )
        return RunSubject(None, rule, {}, texts)
    task, definition = run_task(name, tensors)
    if array_name := next(iter(request.arrays), None):
        raise UsageError(
            f"input {array_name!r} is none of the graph, whose inputs are {', '.join(tensors)}",
            hint="Pass an array for each input of the graph; or texts and files for the task.",
        )
    if not request.schema:
        _refuse_generating(request, task, definition)
        assert definition is not None  # refused above
        _refuse_inputs(request, task, definition, texts, tensors)
        _check_save(request, definition, task)
    return RunSubject(task, rule, {}, texts, definition)


def _is_task_input(key: str, name: str | None, tensors: tuple[str, ...]) -> bool:
    """Return True if an input name belongs to a task."""
    definition = None if name is None else run_task(name, tensors)[1]
    return definition is not None and any(task_input.name == key for task_input in definition.inputs)


def _collect_values(request: RunRequest) -> dict[str, tuple[str, ...]]:
    """Return the input values of the options, by name; files as ``@path``.

    Raises:
        UsageError: a value without a name.
    """
    texts: dict[str, tuple[str, ...]] = {}

    def add(name: str, value: str) -> None:
        texts[name] = (*texts.get(name, ()), value)

    for value in request.values:
        add(*_positional_input(request.name, value))
    for text in request.text:
        add("text", text)
    for image in request.image:
        add("image", f"@{image}")
    for audio in request.audio:
        add("audio", f"@{audio}")
    for label in request.label:
        add("label", label)
    for pair in request.inputs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            kind, _ = _positional_input(request.name, pair)
            raise UsageError(
                f"{opt.input} {pair}: expected NAME=VALUE or NAME=@FILE",
                hint=f"For {_KIND_WORDS[kind]}, use {spell(kind)} {command_line([pair])}; for others, "
                f"{opt.input} context=@article.txt or {opt.input} input_ids=[[2,5,3]].",
            )
        add(name.strip(), value)
    return {**texts, **dict.fromkeys(request.arrays, ("an array",))}


def _positional_input(model: str, value: str) -> tuple[str, str]:
    """Return the input that a positional value means, and the value; files as ``@path``.

    Raises:
        UsageError: the value is a second model.
    """
    # os.path: methods of Path raise an error for a text that is too long for a file name.
    is_file_name = os.path.isfile(value) or not re.search(r"\s", value)  # noqa: PTH113
    suffix = Path(value).suffix.lower() if is_file_name else ""
    if suffix == MODEL_SUFFIX or os.path.isdir(value):  # noqa: PTH112
        raise UsageError(
            f"two models are specified: {model!r} and {value!r}",
            hint=f"winml run runs one model; winml compare {model} {value} compares two.",
        )
    kind = "image" if suffix in IMAGE_FILES else "audio" if suffix in AUDIO_SUFFIXES else "text"
    return kind, value if kind == "text" else f"@{value}"


def _refuse_generating(request: RunRequest, task: str, definition: RunTask | None) -> None:
    """Refuse tasks that ``winml generate`` runs, and tasks without a definition.

    Raises:
        UsageError: names the command to use.
    """
    if prompt_parts(request.files) or VISION in request.files or task in ("text-generation", "image-text-to-text"):
        raise UsageError(
            f"{request.name} is for {task}, whose result is generated token by token",
            hint=f'winml generate {_command_words(request)} -p "Once upon a time"',
        )
    if definition is None and {ENCODER, DECODER} <= request.files.keys():
        raise UsageError(
            f"{request.name} is for {task}, whose result is generated token by token",
            hint=f"winml generate {_command_words(request)} --image photo.jpg",
        )
    if definition is None:
        raise UsageError(
            f"{task}: winml run reads no texts, images or audio for this task",
            hint=f"Pass tensors by name (winml run {request.name} --schema lists them)"
            + ("." if request.files else f", or a task of: {', '.join(RUN_TASKS)}."),
        )


def _refuse_inputs(
    request: RunRequest,
    task: str,
    definition: RunTask,
    texts: Mapping[str, tuple[str, ...]],
    tensors: tuple[str, ...],
) -> None:
    """Refuse input names unknown to the task, and missing inputs.

    Raises:
        UsageError: names the input and the nearest known input.
    """
    inputs = {entry.name: entry for entry in definition.inputs}
    for name, values in texts.items():
        if name not in inputs:
            # Names of options are not misspelled: the task takes other inputs.
            guess = None if name in _BY_OPTION else nearest(name, (*inputs, *tensors))
            hint = f"winml run {request.name} --schema lists its inputs."
            example = f"For example: {_format_run_command(_command_words(request), definition)}"
            raise UsageError(
                f"{request.name} has no input {name!r}: {task} takes {', '.join(inputs)}",
                hint=f"Did you mean {guess!r}? {hint}" if guess else f"{hint} {example}",
            )
        entry = inputs[name]
        if entry.kind != "text" and not values[0].startswith("@"):
            raise UsageError(
                f"input {name!r}: {values[0]!r} is no file; {task} takes {_KIND_WORDS[entry.kind]}",
                hint=f"{opt.input} {name}=@{entry.example}",
            )
    several = [name for name, values in texts.items() if len(values) > 1 and not inputs[name].is_repeatable]
    if len(several) > 1:
        raise UsageError(
            f"inputs {several[0]!r} and {several[1]!r} are both passed several times, and {task} runs once for each "
            "value of one input",
            hint=f"Pass {several[1]!r} once.",
        )
    if several and request.save is not None:
        raise UsageError(
            f"{opt.save} {request.save}: the result of one {several[0]} is saved, {len(texts[several[0]])} are passed",
            hint=f"Omit it, or pass one {several[0]}.",
        )
    missing = [entry for entry in definition.inputs if entry.is_required and entry.name not in texts]
    if missing:
        raise UsageError(
            f"input {missing[0].name!r} is missing: {task} takes {', '.join(inputs)}",
            hint=f"For example: {_format_run_command(_command_words(request), definition)}",
        )


def _check_save(request: RunRequest, definition: RunTask, subject: str) -> None:
    """Refuse ``--save`` for a result without savable content, or with an unsuitable suffix.

    Args:
        request: The request of the user.
        definition: The task, with the kind of its savable content.
        subject: The task, or the kind of the inputs, for messages.

    Raises:
        UsageError: names a suitable file name, if there is one.
    """
    if request.save is None:
        return
    if definition.saved is None:
        raise UsageError(
            f"{opt.save} {request.save}: {subject} has no image and no arrays to save",
            hint="Omit it; -o FILE writes the result as JSON.",
        )
    suffixes = {"image": IMAGE_SUFFIXES, "audio": (AUDIO_SUFFIX,), "arrays": (_ARRAYS_SUFFIX,)}[definition.saved]
    if request.save.suffix.lower() not in suffixes:
        raise UsageError(
            f"{opt.save} {request.save}: the result of {subject} is saved as {', '.join(suffixes)}",
            hint=f"{opt.save} {request.save.with_suffix(suffixes[0])}",
        )


def example_command(
    name: str, task: str, definition: RunTask | None, files: Mapping[str, Path] | None = None
) -> str | None:
    """Return a command that runs a model on inputs of its task; None if only tensors can be passed.

    Args:
        name: The model, as written on a command line.
        task: Its task, as :func:`~winml.modelkit.generate.task_inputs.run_task` names it.
        definition: Inputs of the task, if known.
        files: Part → ONNX file, to find its tokenizer or processor and the provider it is compiled for.
    """
    if files:
        from winml.modelkit.ort.decoding.inputs import TOKEN_IDS

        path = next(iter(files.values()))
        inputs = {tensor.name: tensor.shape for tensor in _read_tensors(files, "inputs")}
        if missing_processors([*inputs], files_folder(path)):
            return None
        if task == "question-answering" and not (files_folder(path) / TOKENIZER_NAME).is_file():
            return None  # places in the text need a fast tokenizer
        *_, token_count = inputs.get(TOKEN_IDS) or (None,)
        if task == "text-generation" and not prompt_parts(files) and isinstance(token_count, int) and token_count > 1:
            return None  # it reads so many tokens in each run
        name = _add_provider_options(name, path)
    if task == "text-generation":
        return f'winml generate {name} -p "Once upon a time"'
    if task == "image-text-to-text" and files and VISION in files:
        return f'winml generate {name} --image photo.jpg -p "What is this?"'
    return None if definition is None else _format_run_command(name, definition)


def _add_provider_options(name: str, path: Path) -> str:
    """Return a model as written on a command line, with the options of the provider it is compiled for."""
    return f"{name} {command_line(provider_options_of(path))}".rstrip()


def _command_words(request: RunRequest) -> str:
    """Return the model of a request as hints write it."""
    if request.ep is not None:
        return f"{request.name} {opt.ep} {request.ep}"
    return _add_provider_options(request.name, _described_file(request)) if request.files else request.name


def _format_run_command(name: str, definition: RunTask) -> str:
    """Return the command that runs a model on the example inputs of a task."""
    shown = [entry for entry in definition.inputs if entry.is_required or entry.is_in_example]
    return " ".join(["winml run", name, *map(_example_words, shown)])


def _input_option(task_input: TaskInput) -> str:
    """Return the option of a task input; ``--input NAME=`` without an own option."""
    return spell(task_input.name) if task_input.name in _BY_OPTION else f"{opt.input} {task_input.name}="


def _example_words(task_input: TaskInput) -> str:
    quoted = task_input.example.replace('"', r"\"")  # as both sh and Windows read it
    value = task_input.example if task_input.kind != "text" else f'"{quoted}"'
    return f"{_input_option(task_input)}{'' if _input_option(task_input).endswith('=') else ' '}{value}"


def _read_tensors(files: Mapping[str, Path], which: str) -> Iterator[SchemaTensor]:
    """Yield the inputs or outputs of the graphs as their files declare them."""
    from winml.modelkit.generate.records import SchemaTensor
    from winml.modelkit.onnx.contents import declared_shape, dtype_name
    from winml.modelkit.onnx.files.reading import read_structure, required_inputs

    for part, path in files.items():
        graph = read_structure(path).graph
        for value in required_inputs(graph) if which == "inputs" else graph.output:
            # An optional tensor is passed as a tensor.
            declared = value.type.optional_type.elem_type if value.type.HasField("optional_type") else value.type
            data_type = declared.tensor_type.elem_type
            kind = (declared.WhichOneof("value") or "").removesuffix("_type")
            dtype = dtype_name(data_type) if data_type else "" if kind == "tensor" else kind
            yield SchemaTensor(part, value.name, dtype, declared_shape(declared) or ())


def _read_metadata(files: Mapping[str, Path]) -> list[dict[str, str]]:
    from winml.modelkit.onnx.files.reading import read_metadata

    return [read_metadata(path) for path in files.values()]


def _graph_bounds(files: Mapping[str, Path]) -> tuple[DynamicDimension, ...]:
    """Return the bounds of dynamic dimensions that the graphs state, each once."""
    from winml.modelkit.onnx.specs import stated_bounds

    return tuple(dict.fromkeys(dim for props in _read_metadata(files) for dim in stated_bounds(props).values()))


def _damaged_bounds_notes(files: Mapping[str, Path]) -> list[str]:
    from winml.modelkit.onnx.specs import damaged_bounds_notes

    return [note for props in _read_metadata(files) for note in damaged_bounds_notes(props)]


def run_schema(plan: AnswerPlan[RunSubject], request: RunRequest) -> RunSchema:
    """Describe the inputs of a model: inputs of its task, tensors of its graph, and a command. Loads no weights.

    Raises:
        WinMLError: a checkpoint cannot be resolved.
    """
    from winml.modelkit.generate.records import RunSchema, SchemaInput, SchemaTensor
    from winml.modelkit.onnx.specs import is_array_type

    subject, bounds = plan.subject, _graph_bounds(request.files)
    name, tensors, outputs = (
        subject.task,
        list(_read_tensors(request.files, "inputs")),
        list(_read_tensors(request.files, "outputs")),
    )
    if request.checkpoint is not None:
        from winml.modelkit.models.resolution import resolve_model

        resolved = resolve_model(request.checkpoint)
        name = None if resolved.decision is None else resolved.decision.task
        tensors = [
            SchemaTensor(part.name, spec.name, spec.dtype, tuple(spec.shape))
            for part in resolved.parts
            for spec in part.inputs
        ]
    task, definition = (None, None) if name is None else run_task(name, tuple(tensor.name for tensor in tensors))
    inputs = tuple(
        SchemaInput(
            entry.name,
            entry.kind,
            _input_option(entry),
            entry.is_required,
            entry.is_repeatable,
            entry.meaning,
        )
        for entry in (definition.inputs if definition is not None else ())
    )
    by_name = " ".join(f"{opt.input} {name}=@{name}.npy" for name in dict.fromkeys(tensor.name for tensor in tensors))
    example = example_command(request.name, task or "", definition, request.files) or ""
    if not example and all(is_array_type(tensor.dtype) for tensor in tensors):
        example = f"winml run {_command_words(request)} {by_name}"
    return RunSchema(request.name, task, inputs, tuple(tensors), tuple(outputs), example, bounds)


def build_in_cache(checkpoint: ModelRequest, ep: str | None) -> tuple[Mapping[str, Path], list[str]]:
    """Build a checkpoint in the cache, unless it is there.

    Returns:
        Part → file of the build, and a note if it took time.

    Raises:
        WinMLError: see :func:`winml.modelkit.builds.build_model.build_with_open_sizes`.
    """
    from winml.modelkit.builds.build_model import build_with_open_sizes

    started = time.perf_counter()
    built = build_with_open_sizes(checkpoint, None, ep=ep)
    seconds = time.perf_counter() - started
    note = f"the checkpoint was built into the cache in {seconds:.1f} s (winml cache ls)"
    files = built.part_paths if len(built.part_paths) > 1 else {ONLY_PART: built.model_path}
    return files, [note] if seconds > _SHORT_S else []


def run_inference(plan: AnswerPlan[RunSubject], request: RunRequest) -> tuple[InferenceResult, Mapping[Path, Any]]:
    """Run the model on the inputs, and compare with PyTorch if requested; write no file.

    Returns:
        The result, and file of ``save`` → function that writes it.

    Raises:
        WinMLError: an input cannot be read, the model cannot be loaded or built, or a run fails.
    """
    plan.recover()
    from winml.modelkit.generate.answering import tensor_answer
    from winml.modelkit.generate.records import InferenceResult

    notes: list[str] = []
    if request.checkpoint is not None:
        files, build_notes = build_in_cache(request.checkpoint, request.ep)
        notes += build_notes
        request = replace(request, files=files)
        subject = _make_subject(replace(request, task=None))
    else:
        subject = plan.subject
    notes += _damaged_bounds_notes(request.files)
    open_model = _choose_opener(request, subject)  # imports libraries, which is not part of the time
    started = time.perf_counter()
    model = open_model()
    session_ms = (time.perf_counter() - started) * 1000
    started = time.perf_counter()
    if subject.task is None:
        from winml.modelkit.ort.graph_inputs import array_words

        dtypes = {item.name: item.dtype for item in getattr(model, "inputs", ())}
        tensors = {
            name: _to_array(name, request.arrays[name], dtypes.get(name))
            if name in request.arrays
            else _read_tensor(name, value, dtypes.get(name))
            for name, value in subject.tensors.items()
        }
        answers: list[tuple[str | None, Answer]] = [(None, tensor_answer(model, tensors, top=request.top))]
        passed: Mapping[str, Any] = {name: array_words(array) for name, array in tensors.items()}
        calls: list[tuple[str | None, Mapping[str, Any]]] = [(None, tensors)]
    else:
        definition = subject.definition
        assert definition is not None  # refused by the plan
        calls = [
            (
                text,
                {item.name: _read_values(item, named[item.name]) for item in definition.inputs if item.name in named},
            )
            for text, named in _split_calls(definition, subject.named)
        ]
        run = _make_runner(model, model, subject.task, request)
        answers = [(text, run(values)) for text, values in calls]
        passed = {
            name: given[0].removeprefix("@") if len(given) == 1 else [text.removeprefix("@") for text in given]
            for name, given in subject.named.items()
        }
    run_ms = (time.perf_counter() - started) * 1000
    provider = request.choose_provider()
    result = InferenceResult(
        model=request.name,
        task=subject.task,
        task_rule=subject.task_rule,
        provider=provider.provider.name,
        simulated_on=provider.stand_in,
        inputs=passed,
        kind=answers[0][1].kind,
        entries=_collect_entries(answers),
        session_ms=session_ms,
        run_ms=run_ms,
        notes=tuple(dict.fromkeys([*notes, *(note for _, answer in answers for note in answer.notes)])),
        saved=request.save,
    )
    if request.reference is not None:
        result = _compare_with_pytorch(result, answers, subject, calls, request, model)
    return result, _make_writer(answers[0][1], calls[0][1], request.save)


_OF_PIPELINES = frozenset({
    "automatic-speech-recognition", "depth-estimation", "document-question-answering", "image-segmentation",
    "mask-generation", "object-detection", "text2text-generation", "zero-shot-object-detection",
})  # fmt: skip
"""Tasks whose results transformers computes from tensors of PyTorch."""


def _choose_opener(request: RunRequest, subject: RunSubject) -> Callable[[], Any]:
    """Return the function that opens the model as a graph of arrays, or as a class of its task for PyTorch tensors.

    A decoder without tensors for its cache starts with an empty one, as its class provides it.
    """
    from winml.modelkit.onnx.bundle import described_model

    names = {tensor.name for tensor in _read_tensors(request.files, "inputs")}
    is_decoder = described_model(_described_file(request)).get("task") == "text-generation"
    is_complete = subject.task is not None or not is_decoder or names <= subject.tensors.keys()
    if len(request.files) == 1 and subject.task not in _OF_PIPELINES and is_complete:
        from winml.modelkit.generate.graph_model import GraphModel

        return partial(GraphModel, next(iter(request.files.values())), **request.provider_options)
    from winml.modelkit.generate.auto_model import WinMLAutoModel

    return partial(WinMLAutoModel.open_files, request.files, **request.provider_options)


def _split_calls(
    definition: RunTask, texts: Mapping[str, tuple[str, ...]]
) -> list[tuple[str | None, Mapping[str, tuple[str, ...]]]]:
    """Return the inputs of each run of the model, with its text or file; None for a single run."""
    several = (spec.name for spec in definition.inputs if len(texts.get(spec.name, ())) > 1 and not spec.is_repeatable)
    name = next(several, None)
    if name is None:
        return [(None, texts)]
    return [(value.removeprefix("@"), {**texts, name: (value,)}) for value in texts[name]]


def _collect_entries(answers: Sequence[tuple[str | None, Answer]]) -> tuple[AnswerEntry, ...]:
    """Return the entries of all results, each with its text or file."""
    return tuple(replace(entry, input=text or entry.input) for text, answer in answers for entry in answer.entries)


def _make_runner(model: Any, built: Any, task: str, request: RunRequest) -> TaskRunner:
    """Create the task runner of a model, with inputs fitted to the graph of the built model.

    PyTorch takes audio and text of any length, even if the graph's inputs are padded or truncated.

    Args:
        model: The model to run: the built one, or PyTorch's.
        built: The built model.
        task: The task.
        request: The request of the user.
    """
    from winml.modelkit.generate.answering import AUDIO, TEXT, TaskRunner

    folder = files_folder(_described_file(request))
    graph_inputs = built.inputs if len(request.files) == 1 else ()
    if {ENCODER, DECODER} <= request.files.keys():
        # The encoder pads a shorter text itself, and makes audio and images fit.
        graph_inputs = tuple(spec for spec in built.graph.encoder.inputs if spec.name == TEXT)
    if model is not built:
        # A question is answered in windows of the context: with equal windows, the scores can be compared.
        whole = {AUDIO} if task == "question-answering" else {AUDIO, TEXT}
        graph_inputs = tuple(spec for spec in graph_inputs if spec.name not in whole)
    return TaskRunner(model, task, folder, graph_inputs=graph_inputs, top=request.top, threshold=request.threshold)


def _described_file(request: RunRequest) -> Path:
    """Return the file that states the task of the model, with tokenizer and configs next to it."""
    return request.files[answering_part(request.files)]


def _compare_with_pytorch(
    result: InferenceResult,
    answers: Sequence[tuple[str | None, Answer]],
    subject: RunSubject,
    calls: Sequence[tuple[str | None, Mapping[str, Any]]],
    request: RunRequest,
    model: Any,
) -> InferenceResult:
    """Load the model into PyTorch, run it on each call, and return the result with the comparison.

    A graph that draws random numbers is compared on the CPU, with fixed numbers on both sides.

    Args:
        result: The result of the ONNX model.
        answers: Text of a call, and answer of the ONNX model.
        subject: Task and inputs.
        calls: Text of a call, and its inputs.
        request: The request of the user.
        model: The opened ONNX model.
    """
    from winml.modelkit.compare.verification.fixed_numbers import FixedNumbers
    from winml.modelkit.generate.answering import compared_answers, tensor_answer
    from winml.modelkit.models.model import load_model
    from winml.modelkit.ort.graph_sessions import draws_numbers, fixed_random_numbers

    checkpoint = _reference_request(request)
    if subject.task is not None:
        checkpoint = replace(checkpoint, task=LOADED_TASKS.get(subject.task, subject.task))
    loaded: Any = load_model(replace(checkpoint, cache=False)).model
    run = None if subject.task is None else _make_runner(loaded, model, subject.task, request)
    draws = len(request.files) == 1 and draws_numbers(next(iter(request.files.values())))
    if draws:
        with fixed_random_numbers():
            fixed = _choose_opener(request, subject)()
        fixed_run = None if subject.task is None else _make_runner(fixed, fixed, subject.task, request)
        answers = [
            (text, tensor_answer(fixed, values, top=request.top) if fixed_run is None else fixed_run(values))
            for text, values in calls
        ]
        result = replace(
            result, notes=(*result.notes, "PyTorch is compared with random numbers fixed in both models, on the CPU")
        )
    with FixedNumbers() if draws else nullcontext():
        theirs = [
            (text, tensor_answer(loaded, values, answer.arrays) if run is None else run(values))
            for (text, answer), (_, values) in zip(answers, calls, strict=True)
        ]
    compared = [
        compared_answers(ours, target, checkpoint.model) for (_, ours), (_, target) in zip(answers, theirs, strict=True)
    ]
    differing = next((index for index, entry in enumerate(compared) if not entry.is_same), None)
    reference = compared[0 if differing is None else differing]
    if len(compared) > 1:
        differences = [entry.max_difference for entry in compared if entry.max_difference is not None]
        text = None if differing is None else f"{answers[differing][0]!r}: {reference.difference}"
        difference = max(differences, default=None)
        reference = replace(reference, entries=_collect_entries(theirs), max_difference=difference, difference=text)
    return replace(result, reference=reference)


def _reference_request(request: RunRequest) -> ModelRequest:
    """Return the checkpoint to compare with.

    Raises:
        UsageError: neither the user nor the model names a checkpoint on this disk.
    """
    from winml.modelkit.models.request import reference_checkpoint
    from winml.modelkit.onnx.files.reading import read_metadata

    if request.checkpoint is not None and request.reference == RECORDED:
        return request.checkpoint
    path = _described_file(request)
    metadata = read_metadata(path)
    return reference_checkpoint(metadata, str(path), str(request.reference))


def _read_values(task_input: TaskInput, texts: tuple[str, ...]) -> Any:
    """Return the value of an input, or a list for a repeatable input."""
    values = [_read_value(task_input, text) for text in texts]
    return values if task_input.is_repeatable else values[0]


def _read_value(task_input: TaskInput, text: str) -> Any:
    """Read a text, an image or a recording.

    Raises:
        ModelPathError: the file does not exist.
        InputError: the file cannot be read.
    """
    if not text.startswith("@"):
        return text
    path = Path(text[1:])
    try:
        refuse_special_file(path)
    except ForeignNameError as error:
        raise ModelPathError(f"input {task_input.name!r}: {path}: {error}", hint="Pass the path of a file.") from None
    if task_input.kind == "text":
        from winml.modelkit.options import JsonError, read_text_file

        try:
            return read_text_file(path)
        except JsonError as error:
            raise InputError(f"input {task_input.name!r}: {path}: {error}", hint="Pass a UTF-8 text file.") from error
    from winml.modelkit.samples.media import Unreadable, open_image, open_recording

    opened: Any = (open_image if task_input.kind == "image" else open_recording)(str(path), None, str(path))
    if isinstance(opened, Unreadable):
        raise InputError(
            f"input {task_input.name!r}: {path} cannot be read as {_KIND_WORDS[task_input.kind]}: {opened.reason}",
            hint=f"Pass {_KIND_WORDS[task_input.kind]}, such as {task_input.example}.",
        )
    return opened.convert("RGB") if task_input.kind == "image" else opened


def _read_tensor(name: str, text: str, dtype: str | None) -> Any:
    """Parse an array: JSON, or a file in NumPy or JSON format.

    Args:
        name: Input of the graph.
        text: The user's value.
        dtype: Element type of the input, to which JSON numbers are converted; None if unknown.

    Raises:
        UsageError: the file does not exist, has another format, or a value does not fit the type.
        InputError: the NumPy file is damaged, or declares more data than it holds.
    """
    import numpy as np

    from winml.modelkit.arrays import numpy_dtype
    from winml.modelkit.ort.graph_inputs import DRAWN_DTYPES, read_array, restore_dtype

    holds_text = dtype == "string"
    kind, example = ("strings", f'\'{name}=["a","b"]\'') if holds_text else ("numbers", f"{name}=[[1,2,3]]")
    hint = f"Pass {kind} as JSON, {opt.input} {example}, or a file of numpy.save: {opt.input} {name}=@{name}.npy."
    path = Path(text[1:]) if text.startswith("@") else None
    try:
        if path is not None and path.suffix.lower() == ".npy":
            return restore_dtype(dtype or "", read_array(path, f"{opt.input} {name}: {path}"))
        content = load_json(text) if path is None else read_json_file(path)
    except (OSError, ValueError) as error:
        label = f"{opt.input} {name}" if path is None else f"{opt.input} {name}: {path}"
        raise UsageError(f"{label}: {error}", hint=hint) from error
    numbers = np.asarray(content, object)
    if not all(isinstance(number, str if holds_text else (int, float)) for number in numbers.flat):
        raise UsageError(f"{opt.input} {name}: holds no {kind} in rows of equal length", hint=hint)
    if holds_text:
        return numbers.astype(str)
    if dtype not in DRAWN_DTYPES:
        array = np.asarray(content)
        return array.astype(np.float32) if array.dtype.kind in "fO" else array
    for number in numbers.flat:
        _refuse_number(name, number, dtype)
    return numbers.astype(numpy_dtype(dtype))


def _to_array(name: str, value: Any, dtype: str | None) -> Array:
    """Return the array of a Python caller, with floats and whole numbers in the element type of the input.

    Raises:
        UsageError: the value holds no numbers in rows of equal length.
    """
    import numpy as np

    from winml.modelkit.arrays import numpy_dtype
    from winml.modelkit.ort.graph_inputs import DRAWN_DTYPES, restore_dtype

    try:
        array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    except ValueError:  # rows of unequal length
        array = np.asarray(None)
    if dtype == "string" and (texts := restore_dtype(dtype, array)).dtype.kind == "U":
        return texts
    if array.dtype.kind not in "biuf":
        raise UsageError(
            f"input {name!r} is a {type(value).__name__} without numbers in rows of equal length",
            hint="Pass an array of numpy, a tensor of PyTorch, or nested lists of numbers.",
        )
    if dtype not in DRAWN_DTYPES or ("float" in dtype) != (array.dtype.kind == "f"):
        return array
    return array.astype(numpy_dtype(dtype))


def _refuse_number(name: str, number: float, dtype: str) -> None:
    """Refuse a number that an element type does not hold; floats are rounded.

    Raises:
        UsageError: names the number, the type and its range.
    """
    import ml_dtypes
    import numpy as np

    from winml.modelkit.arrays import numpy_dtype

    if dtype == "bool":
        is_held, expected = number in (0, 1), "true, false, 0 or 1"
    elif "float" in dtype:
        type_info = ml_dtypes.finfo(numpy_dtype(dtype))  # type: ignore[no-untyped-call]
        limit = float(type_info.max)
        # Slightly larger numbers are rounded down. JSON may write infinity and NaN themselves.
        is_held = not isinstance(number, bool) and not (limit * (1 + float(type_info.eps) / 4) < abs(number) < math.inf)
        expected = f"a number from {-limit:.6g} to {limit:.6g}"
    else:
        limits = np.iinfo(dtype)
        is_held = not isinstance(number, bool) and limits.min <= number <= limits.max and number == int(number)
        expected = f"a whole number from {limits.min} to {limits.max}"
    if not is_held:
        raise UsageError(
            f"{opt.input} {name}: {json.dumps(number)} is not a value of the input, which takes {dtype}",
            hint=f"Pass {expected}.",
        )


def _make_writer(answer: Answer, values: Mapping[str, Any], path: Path | None) -> Mapping[Path, Any]:
    """Return the file to save → function that writes it; `{}` without a path."""
    if path is None:
        return {}
    if path.suffix.lower() == _ARRAYS_SUFFIX:

        def write_arrays(target: Path) -> None:
            import numpy as np

            arrays = answer.arrays
            with target.open("wb") as file:
                # Text without pickled objects.
                plain = {key: array.astype(str) if array.dtype.kind == "O" else array for key, array in arrays.items()}
                np.savez(file, **plain)  # type: ignore[arg-type]  # numpy declares a flag among the keywords

        return {path: write_arrays}
    if path.suffix.lower() == AUDIO_SUFFIX:
        from winml.modelkit.samples.media import Recording, save_recording

        rate_hz = answer.entries[0].rate_hz
        assert rate_hz is not None  # of audio
        return {path: lambda target: save_recording(Recording(answer.arrays["audio"], rate_hz), target)}
    from winml.modelkit.evaluate.drawing import depth_image, image_of_pixels, save_image, with_boxes, with_segments

    image = values["image"]
    if answer.kind == "image":
        image = image_of_pixels(answer.arrays["image"])
    elif answer.kind == "depth":
        image = depth_image(answer.arrays["depth"], image.size)
    elif answer.kind == "segments":
        image = with_segments(image, answer.arrays["segments"], len(answer.entries))
    else:
        boxes = [(f"{entry.label} {entry.score:.2f}", entry.box) for entry in answer.entries if entry.box is not None]
        image = with_boxes(image, boxes)
    return {path: lambda target: save_image(image, target, path.suffix.lower())}


def run_request(options: Mapping[str, Any], stated: Mapping[str, Any]) -> RunRequest:
    """Make a request: find the files or the checkpoint of the model.

    Args:
        options: Values of all options by name, with ``model``.
        stated: Fields of the request that differ from their defaults.

    Raises:
        UsageError: no model is specified, nothing exists at its path, or an option does not apply to an ONNX file.
    """
    from winml.modelkit.builds.found_models import part_files

    name = model_name(options, "an ONNX file, a build folder, or a checkpoint")
    loading = ("model_class", "revision", "trust_remote_code")
    files: Mapping[str, Path] = part_files(name)
    checkpoint = None
    if files:
        refuse_checkpoint_options(next(iter(files.values())), options, loading)
    else:
        found = resolve_named_model(name, options, loading)
        checkpoint = found.request
        files = {} if found.path is None else {ONLY_PART: found.path}
    return RunRequest(
        name=name, files=files, checkpoint=checkpoint, task=options["task"], reference=options["reference"], **stated
    )


def write_files(writers: Mapping[Path, Callable[[Path], None]], *, overwrite: bool) -> list[Path]:
    """Write the files of a result, all or none; return their paths."""
    from winml.modelkit.onnx.files.output_files import OutputFiles

    with OutputFiles() as files:
        for path, write in writers.items():
            write(files.reserve(path))
        files.commit(overwrite=overwrite)
    return list(writers)


@python_function()
def run_model(
    model: str | os.PathLike[str],
    *values: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Mapping[str, Any],
    **options: Any,
) -> InferenceResult:
    """Run a model on text, an image, audio or tensors (``winml run``).

    Args:
        model: ONNX file, build folder, Hub id or checkpoint; a checkpoint is built in the cache first.
        *values: Texts, image files or audio files, or a list of them; or input of the graph → array.
        **options: Options of ``winml run``: ``text``, ``image``, ``audio`` and ``label`` (a text, or a list of
            several), ``inputs`` (name → value or array), ``top``, ``threshold``, ``save``, ``reference``, ``ep`` and so
            on, and options of loading.

    Returns:
        The result: classes, tokens, boxes, similarities or tensors with their scores.

    Raises:
        ConfigError: an option is unknown.
        UsageError: an input is missing, unknown or of another task.
        StageError: the model cannot be loaded or run.

    Example:
        ```python
        answer = run_model("built", "The house is old.", top=1)
        print(answer.entries[0].label)
        ```
    """
    if "output" in options or "schema" in options:
        raise ConfigError("run_model: output and schema are options of the command", hint="Use result.as_record().")
    given = [value for value in values if isinstance(value, Mapping)]
    others = (value for value in values if not isinstance(value, Mapping))
    lists = [[value] if isinstance(value, (str, os.PathLike)) else value for value in others]
    texts = {**options, "values": tuple(os.fspath(value) for items in lists for value in items)}
    for name in ("text", "image", "audio", "label"):
        if isinstance(value := texts.get(name), (str, os.PathLike)):
            texts[name] = (os.fspath(value),)
    inputs = texts.get("inputs")
    named = {name: value for entry in (*given, inputs) if isinstance(entry, Mapping) for name, value in entry.items()}
    arrays = {name: value for name, value in named.items() if not isinstance(value, (str, os.PathLike))}
    if named:
        texts["inputs"] = tuple(f"{name}={value}" for name, value in named.items() if name not in arrays)
    reference = texts.pop("reference", None)
    texts = keyword_options("run_model", model, texts, RunRequest)
    stated = stated_keywords(RunRequest, texts)
    request = run_request({**texts, "reference": RECORDED if reference is True else reference}, stated)
    request = replace(request, arrays=arrays)
    plan = plan_run(request)
    result, saved = run_inference(plan, request)
    write_files(saved, overwrite=request.overwrite)
    return result
