"""Commands that a result ends with: each transforms a model into a new file or folder, or measures models."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from winml.modelkit.errors import spell_flag
from winml.modelkit.file_names import BUILD_MANIFEST_NAME, files_folder
from winml.modelkit.ort.execution_providers import library_words


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
    return shlex.join(["winml", verb, str(source), "-o", str(output), *part_words, *_with_library(words)])


def measuring_command(verb: str, models: Sequence[str | Path], words: Sequence[str]) -> str:
    """Return a command that measures models, and writes no model."""
    return shlex.join(["winml", verb, *map(str, models), *_with_library(words)])


def _with_library(words: Sequence[str]) -> list[str]:
    """Return the words of a command with the user-specified library of its execution provider, if any."""
    ep = spell_flag("ep")
    return [*words, *(library_words(words[words.index(ep) + 1]) if ep in words else [])]


def _find_build(model: Path, submodel: Sequence[str]) -> tuple[Path, Sequence[str]]:
    """Return the folder of the build that a file is a part of, with the part if it has several; else the arguments."""
    from winml.modelkit.builds.found_models import read_model_folder

    folder = files_folder(model)
    if not model.is_file() or not (folder / BUILD_MANIFEST_NAME).is_file():
        return model, submodel
    parts = read_model_folder(folder).parts
    part = next((name for name, path in parts.items() if path.resolve() == model.resolve()), None)
    if part is None:
        return model, submodel
    return folder, (part,) if len(parts) > 1 else ()
