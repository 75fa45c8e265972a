"""Commands that a result ends with: each transforms a model into a new file or folder, or measures models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from winml.modelkit.errors import StageError, TaskError, UsageError, spell_flag
from winml.modelkit.fields import command_words
from winml.modelkit.file_names import BUILD_MANIFEST_NAME, DECODER, VAE_DECODER, files_folder
from winml.modelkit.ort.execution_providers import library_words
from winml.modelkit.words import command_line


def transforming_command(
    verb: str, model: Path, words: Sequence[str], *, suffix: str, like: Path | None = None, submodel: Sequence[str] = ()
) -> str:
    """Return a command that transforms a model into a new one.

    The file of a build is named by its folder, and the result is a folder too: beside a finished build, a file would
    lack its tokenizer.

    Args:
        verb: ``quantize`` or ``optimize``.
        model: The model: a file or a build folder.
        words: Options of the command.
        suffix: End of the name of the result.
        like: File or folder whose name and place the result follows; None: the model.
        submodel: Selected parts of a build folder.
    """
    source, parts = _find_build(model, submodel)
    beside, _ = _find_build(like or model, ())
    stem = beside.name if beside.is_dir() else beside.stem
    output = beside.with_name(f"{stem}_{suffix}{'' if source.is_dir() else '.onnx'}")
    part_words = [word for part in parts for word in (spell_flag("submodel"), part)]
    return command_line(["winml", verb, str(source), "-o", str(output), *part_words, *_with_library(words)])


def measuring_command(verb: str, models: Sequence[str | Path], words: Sequence[str]) -> str:
    """Return a command that measures models, and writes no model."""
    return command_line(["winml", verb, *map(str, models), *_with_library(words)])


def _with_library(words: Sequence[str]) -> list[str]:
    """Return the words of a command with the user-specified library of its execution provider, if any."""
    ep = spell_flag("ep")
    return [*words, *(library_words(words[words.index(ep) + 1]) if ep in words else [])]


def timing_command(source: Path, result: Path, ep: str | None = None) -> str:
    """Return the command that measures a model in alternation with its source.

    A compiled file, a model of several parts and a model of bfloat16 are measured or described alone; a model for a
    provider that is not installed, or with other inputs than tensors, is described.

    Args:
        source: The source.
        result: File or folder made of it.
        ep: Execution provider that the result is for; None: any.
    """
    from winml.modelkit.ort.execution_providers import provider_options_of

    files = model_files(result)
    if not _takes_tensors(*files):  # no values can be generated
        return measuring_command("inspect", [result], [])
    if ep is not None:
        words = [spell_flag("ep"), ep]
        if not _is_installed(ep):
            return measuring_command("inspect", [files[0]], words)
        return measuring_command("perf", [source, result] if len(files) == 1 else [result], words)
    if _has_bfloat16(*files):  # the CPU cannot run it
        return measuring_command("inspect", [result], [])
    if provider_words := provider_options_of(files[0]):
        return measuring_command("perf", [result], provider_words)
    return measuring_command("perf", [source, result] if len(files) == 1 else [result], [])


def _is_installed(ep: str) -> bool:
    """Return True if an execution provider can be used on this machine."""
    from winml.modelkit.ort.devices import choose_provider

    try:
        choose_provider(ep, None, {})
    except (StageError, UsageError):
        return False
    return True


def diverging_command(reference: str | Path, candidate: str | Path, data: Mapping[str, Any]) -> str:
    """Return the command that finds the module whose outputs diverge.

    Args:
        reference: The reference.
        candidate: The compared model.
        data: Fields of :class:`~winml.modelkit.evaluate.declared_options.DataSetFields`: the samples to compare on.
    """
    from winml.modelkit.evaluate.declared_options import DataSetFields

    words = [spell_flag("by_module"), *command_words(DataSetFields(**data), DataSetFields)]
    return measuring_command("compare", [reference, candidate], words)


def running_command(folder: Path, parts: Mapping[str, Path], words: Sequence[str] = ()) -> str:
    """Return a command that runs the model in a folder on an input of its task, or else shows its inputs.

    Args:
        folder: The folder of a build or an export.
        parts: Part → ONNX file.
        words: Options of the execution provider; a compiled file has its own.
    """
    if VAE_DECODER in parts:
        call = f"load_pipeline({json.dumps(str(folder))})"
        code = f'from winml.modelkit import load_pipeline; {call}("a cat").images[0].save("cat.png")'
        return command_line(["python", "-c", code])
    # The CPU, which the other commands use, cannot run bfloat16, and a simulator opens no part with shared weights.
    if _has_bfloat16(_main_part(parts)) or _needs_device(_main_part(parts)):
        return measuring_command("inspect", [folder], [])
    return task_command(folder, parts, words)[1] or measuring_command("run", [folder], [spell_flag("schema")])


def task_command(folder: Path, parts: Mapping[str, Path], words: Sequence[str] = ()) -> tuple[str, str | None]:
    """Return the task of a model, and a command that runs it on inputs of the task.

    The task of a script's model is ``""``; the command is ``None`` if only tensors can be passed.

    Args:
        folder: The folder of a build or an export.
        parts: Part → ONNX file.
        words: Options of the execution provider; a compiled file has its own.
    """
    from winml.modelkit.generate.run_verb import example_command
    from winml.modelkit.generate.task_inputs import run_task
    from winml.modelkit.onnx.bundle import described_model
    from winml.modelkit.onnx.files.reading import read_structure
    from winml.modelkit.ort.execution_providers import provider_options_of

    path = _main_part(parts)
    try:
        inputs = tuple(value.name for value in read_structure(path).graph.input)
        task, definition = run_task(described_model(path).get("task") or "", inputs)
    except TaskError:
        return "", None
    own_words = () if provider_options_of(next(iter(parts.values()))) else words
    return task, example_command(command_line([str(folder), *own_words]), task, definition, parts)


def _main_part(parts: Mapping[str, Path]) -> Path:
    """Return the file whose inputs and metadata describe the model."""
    return parts.get(DECODER) or next(iter(parts.values()))


def model_files(model: Path) -> list[Path]:
    """Return the ONNX files of a model: a file, or a folder with parts."""
    if not model.is_dir():
        return [model]
    from winml.modelkit.builds.found_models import read_model_folder

    return [*read_model_folder(model).parts.values()]


def _needs_device(path: Path) -> bool:
    """Return True if a simulator compiled a file into the common file of several parts, which only a device opens."""
    from winml.modelkit.metadata_keys import COMPILE_KEY
    from winml.modelkit.onnx.files.reading import read_metadata
    from winml.modelkit.options import load_metadata_record

    record = load_metadata_record(read_metadata(path).get(COMPILE_KEY, "{}"))
    return bool(record.get("shares_weights")) and "simulated_on" in record


def _has_bfloat16(*paths: Path) -> bool:
    """Return True if an input or output of a file is bfloat16, which no kernel of the CPU supports."""
    import onnx

    from winml.modelkit.onnx.files.reading import read_structure

    graphs = (read_structure(path).graph for path in paths)
    values = (value for graph in graphs for value in (*graph.input, *graph.output))
    return any(value.type.tensor_type.elem_type == onnx.TensorProto.BFLOAT16 for value in values)


def _takes_tensors(*paths: Path) -> bool:
    """Return True if all inputs of files are tensors, which may be optional."""
    from winml.modelkit.onnx.files.reading import read_structure, required_inputs

    types = (value.type for path in paths for value in required_inputs(read_structure(path).graph))
    return all(kind.HasField("tensor_type") or kind.optional_type.elem_type.HasField("tensor_type") for kind in types)


def _find_build(model: Path, submodel: Sequence[str]) -> tuple[Path, Sequence[str]]:
    """Return the folder of the build that a file is a part of, with the part if it has several; else the arguments."""
    folder = files_folder(model)
    if not model.is_file() or not (folder / BUILD_MANIFEST_NAME).is_file():
        return model, submodel
    from winml.modelkit.builds.found_models import read_model_folder

    parts = read_model_folder(folder).parts
    part = next((name for name, path in parts.items() if path.resolve() == model.resolve()), None)
    if part is None:
        return model, submodel
    return folder, (part,) if len(parts) > 1 else ()
